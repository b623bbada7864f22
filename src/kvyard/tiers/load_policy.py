"""Load policies: they decide if a prefix in lower tiers is loaded, or left there and computed. Each is one of ``LOADS``.

A load is slower than computing where the link is slow or crowded, or the prompt short. A policy is asked when a request is
about to begin, and again whenever something has landed that it waits for; so a load that comes too late can be left as
well. It knows neither links nor engines: it receives the offers and the time that each way would take.

An installed package adds its own by an entry point of the group ``kvyard.loads``, a program by ``LOADS.register``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from kvyard.blocks.spec import ConfigError
from kvyard.registry import Option, Options, Registry, defaults

PrefillTime = Callable[[int, int], int]
"""Returns the nanoseconds to compute this many prompt tokens after this many computed ones."""

REASONS = {
    "small": "too few to load",
    "busy": "too many loads in flight",
    "slower": "computed sooner than loaded",
}
"""Reasons to leave a load, with their words in reports."""


class LoadOffer(NamedTuple):
    """Prefix of a prompt in the tiers down to ``depth``, the first being 1."""

    depth: int
    tokens: int
    """Tokens beyond those on the device."""
    load_ns: Callable[[], int]
    """Returns the time to load them, waiting included, if nothing else uses the links from now on."""


class LoadQuestion(NamedTuple):
    """One request that could load."""

    offers: Sequence[LoadOffer]
    """Closest tiers first; each has more than the one before it."""
    hit: int
    """Tokens that the device has,"""
    prompt: int
    """of this many tokens."""
    in_flight: int
    """Requests of this worker with a load or fetch in flight."""
    backlog: int
    """Prompt tokens that running requests have still to compute here."""


class LoadChoice(NamedTuple):
    """Chosen offer, by its number; -1 for none. ``why`` the rest is left: one of ``REASONS``, or words."""

    taken: int
    why: str = ""


class LoadPolicy:
    """The interface, and the policy that loads all there is: what engines do, and the default."""

    OPTIONS: ClassVar[Options] = {}
    """Numbers that people may set."""
    needs_times = False
    """True if it depends on the time to compute, so that the engine must supply it."""
    asks = False
    """True if it may leave anything."""

    def __init__(self, options: Mapping[str, float], prefill_ns: PrefillTime | None = None) -> None:
        """``options`` have been checked by ``LOADS``."""
        self.options = {**defaults(self.OPTIONS), **options}
        self.prefill_ns = prefill_ns

    def choose(self, question: LoadQuestion) -> LoadChoice:
        """Choose an offer. Changes nothing."""
        return LoadChoice(len(question.offers) - 1)


class ThresholdLoads(LoadPolicy):
    """llm-d's selective transfer (llm-d/llm-d-router #2833): enough tokens, and not too many loads at a time."""

    OPTIONS: ClassVar[Options] = {
        "tokens": Option(1024, "Fewest tokens that are worth a load."),
        "in_flight": Option(8, "Requests of the worker that load or fetch at a time."),
    }
    asks = True

    def choose(self, question: LoadQuestion) -> LoadChoice:
        if question.offers[-1].tokens < self.options["tokens"]:
            return LoadChoice(-1, "small")
        if question.in_flight >= self.options["in_flight"]:
            return LoadChoice(-1, "busy")
        return LoadChoice(len(question.offers) - 1)


class LeastTimeLoads(LoadPolicy):
    """Earliest first token: nothing loaded, or the offer of the tiers down to one of them.

    Computing waits for the prompts that are being computed already. So does what is left to compute after a load, but that wait
    goes by while it loads.
    """

    needs_times = True
    asks = True

    def choose(self, question: LoadQuestion) -> LoadChoice:
        prefill_ns = self.prefill_ns
        assert prefill_ns is not None
        hit, prompt = question.hit, question.prompt
        waited = prefill_ns(question.backlog, 0)
        best = waited + prefill_ns(prompt - hit, hit)
        taken = -1
        for number, offer in enumerate(question.offers):
            there = hit + offer.tokens
            rest = prefill_ns(prompt - there, there)
            if rest < best:  # else not even an instant load would do
                took = max(offer.load_ns(), waited) + rest
                if took < best:
                    best, taken = took, number
        return LoadChoice(taken, "slower")


LOADS: Registry[type[LoadPolicy]] = Registry(
    "load policy",
    "kvyard.loads",
    {
        "always": "kvyard.tiers.load_policy:LoadPolicy",
        "threshold": "kvyard.tiers.load_policy:ThresholdLoads",
        "least-time": "kvyard.tiers.load_policy:LeastTimeLoads",
    },
    error=ConfigError,
)
