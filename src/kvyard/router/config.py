"""What a router can be told. Checked once; each refusal is one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvyard.errors import KvyardError

LOADS = ("requests", "tokens", "blocks")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy and its figures; ``docs/routing.md`` explains each. Raises ``KvyardError`` for what can't be."""

    policy: str = "kv"
    """A name that ``kvyard.router.POLICIES`` has."""
    block_size: int | None = None
    """Tokens per request key. Left out, it is the index's."""

    overlap_credit: float = 1.0
    """What a block in the worker's device memory is worth, against computing it."""
    overlap_decay: float = 0.0
    """How fast that shrinks with the worker's prefill backlog beyond the least of all, in prompts of this size."""
    host_credit: float = 0.75
    storage_credit: float = 0.25
    remote_credit: float = 0.25
    prefill_scale: float = 1.0
    """What a block to compute costs, against a block that is held."""
    request_weight: float = 0.0
    """Blocks that an active request costs by itself."""
    temperature: float = 0.0
    """0: the least cost. Above: by chance, less costly ones more often."""

    load: str = "requests"
    """What ``least-loaded`` and the guard go by: active ``requests``, ``tokens`` still to prefill, or ``blocks`` to prefill and
    held."""
    guard: float | None = None
    """The difference in load, between the most and the least loaded, beyond which the least loaded is taken; off without."""
    guard_ratio: float = 1.5
    """And the most loaded must have this many times the least's."""

    predicted_ttl_s: float = 2.0
    """How long ``kv`` credits a prefix that it sent a worker and that no event told of yet; 0: not at all."""
    approx_ttl_s: float | None = 120.0
    """How long ``approx`` remembers; ``None``: by room only."""
    remembered_blocks: int = 1 << 20
    """How many blocks, once per worker, either of the two remembers at most."""

    fallback: str = "kv"
    """The policy of ``affinity`` where a session has no worker yet, or none any more."""
    session_ttl_s: float = 600.0
    """How long a session stays with a worker after its last request."""
    sessions: int = 1 << 16
    """How many are remembered at most."""

    track_output: bool = False
    """Whether blocks of generated tokens count as held; needs ``Router.progressed``."""
    reserve_output: float = 0.0
    """Which share of an expected output's blocks counts as held from the start."""
    forget_after_s: float = 3600.0
    """A request that nobody reported finished is given up after this."""

    def __post_init__(self) -> None:
        from kvyard.router.policies import POLICIES  # the registry is the authority on names

        _one_of("policy", self.policy, POLICIES.names())
        _one_of("load", self.load, LOADS)
        if self.policy == "affinity":
            _one_of("fallback", self.fallback, [name for name in POLICIES.names() if name != "affinity"])
        for key in (
            "overlap_credit",
            "overlap_decay",
            "host_credit",
            "storage_credit",
            "remote_credit",
            "prefill_scale",
            "request_weight",
            "temperature",
            "predicted_ttl_s",
            "reserve_output",
        ):
            _number(key, getattr(self, key), 0.0, inclusive=True)
        for key in ("session_ttl_s", "forget_after_s"):
            _number(key, getattr(self, key), 0.0, inclusive=False)
        _number("guard_ratio", self.guard_ratio, 1.0, inclusive=True)
        if self.guard is not None:
            _number("guard", self.guard, 0.0, inclusive=True)
        if self.approx_ttl_s is not None:
            _number("approx_ttl_s", self.approx_ttl_s, 0.0, inclusive=False)
        for key in ("remembered_blocks", "sessions", "block_size"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise KvyardError(f"{key} of a router must be a whole number of 1 or more, got {value!r}")

    @property
    def lower_credits(self) -> tuple[float, ...]:
        """What a block is worth on each tier below the device, closest first."""
        return (self.host_credit, self.storage_credit, self.remote_credit)


def parse_router_config(raw: Mapping[str, object]) -> RouterConfig:
    """The configuration that a file describes. Raises ``KvyardError`` for an unknown key or a value that can't be."""
    unknown = [key for key in raw if key not in RouterConfig.__struct_fields__]
    if unknown:
        known = ", ".join(RouterConfig.__struct_fields__)
        raise KvyardError(f"unknown key {unknown[0]!r} of a router: choose from {known}")
    try:
        return msgspec.convert(dict(raw), RouterConfig)
    except msgspec.ValidationError as error:
        raise KvyardError(f"the router's configuration can't be read: {error}") from error


def _one_of(key: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise KvyardError(f"unknown {key} {value!r} of a router: choose one of {', '.join(sorted(choices))}")


def _number(key: str, value: object, least: float, *, inclusive: bool) -> None:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    if not fine or not (least <= value < float("inf") if inclusive else least < value < float("inf")):  # type: ignore[operator]
        raise KvyardError(
            f"{key} of a router must be {'at least' if inclusive else 'more than'} {least:g}, got {value!r}"
        )
