"""Jobs of a fleet: routers choose workers for them, and engines run them."""

from collections.abc import Callable, Sequence

from kvyard.blocks import NO_HINTS, Hints
from kvyard.blocks.use import NO_FACTS, RequestFacts
from kvyard.engine.job import Job
from kvyard.hashing import PLAIN, Namespace, TokenChain, TraceChain, algorithm
from kvyard.index.chains import WholeChain
from kvyard.replay.facts import TraceFacts, hints_of
from kvyard.replay.record import Record

PREFILL = ":prefill"
"""Suffix of the id of a job that computes a prompt for another worker, so that one worker may have both jobs of a request."""


class FleetJob(Job):
    """A request, or a stage of one, in a fleet. Routers read it as they read a ``RouteRequest``."""

    __slots__ = ("keys", "record")

    def __init__(
        self,
        record: Record,
        chain: TokenChain | TraceChain,
        *,
        suffix: str = "",
        reads_keys: bool = True,
        hints: Hints = NO_HINTS,
        facts: RequestFacts = NO_FACTS,
        sample: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        """Unless a router ``reads_keys``, there are none."""
        request = record.request
        super().__init__(
            request.id + suffix,
            chain,
            max(1, request.output_length),
            arrival=record.arrival,
            priority=request.priority,
            hints=hints,
            facts=facts,
            sample=sample,
        )
        self.record = record
        self.keys: Sequence[int] = chain.keys if reads_keys else ()  # type: ignore[assignment]  # trace keys are integers

    @property
    def session(self) -> str | None:
        """The conversation that it belongs to."""
        return self.record.request.session

    @property
    def expected_output(self) -> int | None:
        """Tokens that the trace has for its answer."""
        return self.record.request.output_length


class JobMaker:
    """Makes the jobs of one fleet."""

    def __init__(self, facts: TraceFacts | None, *, names_sessions: bool, reads_keys: bool) -> None:
        """``facts`` are for eviction policies that use them. ``names_sessions``: engines note whose blocks are whose.
        ``reads_keys``: routers read the keys of prompts.
        """
        self._facts = facts
        self._names_sessions = names_sessions
        self._reads_keys = reads_keys
        self._made = 0

    def facts(self, record: Record) -> RequestFacts:
        """Return the trace's facts of a request; to be asked once each time that it is placed."""
        facts = NO_FACTS if self._facts is None else self._facts.of(record.request)
        return facts._replace(tenant=record.tenant) if record.tenant else facts

    def make(self, record: Record, block_size: int, facts: RequestFacts, suffix: str = "") -> FleetJob:
        """Return a job for a worker whose blocks hold ``block_size`` tokens."""
        self._made += 1
        request = record.request
        chain: TraceChain | TokenChain
        sample = None
        space = PLAIN
        if request.lora is not None or request.salt is not None:
            space = Namespace(lora_name=request.lora, salt=request.salt)
        if request.ids is not None:
            chain = TraceChain(request.ids, request.id_block_size, request.input_length, block_size, self._made, space)
        elif request.tokens is not None:
            chain = WholeChain(list(request.tokens), block_size, algorithm("xxh3"), space)
            known = list(request.output_tokens or ())

            def sample(start: int, stop: int) -> list[int]:
                return [known[index] if index < len(known) else 0 for index in range(start, stop)]
        else:
            # Nothing is known of what it shares, so it shares nothing: all of its blocks have names of their own.
            chain = TraceChain((), 1, 0, block_size, self._made)
            chain.grow(request.input_length)
        return FleetJob(
            record,
            chain,
            suffix=suffix,
            reads_keys=self._reads_keys,
            hints=hints_of(request) if self._names_sessions else request.hints,
            facts=facts,
            sample=sample,
        )
