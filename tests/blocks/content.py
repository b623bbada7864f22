"""A fake engine that keeps what a real one keeps: content, per physical block, and reads it back through block tables.

The content of a position depends on the group and on the whole text up to it, as attention keys and values do. The engine
writes what it computes, loads what it is told to load, runs the copies it is asked for, and before and after everything
reads the whole history that the next token of each running request would see. It has no idea who shares which block, so a
block that was given to two owners, given up too early, or found under a wrong name shows as wrong content.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from tests.blocks.support import make

from kvyard.blocks import BlockManager, GroupSpec, Hit, Request
from kvyard.hashing import Key

Cell = tuple[int, int, int]
"""(group, tokens up to here, digest of these tokens): what one position of one group must hold."""


class Corrupted(AssertionError):
    """A block doesn't hold what its reader needs."""


def digests(tokens: Iterable[int], before: int = 0) -> list[int]:
    """One digest per token, of the text up to and with it."""
    found = []
    for token in tokens:
        before = hash((before, token))
        found.append(before)
    return found


class Job:
    """A request, its text, and its drafts."""

    def __init__(self, request: Request, tokens: list[int]) -> None:
        self.request = request
        self.tokens = tokens
        self.known = digests(tokens)
        self.drafts: list[int] = []
        """Digests of computed tokens that the text doesn't have (yet)."""
        self.states: dict[int, int] = {}
        """Aligned state group -> the block that has the running state."""

    def append(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.known += digests(tokens, self.known[-1])
        self.request.append(tokens)

    def digest(self, position: int) -> int:
        """Of the text up to ``position``, drafts included."""
        return self.known[position] if position < len(self.known) else self.drafts[position - len(self.known)]


class Engine:
    """Runs requests on a ``BlockManager`` and remembers what is in each block."""

    def __init__(self, num_blocks: int, groups: list[GroupSpec], *, overlap: bool = False, **options: Any) -> None:
        """``overlap``: a step is scheduled before the output of the one before it is known."""
        self.manager = BlockManager(num_blocks, groups, **options)
        self.overlap = overlap
        self.memory: dict[int, dict[int, Cell]] = {}
        """Physical block -> what is at each offset; a state has offset 0 only."""
        self.jobs: dict[str, Job] = {}
        self.waiting: dict[str, Job] = {}
        self.loading: dict[str, tuple[int, int]] = {}
        """Request -> positions that an asynchronous load will fill."""
        self.texts: dict[tuple[int, Key], tuple[int, int]] = {}
        """(group, hash) -> (tokens, digest) that the hash stands for, as far as any request has had it."""

    # -- what a step writes -------------------------------------------------------------------------------------------

    def write(self, job: Job, start: int, stop: int, accepted: int = 0, rejected: int = 0) -> None:
        """Compute, or load, positions ``start`` to ``stop``: fill the blocks that the request has for them.

        The last ``accepted`` + ``rejected`` are drafts. What was computed of the rejected ones is there too, and wrong.
        """
        tables = self.manager.block_ids(job.request)
        for index, (group, table) in enumerate(zip(self.manager.groups, tables, strict=True)):
            if group.spec.is_state:
                self.write_states(job, index, table, start, stop, accepted, rejected)
                continue
            for position in range(start, stop):
                block = table[position // group.block_size]
                if block:
                    cell = (index, position + 1, job.digest(position))
                    self.memory.setdefault(block, {})[position % group.block_size] = cell

    def write_states(
        self, job: Job, index: int, table: list[int], start: int, stop: int, accepted: int, rejected: int
    ) -> None:
        """A state at every block's end that the step passes and has a block for, and one where the accepted text ends.

        An aligned group has that one in the block where the step would have ended, or, after drafts, in one of the
        speculative blocks behind it: one per accepted draft.
        """
        spec = self.manager.groups[index].spec
        kept = stop - rejected
        slots = {end: (end - 1) // spec.block_size for end in range(start + 1, kept) if end % spec.block_size == 0}
        slots[kept] = (kept - 1) // spec.block_size
        for end, slot in slots.items():
            if table[slot] and (end % spec.block_size == 0 or spec.mode != "align"):
                self.memory[table[slot]] = {0: (index, end, job.digest(end - 1))}
        if spec.mode == "align":
            block = job.states[index] = table[(stop - 1) // spec.block_size + accepted]
            self.memory[block] = {0: (index, kept, job.digest(kept - 1))}

    def run_copies(self) -> None:
        for source, target in self.manager.take_copies():
            self.memory[target] = dict(self.memory.get(source, {}))

    # -- what is read -------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Read the history of every running request, and everything that a lookup could return. Raises ``Corrupted``."""
        for job in self.jobs.values():
            if job.request.id not in self.loading:
                self.verify_history(job)
        self.verify_cached()

    def verify_history(self, job: Job) -> None:
        request = job.request
        computed = request.num_computed_tokens
        settled = max(0, computed - request.num_in_flight_tokens)
        tables = self.manager.block_ids(request)
        for index, (group, table) in enumerate(zip(self.manager.groups, tables, strict=True)):
            if group.spec.is_state:
                if computed:
                    block = job.states.get(index) or table[(computed - 1) // group.block_size]
                    self.expect(block if block in table else 0, 0, (index, computed, job.digest(computed - 1)), job)
                continue
            for position in range(first_seen(group.spec, settled), computed):
                block = table[position // group.block_size]
                self.expect(block, position % group.block_size, (index, position + 1, job.digest(position)), job)

    def verify_hit(self, job: Job, hit: Hit) -> None:
        """Check that a lookup found this text, whether or not it is going to be read."""
        for index, (group, ids) in enumerate(zip(self.manager.groups, hit.block_ids(), strict=True)):
            size = group.block_size
            for at, block in enumerate(ids):
                end = min((at + 1) * size, hit.tokens)
                if block and group.spec.is_state:
                    self.expect(block, 0, (index, end, job.digest(end - 1)), job)
                elif block:
                    for position in range(at * size, end):
                        self.expect(block, position % size, (index, position + 1, job.digest(position)), job)

    def verify_cached(self) -> None:
        """Every name in the pool's maps tells the truth about its block."""
        for index, key, block in self.manager.pool.cached_blocks():
            tokens, digest = self.texts[index, key]
            group = self.manager.groups[index]
            offset = 0 if group.spec.is_state else (tokens - 1) % group.block_size
            self.expect(block, offset, (index, tokens, digest), None)

    def expect(self, block: int, offset: int, cell: Cell, job: Job | None) -> None:
        found = self.memory.get(block, {}).get(offset)
        if block == 0 or found != cell:
            reader = f"request {job.request.id}" if job is not None else "the map of cached copies"
            what = "nothing: the block is null" if block == 0 else f"{found} in block {block}"
            raise Corrupted(f"{reader} expects {cell} and reads {what}")

    # -- what is asked of the manager ---------------------------------------------------------------------------------

    def create(self, name: str, tokens: list[int]) -> Job:
        job = self.waiting[name] = Job(make(self.manager, name, tokens), list(tokens))
        self.learn(job)
        return job

    def learn(self, job: Job) -> None:
        """Note what the hashes of this text stand for."""
        unit = self.manager.geometry.hash_block_size
        for at, key in enumerate(job.request.chain.hashes(0, len(job.request.chain.keys))):
            tokens = (at + 1) * unit
            for index in range(len(self.manager.groups)):
                self.texts[index, key] = (tokens, job.known[tokens - 1])

    def admit(
        self,
        job: Job,
        new: int,
        hit: Hit | None = None,
        *,
        external: int = 0,
        later: bool = False,
        sampled: int = 1,
        **options: Any,
    ) -> bool:
        """Start a request: adopt its hit, load ``external`` tokens (``later``: not before ``land``), compute ``new``."""
        request = job.request
        if hit is None:
            hit = self.manager.lookup(request)
        self.verify_hit(job, hit)
        new = min(new, request.num_tokens - hit.tokens - external)
        if new < 0 or external + new == 0:
            return False
        new = 0 if later else new
        taken = self.manager.allocate(request, new, hit, external=external, delay_caching=later, **options)
        if taken is None:
            return False
        loaded = hit.tokens + external
        request.num_computed_tokens = loaded
        request.running = True
        self.jobs[request.id] = self.waiting.pop(request.id)
        self.run_copies()
        if later:
            self.loading[request.id] = (hit.tokens, loaded)
            return True
        if external:
            self.write(job, hit.tokens, loaded)
        self.compute(job, new, 0, 0)
        self.sample(job, sampled)
        return True

    def compute(self, job: Job, count: int, accepted: int, rejected: int) -> None:
        """Run a step that has its slots: read all that its first token sees, then write ``count`` tokens."""
        self.verify_history(job)
        computed = job.request.num_computed_tokens
        job.request.num_computed_tokens += count
        if count:
            self.write(job, computed, computed + count, accepted, rejected)

    def sample(self, job: Job, *tokens: int) -> None:
        """Add to the text what a step that reached its end came up with."""
        if job.request.num_computed_tokens >= len(job.tokens):
            job.append(list(tokens))
            self.learn(job)

    def land(self, job: Job) -> None:
        """The asynchronous load is done."""
        start, stop = self.loading.pop(job.request.id)
        self.write(job, start, stop)
        self.manager.cache(job.request, stop)

    def step(self, job: Job, count: int, drafts: list[int], accepted: int, sampled: int, **options: Any) -> bool:
        """Compute ``count`` tokens of the text and then ``drafts``, of which ``accepted`` turn out right."""
        request = job.request
        computed = request.num_computed_tokens
        count = min(count, len(job.tokens) - computed)
        if computed + count < len(job.tokens):
            drafts = []
        accepted = min(accepted, len(drafts))
        rejected = len(drafts) - accepted
        if self.manager.allocate(request, count + len(drafts), **options) is None:
            return False
        self.run_copies()
        job.drafts = digests(drafts, job.known[-1])
        self.compute(job, count + len(drafts), accepted, rejected)
        request.num_in_flight_tokens = count if self.overlap else 0
        self.manager.rollback(request, rejected)
        self.sample(job, *drafts[:accepted], sampled)
        job.drafts = []
        return True

    def finish(self, job: Job) -> None:
        self.manager.free(self.jobs.pop(job.request.id).request)
        self.loading.pop(job.request.id, None)

    def preempt(self, job: Job) -> None:
        self.manager.preempt(job.request)
        self.waiting[job.request.id] = self.jobs.pop(job.request.id)
        job.states.clear()
        self.loading.pop(job.request.id, None)


def first_seen(spec: GroupSpec, computed: int) -> int:
    """The first position that the token after ``computed`` others looks at."""
    if spec.window is not None:
        return max(0, computed + 1 - spec.window)
    if spec.chunk is not None:
        return computed - computed % spec.chunk
    return 0


class Traffic:
    """Random requests with much text in common, for an engine that is always a little too small."""

    def __init__(self, engine: Engine, seed: int, drafts: int = 0, external: float = 0.3) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.drafts = drafts
        groups = engine.manager.groups
        self.unit = engine.manager.geometry.scheduler_block_size
        self.hash_unit = engine.manager.geometry.hash_block_size
        self.aligned = any(group.spec.is_state and group.spec.mode == "align" for group in groups)
        # Nobody loads states into an aligned group (vLLM doesn't either).
        self.external = 0.0 if self.aligned else external
        self.texts = [[1000 * (text + 1) + i for i in range(6 * self.unit)] for text in range(2)]
        self.names = iter(range(10**9))
        self.hits: dict[str, Hit] = {}
        """Hits of requests that still wait. The manager knows if they may still be used."""
        self.done: dict[str, int] = dict.fromkeys(
            ("admitted", "hit", "loaded", "stepped", "preempted", "finished", "late"), 0
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.manager.begin_step()
            self.act()
            self.engine.verify()

    def act(self) -> None:
        rng, engine = self.rng, self.engine
        roll = rng.random()
        if roll < 0.25 or not (engine.jobs or engine.waiting):
            self.create()
        elif roll < 0.5 and engine.waiting:
            self.admit(rng.choice(list(engine.waiting.values())))
        elif roll < 0.86 and engine.jobs:
            self.step(rng.choice(list(engine.jobs.values())))
        elif roll < 0.94 and engine.jobs:
            engine.finish(rng.choice(list(engine.jobs.values())))
            self.done["finished"] += 1
        elif roll < 0.95:
            for job in engine.waiting.values():
                self.hits[job.request.id] = engine.manager.lookup(job.request)
        elif roll < 0.97 and engine.jobs:
            self.preempt(rng.choice(list(engine.jobs.values())))
        elif roll < 0.99:
            engine.manager.evict(rng.sample(range(1, engine.manager.pool.num_blocks), 2))
        else:
            for job in list(engine.jobs.values()) if rng.random() < 0.5 else []:
                engine.finish(job)
            assert engine.manager.reset() == (not engine.jobs)

    def create(self) -> None:
        rng = self.rng
        text = rng.choice(self.texts)
        start = text[: rng.randint(0, len(text))]
        own = [rng.randint(1, 3) for _ in range(rng.randint(1, 2 * self.unit))]
        self.engine.create(f"r{next(self.names)}", start + own)

    def admit(self, job: Job) -> None:
        rng, engine = self.rng, self.engine
        found, late = self.look_up(job)
        left = len(job.tokens) - found.tokens
        external = 0
        if left > self.unit and rng.random() < self.external:
            external = self.unit * rng.randint(1, (left - 1) // self.unit)
        later = external > 0 and rng.random() < 0.4
        hit = len(job.tokens) - left
        new = self.cut(job, hit + external, rng.choice([1, self.unit, 3 * self.unit, 99 * self.unit]))
        if engine.admit(job, new, found, external=external, later=later, has_running=bool(engine.jobs)):
            self.done["admitted"] += 1
            self.done["hit"] += hit > 0
            self.done["loaded"] += external > 0
            self.done["late"] += late and hit > 0
            del self.hits[job.request.id]
        elif not engine.jobs:
            del engine.waiting[job.request.id]

    def look_up(self, job: Job) -> tuple[Hit, bool]:
        """Return the hit of this request: from an earlier time, if that still counts, else as of now."""
        kept = self.hits.get(job.request.id)
        late = kept is not None and kept.version == self.engine.manager.pool.version and self.rng.random() < 0.8
        if not late:
            kept = self.hits[job.request.id] = self.engine.manager.lookup(job.request)
        assert kept is not None
        return kept, late

    def cut(self, job: Job, start: int, count: int) -> int:
        """End a chunk of the prompt where an aligned state may be kept, as vLLM's scheduler does."""
        end = min(start + count, len(job.tokens))
        if self.aligned and start < len(job.tokens):
            tail = (job.request.num_prompt_tokens - 1) // self.hash_unit * self.hash_unit
            if self.hash_unit < self.unit and start < tail < end:
                end = tail if tail // self.unit == start // self.unit else tail // self.unit * self.unit
            elif end < len(job.tokens):
                end = end // self.unit * self.unit
                if end <= start:
                    end = min((start // self.unit + 1) * self.unit, len(job.tokens))
        return max(end - start, 1)

    def step(self, job: Job) -> None:
        rng, engine = self.rng, self.engine
        if job.request.id in engine.loading:
            engine.land(job)
            return
        computed = job.request.num_computed_tokens
        count = self.cut(job, computed, rng.choice([1, self.unit, 99 * self.unit]))
        # Drafts are made by a step that sampled, so the next one has a single token of the text before them.
        drafting = self.drafts if computed == len(job.tokens) - 1 >= job.request.num_prompt_tokens else 0
        drafts = [rng.randint(1, 3) for _ in range(rng.randint(0, drafting))]
        accepted = rng.randint(0, len(drafts))
        sampled = rng.randint(1, 3)
        while not engine.step(job, count, drafts, accepted, sampled, lookahead=self.drafts):
            victim = rng.choice(list(engine.jobs.values()))
            self.preempt(victim)
            if victim is job:
                return
        self.done["stepped"] += 1
        if len(job.tokens) > 14 * self.unit:
            engine.finish(job)
            self.done["finished"] += 1

    def preempt(self, job: Job) -> None:
        self.engine.preempt(job)
        self.done["preempted"] += 1


def pool_for(groups: list[GroupSpec], scale: int = 1) -> int:
    """A pool in which about three of ``Traffic``'s requests fit, or ``scale`` times as many."""
    unit = math.lcm(*(group.block_size for group in groups))
    return 1 + scale * sum(20 * unit // group.block_size for group in groups)
