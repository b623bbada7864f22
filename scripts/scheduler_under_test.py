"""The scheduler of the installed vLLM, made from the settings of a log, without a model.

The file that knows vLLM's API, written for 0.32; that of connectors is known by ``scripted_connector.py``. Where a new version
has moved something, this is what to change.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
"""The config.json of a model that is never loaded: the scheduler asks it for limits."""
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
REASONS = {"FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "aborted"}


def import_vllm() -> str:
    """Import vLLM, which takes 10 to 30 s, with all it prints sent to stderr; returns its version."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.pop("PYTHONHASHSEED", None)
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        import vllm
        import vllm.v1.core.sched.async_scheduler
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
    return str(vllm.__version__)


class Observed:
    """Mixed into vLLM's schedulers: notes who is preempted and who is freed, in order, and changes nothing."""

    def observe(self) -> None:
        self.preempted: list[str] = []
        self.freed: list[tuple[str, str]] = []
        """Who, and why."""

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.preempted.append(request.request_id)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.freed.append((request.request_id, REASONS[request.status.name]))
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


class SchedulerUnderTest:
    """One scheduler, and what the loop around it needs."""

    def __init__(
        self,
        settings: dict[str, Any],
        model: str,
        *,
        inside: bool = False,
        events: Any = None,
        transfer: Any = None,
        log_stats: bool = False,
    ) -> None:
        """``model``: a folder with ``MODEL`` as its config.json. ``inside``: with kvyard's block manager in the place of
        vLLM's. ``events`` and ``transfer``: vLLM's settings for KV events and a connector; where a log has a connector and
        ``transfer`` is not given, it is the one that does what requests say. Raises ``ValueError`` if vLLM makes something
        else of a setting, which would be recorded as if it had been asked for.
        """
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.structured_output import StructuredOutputManager

        if inside:
            from kvyard.vllm import AsyncScheduler, Scheduler
        else:
            from vllm.v1.core.sched.async_scheduler import AsyncScheduler
            from vllm.v1.core.sched.scheduler import Scheduler

        config = _vllm_config(settings, model)
        self._scripted = bool(settings.get("connector")) and transfer is None
        config.kv_events_config, config.kv_transfer_config = events, _scripted() if self._scripted else transfer
        cache = _cache_config(settings)
        block_size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
        base = AsyncScheduler if settings["async_scheduling"] else Scheduler
        self.of_vllm = type("Observed" + base.__name__, (Observed, base), {})(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_size,
            include_finished_set=False,
            log_stats=log_stats,
        )
        self.of_vllm.observe()
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_fn)
        self._hasher = (
            kv_cache_utils.get_request_block_hasher(hash_size, hash_fn) if settings["enable_prefix_caching"] else None
        )
        self._drafts = settings["num_speculative_tokens"]

    # -- what clients send ------------------------------------------------------------------------------------------

    def add(self, request: dict[str, Any]) -> None:
        """A request of a log arrives."""
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        if self._scripted:
            self.of_vllm.connector.tell(request)
        adapter = request.get("lora")
        self.of_vllm.add_request(
            Request(
                request_id=request["request"],
                prompt_token_ids=[token for low, count in request["prompt"] for token in range(low, low + count)],
                sampling_params=SamplingParams(max_tokens=request["output"][1], ignore_eos=True),
                pooling_params=None,
                arrival_time=float(request["arrival"]),
                priority=request["priority"],
                lora_request=LoRARequest(f"adapter-{adapter}", adapter, f"/adapters/{adapter}") if adapter else None,
                block_hasher=self._hasher,
            )
        )

    def abort(self, name: str) -> None:
        """A request is given up, if it is still there."""
        from vllm.v1.request import RequestStatus

        self.of_vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # -- steps ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Any:
        """Decide on a step; returns vLLM's ``SchedulerOutput``."""
        return self.of_vllm.schedule()

    def update(self, output: Any, sampled: dict[str, list[int]]) -> None:
        """The model has run ``output`` and sampled these tokens. Those who sampled have new drafts, if there are any. What a
        connector has loaded and sent by now is reported with it.
        """
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        result = EMPTY_MODEL_RUNNER_OUTPUT
        if names or self._scripted:
            connector = self.of_vllm.connector
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
                kv_connector_output=connector.take_ended(connector.now) if self._scripted else None,
            )
        self.of_vllm.update_from_output(output, result)
        if names and self._drafts:
            self.of_vllm.update_draft_token_ids(DraftTokenIds(names, [[0] * self._drafts for _ in names]))

    def tell_time(self, now: int) -> None:
        """What happens from here on happens at ``now``: for a connector."""
        if self._scripted:
            self.of_vllm.connector.now = now

    def report(self) -> None:
        """No step is under way, and a connector has loaded or sent something."""
        from vllm.v1.core.sched.output import SchedulerOutput

        self.update(SchedulerOutput.make_empty(), {})

    # -- what can be seen -------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        """Whether vLLM's loop would schedule a step."""
        return bool(self.of_vllm.has_requests())

    def outputs(self) -> dict[str, int]:
        """Of the requests that are there, how many tokens each has produced."""
        return {name: request.num_output_tokens for name, request in self.of_vllm.requests.items()}

    def computes_prompt(self, name: str) -> bool:
        """Whether a request has known tokens left after the step that was just scheduled, so that nothing is sampled."""
        return bool(self.of_vllm.requests[name].is_prefill_chunk)

    def follow(self, requests: Iterable[str]) -> Callable[[], dict[str, int]]:
        """A function that says how many tokens these have produced, even when they have ended."""
        watched = {name: self.of_vllm.requests[name] for name in requests}
        return lambda: {name: request.num_output_tokens for name, request in watched.items()}

    def take_preempted(self) -> list[str]:
        """Who was preempted since it was last asked."""
        taken, self.of_vllm.preempted = self.of_vllm.preempted, []
        return list(taken)

    def take_loading(self) -> dict[str, int]:
        """For whom a connector began to load since it was last asked, and how many tokens."""
        if not self._scripted:
            return {}
        connector = self.of_vllm.connector
        taken, connector.started = connector.started, {}
        return dict(taken)

    def next_transfer(self) -> int | None:
        """When a connector has next loaded or sent something."""
        end: int | None = self.of_vllm.connector.next_end() if self._scripted else None
        return end

    def take_freed(self) -> list[tuple[str, str]]:
        """Who ended since it was last asked, in the order in which blocks went back, and why."""
        taken, self.of_vllm.freed = self.of_vllm.freed, []
        return list(taken)

    def state(self, *, with_line: bool) -> dict[str, int | None]:
        """How many run and wait, how many blocks are free, and their order as a checksum."""
        scheduler = self.of_vllm
        pool = scheduler.kv_cache_manager.block_pool
        line = None
        if with_line:
            ids = ",".join([str(block.block_id) for block in pool.free_block_queue.get_all_free_blocks()])
            line = zlib.crc32(ids.encode())
        running, waiting = scheduler.get_request_counts()
        return {"running": running, "waiting": waiting, "free": pool.get_num_free_blocks(), "line": line}


def _scripted() -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="ScriptedConnector", kv_role="kv_both", kv_connector_module_path="scripted_connector"
    )


def _vllm_config(settings: dict[str, Any], model: str) -> Any:
    from vllm.config import CacheConfig, LoRAConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig

    of_scheduler = (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "enable_chunked_prefill",
        "policy",
        "scheduler_reserve_full_isl",
        "watermark",
    )
    of_cache = ("block_size", "enable_prefix_caching", "prefix_cache_retention_interval")
    length, drafts, overlaps = (
        settings[name] for name in ("max_model_len", "num_speculative_tokens", "async_scheduling")
    )
    if drafts and overlaps:
        raise ValueError("drafts are recorded with synchronous scheduling only")
    if settings.get("connector") and (drafts or overlaps or "max_loras" in settings):
        raise ValueError("connectors are recorded without drafts, adapters and asynchronous scheduling")
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=length, dtype="float32", seed=0),
        scheduler_config=SchedulerConfig(
            is_encoder_decoder=False, async_scheduling=False, **{name: settings[name] for name in of_scheduler}
        ),
        cache_config=CacheConfig(**{name: settings[name] for name in of_cache}),
        lora_config=LoRAConfig(max_loras=settings["max_loras"]) if "max_loras" in settings else None,
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=4)
        if drafts
        else None,
    )
    # Of a drafter, the scheduler asks for no more than its kind; that of eagle would need a second model.
    if drafts:
        config.speculative_config.method = settings["drafter"]
    # The CPU platform turns these off, which an engine on a GPU has.
    config.scheduler_config.async_scheduling = overlaps
    for group in settings["groups"]:
        if group["type"] == "mamba":
            config.cache_config.mamba_cache_mode = group.get("mode", "align")
    config.cache_config.num_gpu_blocks = settings["num_blocks"]
    in_flight = settings["max_num_batched_tokens"] * (2 if overlaps else 1)
    if config.max_in_flight_tokens != in_flight:
        raise ValueError(f"vLLM made max_in_flight_tokens {config.max_in_flight_tokens}, expected {in_flight}")
    for part in (config.scheduler_config, config.cache_config):
        for name, value in settings.items():
            if getattr(part, name, value) != value:
                raise ValueError(f"vLLM made {name} {getattr(part, name)!r}, asked for {value!r}")
    return config


def _cache_config(settings: dict[str, Any]) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec([f"layer{index}"], _spec(group, settings)) for index, group in enumerate(settings["groups"])
    ]
    return KVCacheConfig(
        num_blocks=settings["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=settings["prefix_cache_retention_interval"],
    )


def _spec(group: dict[str, Any], settings: dict[str, Any]) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as specs

    size = group.get("block_size", settings["block_size"])
    attention = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    match group["type"]:
        case "full":
            return specs.FullAttentionSpec(**attention)
        case "sliding_window":
            return specs.SlidingWindowSpec(**attention, sliding_window=group["window"])
        case "chunked_local":
            return specs.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group["chunk"])
        case "mamba":
            unit = group.get("checkpoint_unit")
            return specs.MambaSpec(
                block_size=size,
                shapes=((1, 1),),
                dtypes=(torch.float32,),
                mamba_cache_mode=group.get("mode", "align"),
                num_prefill_checkpoint_blocks=int(unit is not None),
                prefill_checkpoint_alignment=unit,
            )
    raise ValueError(f"no group is of type {group['type']!r}")
