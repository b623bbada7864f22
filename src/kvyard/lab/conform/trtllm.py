"""Conformance of ``backend=trtllm``: logs of TensorRT-LLM's Python schedulers, replayed through our engine and compared pass by
pass.

A log is like one of vLLM's scheduler (``kvyard.lab.conform.scheduler``) with TensorRT-LLM's settings; requests that were paused
count as preempted. A pass lists prompts that go on first, then prompts that end, then requests that decode.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec

from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.passes import Pass
from kvyard.engine.policies.settings import TrtllmSettings
from kvyard.engine.policies.trtllm import TrtllmPasses
from kvyard.engine.timing import TimingConfig
from kvyard.errors import KvyardError
from kvyard.lab.conform import LogError, LogVerdict
from kvyard.lab.conform.scheduler import LoggedRun, Record, SchedulerLog, replay

FORMAT = "trtllm-log/1"
LOWER_CASE = ("capacity_scheduler_policy", "context_chunking_policy")
SAME_NAMES = (
    "enable_chunked_prefill",
    "chunk_unit_size",
    "batch_wait_timeout_iters",
    "batch_wait_max_tokens_ratio",
)


class TrtllmLog(SchedulerLog):
    """One recorded run."""

    format: ClassVar[str] = FORMAT

    def engine_config(self, config: Record, timing: TimingConfig) -> EngineConfig:
        engine = EngineConfig(
            backend="trtllm",
            block_size=config["tokens_per_block"],
            num_gpu_blocks=config["num_blocks"],
            max_num_seqs=config["max_batch_size"],
            max_num_batched_tokens=config["max_num_tokens"],
            enable_prefix_caching=config["enable_block_reuse"],
            async_scheduling=config["overlap"],
            timing=timing,
            trtllm=msgspec.convert(
                {
                    **{name: config[name].lower() for name in LOWER_CASE},
                    **{name: config[name] for name in SAME_NAMES},
                },
                TrtllmSettings,
            ),
        )
        try:
            engine.check()
        except KvyardError as refused:
            raise LogError(f"this configuration can't be replayed: {refused}") from refused
        return engine


class TrtllmRun(LoggedRun):
    """A log's requests through our engine."""

    def in_order(self, batch: Pass) -> list[tuple[Job, int]]:
        policy = self.core.scheduler.policy
        assert isinstance(policy, TrtllmPasses)
        return policy.order(batch)


def conform(path: Path) -> LogVerdict:
    """Replay one log. Raises ``LogError`` for a file that isn't one, or can't be replayed."""
    return replay(path, TrtllmLog(path), TrtllmRun)
