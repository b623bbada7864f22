"""SGLang's scheduling, as its ``Scheduler`` and ``PrefillAdder`` decide: held to logs of both (``tests/golden/sglang``).

A pass extends (computes prompts) or decodes; while a prompt can get in, decoding waits, unless the two are mixed. A prompt
gets in if it fits whole, with its answer and a page to spare, into what is free after a share of the output that running
requests may still produce is set aside (``NewTokenRatio``), even where only a chunk of it is computed at first. Once one did
not fit, the batch counts as full until a request leaves it. When the share was too little, requests with the least output go
back to the queue.

What is cached is a radix tree (``kvyard.blocks.radix``).
"""

import random
from collections.abc import Iterator

import msgspec

from kvyard.blocks import Hit
from kvyard.blocks.extent import Node
from kvyard.blocks.radix import RadixGroup, held_of
from kvyard.blocks.spec import ConfigError, GroupSpec
from kvyard.blocks.window_pages import WindowPages
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.loads import TreeLoads
from kvyard.engine.passes import Chunk, Pass
from kvyard.engine.policies.backend import SchedulerBackend, TreeSettings
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.mocker import (
    DECAY_PASSES,
    FIRST,
    LONGEST_SORTED,
    LOOK_AHEAD,
    LOWEST_SHARE,
    SAME_START,
    MockerPasses,
    PrefixQueue,
)
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.queue import ArrivalQueue, Queue
from kvyard.hashing import TokenChain
from kvyard.integers import ceil_div
from kvyard.tiers.hicache import check as check_hicache

UNUSED = {
    "max_loras": "a limit of adapters per pass is modelled for vllm",
    "max_num_batched_tokens": "it has sglang.max_prefill_tokens and sglang.chunked_prefill_size",
    "long_prefill_token_threshold": "it has sglang.chunked_prefill_size",
    "long_prefill_token_threshold_adaptive": "it has sglang.chunked_prefill_size",
    "max_num_scheduled_tokens": "it has sglang.max_prefill_tokens and sglang.chunked_prefill_size",
    "enable_chunked_prefill": "it has sglang.chunked_prefill_size, which -1 turns off",
    "scheduling_policy": "it has sglang.schedule_policy",
    "preemption_mode": "it retracts the request with the least output",
    "scheduler_reserve_full_isl": "it admits by a budget of free tokens",
    "watermark": "it admits by a budget of free tokens",
}
SLIDE_INTERVAL = 128
"""Tokens by which a window moves on before a request gives back what is out of it: SGLANG_SWA_EVICTION_INTERVAL."""
REFRESH_INTERVAL = 32
"""Waiting requests count as uses of what is cached for them once in this many attempts to admit one."""
BY_CACHE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
"""Schedule policies that match every waiting request before they choose."""


ROUNDING = 1e-6
NO_TOKENS = -1
"""A prompt doesn't fit."""


class NewTokenRatio:
    """Share of the output that running requests may still produce for which room is set aside.

    Setting aside all of it would waste most; setting aside none would retract often. So the share falls with every decode
    pass in which nothing was retracted; a retraction sets it to what the running requests have shown to need. It is a running
    sum, as SGLang's is: a product would round differently.
    """

    def __init__(self, conservativeness: float) -> None:
        self._first = min(FIRST * conservativeness, 1.0)
        self._floor = min(self._first * LOWEST_SHARE, 1.0)
        self._step = (self._first - self._floor) / DECAY_PASSES
        self.current = self._first

    def decay(self, passes: int) -> None:
        """``passes`` decode passes retracted nothing."""
        while passes and self.current != self._floor:
            self.current = max(self.current - self._step, self._floor)
            passes -= 1

    def reset(self) -> None:
        """All requests are gone."""
        self.current = self._first

    def estimate(self, produced: int, wanted: int, requests: int) -> None:
        """A request was retracted: start again from what the rest have produced so far, out of the ``wanted`` tokens they may
        produce in all.
        """
        self.current = min(1.0, (produced + LOOK_AHEAD * requests) / (wanted + 1))


class WaitingQueue:
    """Jobs in the order in which they were last sorted; who comes, or comes back, goes to the end."""

    def __init__(self) -> None:
        self.strict = False
        self.jobs: list[Job] = []
        self.entries: dict[Job, int] = {}
        """When each job came or came back, as a number."""
        self._entered = 0
        self.processed = 0
        """Prompt tokens computed so far, the axis by which ``hrrn`` ages requests."""
        self.arrivals: dict[Job, int] = {}
        """Those that had been computed when each job came."""

    def push(self, job: Job) -> None:
        self._note(job)
        self.jobs.append(job)

    def push_front(self, job: Job) -> None:
        self._note(job)
        self.jobs.insert(0, job)

    def _note(self, job: Job) -> None:
        self._entered += 1
        self.entries[job] = self._entered
        self.arrivals[job] = self.processed

    def peek(self) -> Job:
        return self.jobs[0]

    def pop(self) -> Job:
        job = self.jobs[0]
        self.remove(job)
        return job

    def remove(self, job: Job) -> None:
        self.jobs.remove(job)
        del self.entries[job], self.arrivals[job]

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)


class Budget:
    """Tokens that one batch of prompts may still take: ``PrefillAdder`` and its ``PrefillBudget``."""

    def __init__(self, free: int, page: int, aside: float, inputs: int, chunk: int | None, mixed: int) -> None:
        """``free`` tokens could be had at once, of which ``aside`` are for the answers of running requests; ``mixed`` of these
        decode in the batch.
        """
        self.free = free
        self.page = page
        self.total = mixed + aside
        """Tokens spoken for, answers included."""
        self.current: float = mixed
        """Tokens spoken for in this batch."""
        self.inputs = inputs - mixed
        self.chunk = chunk - mixed if chunk is not None else None

    @property
    def roomy(self) -> bool:
        """True if something is free that isn't spoken for."""
        return self.free - self.total > 0 and self.free - self.current > 0

    @property
    def spent(self) -> bool:
        """True if the batch has as many tokens as it may have, though more would fit."""
        return self.roomy and (self.inputs <= 0 or (self.chunk is not None and self.chunk <= 0))

    @property
    def open(self) -> bool:
        """True if another prompt may be tried."""
        return self.roomy and not self.spent

    def pages(self, tokens: int) -> int:
        """``tokens`` in whole pages, as tokens."""
        return ceil_div(tokens, self.page) * self.page

    def continued(self) -> int:
        """Tokens that a prompt which is partly computed may have: what is free, unless that is nothing."""
        assert self.chunk is not None
        room = min(self.chunk, int(self.free - self.total))
        return room if room > 0 else self.chunk

    def fits(self, left: int, answer: int, locked: int) -> bool:
        """True if ``left`` prompt tokens and the answer fit, with a page to spare, once ``locked`` free pages are held."""
        return left + answer + self.page < self.free - locked * self.page - self.total

    def longest(self, left: int, answer: int, hit: Hit | None) -> int | None:
        """Tokens of a prompt that fits whole which the batch may compute; ``None`` for any number."""
        return self.chunk

    def price(
        self,
        left: int,
        answer: int,
        locked: int,
        *,
        first: bool,
        uncut: bool = False,
        hit: Hit | None = None,
        loaded: int = 0,
    ) -> int:
        """Return how many of the ``left`` tokens of a prompt are computed in this batch: ``NO_TOKENS`` if it doesn't fit whole,
        0 if the batch has as much as it may have. ``first``: the batch has no other prompt. ``uncut``: it may have no chunk
        of this one. ``hit``: what is cached of it and gets ``locked``. ``loaded`` tokens come from the host.
        """
        if not self.fits(left, answer, locked):
            return NO_TOKENS
        longest = self.longest(left, answer, hit)
        if longest == NO_TOKENS:
            return NO_TOKENS
        left -= loaded
        charged = self.pages(left)
        if self.chunk is None and not first and charged >= self.inputs:
            return 0
        if longest is None or charged <= longest:
            return left
        return 0 if uncut else max(0, longest // self.page * self.page)

    def price_known(self, left: int, answer: int, remaining: int, occupied: int, known: "KnownEnds") -> int:
        """Like ``price`` without prefix caching, where all answers are known to have all their tokens: a prompt fits if there
        is room whenever a request ends.
        """
        paged = self.pages(left) + self.page
        if paged > min(self.free - self.current, self.free - self.total):
            return NO_TOKENS
        known.add(remaining, occupied)
        if not known.fit(self.free - self.current - paged):
            return NO_TOKENS
        if self.chunk is None or left <= self.chunk:
            return left
        return max(0, self.chunk)

    def charge(self, tokens: int, answer: int) -> None:
        """A prompt computes ``tokens`` in this batch and has ``answer`` tokens set aside."""
        charged = self.pages(tokens)
        self.total += charged + self.page + answer
        self.current += charged + self.page
        self.inputs -= charged
        if self.chunk is not None:
            self.chunk -= charged


class WindowBudget(Budget):
    """The budget of a model with sliding windows beside full attention: ``SWAPrefillBudget``."""

    def __init__(
        self,
        free: int,
        page: int,
        aside: float,
        inputs: int,
        chunk: int | None,
        mixed: int,
        windows: WindowPages,
    ) -> None:
        super().__init__(free, page, aside, inputs, chunk, mixed)
        self._windows = windows
        self._spoken_for = 0
        """Window tokens spoken for."""

    @property
    def window_room(self) -> int:
        """Window tokens that could be had at once and aren't spoken for."""
        windows = self._windows
        return (windows.free + windows.evictable) * self.page - self._spoken_for

    @property
    def roomy(self) -> bool:
        return super().roomy and self.window_room > 0

    def needed(self, tokens: int, answer: int) -> int:
        """Window tokens that a prompt of ``tokens`` takes at once at most, and its answer after that."""
        window = self._windows.window
        allocated = tokens if self.chunk is None else min(tokens, self.chunk)
        return max(allocated - window, 0) + min(tokens + answer, window) + self.page

    def continued(self) -> int:
        """What is free, and nothing if that is nothing."""
        assert self.chunk is not None
        return max(0, min(self.chunk, int(self.free - self.total), self.window_room - self.page))

    def longest(self, left: int, answer: int, hit: Hit | None) -> int | None:
        room = self.window_room
        if hit is not None:
            room -= self._windows.lockable(hit.groups[0].parts()) * self.page
        needed = self.needed(self.pages(left), answer)
        if needed < room:
            return self.chunk
        if self.chunk is None or needed < self._windows.size * self.page:
            return NO_TOKENS  # it fits later
        cap = (room - self.needed(0, answer)) // self.page * self.page
        return min(self.chunk, cap) if cap > 0 else NO_TOKENS

    def price_known(self, left: int, answer: int, remaining: int, occupied: int, known: "KnownEnds") -> int:
        """As far as memory goes it is enough that the prompt fits now."""
        paged = self.pages(left) + self.page
        if (
            paged > min(self.free - self.current, self.free - self.total)
            or self.needed(left, answer) > self.window_room
        ):
            return NO_TOKENS
        if self.chunk is None or left <= self.chunk:
            return left
        return max(0, self.chunk)

    def charge(self, tokens: int, answer: int) -> None:
        self._spoken_for += self.needed(self.pages(tokens), answer)
        super().charge(tokens, answer)


class KnownEnds:
    """When requests end that are known to have all their tokens, the next one first."""

    def __init__(self, running: list[tuple[float, int]]) -> None:
        self._running = running
        self._ends: list[tuple[float, int]] | None = None

    def add(self, left: float, occupied: int) -> None:
        """A request with ``left`` tokens to produce is about to be admitted. SGLang puts the latest to end before the last."""
        if self._ends is None:
            self._ends = [end for end in [(left, occupied), *self._running] if end[0] > 0]
            self._ends.sort(key=lambda end: end[0])
        elif left > 0:
            at = next((at for at, end in enumerate(self._ends) if left <= end[0]), max(0, len(self._ends) - 1))
            self._ends.insert(at, (left, occupied))

    def fit(self, free: float) -> bool:
        """True if ``free`` tokens suffice until each of them ends."""
        ends = self._ends or []
        freed = 0
        for at, (left, occupied) in enumerate(ends):
            others = len(ends) - at
            if free + freed - left * others <= others:
                return False
            freed += occupied
        return True


class SglangPasses(PassMaker):
    """Extend passes and decode passes."""

    spare_tokens = 1

    def __init__(self, jobs: Lifecycle, config: EngineConfig) -> None:
        super().__init__(jobs)
        settings = self._settings = config.sglang or SglangSettings()
        self._page = jobs.manager.groups[0].block_size
        self._max_seqs = config.max_num_seqs
        self._ahead = config.decides_ahead
        """Whether the tokens of the last pass are not known yet when the next one is formed."""
        chunk = settings.chunked_prefill_size
        self._chunk_size = chunk if chunk > 0 else None
        self._clip = settings.clip_max_new_tokens
        self._ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._policy = settings.schedule_policy
        self._random = random.Random(config.seed)
        self._preempts = settings.enable_priority_scheduling and not settings.disable_priority_preemption
        self._tree: RadixGroup | None = jobs.manager.tree if jobs.manager.caching else None
        self._windows = jobs.manager.pool.windows
        self._hicache = jobs.loads.hicache if isinstance(jobs.loads, TreeLoads) else None
        waiting = jobs.waiting
        assert isinstance(waiting, WaitingQueue)
        # A plan is made only where nobody waits, or nobody is tried until a request leaves: who comes later changes nothing.
        waiting.strict = True
        self._waiting = waiting
        self._running: list[Job] = []
        """The decode batch, in SGLang's order."""
        self._mixes = settings.enable_mixed_chunk and self._chunk_size is not None
        self._extended_tokens = 0
        """Tokens of the last pass that extended."""
        self._extended: list[Job] = []
        """The jobs of the last pass, if that extended; they are not in the decode batch yet."""
        self._chunked: Job | None = None
        """The job whose prompt goes on in the next pass."""
        self._stash = 0
        """Tokens of its prompt that are computed and not in the tree yet."""
        self._full = False
        """Whether no prompt is tried until a request leaves the batch."""
        self._attempts = 0
        self._tick = jobs.batch.tick
        """Decode passes that the ratio knows of."""
        self._endings = 0
        """Jobs that had ended when the decode batch was last looked through."""
        self._published: set[Job] = set()
        """Jobs whose prompts were inserted at the end of this pass."""
        self._cached: dict[Job, int] = {}
        """Tokens that were last found cached of each waiting job, where the policy goes by that."""
        self._entries: dict[Job, int] = {}
        """When each running job last came to the queue; for preemption."""
        self._tried: dict[Job, tuple[int, int]] = {}
        """Tokens of each job, and how many of these were cached, when it was last tried; for preemption."""
        self._founding = 0
        """Tokens of the extend pass that the decode batch began with. SGLang counts them again with each decode pass."""
        self._until = 0
        """When what the pass being formed loads has come."""
        self._aborted: list[Job] = []
        """Running jobs that were cancelled since the last pass was formed."""
        jobs.finishing = self._finishing
        if not self._ahead:
            jobs.aborting = self._aborted.append
        jobs.blocks.headroom = self._tree is not None and self._page > 1

    @property
    def ratio(self) -> float:
        """Share of the running requests' output that room is set aside for."""
        return self._ratio.current

    def decoding(self) -> list[Job]:
        """The jobs that decode in the pass that was last formed, in SGLang's order."""
        return [job for job in [*self._extended, *self._running] if job.end >= 0 and not job.state.ended]

    # -- a pass -----------------------------------------------------------------------------------------------------

    def form(self, now: int, longest: int) -> Pass | None:
        jobs = self.jobs
        jobs.manager.begin_step()
        jobs.batch.resting = bool(jobs.flights) and not jobs.flights[-1].made.decoding
        made = self._form(now, longest)
        jobs.batch.resting = False
        return made

    def _form(self, now: int, longest: int) -> Pass | None:
        jobs = self.jobs
        if self._aborted:
            self._abort(now)
        self._merge()
        chunks = self._admit(now)
        batch = jobs.batch
        if chunks:
            tokens = sum([new for _, new, _ in chunks])
            self._extended = [job for job, _, _ in chunks]
            mixed = self._mixes and self._mix()
            self._extended_tokens = tokens + (batch.count if mixed else 0)
            self._waiting.processed += self._extended_tokens
            made = Pass(chunks, batch.count, batch.context, batch.longest()) if mixed else Pass(chunks, 0, 0)
            made.until, self._until = self._until, 0
            return made
        if not self._running:
            if not jobs.waiting and not jobs.flights and self._chunked is None:
                self._ratio.reset()
            return None
        took_pages = self._decode(now)
        if took_pages is None:
            return None
        self._waiting.processed += self._founding
        passes = 1
        if self._ahead or self._policy == "hrrn":
            pass  # a plan would have to know what is in flight, or when requests arrive in it
        elif self._windows is not None:
            pass  # windows move on in every pass
        elif self._chunked is None and (not jobs.waiting or (self._full and not self._preempts)):
            passes = self.horizon.passes(longest, took_pages)
        return Pass((), batch.count, batch.context, batch.longest(), stable_for=passes)

    def _merge(self) -> None:
        """Take what became of the last pass into account: its prompts join the decode batch, ended requests leave it."""
        batch = self.jobs.batch
        passed = batch.tick - self._tick
        if passed > 0:
            # The first pass of a plan was counted when it was formed.
            self._ratio.decay(passed)
            self._waiting.processed += passed * self._founding
        self._tick = batch.tick
        chunked = self._chunked
        if chunked is not None and chunked.state.ended:
            chunked = self._chunked = None
        if chunked is not None and self._stash:
            self._insert(chunked, self._stash)
            self._stash = 0
        overtaken = False
        if self._extended:
            joined = [job for job in self._extended if job is not chunked and not job.state.ended]
            if len(joined) < len(self._extended):
                self._full = False
            if joined:
                if not self._running:
                    self._running, self._full = joined, False
                    self._founding = self._extended_tokens
                else:
                    # Shorter prompts may have passed one in chunks, which stands behind them from now on.
                    overtaken = joined[0].serial < self._running[-1].serial
                    self._running = self._running + joined
            self._extended = []
        if self._endings != self.jobs.endings:
            self._endings = self.jobs.endings
            still = [job for job in self._running if job.state < JobState.FINISHED]
            if len(still) < len(self._running):
                self._running, self._full = still, False
        if overtaken:
            self.jobs.renumber([job for job in self._running if job.end >= 0])

    def _abort(self, now: int) -> None:
        """A prompt in chunks that was cancelled goes; others have one more token and are inserted."""
        for job in self._aborted:
            if job is self._chunked:
                self._chunked, self._stash = None, 0
                self.jobs.drop(job, now)
            elif job.state is JobState.DECODE and not job.aborted:
                self.jobs.batch.abort(job)
        self._aborted.clear()

    # -- prompts ----------------------------------------------------------------------------------------------------

    def _admit(self, now: int) -> list[Chunk]:
        """Let prompts in, in order, until one has to wait; returns the chunks to compute."""
        running, waiting = self._running, self._waiting
        if self._preempts or self._windows is not None or not running:
            self._full = False
        if (self._full or not waiting) and self._chunked is None:
            return []
        if self._rows() <= 0 and self._chunked is None and not self._preempts:
            self._full = True
            return []
        self._sort()
        settings, pool = self._settings, self.jobs.manager.pool
        mixed = len(running) if self._mixes else 0
        budget = self._budget(mixed)
        chunks: list[Chunk] = []
        if self._chunked is not None:
            self._continue(self._chunked, budget, chunks)
        most = settings.prefill_max_requests
        held = len(chunks)
        known = KnownEnds(self._ends(chunks)) if settings.ignore_eos and not self.jobs.manager.caching else None
        for _ in range(len(waiting)):
            job = waiting.jobs[0]  # those before it are in the batch
            if budget.spent:
                break
            if len(chunks) >= self._rows(held, len(chunks) - held):
                self._full = True
            if self._full and not (self._preempts and self._make_way(job, budget, now)):
                break
            hit = self._match(job, job.num_tokens - 1)
            self._tried[job] = (job.num_tokens, hit.tokens)
            if most is not None and len(chunks) >= most:
                break
            left, answer = job.num_tokens - hit.tokens, min(self._wanted(job) - job.output, self._clip)
            if known is not None:
                new = budget.price_known(left, answer, self._wanted(job) - job.output, job.num_tokens, known)
            else:
                # One prompt at a time goes on in the next pass.
                uncut = self._chunked is not None and (
                    self._policy == "shortest-prefill-first" or self._windows is not None
                )
                locked = hit.groups[0].free_blocks(0)
                beyond = self._beyond()
                new = budget.price(left, answer, locked, first=not chunks, uncut=uncut, hit=hit, loaded=beyond)
                if new > 0 and beyond:
                    assert self._hicache is not None
                    loaded = self._hicache.bring(hit)
                    if loaded is None:
                        new = budget.price(left, answer, locked, first=not chunks, uncut=uncut, hit=hit)
                    else:
                        job.loaded, job.loaded_by_tier = beyond, (beyond,)
                        hit = loaded
            if new == NO_TOKENS:
                self._full = bool(chunks) or bool(running)
                break
            if not new:
                break
            self._start(job, hit, now)
            budget.free = pool.free * self._page
            whole = new == job.num_tokens - hit.tokens
            budget.charge(new, min(self._wanted(job), self._clip) if whole else 0)
            chunks.append((job, new, hit.tokens))
            if not whole:
                self._chunked = job
            if not budget.open:
                if not budget.spent:
                    self._full = True
                break
        if self._hicache is not None and self._hicache.pages.loads:
            self._until = self._hicache.load(now)
        self._take(chunks)
        return chunks

    def _beyond(self) -> int:
        """Tokens that only the host has of the latest match."""
        if self._hicache is None or self._tree is None:
            return 0
        return sum([node.stop - node.start for node in self._tree.beyond]) * self._page

    def _budget(self, mixed: int) -> Budget:
        inputs, page = self._settings.max_prefill_tokens, self._page
        free = self.jobs.manager.pool.free * page
        if self._windows is not None:
            return WindowBudget(free, page, self._aside(), inputs, self._chunk_size, mixed, self._windows)
        return Budget(free, page, self._aside(), inputs, self._chunk_size, mixed)

    def _rows(self, held: int = 0, started: int = 0) -> int:
        """How many requests may be in the batch being formed; ``held`` of them ran before, ``started`` have begun with it."""
        rows = self._max_seqs - len(self.jobs.running) + started
        return min(self._max_seqs - len(self._running), rows + held)

    def _aside(self) -> float:
        """Tokens set aside for the answers of running requests."""
        # One by one, as SGLang adds them up: a product would round differently.
        aside = 0.0
        if self._ahead:
            for job in self._running:
                aside += self._aside_for(job)
            return aside
        ratio = 1.0 if self._settings.ignore_eos else self._ratio.current
        clip, tick = self._clip, self.jobs.batch.tick
        for job in self._running:
            left = job.end - tick + job.forgone
            aside += (left if left < clip else clip) * ratio
        return aside

    def _aside_for(self, job: Job) -> float:
        ratio = 1.0 if self._settings.ignore_eos else self._ratio.current
        return min(self._remaining(job), self._clip) * ratio

    def _remaining(self, job: Job) -> int:
        """Tokens that a running request has still to produce, those in flight included."""
        if job.end < 0:
            return 1
        batch = self.jobs.batch
        left = job.end - batch.tick + job.forgone
        return left + batch.in_flight(job) if self._ahead else left

    def _continue(self, job: Job, budget: Budget, chunks: list[Chunk]) -> None:
        """The next chunk of a prompt. It is cut at what is free, unless that is nothing."""
        past = job.num_computed_tokens
        left = job.num_tokens - past
        room = budget.continued()
        if not room:
            return
        if self._policy == "shortest-prefill-first" and budget.chunk is not None:
            room = min(room, self._spare_for_shorter(left, budget.chunk))
        new = min(left, room)
        budget.charge(new, 0 if left > room else min(self._wanted(job), self._clip))
        chunks.append((job, new, past))
        if left <= room:
            self._chunked = None

    def _spare_for_shorter(self, left: int, chunk: int) -> int:
        """Tokens of the next chunk of a prompt with ``left`` tokens to go, so that shorter prompts fit beside it."""
        page, reserved = self._page, 0
        if chunk < 2 * page:
            return chunk
        for job in self._waiting:
            work = max(1, job.num_tokens - self._cached[job])
            charged = ceil_div(work, page) * page
            if work >= left or reserved + charged > chunk - page:
                break
            reserved += charged
        return (chunk - reserved) // page * page if reserved else chunk

    def _ends(self, chunks: list[Chunk]) -> list[tuple[float, int]]:
        """Of the requests in the batch, the tokens left of each answer and the tokens each occupies."""
        running: list[tuple[float, int]] = [(self._remaining(job), self._length(job)) for job in self._running]
        return running + [(self._wanted(job) - job.output, job.num_tokens) for job, _, _ in chunks]

    def _length(self, job: Job) -> int:
        return job.num_prompt_tokens + self._produced(job)

    # -- preemption -------------------------------------------------------------------------------------------------

    def _make_way(self, job: Job, budget: Budget, now: int) -> bool:
        """Preempt running requests whose priorities are low enough for ``job``, if it fits then; returns whether it does."""
        settings, jobs = self._settings, self.jobs
        sign = 1 if settings.schedule_low_priority_values_first else -1
        order = sorted(self._running, key=lambda one: (one.priority * -sign, -self._entries[one]))
        tokens, cached = self._tried.get(job, (0, 0))
        missing = tokens - cached + min(self._wanted(job), self._clip) - (budget.free - budget.total)
        victims: list[Job] = []
        for victim in order:
            if (job.priority - victim.priority) * -sign <= settings.priority_scheduling_preemption_threshold:
                break
            victims.append(victim)
            missing -= self._aside_for(victim)
            if missing <= 0:
                break
        if not victims or missing > 0:
            return False
        left = len(self._running)
        for victim in [one for one in self._running if one in victims]:
            budget.total -= self._aside_for(victim)
            left -= 1
            self._send_back(victim, left, now)
        self._running = [one for one in self._running if one not in victims]
        for victim in victims:
            self._waiting.push(victim)
        budget.free = jobs.manager.pool.free * self._page
        return True

    def _send_back(self, job: Job, left: int, now: int) -> None:
        """Take everything from ``job``, and evict for the ``left`` requests of the batch; it is in no queue then."""
        jobs = self.jobs
        jobs.preempt(job, now, to_front=False, keeps_in_flight=False)
        self._waiting.remove(job)
        self._tried[job] = (self._tried.get(job, (0, 0))[0], 0)
        jobs.manager.pool.make_room(ceil_div(left * LOOK_AHEAD, self._page))

    def _start(self, job: Job, hit: Hit, now: int) -> None:
        """``job`` leaves the queue and holds what is cached of it."""
        jobs = self.jobs
        if hit.tokens or hit.shared_prefix_boundary:
            jobs.manager.hold(job, hit)
            if hit.shared_prefix_boundary:
                held_of(job.tables[0]).branch = hit.shared_prefix_boundary
        if self._preempts:
            self._entries[job] = self._waiting.entries[job]
        jobs.waiting.remove(job)
        jobs.start(job, hit.tokens, now)

    def _take(self, chunks: list[Chunk]) -> None:
        """Take the pages of all chunks. SGLang evicts for a page more than each request needs."""
        if not chunks:
            return
        manager, page = self.jobs.manager, self._page
        tokens = sum([new for _, new, _ in chunks]) + (len(chunks) * page if page > 1 else 0)
        manager.pool.make_room(ceil_div(tokens, page))
        if self._windows is not None and self._tree is None:
            self._slide_chunks(chunks)
        for job, new, _ in chunks:
            taken = manager.allocate(job, new, delay_caching=True)
            assert taken is not None, f"{job} was left without a page"
        chunked = self._chunked
        if chunked is not None:
            self._stash = next((past + new for job, new, past in chunks if job is chunked), 0)

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _match(self, job: Job, tokens: int) -> Hit:
        return self._tree.match(job, tokens) if self._tree is not None else self.jobs.manager.lookup(job)

    def _insert(self, job: Job, tokens: int, *, finished: bool = False) -> None:
        if self._tree is not None:
            self._tree.insert(job, tokens, job.priority, finished=finished)
        elif self.jobs.manager.caching:
            self.jobs.manager.cache(job, tokens)

    def computed(self, done: Pass) -> None:
        """Prompts that are computed can be found from now on; chunks of them from the next pass on."""
        self._published.clear()
        for job, new, past in done.chunks:
            if job.running and past + new >= job.num_tokens and not job.state.ended:
                job.awaits = 0
                self._insert(job, past + new, finished=job.output + 1 >= job.max_tokens)
                self._published.add(job)

    def _finishing(self, job: Job) -> None:
        """``job`` has its last token: what it computed can be found from now on."""
        if job not in self._published:
            self._insert(job, job.num_computed_tokens, finished=True)

    # -- order ------------------------------------------------------------------------------------------------------

    def _sort(self) -> None:
        """Bring those that wait into the order of the policy."""
        waiting, settings, policy = self._waiting, self._settings, self._policy
        jobs = waiting.jobs
        by_cache = policy in BY_CACHE and self._tree is not None
        if by_cache and policy in ("lpm", "hrrn") and len(jobs) > LONGEST_SORTED:
            by_cache = False
        elif policy == "lof":
            sign = 1 if settings.schedule_low_priority_values_first else -1
            if settings.enable_priority_scheduling:
                jobs.sort(key=lambda job: (job.priority * sign, -self._wanted(job)))
            else:
                jobs.sort(key=lambda job: -self._wanted(job))
        elif policy == "random":
            self._random.shuffle(jobs)
        elif policy == "fifo" and settings.enable_priority_scheduling:
            sign = 1 if settings.schedule_low_priority_values_first else -1
            entries = waiting.entries
            jobs.sort(key=lambda job: (job.priority * sign, entries[job]))
        if by_cache:
            self._sort_by_cache(jobs)
        else:
            self._refresh(jobs)

    def _sort_by_cache(self, jobs: list[Job]) -> None:
        cached: dict[Job, int] = {}
        later: set[Job] = set()
        starts: set[object] = set()
        ends: list[Node | None] = []
        for job in jobs:
            hit = self._match(job, job.num_tokens)
            found = hit.tokens
            ends.append(hit.groups[0].nodes[-1] if found else None)
            cached[job] = min(found + self._beyond(), job.num_tokens - 1)
            if found <= SAME_START and job.num_tokens >= SAME_START:
                start = self._start_of(job)
                if start in starts:
                    later.add(job)
                elif start is not None:
                    starts.add(start)
        if self._policy == "dfs-weight":
            assert self._tree is not None
            jobs[:] = [jobs[at] for at in self._tree.order_by_weight(ends)]
        elif self._policy == "lpm":
            jobs.sort(key=lambda job: (job in later, -cached[job] if job not in later else 0))
        elif self._policy == "hrrn":
            jobs.sort(key=lambda job: self._response_ratio(job, cached[job], job in later))
        else:
            entries = self._waiting.entries
            jobs.sort(key=lambda job: (job in later, max(1, job.num_tokens - cached[job]), entries[job]))
        self._cached = cached

    def _start_of(self, job: Job) -> object:
        """The first tokens of ``job``, or their name; ``None`` if neither is known."""
        chain = job.chain
        if isinstance(chain, TokenChain):
            return tuple(chain.tokens[:SAME_START])
        blocks = ceil_div(SAME_START, self._page)
        return chain.keys[blocks - 1] if len(chain.keys) >= blocks else None

    def _response_ratio(self, job: Job, cached: int, later: bool) -> tuple[float, str]:
        if later:
            return float("inf"), job.id
        uncached = max(0, job.num_prompt_tokens - cached)
        if not uncached:
            return -float("inf"), job.id
        return -max(0, self._waiting.processed - self._waiting.arrivals[job]) / uncached, job.id

    def _refresh(self, jobs: list[Job]) -> None:
        """Now and then count those that wait as users of what is cached for them, the next one last."""
        tree = self._tree
        if tree is None or not jobs or self._settings.radix_eviction_policy != "lru":
            return
        self._attempts += 1
        if self._attempts % REFRESH_INTERVAL == 1:
            for job in reversed(jobs[:LONGEST_SORTED]):
                tree.touch(job)

    # -- decode passes ----------------------------------------------------------------------------------------------

    def _decode(self, now: int) -> bool | None:
        """Provide for a decode pass, retracting until the rest of the batch fits. Returns whether a job needed a page; ``None``
        if nothing decodes.
        """
        jobs = self.jobs
        ending = self._leave_ending()
        if not self._running:
            return None
        due = jobs.blocks.due()
        if self._has_room(len(due)):
            self._ratio.decay(1)
        elif ending:
            # What ends with the pass in flight makes room.
            for job in due:
                jobs.batch.watch(job, jobs.batch.tick)
            return None
        else:
            due = self._retract(due, now)
            if not self._running:
                return None
        self._tick = jobs.batch.tick + 1
        self._take_decoding(due)
        return bool(due)

    def _leave_ending(self) -> bool:
        """Requests whose last token is in flight leave the batch, though their pages are still theirs. Returns whether there
        are any.
        """
        if not self._ahead:
            return False
        still = [job for job in self._running if job.end >= 0]
        ending = len(still) < len(self._running)
        if ending:
            self._running, self._full = still, False
        return ending

    def _has_room(self, pages: int) -> bool:
        pool = self.jobs.manager.pool
        windows = self._windows
        if self._tree is None:
            return pool.free >= pages and (windows is None or windows.free >= pages)
        pool.make_room(pages)
        return pool.unnamed >= pages and (windows is None or windows.free >= pages)

    def _take_decoding(self, due: list[Job]) -> None:
        """Take the pages of a decode pass. SGLang evicts for a page for each request, whether it needs one or not."""
        jobs = self.jobs
        if self._windows is not None:
            self._slide()
        if jobs.blocks.headroom:
            jobs.blocks.make_headroom()
        for job in due:
            taken = jobs.blocks.take(job)
            assert taken, f"{job} was left without a page"

    def _slide(self) -> None:
        """Free what is out of the windows of the decode batch, of a request once in ``SLIDE_INTERVAL`` tokens, and not before
        its second decode pass: the pass in flight may still compute its prompt.
        """
        tree, windows = self.jobs.manager.tree, self._windows
        assert tree is not None
        assert windows is not None
        for job in self._running:
            held = held_of(job.tables[0])
            tokens = self._length(job) - 1
            if held.decodes and tokens - windows.window >= held.evicted * self._page + SLIDE_INTERVAL:
                tree.slide(job.tables[0], tokens)
            held.decodes = True

    def _slide_chunks(self, chunks: list[Chunk]) -> None:
        """Without a tree, free what is out of the windows of prompts that go on; of the pass before, if that is in flight."""
        tree = self.jobs.manager.tree
        assert tree is not None
        for job, _, past in chunks:
            if job.tables:
                tree.slide(job.tables[0], past - (self._chunk_size or 0) if self._ahead else past)

    def _retract(self, due: list[Job], now: int) -> list[Job]:
        """Send those with the least output back to the queue until the rest fits. Returns the rest of ``due``."""
        jobs = self.jobs
        needing = set(due)
        kept = sorted(self._running, key=lambda job: (self._produced(job), -job.num_prompt_tokens), reverse=True)
        retracted: list[Job] = []
        while len(kept) > 1 and (not retracted or not self._has_room(len(needing))):
            victim = kept.pop()
            needing.discard(victim)
            retracted.append(victim)
            self._send_back(victim, len(kept), now)
        for victim in retracted:
            self._waiting.push(victim)
        if len(kept) == 1 and not self._has_room(len(needing)):
            # SGLang gives it up: a prompt under way holds the rest, and is not retracted.
            needing.discard(kept[0])
            jobs.drop(kept.pop(), now)
        self._running = kept
        self._full = False
        jobs.renumber(kept)
        produced = sum([self._produced(job) for job in kept])
        self._ratio.estimate(produced, sum([self._wanted(job) for job in kept]), len(kept))
        return [job for job in kept if job in needing]

    def _produced(self, job: Job) -> int:
        return self._wanted(job) - self._remaining(job)

    @staticmethod
    def _wanted(job: Job) -> int:
        """Tokens that ``job`` asked for, which SGLang counts with even once it is aborted."""
        return job.max_tokens + job.forgone

    def _mix(self) -> bool:
        """Let the decode batch take part in an extend pass; false if there is none, or no room for it."""
        jobs = self.jobs
        self._leave_ending()
        if not self._running:
            return False
        # From here on they stand behind the prompts of this batch.
        jobs.renumber(self._running)
        due = jobs.blocks.due()
        if not self._has_room(len(due)):
            for job in due:
                jobs.batch.watch(job, jobs.batch.tick)
            return False
        self._take_decoding(due)
        self._tick = jobs.batch.tick + 1
        self._extended += self._running
        self._running = []
        return True


def queue(config: EngineConfig) -> Queue:
    """Kept in the order in which it was last sorted; by arrival for the mocker's rules."""
    if _as_mocker(config):
        sorts = config.sglang is not None and config.sglang.schedule_policy == "lpm" and config.enable_prefix_caching
        return PrefixQueue() if sorts else ArrivalQueue()
    return WaitingQueue()


def policy(jobs: Lifecycle, config: EngineConfig) -> PassMaker:
    """SGLang's own rules, or those of Dynamo's mocker."""
    loads = jobs.may_load and not isinstance(jobs.loads, TreeLoads)
    return MockerPasses(jobs, config) if loads or _as_mocker(config) else SglangPasses(jobs, config)


def _as_mocker(config: EngineConfig) -> bool:
    return config.role != "both" or (config.sglang is not None and config.sglang.books_sampled)


def tree(config: EngineConfig) -> TreeSettings | None:
    """The radix tree; ``None`` where blocks are cached as vLLM's. With windows, the memory of all blocks is divided."""
    if _as_mocker(config):
        return None
    settings, blocks = config.sglang or SglangSettings(), config.num_gpu_blocks
    windows = _windows(config)
    if windows:
        ratio, page = settings.swa_full_tokens_ratio, windows[0].block_size
        pages = int(blocks / (len(config.specs) - len(windows) + ratio * len(windows)) + ROUNDING)
        assert windows[0].window is not None
        window_pages = int(pages * page * ratio) // page
        return TreeSettings(settings.radix_eviction_policy, pages, windows[0].window - 1, window_pages)
    plain = config.eviction == "lru" and not config.heed_hints and config.enable_prefix_caching
    return TreeSettings(settings.radix_eviction_policy, blocks) if plain else None


def _windows(config: EngineConfig) -> list[GroupSpec]:
    """The groups of sliding windows."""
    return [spec for spec in config.specs if spec.attention.is_window]


MOCKER_READS = (
    "schedule_policy",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "clip_max_new_tokens",
    "schedule_conservativeness",
    "books_sampled",
)
"""Settings that the mocker's rules read; they know the policies fifo and lpm."""


def _check_groups(config: EngineConfig) -> None:
    """Raise ``ConfigError`` unless there is full attention, with or without sliding windows of one size."""
    windows = _windows(config)
    if config.tiers is not None:
        if windows or tree(config) is None:
            raise ConfigError(
                "lower tiers with backend sglang are HiCache's: they need full attention alone and eviction lru, and neither "
                "hints nor roles nor books_sampled"
            )
        check_hicache(config.tiers)
        config = msgspec.structs.replace(config, tiers=None)
    if not windows:
        config.check_plain_model()
        return
    full = [spec for spec in config.specs if spec not in windows]
    if not full or not all(spec.is_full for spec in full):
        raise ConfigError("backend sglang is modelled for full attention, with or without sliding windows beside it")
    if len({spec.window for spec in windows}) > 1:
        raise ConfigError("backend sglang has windows of one size: SGLang keeps one sliding_window_size for a model")
    if len({spec.block_size for spec in config.specs}) > 1:
        raise ConfigError("backend sglang has one page size: give all groups the same block_size")
    if _as_mocker(config):
        raise ConfigError("workers with roles and books_sampled are modelled for one group of full attention")
    if config.eviction != "lru" or config.heed_hints:
        raise ConfigError(
            "with sliding windows, backend sglang evicts by sglang.radix_eviction_policy and heeds no hints"
        )
    config.check_no_extras()
    given = tree(config)
    assert given is not None
    page, window = windows[0].block_size, ceil_div(windows[0].window or 1, windows[0].block_size)
    if given.window_pages < 2 * window + 3:
        raise ConfigError(
            f"sglang.swa_full_tokens_ratio leaves {given.window_pages * page} window tokens, too few for two windows of "
            f"{windows[0].window}: raise it, or num_gpu_blocks"
        )


def check(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for what it isn't modelled with."""
    _check_groups(config)
    config.refuse(UNUSED)
    given, usual = config.sglang or SglangSettings(), SglangSettings()
    given.check(config.specs[0].block_size)
    changed = [name for name in given.__struct_fields__ if getattr(given, name) != getattr(usual, name)]
    if _as_mocker(config):
        unread = [name for name in changed if name not in MOCKER_READS]
        if unread or given.schedule_policy not in ("fifo", "lpm") or given.chunked_prefill_size == -1:
            name = (
                unread[0]
                if unread
                else "chunked_prefill_size"
                if given.chunked_prefill_size == -1
                else "schedule_policy"
            )
            raise ConfigError(
                f"sglang.{name} is {getattr(given, name)!r}, which workers with roles and books_sampled can't have: "
                "leave it out"
            )
    elif "radix_eviction_policy" in changed and tree(config) is None:
        raise ConfigError(
            "sglang.radix_eviction_policy is for a cache with eviction lru, prefix caching and no hints: leave one of them out"
        )


SGLANG = SchedulerBackend(block_size=1, check=check, queue=queue, policy=policy, spare_blocks=1, tree=tree)
