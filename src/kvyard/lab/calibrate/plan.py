"""Probes of an engine: small before large, so that a run that is cut short has seen most."""

from typing import NamedTuple

import msgspec

from kvyard.errors import KvyardError
from kvyard.replay.live.facts import EngineFacts

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (48, 1024)
"""Prompts of requests that decode together."""
TOKENS = 40
"""Tokens that each of them decodes."""
MIXED = (4, 16, 64)
"""Requests that decode while prompts come."""
BESIDE = (32, 128, 512, 1024, 2048)
"""Lengths of those prompts."""
PAUSE = 4
"""Tokens between two of them."""
SHARE = 0.7
"""Share of the cache that probes may fill: an engine that evicts or preempts behaves differently."""


class CalibrationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the requests to an engine."""

    max_prompt: int = 4096
    max_batch: int = 64
    rounds: int = 2
    """Number of times that each probe is sent, with other prompts each time."""
    seconds: float = 300.0
    """After which no further probe begins."""

    def check(self) -> None:
        """Raise ``KvyardError`` for what can't be."""
        if self.max_prompt < 64 or self.max_batch < 4:
            raise KvyardError("probes need prompts of up to 64 tokens and 4 requests at once at least")
        if self.rounds < 1 or not self.seconds > 0:
            raise KvyardError("rounds must be at least 1, and seconds above 0")


class Probe(NamedTuple):
    """Requests that go out together: ``batch`` that decode ``tokens`` each after ``prompt``, and prompts beside them."""

    prompt: int
    batch: int = 1
    tokens: int = 1
    beside: tuple[int, ...] = ()

    @property
    def requests(self) -> int:
        return self.batch + len(self.beside)

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"a prompt of {self.prompt:,}"
        many = f"{self.batch} that decode" if self.batch > 1 else "one that decodes"
        return f"{many} after {self.prompt:,}{', and prompts beside' if self.beside else ''}"


def make_plan(limits: CalibrationLimits, facts: EngineFacts) -> list[Probe]:
    """Return the probes of one round for an engine, by what it can hold. Raises ``KvyardError`` where it holds none."""
    longest = min(limits.max_prompt, (facts.max_model_len or limits.max_prompt + TOKENS) - TOKENS)
    seats = min(limits.max_batch, facts.max_num_seqs or limits.max_batch)
    room = SHARE * (facts.capacity or float("inf"))

    def fits(probe: Probe) -> bool:
        each = probe.prompt + probe.tokens
        short = each <= (facts.max_model_len or float("inf"))
        return short and probe.batch * each + sum(probe.beside) <= room and probe.batch <= seats

    lengths = [length for length in LENGTHS if length <= longest]
    probes = [Probe(length) for length in lengths if fits(Probe(length))]
    contexts = [context for context in CONTEXTS if context <= longest]
    beside = tuple(length for length in BESIDE if length <= longest)
    for batch in BATCHES:
        for context in contexts:
            probe = Probe(context, batch, TOKENS)
            if fits(probe):
                probes.append(probe)
        if batch in MIXED and contexts:
            # Long enough that the last prompt still finds them decoding.
            kept = beside
            while kept and not fits(Probe(contexts[0], batch, 2 * TOKENS, kept)):
                kept = kept[:-1]
            if kept and batch < seats:
                probes.append(Probe(contexts[0], batch, 2 * TOKENS, kept))
    if not any(probe.tokens > 1 for probe in probes):
        raise KvyardError(
            f"the engine is too small to be probed: requests of {CONTEXTS[0] + TOKENS} tokens must fit into its "
            f"max_model_len ({facts.max_model_len or 'unknown'}) and into {SHARE:.0%} of its cache "
            f"({'unknown' if facts.capacity is None else f'{facts.capacity:,} tokens'})"
        )
    return probes
