"""A job: one request as the engine runs it, from arrival to its last token.

It is the block manager's ``Request`` plus what scheduling needs. While it decodes, its counts are not kept up token by token:
``DecodeBatch`` knows how many passes ago it joined, and ``catch_up`` writes the counts down when they are needed.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

from kvyard.blocks import NO_HINTS, Hints, Request
from kvyard.blocks.use import NO_FACTS, RequestFacts
from kvyard.hashing import TokenChain, TraceChain


class JobState(IntEnum):
    """State of a job."""

    WAITING = 0
    """In the queue, or not yet handed over."""
    LOADING = 1
    """Blocks of the job are in flight from a lower tier or another worker; it is in no queue."""
    PREFILL = 2
    """Running, with known tokens still to compute."""
    DECODE = 3
    """Running, one pass per step of output."""
    FINISHED = 4
    REJECTED = 5
    CANCELLED = 6

    @property
    def ended(self) -> bool:
        """Return true if it has ended."""
        return self >= JobState.FINISHED


class Job(Request):
    """One request. ``max_tokens`` is how many it will produce unless the model's length or a cancellation stops it."""

    __slots__ = (
        "_sample",
        "aborted",
        "ahead",
        "arrival",
        "awaits",
        "base",
        "cached_tokens",
        "defers",
        "end",
        "external_tokens",
        "forgone",
        "handed_over",
        "joined",
        "left",
        "loaded",
        "loaded_by_tier",
        "max_tokens",
        "output",
        "preemptions",
        "priority",
        "pulled",
        "received",
        "serial",
        "state",
        "tier_tokens",
        "touch",
    )

    def __init__(
        self,
        request_id: str,
        chain: TokenChain | TraceChain,
        max_tokens: int,
        *,
        arrival: int = 0,
        priority: int = 0,
        reads_cache: bool = True,
        hints: Hints = NO_HINTS,
        facts: RequestFacts = NO_FACTS,
        sample: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        """``sample`` gives the ids of the output tokens from one index to another; a chain of real tokens needs it.

        Raises ``ValueError`` for a request without tokens.
        """
        if max_tokens < 1:
            raise ValueError(f"request {request_id} asks for {max_tokens} tokens; it must ask for at least one")
        if chain.num_tokens < 1:
            raise ValueError(f"request {request_id} has an empty prompt")
        super().__init__(request_id, chain, reads_cache=reads_cache, hints=hints, facts=facts)
        self.max_tokens = max_tokens
        self.arrival = arrival
        self.priority = priority
        self.state = JobState.WAITING
        self.output = 0
        """Tokens produced, as of the last ``catch_up``."""
        self.serial = 0
        """Its place among the running, in order of admission; another after a preemption."""
        self.cached_tokens = -1
        """Prompt tokens found on the device at its first admission; -1 before that."""
        self.external_tokens = 0
        """Prompt tokens loaded from lower tiers before its first admission."""
        self.preemptions = 0
        self.tier_tokens: tuple[int, ...] = ()
        """``loaded`` by tier, closest to the device first."""
        self.loaded = 0
        """Tokens that came, or are coming, from lower tiers for its next admission."""
        self.loaded_by_tier: tuple[int, ...] = ()
        self.pulled = 0
        """Tokens of ``loaded`` that came from another worker."""
        self.left = 0
        """Tokens that lower tiers had for its last admission, and that were left there to be computed."""
        self.handed_over = False
        """True if its blocks stay after its end, until another worker, for which it computes the prompt, has them."""
        self.received = False
        """True if another worker computed its prompt, whose blocks it gets before it begins."""
        self.aborted = False
        """True if it was cancelled and ends with its next token: SGLang's way."""
        self.forgone = 0
        """Tokens by which ``max_tokens`` was cut then."""
        self.defers = False
        """True if blocks it completes while decoding may be registered when the next one is taken: one pass late, which
        makes no difference, since their names are its own."""
        self.ahead: list[int] = []
        """Blocks taken for it that its table doesn't have yet (``DecodeBlocks``)."""
        # Kept by the decode batch.
        self.base = 0
        self.joined = 0
        self.awaits = 0
        """1 if it joined with its last token in flight, which is known later: with asynchronous scheduling."""
        self.touch = self.end = -1
        if sample is None and not isinstance(chain, TraceChain):
            raise ValueError(f"request {request_id} has real tokens and needs a way to sample more")
        self._sample = sample

    def emit(self, count: int) -> None:
        """Add ``count`` produced tokens."""
        chain, sample = self.chain, self._sample
        if isinstance(chain, TraceChain):
            chain.grow(count)
        elif sample is not None:
            chain.append(sample(self.output, self.output + count))
        self.output += count

    @property
    def wanted(self) -> int:
        """Return the number of tokens that it asked for, also once it is aborted."""
        return self.max_tokens + self.forgone

    @property
    def remaining(self) -> int:
        """Return the number of tokens it has still to produce."""
        return self.max_tokens - self.output

    def catch_up(self, tick: int) -> None:
        """Add the tokens that ``tick - joined`` decode passes computed and produced."""
        behind = self.base + tick - self.joined - self.num_computed_tokens
        if behind:
            self.num_computed_tokens += behind
            self.emit(behind)

    def catch_up_known(self, tick: int, in_flight: int) -> None:
        """Like ``catch_up``, where the tokens of ``in_flight`` passes are not known yet."""
        self.num_computed_tokens = self.base + tick - self.joined
        known = self.num_computed_tokens + 1 - in_flight
        if known > self.num_tokens:
            self.emit(known - self.num_tokens)

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self.state.name}, {self.num_computed_tokens}/{self.num_tokens}, out={self.output})"
