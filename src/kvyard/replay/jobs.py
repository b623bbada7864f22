"""From a trace's requests to what routers and engines take."""

from kvyard.blocks.use import NO_FACTS, RequestFacts
from kvyard.engine.job import Job
from kvyard.hashing import PLAIN, Namespace, TokenChain, TraceChain, algorithm
from kvyard.index.chains import WholeChain
from kvyard.replay.facts import TraceFacts, hints_of
from kvyard.replay.record import Record
from kvyard.router import RouteRequest

PREFILL = ":prefill"
"""Suffix of the id of a job that computes a prompt for another worker, so that one worker may have both jobs of a request."""


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

    def make(self, record: Record, block_size: int, facts: RequestFacts, suffix: str = "") -> Job:
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
        return Job(
            request.id + suffix,
            chain,
            max(1, request.output_length),
            arrival=record.arrival,
            priority=request.priority,
            hints=hints_of(request) if self._names_sessions else request.hints,
            facts=facts,
            sample=sample,
        )

    def route_request(self, record: Record, job: Job) -> RouteRequest:
        """Return the request as a router takes it; ``job`` has its keys."""
        request = record.request
        return RouteRequest(
            id=request.id,
            keys=job.chain.keys if self._reads_keys else (),  # type: ignore[arg-type]  # trace keys are integers
            num_tokens=request.input_length,
            session=request.session,
            expected_output=request.output_length,
        )
