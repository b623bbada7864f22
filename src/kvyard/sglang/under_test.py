"""The scheduler of the installed SGLang, made from the settings of a log, without a model and without a GPU.

The file that knows SGLang's API, written for 0.5.23. If a new version has moved something, change it here.

Real: ``Scheduler`` (``get_next_batch_to_run``, ``process_batch_result``, ``_add_request_to_queue``, ``update_running_batch``,
``init_running_status``, ``init_chunked_prefill``, ``init_schedule_policy``, ``init_req_max_new_tokens``), ``SchedulePolicy``,
``PrefillAdder`` with its budgets, ``ScheduleBatch``, ``SchedulerBatchResultProcessor``, ``NewTokenRatioTracker``,
``UnifiedRadixCache`` with its tree core (the Rust one where it loads), the allocators, ``ReqToTokenPool``, the event recorder,
and HiCache's ``HybridCacheController`` with its host pool. Stand-ins: the model runner (every batch samples scripted tokens),
the tensors of keys and values, copies between device and host (``VirtualCopies``), metrics, output streaming, tokenizer and
every socket.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from kvyard.sglang.absent import Anything
from kvyard.sglang.copies import VirtualCopies
from kvyard.sglang.memory import DEVICE, make_allocator, make_tree, rows_with_states
from kvyard.sglang.server_args import draft_args, hicache_args, state_args
from kvyard.sglang.storage import VirtualStorage

CONTEXT_LEN = 1 << 15


class Metrics(Anything):
    """Counts what SGLang adds up in place; the rest is ignored."""

    num_generated_tokens = 0
    forward_ct_decode = 0
    num_retracted_reqs = 0
    enable_metrics = False


class SglangUnderTest:
    """One scheduler, and what the loop around it needs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.environ import envs
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.runtime_context import get_context, get_schedule
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self._torch = torch
        self._settings = settings
        context = get_context()
        context.override_server_args(
            device=DEVICE,
            attention_backend="torch_native",
            page_size=settings["page_size"],
            schedule_policy=settings["schedule_policy"],
            schedule_conservativeness=settings["schedule_conservativeness"],
            chunked_prefill_size=settings["chunked_prefill_size"] or -1,
            enable_mixed_chunk=settings["enable_mixed_chunk"],
            prefill_max_requests=settings.get("prefill_max_requests"),
            disable_radix_cache=settings["disable_radix_cache"],
            radix_eviction_policy=settings["radix_eviction_policy"],
            disable_overlap_schedule=not settings["overlap"],
            enable_priority_scheduling=settings["enable_priority_scheduling"],
            disable_priority_preemption=settings.get("disable_priority_preemption", False),
            schedule_low_priority_values_first=settings.get("schedule_low_priority_values_first", False),
            priority_scheduling_preemption_threshold=settings.get("priority_scheduling_preemption_threshold", 10),
            max_running_requests=settings["max_running_requests"],
            pp_max_micro_batch_size=settings["max_running_requests"],
            skip_tokenizer_init=True,
            **hicache_args(settings),
            **state_args(settings),
            **draft_args(settings),
        ).install()
        envs.SGLANG_INIT_NEW_TOKEN_RATIO.set(settings.get("init_new_token_ratio", 0.7))
        scheduler = self.of_sglang = Scheduler.__new__(Scheduler)
        size, page = settings["num_tokens"], settings["page_size"]
        scheduler.is_generation = True
        scheduler.server_args = context.server_args
        scheduler.schedule_policy = get_schedule().schedule_policy
        scheduler.enable_priority_scheduling = settings["enable_priority_scheduling"]
        scheduler.abort_on_priority_when_disabled = False
        scheduler.schedule_low_priority_values_first = get_schedule().schedule_low_priority_values_first
        scheduler.priority_scheduling_preemption_threshold = get_schedule().priority_scheduling_preemption_threshold
        scheduler.enable_overlap = settings["overlap"]
        drafts = settings.get("speculative")
        scheduler.spec_algorithm = SpeculativeAlgorithm.from_string(drafts["algorithm"] if drafts else None)
        scheduler.page_size = page
        scheduler.device = DEVICE
        scheduler.model_config = SimpleNamespace(
            is_encoder_decoder=False,
            vocab_size=1 << 30,
            is_multimodal=False,
            context_len=CONTEXT_LEN,
            hf_config=None,
            hf_text_config=None,
            self_opened_think_start_ids=None,
            think_end_ids=None,
        )
        scheduler.max_total_num_tokens = size
        scheduler.max_prefill_tokens = settings["max_prefill_tokens"]
        scheduler.max_running_requests = settings["max_running_requests"]
        scheduler.max_req_len = min(CONTEXT_LEN - 1, size - 1)
        scheduler.kv_shard_widening = 1
        window = scheduler.sliding_window_size = settings.get("sliding_window_size")
        scheduler.disaggregation_mode = DisaggregationMode.NULL
        scheduler.metrics_reporter = scheduler.metrics_collector = Metrics()
        scheduler.tp_worker = scheduler.model_worker = SimpleNamespace(
            model_runner=SimpleNamespace(attn_backend=None, prefill_aware_swa=False),
            on_verify_complete_cpu=lambda *_, **__: None,
        )
        for name in NONE:
            setattr(scheduler, name, None)
        for name in OFF:
            setattr(scheduler, name, False)
        scheduler.enable_hierarchical_cache = "hicache" in settings
        scheduler.is_hybrid_swa = window is not None
        for name in IGNORED:
            setattr(scheduler, name, Anything())
        scheduler.grammar_manager = SimpleNamespace(
            has_waiting_grammars=lambda: False, abort_requests=lambda _: None, __len__=lambda: 0
        )
        scheduler.dp_attn_adapter = SimpleNamespace(
            maybe_prepare_mlp_sync_batch=lambda batch, need_sync=None: batch,
            maybe_convert_decode_to_extend=lambda batch: batch,
        )
        scheduler.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, chunked_req: batch)
        rows: dict[str, Any] = {
            "size": settings["max_running_requests"],
            "max_context_len": CONTEXT_LEN,
            "device": DEVICE,
            "enable_memory_saver": False,
        }
        if "max_mamba_cache_size" in settings:
            scheduler.is_hybrid_ssm = True
            scheduler.server_args._mamba_cache_chunk_size = max(64, page)
            torch.Tensor.pin_memory = lambda tensor, *_: tensor  # there is no device to copy to
            scheduler.req_to_token_pool = rows_with_states(rows, settings)
        else:
            scheduler.req_to_token_pool = ReqToTokenPool(**rows)
        scheduler.token_to_kv_pool_allocator = make_allocator(settings)
        scheduler.tree_cache = make_tree(settings, scheduler)
        self.copies: VirtualCopies | None = None
        self.storage: VirtualStorage | None = None
        if "hicache" in settings:
            self._attach_host(scheduler.tree_cache, settings["hicache"])
        # Parts that a scheduler makes of these, by its own code.
        scheduler._confidence_budget_prepare = None
        scheduler.processed_tokens_counter = 0
        _with_model_impl(scheduler.init_chunked_prefill)
        scheduler.init_running_status()
        scheduler.init_schedule_policy()
        scheduler.init_batch_result_processor()
        scheduler.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda **_: 0, get_loads=lambda *_: None)
        scheduler.publish_load_snapshot = lambda force=False: None
        scheduler._record_step_counters = lambda batch, result: None
        scheduler._maybe_clear_mm_inputs = lambda batch: None
        scheduler.maybe_send_health_check_signal = lambda: None
        scheduler.enable_skip_finishing_decode = settings["overlap"]
        self._requeued: list[tuple[str, str]] = []
        self._observe_queue()

    def _attach_host(self, tree: Any, hicache: dict[str, Any]) -> None:
        """Have copies of HiCache happen on a virtual clock."""
        page = self._settings["page_size"]
        self.copies = VirtualCopies(page, hicache["first_byte"], hicache["per_page"])
        tree.cache_controller.l2_transfer_engine = self.copies
        if "sliding_window_size" in self._settings:
            hicache["window_host_pages"] = self._free_window_host(tree)
        if "storage" in hicache:
            self.storage = VirtualStorage(tree, self.copies, hicache["storage"])
            self.of_sglang.enable_hicache_storage = True

    def _observe_queue(self) -> None:
        """Note which requests come back to the queue, and change nothing."""
        add = self.of_sglang._add_request_to_queue

        def observed(req: Any, is_retracted: bool = False) -> Any:
            if is_retracted or req.retracted_stain:
                self._requeued.append(("retracted" if is_retracted else "preempted", req.rid))
            return add(req, is_retracted)

        self.of_sglang._add_request_to_queue = observed

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: dict[str, Any]) -> Any:
        """Return a request of a log arrives; returns SGLang's ``Req``."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(max_new_tokens=request["output"][1], ignore_eos=request["ignore_eos"])
        params.normalize(None)
        req = Req(
            rid=request["request"],
            origin_input_text="",
            origin_input_ids=array(
                "q", [token for low, count in request["prompt"] for token in range(low, low + count)]
            ),
            sampling_params=params,
            vocab_size=1 << 30,
            priority=request["priority"],
            extra_key=request.get("salt"),
        )
        self.of_sglang.init_req_max_new_tokens(req)
        if req.sampling_params.max_new_tokens != request["output"][1]:
            raise ValueError(f"SGLang clips the answer of {req.rid} to {req.sampling_params.max_new_tokens} tokens")
        self.of_sglang._add_request_to_queue(req)
        return req

    def abort(self, name: str) -> bool:
        """Abort a request, if it is here; returns whether it leaves before the next batch, without another token."""
        from sglang.srt.managers.io_struct import AbortReq

        scheduler = self.of_sglang
        chunked = scheduler.chunked_req is not None and scheduler.chunked_req.rid == name
        leaves = chunked or any(req.rid == name for req in scheduler.waiting_queue)
        scheduler.abort_request(AbortReq(rid=name))
        return leaves

    # -- batches ----------------------------------------------------------------------------------------------------

    def next_batch(self) -> Any:
        """Decide on a batch, as the event loops do; ``None`` if there is nothing to run."""
        scheduler = self.of_sglang
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch is not None:
            scheduler.forward_ct += 1
            batch.forward_iter = scheduler.forward_ct
            if batch.extend_num_tokens:  # also of a decode batch that began as an extend batch: so does run_batch
                scheduler.processed_tokens_counter += batch.extend_num_tokens
        return batch

    def result(self, tokens: list[list[int]], *, verifies: bool = False) -> Any:
        """Return the model's output of a batch: the tokens of each request, one unless the batch ``verifies`` drafts."""
        from sglang.srt.managers.utils import GenerationBatchResult

        torch = self._torch
        width = self._settings["speculative"]["num_draft_tokens"] if verifies else 1
        padded = [token for row in tokens for token in (*row, *[0] * (width - len(row)))]
        result = GenerationBatchResult(
            logits_output=None, next_token_ids=torch.tensor(padded, dtype=torch.int64), can_run_cuda_graph=False
        )
        if verifies:
            result.accept_lens = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
            result.speculative_num_draft_tokens = width
        return result

    def process(self, batch: Any, result: Any) -> None:
        """The result of a batch is known."""
        self.of_sglang.process_batch_result(batch, result)

    def reset_if_idle(self) -> None:
        """Do what ``Scheduler.on_idle`` does for later decisions: nothing unless all requests are gone."""
        scheduler = self.of_sglang
        if not scheduler.waiting_queue and scheduler.running_batch.is_empty() and scheduler.chunked_req is None:
            scheduler.new_token_ratio_tracker.reset()

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return requests that run and wait; pages that are free, evictable and protected; the share of output set aside."""
        scheduler = self.of_sglang
        page = scheduler.page_size
        tree = scheduler.tree_cache
        allocator = scheduler.token_to_kv_pool_allocator
        windows = scheduler.is_hybrid_swa
        state = {
            "running": scheduler.req_to_token_pool.size - scheduler.req_to_token_pool.available_size(),
            "waiting": len(scheduler.waiting_queue),
            "free": (allocator.full_available_size() if windows else allocator.available_size()) // page,
            "evictable": tree.full_evictable_size() // page,
            "protected": tree.full_protected_size() // page,
            "ratio": scheduler.new_token_ratio_tracker.current,
        }
        if self.copies is not None:
            host = tree.cache_controller.mem_pool_host
            state["host"] = host.available_size() // page
        if self.storage is not None:
            state["storage"] = [self.storage.files(), tree.cache_controller.prefetch_tokens_occupied // page]
        if scheduler.is_hybrid_ssm:
            free = scheduler.req_to_token_pool.mamba_allocator.available_size()
            state["states"] = [free, tree.mamba_evictable_size(), tree.mamba_protected_size()]
        if windows:
            sizes = (allocator.swa_available_size(), tree.swa_evictable_size(), tree.swa_protected_size())
            state["swa"] = [size // page for size in sizes]
            if self.copies is not None:
                state["swa_host"] = self._free_window_host(tree)
        return state

    def _free_window_host(self, tree: Any) -> int:
        """Free pages of the host's window pool."""
        from sglang.srt.mem_cache.hicache_storage import PoolName

        return int(tree.host_pool_group.get_pool(PoolName.SWA).available_size()) // int(self._settings["page_size"])

    def loading(self) -> list[Any]:
        """Return loads from the host that are in flight, the latest last."""
        return list(self.of_sglang.tree_cache.cache_controller.ack_load_queue) if self.copies is not None else []

    def take_requeued(self) -> list[tuple[str, str]]:
        """Return requests that were retracted or preempted since this was last called, in order."""
        taken, self._requeued = self._requeued, []
        return taken

    def take_events(self) -> list[Any]:
        """Return events of the tree since they were last taken."""
        return list(self.of_sglang.tree_cache.take_events())


NONE = (
    "min_free_slots_delayer",
    "hisparse_coordinator",
    "decode_offload_manager",
    "draft_worker",
    "dllm_config",
    "scripted_scheduler_hook",
    "lora_drainer",
    "max_queued_requests",
    "mm_receiver",
    "truncation_align_size",
    "dynamic_chunk_sizer",
    "max_new_tokens_limit",
    "rust_server",
)
OFF = (
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_session_radix_cache",
    "enable_hicache_storage",
    "enable_unified_cache_external_linker",
    "enable_hisparse",
    "enable_unified_memory",
    "enable_lora",
    "enable_overlap_mlx",
    "is_hybrid_ssm",
    "require_mlp_sync",
    "enable_fpm",
    "attn_dp_enabled",
)
IGNORED = (
    "future_map",
    "output_streamer",
    "load_publisher",
    "scheduler_stage_metrics",
    "ipc_channels",
    "kv_events_publisher",
)


def _with_model_impl(init: Any) -> None:
    """Run ``init``, which asks how the model is implemented."""
    from sglang.srt.managers import scheduler

    resolve, scheduler.get_resolved_model_impl = scheduler.get_resolved_model_impl, lambda _: None
    try:
        init()
    finally:
        scheduler.get_resolved_model_impl = resolve
