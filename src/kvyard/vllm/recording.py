"""Watches one of vLLM's schedulers and passes what it sees to a recorder. It changes nothing, and what goes wrong in it stays
in it.
"""

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.request import RequestStatus

from kvyard.clock import SECOND, WallClock
from kvyard.errors import KvyardError
from kvyard.vllm.groups import group_specs
from kvyard.vllm.recorder import EndedRequest, EngineRecorder, PassComposition
from kvyard.vllm.recording_settings import recording_settings
from kvyard.vllm.version import UnsupportedError, installed_version

logger = init_logger("vllm.kvyard")

FORMAT = "scheduler-log/1"
SAME_NAMES = {
    "cache_config": ("block_size", "enable_prefix_caching", "prefix_cache_retention_interval"),
    "scheduler_config": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "enable_chunked_prefill",
        "policy",
        "scheduler_reserve_full_isl",
        "watermark",
        "async_scheduling",
    ),
}
"""Settings that a log of decisions has under vLLM's own names."""


class RecordingMixin(SchedulerInterface):
    """Mixed into a scheduler of vLLM's: records if it is configured, and does nothing otherwise."""

    kvyard_recorder: EngineRecorder | None = None
    _clock = WallClock()
    _in_flight = 0
    """Steps that were decided on and whose output hasn't been looked at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler: Any = self
        self._preempted: list[str] = []
        try:
            settings = recording_settings(scheduler.vllm_config)
            if settings is not None:
                self.kvyard_recorder = _begin(scheduler, *settings, self._clock)
        except KvyardError as refused:
            logger.warning("kvyard: nothing is recorded: %s", refused)
        except Exception as fault:
            logger.warning("kvyard: nothing is recorded, by a fault of the recorder's own: %r; serving goes on", fault)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        start = self._clock.now()
        self._preempted.clear()
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._in_flight += 1
            self._tell(_decided, self, start, output, list(self._preempted))
        elif not self._in_flight and not self._is_busy():
            # vLLM asks once more after its last request has ended. Its output has left by then, so that writing delays none.
            self._tell(EngineRecorder.idle, start)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        counts = bool(scheduler_output.total_num_scheduled_tokens)
        if counts:
            self._tell(EngineRecorder.returned, self._clock.now())
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if counts:
            self._in_flight -= 1
            if self.kvyard_recorder is not None:
                self._tell(EngineRecorder.looked_at, self._is_busy())
        return outputs

    def add_request(self, request: Any) -> None:
        scheduler: Any = self
        fresh = request.request_id not in scheduler.requests
        super().add_request(request)
        if fresh:
            self._tell(_arrived, request)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._preempted.append(request.request_id)
        self._tell(EngineRecorder.preempted, request.request_id)
        return super()._preempt_request(request, *args, **kwargs)

    def _update_request_with_output(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not request.num_output_tokens:
            self._tell(EngineRecorder.sampled, request.request_id)
        return super()._update_request_with_output(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell(_ended, request, self._in_flight > 0)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        scheduler: Any = self
        self._tell(lambda recorder: recorder.close({name: _text(r) for name, r in scheduler.requests.items()}))
        if self.kvyard_recorder is not None:
            atexit.unregister(self.kvyard_recorder.flush)
        self.kvyard_recorder = None
        super().shutdown()

    def _is_busy(self) -> bool:
        scheduler: Any = self
        return any(scheduler.get_request_counts())

    def _tell(self, what: Callable[..., None], *args: Any) -> None:
        """Tell the recorder, if there is one; whatever it raises ends the recording and nothing else."""
        recorder = self.kvyard_recorder
        if recorder is None:
            return
        began = self._clock.now()
        try:
            what(recorder, *args)
        except Exception:
            self.kvyard_recorder = None
            logger.exception("kvyard: the recording in %s ends by a fault of its own; serving goes on", recorder.folder)
        recorder.counters.spent_ns += self._clock.now() - began


def _begin(scheduler: Any, folder: Path, limit: int, clock: WallClock) -> EngineRecorder:
    started = WallClock.since_epoch().now() // SECOND
    place = folder / f"engine-{started}-{os.getpid()}-{scheduler.parallel_config.data_parallel_index}"
    overlapping = scheduler.vllm_config.max_concurrent_batches > 1
    staged = scheduler.parallel_config.pipeline_parallel_size > 1
    header: dict[str, Any] | None = None
    if staged:
        why_not = "steps are in several pipeline stages at once, so that no pass has a time of its own"
    elif overlapping:
        why_not = "asynchronous scheduling is on"
    else:
        header, why_not = _header(scheduler)
    if header is None:
        left = "the trace" if staged else "the trace and passes"
        logger.warning("kvyard: decisions are not recorded, only %s: %s", left, why_not)
    recorder = EngineRecorder(
        place,
        header,
        clock=clock,
        hash_block_size=scheduler.hash_block_size,
        limit=limit,
        overlapping=overlapping,
        timed=not staged,
    )
    # An engine in its caller's own process may end without a word: no schedule() after the last request, no shutdown().
    atexit.register(recorder.flush)
    logger.info("kvyard: recording to %s", place)
    return recorder


def _header(scheduler: Any) -> tuple[dict[str, Any] | None, str]:
    """Return the first line of a log of decisions; or ``None`` and why kvyard's engine couldn't repeat them."""
    if scheduler.connector is not None:
        return None, "a connector brings blocks from elsewhere"
    if scheduler.lora_config is not None or scheduler.vllm_config.speculative_config is not None:
        return None, "adapters or draft tokens are on"
    if scheduler.scheduler_config.policy != "fcfs":
        return None, "requests go by priority, and equals by the time at their API server"
    if scheduler.max_num_encoder_input_tokens:
        return None, "the model takes images or sound"
    try:
        groups = group_specs(scheduler.kv_cache_config)
    except UnsupportedError as unknown:
        return None, str(unknown)
    config: dict[str, Any] = {"num_blocks": scheduler.kv_cache_config.num_blocks, "num_speculative_tokens": 0}
    config["max_model_len"] = scheduler.max_model_len
    for part, names in SAME_NAMES.items():
        config |= {name: getattr(getattr(scheduler, part), name) for name in names}
    config["prefix_cache_retention_interval"] = scheduler.kv_cache_config.prefix_cache_retention_interval
    config["groups"] = [
        {
            "type": spec.kind,
            "block_size": spec.block_size,
            **{name: getattr(spec, name) for name in spec.attention.fields if getattr(spec, name)},
        }
        for spec in groups
    ]
    return {"format": FORMAT, "vllm": installed_version(), "config": config, "timing": None}, ""


def _arrived(recorder: EngineRecorder, request: Any) -> None:
    recorder.arrived(
        request.request_id, request.block_hashes, request.all_token_ids[: request.num_prompt_tokens], request.priority
    )


def _ended(recorder: EngineRecorder, request: Any, in_step: bool) -> None:
    aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
    recorder.ended(request.request_id, _text(request), aborted=aborted, in_step=in_step)


def _text(request: Any) -> EndedRequest:
    return EndedRequest(request.block_hashes, request.num_prompt_tokens, request.num_output_tokens, request.max_tokens)


def _decided(recorder: EngineRecorder, scheduler: Any, start: int, output: Any, preempted: list[str]) -> None:
    known = output.scheduled_cached_reqs
    computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
    hits = {name: computed[name] for name in known.req_ids if name in known.resumed_req_ids}
    for data in output.scheduled_new_reqs:
        computed[data.req_id] = hits[data.req_id] = data.num_computed_tokens
    requests = scheduler.requests
    prefills: list[tuple[int, int]] = []
    batch = context = longest = 0
    for name, count in output.num_scheduled_tokens.items():
        past = computed[name]
        if past < requests[name].num_prompt_tokens or count > 1:
            prefills.append((count, past))
        else:
            batch += 1
            context += past + 1
            if past >= longest:
                longest = past + 1
    running, waiting = scheduler.get_request_counts()
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    shape = PassComposition(prefills, batch, context, longest)
    recorder.decided(start, output.num_scheduled_tokens, hits, preempted, (running, waiting, free), shape)
