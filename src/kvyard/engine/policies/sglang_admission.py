"""Admission of prompts to a pass of SGLang's, as ``PrefillAdder`` and the loop around it decide.

Prompts are tried in the order of the queue until one has to wait. One prompt at a time may be cut; the rest of it goes first
in the next pass.
"""

from kvyard.blocks import Hit
from kvyard.blocks.radix import NOTHING, held_of
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.loads import TreeLoads, prefetches_of
from kvyard.engine.passes import Chunk
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_budget import NO_TOKENS, Budget, KnownEnds, WindowBudget
from kvyard.engine.policies.sglang_decoding import DecodeSide
from kvyard.engine.policies.sglang_order import QueueOrder
from kvyard.engine.policies.sglang_queue import WaitingQueue
from kvyard.integers import ceil_div


class Admission:
    """Lets prompts into passes."""

    def __init__(self, jobs: Lifecycle, config: EngineConfig, decode: DecodeSide, waiting: WaitingQueue) -> None:
        settings = self._settings = config.sglang or SglangSettings()
        self.jobs = jobs
        self._decode = decode
        self._waiting = waiting
        self._page = decode.page
        self._tree, self._windows = decode.tree, decode.windows
        self._states = jobs.manager.pool.states
        self._hicache = jobs.loads.hicache if isinstance(jobs.loads, TreeLoads) else None
        self._prefetches = prefetches_of(jobs.loads)
        self._preempted: list[Job] = []
        """Jobs preempted for others in the pass being formed."""
        self._order = QueueOrder(waiting, decode.tree, config, decode.page)
        self._max_seqs = config.max_num_seqs
        chunk = settings.chunk
        self._chunk_size = chunk if chunk > 0 else None
        self.mixes = settings.enable_mixed_chunk and chunk > 0
        """True if requests decode in passes that compute prompts."""
        self._clip = settings.clip_max_new_tokens
        self._shortest_first = settings.schedule_policy == "shortest-prefill-first"
        self.preempts = settings.enable_priority_scheduling and not settings.disable_priority_preemption
        """True if requests may be preempted for those with a higher priority."""
        self.chunked: Job | None = None
        """The job whose prompt goes on in the next pass."""
        self.stash = 0
        """Tokens of its prompt that are computed and not in the tree yet."""
        self.until = 0
        """Landing of the loads of the pass being formed."""
        self._entries: dict[Job, int] = {}
        """Time at which each running job was last queued; for preemption."""

    def admit(self, now: int) -> list[Chunk]:
        """Let prompts in, in order, until one has to wait; returns the chunks to compute."""
        decode, waiting, settings = self._decode, self._waiting, self._settings
        running = decode.running
        if self.preempts or self._windows is not None or not running:
            decode.full = False
        if (decode.full or not waiting.jobs) and self.chunked is None:
            return []
        if self._rows() <= 0 and self.chunked is None and not self.preempts:
            decode.full = True
            return []
        self._order.sort()
        budget = self._budget(len(running) if self.mixes else 0)
        chunks: list[Chunk] = []
        if self.chunked is not None:
            self._continue(self.chunked, budget, chunks)
        held, skipped, prefetches = len(chunks), 0, self._prefetches
        known = KnownEnds(self._ends(chunks)) if settings.ignore_eos and not self.jobs.manager.caching else None
        for _ in range(len(waiting.jobs)):
            job = waiting.jobs[skipped]  # those before it are in the batch, or wait for storage
            if budget.spent:
                break
            if len(chunks) >= self._rows(held, len(chunks) - held):
                decode.full = True
            if decode.full and not (self.preempts and self._make_way(job, budget, now)):
                break
            if prefetches is not None and not prefetches.ready(job):
                skipped += 1
                continue
            hit = self._match(job, job.num_tokens - 1)
            if prefetches is not None and prefetches.lost(job, hit):
                skipped += 1
                continue
            if not self._try(job, hit, budget, chunks, known, now):
                break
            if not budget.open:
                if not budget.spent:
                    decode.full = True
                break
        if prefetches is not None:
            for victim in self._preempted:
                prefetches.ask(victim)
            self._preempted.clear()
        if self._hicache is not None and self._hicache.pages.loads:
            self.until = self._hicache.load(now)
        self._take(chunks)
        return chunks

    # -- one prompt -------------------------------------------------------------------------------------------------

    def _try(self, job: Job, hit: Hit, budget: Budget, chunks: list[Chunk], known: KnownEnds | None, now: int) -> bool:
        """Let ``job``, of which ``hit`` is cached, in if it fits; returns true if it does."""
        tokens, wanted = job.num_tokens, job.wanted
        if self._states is not None and hit.tokens and self._tree is not None:
            self._tree.copy_state(hit)
        if self.preempts:
            self._decode.tried[job] = (tokens, hit.tokens)
        most = self._settings.prefill_max_requests
        if most is not None and len(chunks) >= most:
            self._return_state(hit)
            return False
        if known is not None:
            left, answer = tokens - hit.tokens, min(wanted - job.output, self._clip)
            new = budget.price_known(left, answer, wanted - job.output, tokens, known)
        else:
            hit, new = self._price(job, hit, budget, first=not chunks)
        if new == NO_TOKENS:
            self._decode.full = bool(chunks) or bool(self._decode.running)
        if new <= 0:
            self._return_state(hit)
            return False
        self._start(job, hit, now)
        budget.free = self.jobs.manager.pool.free * self._page
        whole = new == tokens - hit.tokens
        budget.charge(new, min(wanted, self._clip) if whole else 0)
        chunks.append((job, new, hit.tokens))
        if not whole:
            self.chunked = job
        return True

    def _price(self, job: Job, hit: Hit, budget: Budget, *, first: bool) -> tuple[Hit, int]:
        """Return how many tokens of a prompt are computed in this batch, as ``Budget.price`` does, and what is cached of it
        then: what the host adds to ``hit`` is loaded, if that fits. ``first``: the batch has no other prompt.
        """
        left, answer = job.num_tokens - hit.tokens, min(job.wanted - job.output, self._clip)
        # One prompt at a time goes on in the next pass.
        uncut = self.chunked is not None and (self._shortest_first or self._windows is not None)
        locked = hit.groups[0].free_blocks(0)
        beyond = self._tree.beyond if self._hicache is not None and self._tree is not None else NOTHING
        windows = sum([node.stop - node.start for node in beyond.windows]) * self._page
        new = budget.price(
            left, answer, locked, first=first, uncut=uncut, hit=hit, loaded=beyond.tokens, windows=windows
        )
        if new > 0 and (beyond.tokens or windows):
            assert self._hicache is not None
            loaded = self._hicache.bring(hit)
            if loaded is not None:
                job.loaded = sum([node.stop - node.start for node in beyond.nodes]) * self._page
                job.loaded_by_tier = self._hicache.latest_load
                return loaded, min(new, job.num_tokens - loaded.tokens)
            if beyond.tokens:
                new = budget.price(left, answer, locked, first=first, uncut=uncut, hit=hit)
        return hit, new

    def _start(self, job: Job, hit: Hit, now: int) -> None:
        """``job`` leaves the queue and holds what is cached of it."""
        jobs = self.jobs
        if hit.tokens or hit.shared_prefix_boundary:
            jobs.manager.hold(job, hit)
            if hit.shared_prefix_boundary:
                held_of(job.tables[0]).branch = hit.shared_prefix_boundary
        if self.preempts:
            self._entries[job] = self._waiting.entries[job]
        jobs.waiting.remove(job)
        jobs.start(job, hit.tokens, now)
        if self._prefetches is not None:
            self._prefetches.admitted(job)

    def _match(self, job: Job, tokens: int) -> Hit:
        return self._tree.match(job, tokens) if self._tree is not None else self.jobs.manager.lookup(job)

    def _return_state(self, hit: Hit) -> None:
        """Free the slot that was taken for a request which wasn't admitted."""
        if self._states is not None and hit.tokens and self._tree is not None:
            self._states.free += 1

    def _continue(self, job: Job, budget: Budget, chunks: list[Chunk]) -> None:
        """The next chunk of a prompt. It is cut at what is free, unless that is nothing."""
        past = job.num_computed_tokens
        left = job.num_tokens - past
        room = budget.continued()
        if not room:
            return
        if self._shortest_first and budget.chunk is not None:
            room = min(room, self._order.spare_for_shorter(left, budget.chunk))
        new = min(left, room)
        budget.charge(new, 0 if left > room else min(job.wanted, self._clip))
        chunks.append((job, new, past))
        if left <= room:
            self.chunked = None

    # -- room -------------------------------------------------------------------------------------------------------

    def _budget(self, mixed: int) -> Budget:
        inputs, page = self._settings.max_prefill_tokens, self._page
        free = self.jobs.manager.pool.free * page
        aside = self._decode.aside()
        if self._windows is not None:
            return WindowBudget(free, page, aside, inputs, self._chunk_size, mixed, self._windows)
        return Budget(free, page, aside, inputs, self._chunk_size, mixed)

    def _rows(self, held: int = 0, started: int = 0) -> int:
        """Return the number of requests that may be in the batch being formed; ``held`` of them ran before, ``started``
        have begun with it."""
        rows = self._max_seqs - len(self.jobs.running) + started
        return min(self._max_seqs - len(self._decode.running), rows + held)

    def _ends(self, chunks: list[Chunk]) -> list[tuple[int, int]]:
        """Of the requests in the batch, the tokens left of each answer and the tokens each occupies."""
        decode = self._decode
        running = [(decode.remaining(job), decode.length(job)) for job in decode.running]
        return running + [(job.wanted - job.output, job.num_tokens) for job, _, _ in chunks]

    def _make_way(self, job: Job, budget: Budget, now: int) -> bool:
        """Preempt running requests whose priorities are low enough for ``job``, if it fits then; returns whether it does."""
        settings, decode = self._settings, self._decode
        sign = 1 if settings.schedule_low_priority_values_first else -1
        order = sorted(decode.running, key=lambda one: (one.priority * -sign, -self._entries[one]))
        tokens, cached = decode.tried.get(job, (0, 0))
        missing = tokens - cached + min(job.wanted, self._clip) - (budget.free - budget.total)
        victims: list[Job] = []
        for victim in order:
            if (job.priority - victim.priority) * -sign <= settings.priority_scheduling_preemption_threshold:
                break
            victims.append(victim)
            missing -= decode.aside_for(victim)
            if missing <= 0:
                break
        if not victims or missing > 0:
            return False
        left = len(decode.running)
        for victim in [one for one in decode.running if one in victims]:
            budget.total -= decode.aside_for(victim)
            left -= 1
            decode.send_back(victim, left, now)
        decode.running = [one for one in decode.running if one not in victims]
        for victim in victims:
            self._waiting.push(victim)
        self._preempted += victims
        budget.free = self.jobs.manager.pool.free * self._page
        return True

    # -- pages ------------------------------------------------------------------------------------------------------

    def _take(self, chunks: list[Chunk]) -> None:
        """Take the pages of all chunks. SGLang evicts for a page more than each request needs."""
        if not chunks:
            return
        manager, page = self.jobs.manager, self._page
        states = self._states
        if states is not None:
            needed = len(chunks) * states.per_request
            needed -= sum([held_of(job.tables[0]).slots for job, _, _ in chunks if job.tables])
            manager.pool.radix.make_state_room(needed)
            states.free -= needed
        tokens = sum([new for _, new, _ in chunks]) + (len(chunks) * page if page > 1 else 0)
        if self._tree is not None:
            manager.pool.radix.make_room(ceil_div(tokens, page))
        elif self._windows is not None:
            self._slide(chunks)
        for job, new, _ in chunks:
            taken = manager.allocate(job, new, delay_caching=True)
            assert taken is not None, f"{job} was left without a page"
        if states is not None:
            for job, new, past in chunks:
                held = held_of(job.tables[0])
                held.slots, held.prefilled = states.per_request, past + new
                held.track = states.tracking.in_prompt(past, new, held.branch) if states.tracking is not None else 0
        chunked = self.chunked
        if chunked is not None:
            self.stash = next((past + new for job, new, past in chunks if job is chunked), 0)

    def _slide(self, chunks: list[Chunk]) -> None:
        """Without a tree, free what is out of the windows of prompts that go on; of the pass before, if that is in flight."""
        tree = self.jobs.manager.tree
        assert tree is not None
        for job, _, past in chunks:
            if job.tables:
                tree.slide(job.tables[0], past - (self._chunk_size or 0) if self._decode.ahead else past)
