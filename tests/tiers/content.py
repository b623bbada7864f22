"""The fake engine of the block manager's content check, with tiers below it: every copy moves content, as it lands.

What was written on the device must be read there after a way through host and storage. Contents move when a transfer
lands, from what it holds to what it holds; so a source given up too early, a destination used too early, or a page under a
wrong name shows as wrong content, to the next reader on the device.
"""

from __future__ import annotations

from typing import Any

from tests.blocks.content import Cell, Corrupted, Engine, Job, Traffic
from tests.tiers.support import BLOCK

from kvyard.blocks import GroupSpec
from kvyard.events import Batcher, Mirror
from kvyard.events.types import Tier
from kvyard.tiers import Copy, LoadStep, Offload, OffloadConfig, Timeline
from kvyard.tiers.copies import LinkedTier
from kvyard.tiers.links import Direction

Page = list[dict[int, Cell]]


class TieredEngine(Engine):
    """Runs requests on a ``BlockManager`` with tiers, and remembers what is in each block and page."""

    def __init__(
        self,
        num_blocks: int,
        groups: list[GroupSpec],
        config: OffloadConfig,
        *,
        name: str = "w0",
        timeline: Timeline | None = None,
        pages: dict[Tier, dict[int, Page]] | None = None,
        **options: Any,
    ) -> None:
        """``pages`` are the contents of shared tiers, common to all workers."""
        self.batcher = Batcher([group.meta for group in groups], stream=name)
        super().__init__(num_blocks, groups, sink=self.batcher, **options)
        self.offload = Offload(
            self.manager,
            config,
            block_bytes=BLOCK,
            name=name,
            sink=self.batcher,
            timeline=timeline,
            prefill_ns=lambda tokens, past: (
                tokens * BLOCK // 3
            ),  # so that sometimes loading and sometimes computing is quicker
        )
        self.mirror = Mirror()
        self.now = 0
        self.pages: dict[Tier, dict[int, Page]] = {}
        for tier in self.offload.tiers:
            level = tier.store.tier
            shared = pages is not None and level in pages
            self.pages[level] = pages[level] if shared and pages is not None else {}
            if not shared:
                tier.watch = self.moved

    # -- what a copy moves --------------------------------------------------------------------------------------------

    def moved(self, copy: Copy) -> None:
        """A copy of this worker lands."""
        chunk = self.offload.layout.chunk
        for at, piece in enumerate(copy.pieces):
            near_tier, far_tier = Tier(copy.level + 1), Tier(copy.level + 2)
            far = [page for extent in copy.far[at] for page in extent.ids]
            if copy.level == 0 and copy.direction == Direction.OUT:
                blocks = [block for extent in copy.near[at] for block in extent.ids]
                for index, page in enumerate(far):
                    held = blocks[index * chunk : (index + 1) * chunk]
                    self.pages[far_tier][page] = [dict(self.memory[block]) for block in held]
            elif copy.level == 0:
                content = [cells for page in far for cells in self.pages[far_tier][page]]
                first = copy.first_block[at]
                stop = copy.tokens // self.manager.groups[piece.group].block_size
                if copy.request is not None:
                    slots = self.manager.block_ids(copy.request)[piece.group][first:stop]
                else:
                    slots = [block for extent in copy.near[at] for block in extent.ids]
                for block, cells in zip(slots, content[first - piece.start * chunk :], strict=False):
                    self.memory[block] = dict(cells)
            else:
                near = [page for extent in copy.near[at] for page in extent.ids]
                ways = (near, far, near_tier, far_tier)
                if copy.direction == Direction.IN:
                    ways = (far, near, far_tier, near_tier)
                for source, target in zip(ways[0], ways[1], strict=True):
                    self.pages[ways[3]][target] = [dict(cells) for cells in self.pages[ways[2]][source]]

    # -- what is asked ------------------------------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        self.now = now
        for request in self.offload.tick(now):
            del self.loading[request.id]

    def onboard(self, job: Job) -> LoadStep:
        request = job.request
        hit = self.manager.lookup(request)
        self.verify_hit(job, hit)
        outcome = self.offload.onboard(request, hit, self.now)
        if outcome.step is LoadStep.STARTED:
            self.jobs[request.id] = self.waiting.pop(request.id)
            self.loading[request.id] = (hit.tokens, hit.tokens + outcome.tokens)
            self.run_copies()
        return outcome.step

    def admit(self, job: Job, new: int, *args: Any, **options: Any) -> bool:
        done = super().admit(job, new, *args, **options)
        if done:
            self.offload.offload(job.request, self.now)
        return done

    def step(self, job: Job, *args: Any, **options: Any) -> bool:
        done = super().step(job, *args, **options)
        if done:
            job.request.running = True
            self.offload.offload(job.request, self.now)
        return done

    def finish(self, job: Job) -> None:
        self.offload.forget(job.request, self.now)
        super().finish(job)

    def preempt(self, job: Job) -> None:
        self.offload.forget(job.request, self.now)
        super().preempt(job)

    def verify(self) -> None:
        super().verify()
        for tier in self.offload.tiers:
            self.verify_pages(tier)
        batch = self.batcher.end_iteration(self.now)
        if batch is not None:
            self.mirror.apply(batch.events)

    def verify_pages(self, tier: LinkedTier) -> None:
        """Every name in a lower tier's maps tells the truth about its page."""
        level = tier.store.tier
        for index, key, page in tier.store.pool.cached_blocks():
            tokens, digest = self.texts[index, key]
            group = self.manager.groups[index]
            offset = 0 if group.spec.is_state else group.block_size - 1
            content = self.pages[level].get(page)
            found = content[-1].get(offset) if content else None
            if found != (index, tokens, digest):
                raise Corrupted(f"{level.name} page {page} of group {index} holds {found}, not {tokens} tokens")


class TieredTraffic(Traffic):
    """Random requests whose loads come from real tiers; time passes by fits and starts."""

    def __init__(self, engine: TieredEngine, seed: int, drafts: int = 0, pace: int = 3_000) -> None:
        super().__init__(engine, seed, drafts, external=0.0)
        self.tiered = engine
        self.pace = pace
        self.done.update(dict.fromkeys(("started", "waiting", "no room", "nothing", "unclean"), 0))

    def run(self, steps: int) -> None:
        engine = self.tiered
        for _ in range(steps):
            engine.manager.begin_step()
            engine.tick(engine.now + self.rng.choice([0, 1, self.rng.randint(0, self.pace)]))
            self.act()
            engine.verify()

    def act(self) -> None:
        rng, engine = self.rng, self.tiered
        roll = rng.random()
        if roll < 0.25 or not (engine.jobs or engine.waiting):
            self.create()
        elif roll < 0.55 and engine.waiting:
            self.admit(rng.choice(list(engine.waiting.values())))
        elif roll < 0.88 and engine.jobs:
            self.step(rng.choice(list(engine.jobs.values())))
        elif roll < 0.95 and engine.jobs:
            engine.finish(rng.choice(list(engine.jobs.values())))
            self.done["finished"] += 1
        elif roll < 0.98 and engine.jobs:
            self.preempt(rng.choice(list(engine.jobs.values())))
        elif roll < 0.99:
            engine.manager.evict(rng.sample(range(1, engine.manager.pool.num_blocks), 2))

    def admit(self, job: Job) -> None:
        engine = self.tiered
        if job.request.num_computed_tokens == 0 and not job.request.tables:
            step = engine.onboard(job)
            self.done[step.value] += 1
            if step is not LoadStep.NOTHING:
                return
        needed = -(-len(job.tokens) // min(group.block_size for group in engine.manager.groups))
        if engine.offload.make_clean(needed * len(engine.manager.groups), engine.now) is not None:
            self.done["unclean"] += 1
            return
        super().admit(job)

    def step(self, job: Job) -> None:
        if job.request.id in self.tiered.loading:
            return
        super().step(job)
