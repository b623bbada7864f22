"""Parts of a fleet and their cost per hour: its cards, and the memory and storage behind them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec

from kvyard.engine.price_list import PriceList, default_prices
from kvyard.errors import KvyardError
from kvyard.events.tier import LOWER_TIERS
from kvyard.replay.config import ReplayConfig
from kvyard.replay.settings import OF_A_WORKER, SETTINGS
from kvyard.settings import Setting, settings_of

GIB = 1 << 30
SPLITS = ("tensor_parallel_size", "pipeline_parallel_size", "dp_size")
"""A worker has as many cards as these multiply to."""
ORACLE = "belady"
"""The eviction policy that knows the future."""


class FleetSize(NamedTuple):
    """Size of a fleet, the dearest part first: fleets without prices are ordered by this."""

    workers: int
    device: int
    """Blocks on all devices together."""
    lower: tuple[int, ...]
    """Bytes of each lower tier, all workers together, closest to the device first."""

    def __str__(self) -> str:
        pieces = [f"{self.workers:,} worker{'s' if self.workers != 1 else ''}", f"{self.device:,} device blocks"]
        pieces += [
            f"{held / GIB:,.1f} GiB of {tier.place}"
            for tier, held in zip(LOWER_TIERS, self.lower, strict=False)
            if held
        ]
        return f"{', '.join(pieces[:-1])} and {pieces[-1]} in all"


def fleet_size(config: ReplayConfig) -> FleetSize:
    """Return the size of the fleet of a replay; a tier that workers share counts once."""
    counts = [kind.count for kind in config.workers]
    device = sum(kind.count * kind.dp_size * kind.engine.num_gpu_blocks for kind in config.workers)
    return FleetSize(sum(counts), device, tuple(map(int, lower_bytes(config, counts))))


def foresees(config: ReplayConfig) -> bool:
    """True if a cache evicts by what comes next, as only a replay can."""
    engines = [kind.engine for kind in config.workers]
    orders = {engine.eviction for engine in engines}
    orders |= {tier.eviction for engine in engines if engine.tiers is not None for tier in engine.tiers.tiers}
    return ORACLE in orders


class CardPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per hour, in one currency. Yours to set: the defaults are there so that a first search has an answer."""

    heading: ClassVar[str] = "Prices per hour"
    card: Annotated[
        float, Setting("Price of a card. [default: its price in engine/prices.toml, else 2.35]", flag=True)
    ] = 2.35
    """For a worker whose card isn't known: an H100's price in ``prices.toml``."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            price = getattr(self, name)
            if not 0 <= price < float("inf"):
                raise KvyardError(f"{PRICE}{name} is {price}: a price is a number of at least 0")


if TYPE_CHECKING:

    class Prices(CardPrice, frozen=True, kw_only=True):
        """Prices of a card, and of a GiB of each lower tier, by the tier's label."""

        def __init__(self, **prices: float) -> None: ...
else:
    Prices = msgspec.defstruct(
        "Prices",
        [
            (tier.label, Annotated[float, Setting(f"Price of a GiB of {tier.place}.", flag=True)], tier.entry.price)
            for tier in LOWER_TIERS
        ],
        bases=(CardPrice,),
        module=__name__,
        frozen=True,
        kw_only=True,
    )


PRICE = "price_"
"""Beginning of the names that prices have as settings."""
TUNE_SETTINGS = SETTINGS.joined(settings_of(Prices, PRICE), {"prices": settings_of(Prices, PRICE)})
"""Settings of a search, in a file or by flags."""


def parted(settings: Mapping[str, object], price_list: PriceList | None = None) -> tuple[dict[str, object], Prices]:
    """Return the settings of a replay and the prices, from both in one. A card that no setting prices has the price that
    ``price_list``, by default kvyard's own, has for the setting ``gpu``. Raises ``KvyardError``.
    """
    price_list = price_list or default_prices()
    known = settings_of(Prices, PRICE)
    given = known.parse({name: value for name, value in settings.items() if name in known})
    fields = {known[name].field: value for name, value in given.items()}
    gpu = settings.get("gpu")
    if isinstance(gpu, str) and "card" not in fields and (price := price_list.card(gpu)) is not None:
        fields["card"] = price
    prices = Prices(**fields)
    return {name: value for name, value in settings.items() if name not in known}, prices


def cards(settings: Mapping[str, object], config: ReplayConfig, mean: Mapping[str, float] | None = None) -> float:
    """Return the number of cards of the fleet of ``config``; ``settings`` and ``mean`` are as for ``cost``."""
    counts = _counts(config, mean)
    return sum(count * each for count, each in zip(counts, _cards(settings, len(counts)), strict=True))


def currency_of(prices: Prices, gpu: object) -> str:
    """Return the price list's currency if ``prices`` has its price of the card, else nothing: prices are the user's own."""
    listed = default_prices()
    own = prices.card != (listed.card(gpu) if isinstance(gpu, str) else Prices().card)
    return "" if own else listed.currency


def list_price(
    settings: Mapping[str, object], config: ReplayConfig, mean: Mapping[str, float] | None = None
) -> float | None:
    """Return the price per hour by kvyard's own price list, as ``cost`` does; ``None`` if the list lacks the card."""
    gpu = settings.get("gpu")
    if not isinstance(gpu, str) or default_prices().card(gpu) is None:
        return None
    return cost(settings, config, parted({"gpu": gpu})[1], mean)


def cost(
    settings: Mapping[str, object], config: ReplayConfig, prices: Prices, mean: Mapping[str, float] | None = None
) -> float:
    """Return the price per hour of the fleet of ``config``, which was made from flat ``settings``.

    ``mean`` is the mean number of workers by role, of a fleet that an autoscaler changes. Without it the smallest size counts:
    the fleet costs at least that.
    """
    total = cards(settings, config, mean) * prices.card
    for tier, held in zip(LOWER_TIERS, lower_bytes(config, _counts(config, mean)), strict=True):
        total += held / GIB * getattr(prices, tier.label)
    return total


def _counts(config: ReplayConfig, mean: Mapping[str, float] | None) -> list[float]:
    """Return the number of workers of each kind."""
    if config.autoscale is None:
        return [float(kind.count) for kind in config.workers]
    least = float(config.autoscale.least)
    return [least if mean is None else mean[kind.engine.role] for kind in config.workers]


def _cards(settings: Mapping[str, object], count: int) -> list[int]:
    """Return the cards of a worker of each of ``count`` kinds."""
    given = SETTINGS.parse(settings)
    kinds = given.get("workers")
    own: list[Mapping[str, Any]] = (
        [OF_A_WORKER.parse(kind) for kind in kinds] if isinstance(kinds, list | tuple) else [{}] * count
    )
    counts = []
    for kind in own:
        cards = 1
        for name in SPLITS:
            cards *= int(kind.get(name, given.get(name, 1)))
        counts.append(cards)
    return counts


def lower_bytes(config: ReplayConfig, counts: Sequence[float]) -> list[float]:
    """Return the bytes of each lower tier, closest to the device first, of a fleet with ``counts`` workers of each kind. A
    tier that workers share counts once, as large as the largest kind says.
    """
    private = [0.0] * len(LOWER_TIERS)
    shared = [0.0] * len(LOWER_TIERS)
    for kind, count in zip(config.workers, counts, strict=True):
        below, size = kind.engine.tiers, kind.engine.bytes_per_block or 0
        for level, tier in enumerate(below.tiers if below is not None else ()):
            held = tier.bytes if tier.bytes is not None else (tier.num_blocks or 0) * size
            if tier.scope == "shared":
                shared[level] = max(shared[level], held)
            else:
                private[level] += count * kind.dp_size * held
    return [own + common for own, common in zip(private, shared, strict=False)]
