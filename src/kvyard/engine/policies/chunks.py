"""Length of the next chunk of a prompt: by the budget of a pass, by the threshold for long prompts, and by aligned states."""

from __future__ import annotations

from kvyard.blocks.geometry import Geometry
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.integers import ceil_div

UNLIMITED = 1 << 30


class ChunkSizes:
    """vLLM's way to cut prompts."""

    def __init__(self, config: EngineConfig, geometry: Geometry, *, always: bool) -> None:
        """``always``: the threshold holds for a job that is alone, too."""
        self.threshold = config.long_prefill_token_threshold
        self._adaptive = config.long_prefill_token_threshold_adaptive
        self._always = always
        self._input_budget = config.max_num_batched_tokens
        self._limit = UNLIMITED
        """The threshold of the pass being formed."""
        aligned = [spec for spec in config.specs if spec.is_state and spec.mode == "align"]
        self._unit = max([spec.block_size for spec in aligned], default=0) if config.enable_prefix_caching else 0
        units = [spec.checkpoint_unit for spec in aligned]
        self._checkpoint_unit = units[0] if units and None not in units else None
        """Tokens between states that a chunk can leave inside; ``None``: it leaves only the one at its end."""
        self._geometry = geometry
        self._fine_unit = geometry.hash_block_size if geometry.fine_hits else 0
        self._drops_block = config.speculative is not None and config.speculative.eagle
        longest = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        self._fits_unit = self._unit <= min(longest, self.threshold or UNLIMITED)
        """True if a pass can compute a whole unit."""

    def begin_pass(self, jobs: int) -> None:
        """Begin to form the next pass, with ``jobs`` jobs that run or wait. A job that is alone delays no other. Required
        if there is a ``threshold``.
        """
        limit = self.threshold
        if jobs <= 1 and not self._always:
            limit = UNLIMITED
        elif self._adaptive:
            limit = max(limit, self._input_budget // jobs)
        self._limit = limit

    def cut(self, job: Job, past: int, budget: int) -> int:
        """Return the number of tokens in the next chunk of ``job``, of which ``past`` are computed; 0 if none can be cut
        off now."""
        new = job.num_tokens - past
        if new > self._limit:
            new = self._limit
        if new > budget:
            new = budget
        return self._align(job, past, new) if self._unit else new

    def _align(self, job: Job, start: int, new: int) -> int:
        """Return the chunk, cut so that it ends where aligned states are kept: at the end of a block, and where others can
        continue.
        """
        known, unit = job.num_tokens, self._unit
        prefill_end = max(job.num_prompt_tokens, known - 1)
        if start >= prefill_end:
            return new
        end = start + new
        stops: list[int] = []
        if end < prefill_end or not self._leaves_checkpoint(start, end, prefill_end):
            last = self._last_kept(known, unit)
            stops.append(last)
            if start % unit:
                stops.append((start // unit + 1) * unit)
            if self._fine_unit:
                tail = self._last_kept(job.num_prompt_tokens, self._fine_unit)
                if last < tail < job.num_prompt_tokens:
                    stops.append(tail)
        if end < prefill_end:
            whole = end // unit * unit
            if whole > start or self._fits_unit:
                end = whole
        junction = job.shared_prefix_boundary
        if start < junction < end:
            stops.append(start + (junction - start) // unit * unit)
        for stop in stops:
            if start < stop < end:
                end = stop
        return max(0, end - start)

    def _leaves_checkpoint(self, start: int, end: int, prefill_end: int) -> bool:
        """Return true if a chunk can leave the state inside that a request with the same prompt could continue from, so that
        it needs no stop there.
        """
        unit, hashed = self._checkpoint_unit, self._geometry.hash_block_size
        if unit is None:
            return False
        tokens = self._last_kept(prefill_end, self._fine_unit or self._geometry.scheduler_block_size)
        return (
            start % hashed == 0
            and ceil_div(end, self._unit) - 2 > (start - 1) // self._unit
            and start + hashed <= tokens < end
            and (tokens - start) % unit == 0
        )

    def _last_kept(self, tokens: int, unit: int) -> int:
        """Return the last end of a block that a request of the same ``tokens`` could continue from."""
        if self._drops_block:
            return max(0, tokens // unit * unit - unit)
        return (tokens - 1) // unit * unit
