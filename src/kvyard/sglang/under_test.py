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

import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
import warnings
from array import array
from types import SimpleNamespace
from typing import Any

QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_LOG_LEVEL": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
ABSENT = ("torchvision", "vllm", "sgl_kernel")
"""Packages that SGLang imports and that have no fitting CPU build."""
DEVICE = "cpu"
CONTEXT_LEN = 1 << 15


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class _Anything(metaclass=_AnyMeta):
    """Stands for whatever is asked of an absent package, and for parts whose effects are not recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _AbsentModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - the import system reads it from the module
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages in ``ABSENT`` that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Metrics(_Anything):
    """Counts what SGLang adds up in place; the rest is ignored."""

    num_generated_tokens = 0
    forward_ct_decode = 0
    num_retracted_reqs = 0
    enable_metrics = False


class OrderedSet(dict[Any, None]):
    """A set that iterates in the order of insertion."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        self[item] = None


def import_sglang() -> str:
    """Import SGLang, which takes 10 to 30 s, with all it prints sent to stderr; returns its version."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    sys.meta_path.append(AbsentPackages())
    warnings.simplefilter("ignore")
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        import sglang.srt.managers.scheduler  # noqa: F401
        from sglang.srt.managers import schedule_policy
        from sglang.version import __version__

        # Requests preempted at once come back in the order of a set, which differs from process to process.
        schedule_policy.set = OrderedSet
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
    logging.disable(logging.WARNING)
    return str(__version__)


class CopyEvent:
    """The end of a copy, which has happened when the virtual clock says so."""

    def __init__(self, engine: VirtualCopies, end: int) -> None:
        self._engine = engine
        self.end = end

    def query(self) -> bool:
        return self._engine.now >= self.end

    def synchronize(self) -> None:
        self._engine.now = max(self._engine.now, self.end)


class VirtualCopies:
    """Stands for ``L2TransferEngine``: copies between device and host take time on a virtual clock and move nothing.

    Each direction carries one copy after the other, which begins ``first_byte`` nanoseconds after it was submitted at the
    earliest and takes ``per_page`` nanoseconds a page.
    """

    def __init__(self, page: int, first_byte: int, per_page: int) -> None:
        self._page, self._first_byte, self._per_page = page, first_byte, per_page
        self.now = 0
        self._free_at = [0, 0]
        self.ends: list[int] = []
        """When copies end that were submitted so far."""

    def submit_device_to_host(self, transfers: list[Any]) -> Any:
        return self._submit(0, transfers)

    def submit_host_to_device(self, transfers: list[Any], **_: Any) -> Any:
        return self._submit(1, transfers)

    def next_end(self) -> int | None:
        """When the next copy ends after now."""
        return min((end for end in self.ends if end > self.now), default=None)

    def _submit(self, direction: int, transfers: list[Any]) -> Any:
        from sglang.srt.mem_cache.l2_transfer import TransferCompletion

        pages = sum(len(transfer.host_indices) for transfer in transfers) // self._page
        start = max(self.now + self._first_byte, self._free_at[direction])
        end = self._free_at[direction] = start + pages * self._per_page
        self.ends.append(end)
        return TransferCompletion(CopyEvent(self, self.now), CopyEvent(self, end), False)


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
            **_hicache_args(settings),
            **_state_args(settings),
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
        scheduler.spec_algorithm = SpeculativeAlgorithm.from_string(None)
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
            model_runner=SimpleNamespace(attn_backend=None, prefill_aware_swa=False)
        )
        for name in NONE:
            setattr(scheduler, name, None)
        for name in OFF:
            setattr(scheduler, name, False)
        scheduler.enable_hierarchical_cache = "hicache" in settings
        scheduler.is_hybrid_swa = window is not None
        for name in IGNORED:
            setattr(scheduler, name, _Anything())
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
            scheduler.req_to_token_pool = _rows_with_states(rows, settings)
        else:
            scheduler.req_to_token_pool = ReqToTokenPool(**rows)
        scheduler.token_to_kv_pool_allocator = self._allocator(size, page)
        self.copies: VirtualCopies | None = None
        scheduler.tree_cache = self._tree()
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

    # -- parts ------------------------------------------------------------------------------------------------------

    def _allocator(self, size: int, page: int) -> Any:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        kv_cache: Any = SimpleNamespace(device=DEVICE, size=size, page_size=page)
        dtype = self._torch.float16
        if "hicache" in self._settings:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            kv_cache = MHATokenToKVPool(size, page, dtype, 1, 8, 1, DEVICE, enable_memory_saver=False)
        if "sliding_window_size" in self._settings:
            swa = int(size * self._settings["swa_full_tokens_ratio"]) // page * page
            pool = _window_pool()
            if "hicache" in self._settings:
                from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

                pool = SWAKVPool(size, swa, page, dtype, 1, 8, [1], [0], DEVICE)
            return SWATokenToKVPoolAllocator(size, swa, page, dtype, DEVICE, pool, need_sort=False)
        if page == 1:
            return TokenToKVPoolAllocator(size, dtype, DEVICE, kv_cache, need_sort=False)
        return PagedTokenToKVPoolAllocator(size, page, dtype, DEVICE, kv_cache, need_sort=False)

    def _tree(self) -> Any:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        settings, scheduler = self._settings, self.of_sglang
        components = [ComponentType.FULL]
        if "sliding_window_size" in settings:
            components.append(ComponentType.SWA)
        if "max_mamba_cache_size" in settings:
            components.append(ComponentType.MAMBA)
        params = CacheInitParams(
            disable=settings["disable_radix_cache"],
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            page_size=settings["page_size"],
            eviction_policy=settings["radix_eviction_policy"],
            enable_kv_cache_events=True,
            chunked_prefill_size=settings["chunked_prefill_size"],
            sliding_window_size=settings.get("sliding_window_size"),
            tree_components=tuple(components),
            tree_core_backend=settings.get("tree_core"),
            enable_mamba_extra_buffer=_tracks_states(settings),
        )
        tree = UnifiedRadixCache(params)
        if "hicache" in settings:
            from sglang.srt.mem_cache.pool_host import common

            hicache = settings["hicache"]
            common._cuda_host_register = lambda *_: None
            tree.init_hicache(scheduler.server_args, params)
            self.copies = VirtualCopies(settings["page_size"], hicache["first_byte"], hicache["per_page"])
            if ComponentType.SWA in components:
                hicache["window_host_pages"] = self._free_window_host(tree)
            tree.cache_controller.l2_transfer_engine = self.copies
        return tree

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
        """A request of a log arrives; returns SGLang's ``Req``."""
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

    def result(self, tokens: list[int]) -> Any:
        """The model's output of a batch: one token for each request."""
        from sglang.srt.managers.utils import GenerationBatchResult

        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=self._torch.tensor(tokens, dtype=self._torch.int64),
            can_run_cuda_graph=False,
        )

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
        """Requests that run and wait; pages that are free, evictable and protected; the share of output set aside."""
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
        """Loads from the host that are in flight, the latest last."""
        return list(self.of_sglang.tree_cache.cache_controller.ack_load_queue) if self.copies is not None else []

    def take_requeued(self) -> list[tuple[str, str]]:
        """Requests that were retracted or preempted since this was last called, in order."""
        taken, self._requeued = self._requeued, []
        return taken

    def take_events(self) -> list[Any]:
        """Events of the tree since they were last taken."""
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
    "future_map",
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
IGNORED = ("output_streamer", "load_publisher", "scheduler_stage_metrics", "ipc_channels", "kv_events_publisher")


def _hicache_args(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a server with HiCache, if the log has it."""
    hicache = settings.get("hicache")
    if hicache is None:
        return {}
    # SGLang adds a page to what the ratio comes to.
    tokens = (hicache["host_pages"] - 1) * settings["page_size"]
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": (tokens + 0.5) / settings["num_tokens"],
        "hicache_size": 0,
        "hicache_write_policy": hicache["write_policy"],
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "layer_first",
    }


def _window_pool() -> Any:
    """Stands for the tensors of full and window attention: it knows which token of one is which of the other."""
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

    class WindowPool(BaseSWAKVPool):
        def __init__(self) -> None:
            self.full_to_swa_index_mapping: Any = None

        def register_mapping(self, full_to_swa_index_mapping: Any) -> None:
            self.full_to_swa_index_mapping = full_to_swa_index_mapping

        def translate_loc_from_full_to_swa(self, kv_indices: Any) -> Any:
            return self.full_to_swa_index_mapping[kv_indices]

    WindowPool.__abstractmethods__ = frozenset()
    return WindowPool()


def _state_args(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a server whose model has states of recurrent layers, if the log has them."""
    names = ("max_mamba_cache_size", "mamba_radix_cache_strategy", "mamba_track_interval")
    return {name: settings[name] for name in names if name in settings}


def _rows_with_states(rows: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Rows of requests beside a pool of tiny Mamba states."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=2, n_groups=1, num_heads=1, head_dim=2, state_size=2, conv_kernel=2
    )
    return HybridReqToTokenPool(
        **rows,
        mamba_size=settings["max_mamba_cache_size"],
        mamba_spec_state_size=0,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=_tracks_states(settings),
        enable_overlap_schedule=settings["overlap"],
    )


def _tracks_states(settings: dict[str, Any]) -> bool:
    """True if requests have a buffer for states inside them."""
    return settings.get("mamba_radix_cache_strategy") == "extra_buffer"


def _with_model_impl(init: Any) -> None:
    """Run ``init``, which asks how the model is implemented."""
    from sglang.srt.managers import scheduler

    resolve, scheduler.get_resolved_model_impl = scheduler.get_resolved_model_impl, lambda _: None
    try:
        init()
    finally:
        scheduler.get_resolved_model_impl = resolve


class LockedTree(_Anything):
    """Stands for a tree of which only the number of evictable tokens is asked; a lock holds a request's prefix."""

    disable = False
    buffer_pipeline = None

    def __init__(self, evictable: int, disable: bool) -> None:
        self.evictable = evictable
        self.disable = disable

    def evictable_size(self) -> int:
        return self.evictable

    def supports_mamba(self) -> bool:
        return False

    def lock(self, tokens: int) -> int:
        self.evictable -= tokens
        return tokens

    def unlock(self, tokens: int) -> None:
        self.evictable += tokens


def admit(state: dict[str, Any]) -> list[list[Any]]:
    """Ask the real ``PrefillAdder`` which prompts of a state get into a batch: tokens computed of each, and its answer."""
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.sampling.sampling_params import SamplingParams

    def request(name: str, prompt: int, output: int, answer: int, cached: int) -> Any:
        params = SamplingParams(max_new_tokens=answer, ignore_eos=state["ignore_eos"])
        req = Req(name, "", array("q", range(prompt)), params)
        req.output_ids = array("q", range(output))
        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        req.prefix_len, req.last_node = cached, cached
        return req

    page, free, evictable = state["page"], state["free"] * state["page"], state["evictable"] * state["page"]
    kv_cache = SimpleNamespace(device=DEVICE)
    allocator: Any = TokenToKVPoolAllocator(free, torch.float16, DEVICE, kv_cache, need_sort=False)
    if page > 1:
        allocator = PagedTokenToKVPoolAllocator(free, page, torch.float16, DEVICE, kv_cache, need_sort=False)
    decoding = [
        request(f"d{at}", prompt, output, answer, 0) for at, (prompt, output, answer) in enumerate(state["running"])
    ]
    running = SimpleNamespace(reqs=decoding)
    adder = PrefillAdder(
        page,
        LockedTree(evictable, state["disable_radix_cache"]),
        allocator,
        running,
        state["ratio"],
        state["inputs"],
        state["chunk"],
        len(running.reqs) if state["mixed"] else 0,
        prefill_max_requests=None,
    )
    answers: list[list[Any]] = []
    chunked = None
    if state["chunked"] is not None:
        prompt, past, answer = state["chunked"]
        req = request("c", prompt, 0, answer, past)
        chunked = adder.add_chunked_req(req)
        answers.append([req.extend_len, "CONTINUED" if chunked is not None else "LAST"])
    for at, (prompt, output, answer, cached) in enumerate(state["waiting"]):
        if adder.budget_state() == AddReqResult.OTHER:
            break
        req = request(f"w{at}", prompt, output, answer, cached)
        before = len(adder.can_run_list)
        result = adder.add_one_req(req, has_chunked_req=chunked is not None, truncation_align_size=None)
        answers.append([req.extend_len if len(adder.can_run_list) > before else 0, result.name])
        if result != AddReqResult.CONTINUE:
            break
    return answers
