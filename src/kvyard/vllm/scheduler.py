"""vLLM's schedulers for ``--scheduler-cls``: with kvyard's block manager in the place of vLLM's, or with vLLM's own.

Scheduling stays vLLM's. Its constructor makes its own manager; ours replaces it before the first request. All of them
record on request.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from kvyard.vllm.manager import Manager
from kvyard.vllm.recording import RecordingMixin
from kvyard.vllm.version import UnsupportedError

logger = init_logger("vllm.kvyard")


class _WithOurManager:
    """Mixed into a scheduler of vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        _check(scheduler)
        scheduler.kv_cache_manager = _manager_of(scheduler)
        if scheduler.connector is not None:
            scheduler.connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
        blocks = scheduler.kv_cache_manager.blocks
        kinds = ", ".join(group.spec.kind for group in blocks.groups)
        logger.info("KV blocks are managed by kvyard: %d blocks, groups %s", blocks.pool.num_blocks, kinds)


def _check(scheduler: Any) -> None:
    """Raise ``UnsupportedError`` for what the manager can't serve and can't see."""
    connector = scheduler.connector
    if connector is not None:
        for name in ("bind_kv_cache_manager", "bind_gpu_block_pool"):
            if getattr(type(connector), name) is not getattr(KVConnectorBase_V1, name):
                raise UnsupportedError(
                    f"{type(connector).__name__} works on vLLM's block pool itself ({name}), which isn't there under "
                    "kvyard.vllm.Scheduler: choose another connector or leave --scheduler-cls out"
                )
    if scheduler.scheduler_config.async_scheduling and not isinstance(scheduler, VllmAsyncScheduler):
        logger.warning("Asynchronous scheduling is on: name kvyard.vllm.AsyncScheduler to have it")


def _manager_of(scheduler: Any) -> Manager:
    """Return a manager with the settings that vLLM's constructor gave its own."""
    return Manager(
        kv_cache_config=scheduler.kv_cache_config,
        max_model_len=scheduler.max_model_len,
        max_in_flight_tokens=scheduler.vllm_config.max_in_flight_tokens,
        enable_caching=scheduler.cache_config.enable_prefix_caching,
        use_eagle=scheduler.use_eagle_block_drop,
        num_prefill_lookahead=scheduler.num_prefill_lookahead,
        log_stats=scheduler.log_stats,
        enable_kv_cache_events=scheduler.enable_kv_cache_events,
        dcp_world_size=scheduler.dcp_world_size,
        pcp_world_size=scheduler.pcp_world_size,
        scheduler_block_size=scheduler.block_size,
        hash_block_size=scheduler.hash_block_size,
        metrics_collector=scheduler.kv_metrics_collector,
        watermark=scheduler.scheduler_config.watermark,
        enable_mamba_shared_prefix_checkpoint=scheduler.cache_config.enable_mamba_shared_prefix_checkpoint,
    )


class KvyardScheduler(RecordingMixin, _WithOurManager, VllmScheduler):
    """vLLM's scheduler over kvyard's block manager."""


class KvyardAsyncScheduler(RecordingMixin, _WithOurManager, VllmAsyncScheduler):
    """``KvyardScheduler`` for asynchronous scheduling, vLLM's default on GPUs."""


class RecordingScheduler(RecordingMixin, VllmScheduler):
    """vLLM's own scheduler, recorded."""


class AsyncRecordingScheduler(RecordingMixin, VllmAsyncScheduler):
    """``RecordingScheduler`` for asynchronous scheduling."""
