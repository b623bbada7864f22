"""Order of SGLang's waiting queue: its schedule policies, and what waiting requests do to the tree."""

import random

from kvyard.blocks.extent import Node
from kvyard.blocks.radix import RadixGroup
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.policies.mocker import LONGEST_SORTED, SAME_START
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_queue import WaitingQueue
from kvyard.hashing import TokenChain
from kvyard.integers import ceil_div

REFRESH_INTERVAL = 32
"""Waiting requests count as uses of what is cached for them once in this many attempts to admit one."""
BY_CACHE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
"""Schedule policies that match every waiting request before they choose."""


class QueueOrder:
    """Sorts the queue by a schedule policy."""

    def __init__(self, waiting: WaitingQueue, tree: RadixGroup | None, config: EngineConfig, page: int) -> None:
        """``tree``: what is cached, if anything is."""
        settings = config.sglang or SglangSettings()
        self._waiting = waiting
        self._tree = tree
        self._page = page
        self._policy = settings.schedule_policy
        self._by_priority = settings.enable_priority_scheduling
        self._sign = 1 if settings.schedule_low_priority_values_first else -1
        self._refreshes = settings.radix_eviction_policy == "lru"
        self._random = random.Random(config.seed)
        self._attempts = 0
        self.cached: dict[Job, int] = {}
        """Tokens that were last found cached of each waiting job, where the policy goes by that."""

    def sort(self) -> None:
        """Bring those that wait into the order of the policy."""
        waiting, policy = self._waiting, self._policy
        jobs = waiting.jobs
        by_cache = policy in BY_CACHE and self._tree is not None
        if by_cache and policy in ("lpm", "hrrn") and len(jobs) > LONGEST_SORTED:
            by_cache = False
        elif policy == "lof":
            sign = self._sign
            if self._by_priority:
                jobs.sort(key=lambda job: (job.priority * sign, -job.wanted))
            else:
                jobs.sort(key=lambda job: -job.wanted)
        elif policy == "random":
            self._random.shuffle(jobs)
        elif policy == "fifo" and self._by_priority:
            sign, entries = self._sign, waiting.entries
            jobs.sort(key=lambda job: (job.priority * sign, entries[job]))
        if by_cache:
            self._sort_by_cache(jobs)
        else:
            self._refresh(jobs)

    def _sort_by_cache(self, jobs: list[Job]) -> None:
        tree = self._tree
        assert tree is not None
        cached: dict[Job, int] = {}
        later: set[Job] = set()
        starts: set[object] = set()
        ends: list[Node | None] = []
        for job in jobs:
            hit = tree.match(job, job.num_tokens)
            found = hit.tokens
            ends.append(hit.groups[0].nodes[-1] if found else None)
            beyond = tree.beyond.tokens if tree.host is not None else 0
            cached[job] = min(found + beyond, job.num_tokens - 1)
            if found <= SAME_START and job.num_tokens >= SAME_START:
                start = self._start_of(job)
                if start in starts:
                    later.add(job)
                elif start is not None:
                    starts.add(start)
        if self._policy == "dfs-weight":
            jobs[:] = [jobs[at] for at in tree.order_by_weight(ends)]
        elif self._policy == "lpm":
            jobs.sort(key=lambda job: (job in later, -cached[job] if job not in later else 0))
        elif self._policy == "hrrn":
            jobs.sort(key=lambda job: self._response_ratio(job, cached[job], job in later))
        else:
            entries = self._waiting.entries
            jobs.sort(key=lambda job: (job in later, max(1, job.num_tokens - cached[job]), entries[job]))
        self.cached = cached

    def _start_of(self, job: Job) -> object:
        """Return the first tokens of ``job``, or their name; ``None`` if neither is known."""
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
        if tree is None or not jobs or not self._refreshes:
            return
        self._attempts += 1
        if self._attempts % REFRESH_INTERVAL == 1:
            for job in reversed(jobs[:LONGEST_SORTED]):
                tree.touch(job)

    def spare_for_shorter(self, left: int, chunk: int) -> int:
        """Return tokens of the next chunk of a prompt with ``left`` tokens to go, so that shorter prompts fit beside it."""
        page, reserved = self._page, 0
        if chunk < 2 * page:
            return chunk
        for job in self._waiting.jobs:
            work = max(1, job.num_tokens - self.cached[job])
            charged = ceil_div(work, page) * page
            if work >= left or reserved + charged > chunk - page:
                break
            reserved += charged
        return (chunk - reserved) // page * page if reserved else chunk
