"""Configuration of a router. Checked once; each refusal is one sentence."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from kvyard.errors import KvyardError, suggest
from kvyard.events.tier import LOWER_TIERS, Tier
from kvyard.settings import Setting, figures

if TYPE_CHECKING:
    from kvyard.registry import Registry
    from kvyard.router.policies import Policy

LOADS = ("requests", "tokens", "blocks")
CREDITS = tuple(f"{tier.label}_credit" for tier in LOWER_TIERS)
"""Fields that hold the worth of a block on a lower tier, closest first."""
_AT_LEAST_0 = (
    *("overlap_credit", "overlap_decay", *CREDITS, "prefill_scale"),
    *("held_weight", "request_weight", "temperature", "predicted_ttl_s", "reserve_output", "guard"),
)
_OPTIONAL = ("guard", "approx_ttl_s")
_credits = attrgetter(*CREDITS)


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routing policy and its settings (``docs/reference/routing-policies.md``). Raises ``KvyardError``."""

    heading: ClassVar[str] = "Router"
    policy: "Annotated[str, Setting('Routing policy: {choices}.', name='router', flag=True, choices=_policies)]" = (
        "least-time"
    )
    block_size: int | None = None
    """Tokens per request key. Left out, it is the index's."""

    overlap_credit: Annotated[float, Setting("Credit of a cached device block; 1: the cost of computing it.")] = 1.0
    overlap_decay: Annotated[float, Setting("How fast overlap_credit shrinks with a worker's prefill backlog.")] = 0.0
    """By its prefill backlog beyond the least of all, in prompts of this size."""
    host_credit: Annotated[float, Setting("Credit of a block in host memory.")] = Tier.G2.entry.credit
    storage_credit: Annotated[float, Setting("Credit of a block in storage.")] = Tier.G3.entry.credit
    remote_credit: Annotated[float, Setting("Credit of a block in remote storage.")] = Tier.G4.entry.credit
    object_credit: Annotated[float, Setting("Credit of a block in object storage.")] = Tier.G5.entry.credit
    prefill_scale: Annotated[float, Setting("Cost of a block to compute.")] = 1.0
    held_weight: Annotated[float, Setting("Cost of a block that requests in flight hold.")] = 1.0
    request_weight: Annotated[float, Setting("Cost of a request in flight, in blocks.")] = 0.0
    temperature: Annotated[float, Setting("0: take the least cost; above: draw by softmax over costs.")] = 0.0

    options: "Annotated[dict[str, float], _OPTIONS]" = msgspec.field(default_factory=dict)
    """``docs/reference/routing-policies.md`` names each policy's."""

    load: Annotated[
        str, Setting("Load measure of least-loaded and the guard: requests, tokens or blocks.", "router_load")
    ] = "requests"
    """Active ``requests``, ``tokens`` still to prefill, or ``blocks`` to prefill and held."""
    guard: Annotated[
        float | None, Setting("Difference in load beyond which the guard takes the least loaded worker. [default: off]")
    ] = None
    """Between the most and the least loaded; off without."""
    guard_ratio: Annotated[
        float, Setting("Ratio of the most to the least loaded worker that the guard also needs.")
    ] = 1.5

    predicted_ttl_s: Annotated[
        float, Setting("Seconds for which a sent prefix is credited without an event; 0: never.")
    ] = 2.0
    approx_ttl_s: Annotated[float | None, Setting("Seconds for which approx remembers a sent prefix.")] = 120.0
    """``None``: by room only."""
    remembered_blocks: Annotated[int, Setting("Sent blocks that are remembered, counted once per worker.")] = 1 << 20

    fallback: Annotated[str, Setting("Policy of affinity for sessions without a worker.")] = "kv"
    session_ttl_s: Annotated[
        float, Setting("Seconds for which a session keeps its worker after its latest request.")
    ] = 600.0
    sessions: Annotated[int, Setting("Sessions that are remembered.")] = 1 << 16

    track_output: Annotated[bool, Setting("Count blocks of generated tokens as held.")] = False
    """Needs ``Router.progressed``."""
    reserve_output: Annotated[float, Setting("Share of the expected output that counts as held from the start.")] = 0.0
    forget_after_s: Annotated[
        float, Setting("Seconds after which a request that was never reported finished is dropped.")
    ] = 3600.0

    def __post_init__(self) -> None:
        _registry().check(self.policy)
        _one_of("load", self.load, LOADS)
        if self.policy == "affinity":
            if self.fallback == "affinity":
                raise KvyardError("fallback of a router can't be affinity itself: choose another routing policy")
            _registry().check(self.fallback)
        for key in _AT_LEAST_0:
            _number(key, getattr(self, key), 0.0, inclusive=True)
        for key in ("session_ttl_s", "forget_after_s", "approx_ttl_s"):
            _number(key, getattr(self, key), 0.0, inclusive=False)
        _number("guard_ratio", self.guard_ratio, 1.0, inclusive=True)
        for key in ("remembered_blocks", "sessions", "block_size"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise KvyardError(f"{key} of a router must be a whole number of 1 or more, got {value!r}")

    @property
    def lower_credits(self) -> tuple[float, ...]:
        """Worth of a block on each tier below the device, closest first."""
        credits: tuple[float, ...] = _credits(self)
        return credits


def _registry() -> "Registry[Callable[[RouterConfig], Policy]]":
    from kvyard.router.policies import POLICIES  # policies are made from a configuration, so they import this module

    return POLICIES


def _policies() -> list[str]:
    return _registry().names()


_OPTIONS = Setting(
    "Options of that routing policy, as NAME=VALUE,... .",
    name="router_options",
    parse=figures,
    options=_registry,
)


def _one_of(key: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise KvyardError(f"unknown {key} {value!r} of a router: {suggest(value, sorted(choices))}")


def _number(key: str, value: object, least: float, *, inclusive: bool) -> None:
    if value is None and key in _OPTIONAL:
        return
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
    if not (least <= number < float("inf") if inclusive else least < number < float("inf")):
        raise KvyardError(
            f"{key} of a router must be {'at least' if inclusive else 'more than'} {least:g}, got {value!r}"
        )
