"""Load policies: whether what lower tiers have of a prompt is loaded, or left there and computed. Each is one of ``LOADS``.

A load is slower than computing where the link is slow or crowded, or the prompt short. A policy is asked when a request is
about to begin, and again whenever something has landed that it waits for; so a load that comes too late can be left as well. It
knows neither links nor engines: it is told what there is and what each way would take.

An installed package adds its own by an entry point of the group ``kvyard.loads``, a program by ``LOADS.register``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from kvyard.blocks.spec import ConfigError
from kvyard.registry import Option, Options, Registry, defaults

PrefillTime = Callable[[int, int], int]
"""How long so many prompt tokens take to compute, in nanoseconds, after so many that are there."""

REASONS = {
    "small": "too few to load",
    "busy": "too many loads under way",
    "slower": "computed sooner than loaded",
}
"""Why a load is left, and what reports say of it."""


class LoadOffer(NamedTuple):
    """What the tiers down to ``depth``, the first being 1, have of a prompt."""

    depth: int
    tokens: int
    """So many beyond what the device has."""
    load_ns: Callable[[], int]
    """How long it takes to bring them, waiting included, if nothing else uses the links from now on."""


class LoadQuestion(NamedTuple):
    """One request that could load."""

    offers: Sequence[LoadOffer]
    """Closest tiers first; each has more than the one before it."""
    hit: int
    """Tokens that the device has,"""
    prompt: int
    """of so many."""
    in_flight: int
    """Requests of this worker that a load or fetch is under way for."""
    backlog: int
    """Prompt tokens that running requests have still to compute here."""


class LoadChoice(NamedTuple):
    """Which of the offers is taken, by its number; -1 for none. ``why`` the rest is left: one of ``REASONS``, or words."""

    taken: int
    why: str = ""


class LoadPolicy:
    """The interface, and the policy that loads all there is: what engines do, and the default."""

    OPTIONS: ClassVar[Options] = {}
    """Numbers that people may set."""
    needs_times = False
    """Whether it goes by how long computing takes, so that the engine must say."""
    asks = False
    """Whether it may leave anything."""

    def __init__(self, options: Mapping[str, float], prefill_ns: PrefillTime | None = None) -> None:
        """``options`` have been checked by ``LOADS``."""
        self.options = {**defaults(self.OPTIONS), **options}
        self.prefill_ns = prefill_ns

    def choose(self, question: LoadQuestion) -> LoadChoice:
        """What to load. Changes nothing."""
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
    """What gives the first token soonest: none of it loaded, or what the tiers down to one of them have.

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
