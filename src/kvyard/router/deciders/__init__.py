"""Split policies: they decide if a prefill worker computes a prompt and hands it over, or the decode worker computes it.

Each is one file and one entry of ``DECIDERS``. A policy sees the workers that the routers would choose now, and the time that
they would take.

An installed package adds its own by an entry point of the group ``kvyard.deciders``, a program by ``DECIDERS.register``.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

from kvyard.registry import Options, Registry, defaults
from kvyard.router.pace import Pace
from kvyard.router.request import Decision


class Prospect(NamedTuple):
    """A worker that a router would choose now."""

    decision: Decision
    pace: Pace
    tokens_per_pass: int
    """Prompt tokens that it computes in one pass at most."""

    @property
    def uncached(self) -> int:
        """Tokens of the prompt that it would have to compute."""
        return self.decision.new_tokens

    @property
    def prefill_ms(self) -> float:
        """Until it would have computed the prompt, and those before it."""
        return self.pace.prefill(self.decision.prefill_tokens + self.uncached)


class SplitInput(NamedTuple):
    """One request, and both ways it could go."""

    num_tokens: int
    decode: Prospect
    prefill: Prospect
    send_ms: float
    """Milliseconds of a hand-over on an idle network, for the part that the decode worker lacks."""


class Decider:
    """The interface."""

    looks = True
    """True if it depends on where the request would be sent; otherwise it is asked once, and its answer holds for all."""
    OPTIONS: ClassVar[Options] = {}
    """Numbers that people may set."""

    def __init__(self, options: Mapping[str, float] | None = None) -> None:
        """``options`` have been checked by ``make_decider``."""
        self.options = {**defaults(self.OPTIONS), **(options or {})}

    def splits(self, split: SplitInput | None) -> bool:
        """Return true if a prefill worker computes the prompt. ``None`` for a split policy that doesn't look."""
        raise NotImplementedError

    def served(self, ttft_ms: float) -> None:
        """Receive the TTFT of a request."""


_HERE = "kvyard.router.deciders"
DECIDERS: Registry[Callable[[Mapping[str, float]], Decider]] = Registry(
    "split policy",
    "kvyard.deciders",
    {
        "always": f"{_HERE}.constant:Always",
        "never": f"{_HERE}.constant:Never",
        "uncached": f"{_HERE}.uncached:Uncached",
        "isl-bounding": f"{_HERE}.conditional:IslBounding",
        "prefill-load": f"{_HERE}.conditional:PrefillLoad",
        "isl-or-load": f"{_HERE}.conditional:IslOrLoad",
        "drift": f"{_HERE}.drift:Drift",
        "least-time": f"{_HERE}.soonest:Soonest",
    },
)


def make_decider(name: str, options: Mapping[str, float] | None = None) -> Decider:
    """Return the split policy called ``name``. Raises ``KvyardError`` for an unknown one, or unknown options."""
    return DECIDERS.get(name)(DECIDERS.resolve(name, options or {}))
