"""SGLang's scheduling, as its ``Scheduler`` and ``PrefillAdder`` decide: held to logs of both (``tests/golden/sglang``).

A pass extends (computes prompts) or decodes; while a prompt can get in, decoding waits, unless the two are mixed. Once one did
not fit (``Budget``), the batch counts as full until a request leaves it. When the share set aside was too little, requests with
the least output go back to the queue.

What is cached is a radix tree (``kvyard.blocks.radix``), with host memory below it or without (``kvyard.tiers.hicache``).
"""

import random
from typing import ClassVar

from kvyard.blocks import Hit
from kvyard.blocks.extent import Node
from kvyard.blocks.radix import NOTHING, RadixGroup, held_of
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.loads import TreeLoads
from kvyard.engine.passes import Chunk, Pass
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.mocker import LONGEST_SORTED, LOOK_AHEAD, SAME_START
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_budget import NO_TOKENS, Budget, KnownEnds, NewTokenRatio, WindowBudget
from kvyard.engine.policies.sglang_queue import WaitingQueue
from kvyard.hashing import TokenChain
from kvyard.integers import ceil_div

SLIDE_INTERVAL = 128
"""Tokens by which a window moves on before a request gives back what is out of it: SGLANG_SWA_EVICTION_INTERVAL."""
REFRESH_INTERVAL = 32
"""Waiting requests count as uses of what is cached for them once in this many attempts to admit one."""
BY_CACHE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
"""Schedule policies that match every waiting request before they choose."""


class SglangPasses(PassMaker):
    """Extend passes and decode passes."""

    spare_tokens: ClassVar[int] = 1

    def __init__(self, jobs: Lifecycle, config: EngineConfig) -> None:
        super().__init__(jobs)
        settings = self._settings = config.sglang or SglangSettings()
        self._page = jobs.manager.groups[0].block_size
        self._max_seqs = config.max_num_seqs
        self._ahead = config.decides_ahead
        """True if the tokens of the last pass are not known yet when the next one is formed."""
        chunk = settings.chunked_prefill_size
        self._chunk_size = chunk if chunk > 0 else None
        self._clip = settings.clip_max_new_tokens
        self._ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._policy = settings.schedule_policy
        self._random = random.Random(config.seed)
        self._preempts = settings.enable_priority_scheduling and not settings.disable_priority_preemption
        self._tree: RadixGroup | None = jobs.manager.tree if jobs.manager.caching else None
        self._windows = jobs.manager.pool.windows
        self._states = jobs.manager.pool.states
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
        """True if no prompt is tried until a request leaves the batch."""
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
        jobs.batch.resting = bool(jobs.in_flight) and not jobs.in_flight[-1].decided.decoding
        made = self._form(now, longest)
        jobs.batch.resting = False
        if made is not None and self._hicache is not None:
            made.begins = self._hicache.clock
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
            if not jobs.waiting and not jobs.in_flight and self._chunked is None:
                self._ratio.reset()
            return None
        took_pages = self._decode(now)
        if took_pages is None:
            # With the last of the decode batch given up, the prompt under way may have room.
            again = self._chunked is not None and not self._running and not jobs.in_flight
            return self._form(now, longest) if again else None
        self._waiting.processed += self._founding
        passes = 1
        if self._ahead or self._policy == "hrrn":
            pass  # a plan would have to know what is in flight, or when requests arrive in it
        elif self._windows is not None:
            pass  # windows move on in every pass
        elif self._chunked is None and (not jobs.waiting or (self._full and not self._preempts)):
            passes = self.horizon.passes(longest, took_pages)
            if self._hicache is not None and self._hicache.pages.writes_back and not jobs.blocks.evict_none(passes):
                passes = 1  # the scheduler waits for the copy of what is evicted
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
            elif self._ahead:
                self.jobs.parting.append(job)
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
            tokens, wanted = job.num_tokens, job.max_tokens + job.forgone
            hit = self._match(job, tokens - 1)
            if self._states is not None and hit.tokens and self._tree is not None:
                self._tree.copy_state(hit)
            if self._preempts:
                self._tried[job] = (tokens, hit.tokens)
            if most is not None and len(chunks) >= most:
                self._return_state(hit)
                break
            left, answer = tokens - hit.tokens, min(wanted - job.output, self._clip)
            if known is not None:
                new = budget.price_known(left, answer, wanted - job.output, tokens, known)
            else:
                # One prompt at a time goes on in the next pass.
                uncut = self._chunked is not None and (
                    self._policy == "shortest-prefill-first" or self._windows is not None
                )
                locked = hit.groups[0].free_blocks(0)
                beyond = self._tree.beyond if self._hicache is not None and self._tree is not None else NOTHING
                windows = sum([node.stop - node.start for node in beyond.windows]) * self._page
                first = not chunks
                new = budget.price(
                    left, answer, locked, first=first, uncut=uncut, hit=hit, loaded=beyond.tokens, windows=windows
                )
                if new > 0 and (beyond.tokens or windows):
                    assert self._hicache is not None
                    loaded = self._hicache.bring(hit)
                    if loaded is not None:
                        job.loaded = sum([node.stop - node.start for node in beyond.nodes]) * self._page
                        job.loaded_by_tier = (job.loaded,)
                        hit = loaded
                        new = min(new, tokens - hit.tokens)
                    elif beyond.tokens:
                        new = budget.price(left, answer, locked, first=first, uncut=uncut, hit=hit)
            if new == NO_TOKENS:
                self._full = bool(chunks) or bool(running)
            if new <= 0:
                self._return_state(hit)
                break
            self._start(job, hit, now)
            budget.free = pool.free * self._page
            whole = new == tokens - hit.tokens
            budget.charge(new, min(wanted, self._clip) if whole else 0)
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

    def _return_state(self, hit: Hit) -> None:
        """Free the slot that was taken for a request which wasn't admitted."""
        if self._states is not None and hit.tokens and self._tree is not None:
            self._states.free += 1

    def _budget(self, mixed: int) -> Budget:
        inputs, page = self._settings.max_prefill_tokens, self._page
        free = self.jobs.manager.pool.free * page
        if self._windows is not None:
            return WindowBudget(free, page, self._aside(), inputs, self._chunk_size, mixed, self._windows)
        return Budget(free, page, self._aside(), inputs, self._chunk_size, mixed)

    def _rows(self, held: int = 0, started: int = 0) -> int:
        """Return the number of requests that may be in the batch being formed; ``held`` of them ran before, ``started``
        have begun with it."""
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

    def _ends(self, chunks: list[Chunk]) -> list[tuple[int, int]]:
        """Of the requests in the batch, the tokens left of each answer and the tokens each occupies."""
        running = [(self._remaining(job), self._length(job)) for job in self._running]
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
        if self._preempts:
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
        states = self._states
        if states is not None:
            needed = len(chunks) * states.per_request
            needed -= sum([held_of(job.tables[0]).slots for job, _, _ in chunks if job.tables])
            manager.pool.make_state_room(needed)
            states.free -= needed
        tokens = sum([new for _, new, _ in chunks]) + (len(chunks) * page if page > 1 else 0)
        manager.pool.make_room(ceil_div(tokens, page))
        if self._windows is not None and self._tree is None:
            self._slide_chunks(chunks)
        for job, new, _ in chunks:
            taken = manager.allocate(job, new, delay_caching=True)
            assert taken is not None, f"{job} was left without a page"
        if states is not None:
            for job, new, past in chunks:
                held = held_of(job.tables[0])
                held.slots = states.per_request
                held.track = states.tracking.in_prompt(past, new, held.branch) if states.tracking is not None else 0
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
            beyond = self._tree.beyond.tokens if self._hicache is not None and self._tree is not None else 0
            cached[job] = min(found + beyond, job.num_tokens - 1)
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
            # SGLang gives it up: a prompt in flight holds the rest, and is not retracted.
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
        tracking = self._states.tracking if self._states is not None else None
        if tracking is not None:
            # No states are kept of answers in mixed passes.
            for job in self._running:
                tokens = self._length(job) + (jobs.batch.in_flight(job) if self._ahead else 0)
                if not tokens % tracking.interval:
                    held_of(job.tables[0]).missed.append(tokens)
        self._take_decoding(due)
        self._tick = jobs.batch.tick + 1
        self._extended += self._running
        self._running = []
        return True
