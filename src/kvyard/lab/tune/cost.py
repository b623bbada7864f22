"""What a fleet costs per hour: its cards, and the memory and storage behind them. A price list is a value; yours differs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.tier import LOWER_TIERS
from kvyard.replay.config import ReplayConfig
from kvyard.replay.fleet_memory import lower_bytes
from kvyard.replay.settings import OF_A_WORKER, SETTINGS
from kvyard.settings import Setting, settings_of

GIB = 1 << 30
SPLITS = ("tensor_parallel_size", "pipeline_parallel_size", "dp_size")
"""A worker has as many cards as these multiply to."""


class CardPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per hour, in one currency. Yours to set: the defaults are there so that a first search has an answer."""

    heading: ClassVar[str] = "Prices per hour, yours to set"
    card: Annotated[float, Setting("Of a card.", flag=True)] = 2.35
    """An H100, rented: SemiAnalysis' rental index of March 2026, in US dollars. Clouds asked for 1.5 to 7 then."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            price = getattr(self, name)
            if not 0 <= price < float("inf"):
                raise KvyardError(f"{PRICE}{name} is {price}: a price is a number of at least 0")


if TYPE_CHECKING:

    class Prices(CardPrice, frozen=True, kw_only=True):
        """Of a card, and of a GiB of each lower tier, by the tier's label."""

        def __init__(self, **prices: float) -> None: ...
else:
    Prices = msgspec.defstruct(
        "Prices",
        [
            (tier.label, Annotated[float, Setting(f"Of a GiB of {tier.place}.", flag=True)], tier.entry.price)
            for tier in LOWER_TIERS
        ],
        bases=(CardPrice,),
        module=__name__,
        frozen=True,
        kw_only=True,
    )


PRICE = "price_"
"""What names of prices begin with, as settings."""
TUNE_SETTINGS = SETTINGS.joined(settings_of(Prices, PRICE), {"prices": settings_of(Prices, PRICE)})
"""Everything that a search can be told in a file or by flags."""


def parted(settings: Mapping[str, object]) -> tuple[dict[str, object], Prices]:
    """Settings of a replay, and prices, from both in one. Raises ``KvyardError``."""
    known = settings_of(Prices, PRICE)
    given = known.parse({name: value for name, value in settings.items() if name in known})
    prices = Prices(**{known[name].field: value for name, value in given.items()})
    return {name: value for name, value in settings.items() if name not in known}, prices


def cost(
    settings: Mapping[str, object], config: ReplayConfig, prices: Prices, mean: Mapping[str, float] | None = None
) -> float:
    """What the fleet of ``config``, made from flat ``settings``, costs per hour.

    ``mean`` has workers by role that there were on average, of a fleet that an autoscaler changes. Without it such a fleet
    counts as small as it may become: it costs that much at least.
    """
    counts = [float(kind.count) for kind in config.workers]
    if config.autoscale is not None:
        least = float(config.autoscale.least)
        counts = [least if mean is None else mean[kind.engine.role] for kind in config.workers]
    cards = _cards(settings, len(config.workers))
    total = sum(count * each * prices.card for count, each in zip(counts, cards, strict=True))
    for tier, held in zip(LOWER_TIERS, lower_bytes(config, counts), strict=True):
        total += held / GIB * getattr(prices, tier.label)
    return total


def _cards(settings: Mapping[str, object], count: int) -> list[int]:
    """Per kind of workers, of which there are so many, the cards of each."""
    given = SETTINGS.parse(settings)
    kinds = given.get("workers")
    own: list[Mapping[str, Any]] = (
        [OF_A_WORKER.parse(kind) for kind in kinds] if isinstance(kinds, list | tuple) else [{}] * count
    )
    found = []
    for kind in own:
        cards = 1
        for name in SPLITS:
            cards *= int(kind.get(name, given.get(name, 1)))
        found.append(cards)
    return found
