"""Settings: a replay described in flat names, the same on the command line, in a file, in Python and in a sweep.

``make_config`` is the one way from there to a ``ReplayConfig``. What makes no sense together is refused in one sentence that
says what to do; nothing is ignored.
"""

from __future__ import annotations  # a field called bandwidth stands before the function of that name

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from kvyard.blocks.eviction import ORDERS
from kvyard.blocks.spec import GroupSpec
from kvyard.engine.cards import CARDS, find_card
from kvyard.engine.config import BACKENDS, EngineConfig, SpeculativeConfig
from kvyard.engine.models import find_config, plan
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.memory import NEWEST, find_release
from kvyard.engine.models.planning import (
    ExpertParallel,
    ModelPlan,
    PipelineParallel,
    PlanOptions,
    TensorParallel,
    weight_dtypes,
)
from kvyard.engine.models.sglang_memory import context_bytes, static_share
from kvyard.engine.models.weights import find_weight_dtype
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_tree import STATES_PER_REQUEST
from kvyard.engine.timing import TimingConfig, parse_timing, timing_choices
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.host import HostTiming
from kvyard.errors import KvyardError, suggest
from kvyard.events.tier import LOWER_TIERS, Tier
from kvyard.replay.config import LEFT_OUT, HandoverConfig, NetworkConfig, ReplayConfig, WorkerConfig
from kvyard.router import RouterConfig
from kvyard.router.flow import FlowConfig
from kvyard.settings import Setting, Settings, as_it_is, bandwidth, chosen, count, duration, figures, settings_of, size
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.links.config import LaneConfig, LinkConfig, parse_link_config
from kvyard.tiers.policy import POLICIES as OFFLOADS

BYTES_PER_TOKEN = 131_072
"""Without a model: what Llama 3.1 8B keeps of a token (32 layers, 8 KV heads of 128, keys and values, bfloat16)."""
GB = 10**9
SHARED_GB_S = 80


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that become blocks, bytes and times of an engine, and aren't fields of its configuration."""

    heading: ClassVar[str] = "Model, card and time"
    model: Annotated[
        str | None, Setting("The model: a preset of kvyard model --list, or a config.json.", flag=True)
    ] = None
    gpu: Annotated[
        str | None,
        Setting("The card, which determines memory and times: {choices}.", flag=True, choices=CARDS.keys),
    ] = None
    gpu_memory: Annotated[
        int | None, Setting("Memory of the card, such as 80GiB. [default: the card's]", flag=True, parse=size)
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Setting("Share of the card's memory that the engine uses. [default: the vLLM release's, 0.92]", flag=True),
    ] = None
    vllm_version: Annotated[
        str | None,
        Setting("The vLLM release whose memory use and defaults are simulated.", flag=True),
    ] = None
    tensor_parallel_size: TensorParallel = 1
    pipeline_parallel_size: PipelineParallel = 1
    enable_expert_parallel: ExpertParallel = False
    weight_dtype: Annotated[
        str | None,
        Setting(
            "Type of the stored weights: {choices}. [default: the model's]",
            flag=True,
            also=("quantization",),
            choices=weight_dtypes,
        ),
    ] = None
    dtype: Annotated[
        str | None, Setting("vLLM's name of --weight-dtype; auto and 16-bit types keep the model's.", flag=True)
    ] = None
    kv_cache_dtype: Annotated[
        str, Setting("Type of the KV cache: auto (the model's), bfloat16, fp8, ...", flag=True)
    ] = "auto"
    bytes_per_token: Annotated[
        int | None,
        Setting("Cache bytes of a token, without --model. [default: 128KiB]", flag=True, parse=size),
    ] = None
    timing: Annotated[
        str | None,
        Setting(
            "Timing model: {choices}. [default: with --model and --gpu roofline, else polynomial]",
            flag=True,
            choices=timing_choices,
        ),
    ] = None
    calibrate: Annotated[
        str | None, Setting("Two measured times for roofline, as in ttft=120@2048,itl=14@32 (ms@tokens, ms@batch).")
    ] = None
    host_us: Annotated[
        float | None,
        Setting("Microseconds of host work per pass, for roofline and tables. [default: the engine's]", flag=True),
    ] = None
    host_sequence_us: Annotated[
        float | None,
        Setting(
            "Microseconds of host work per sequence of a pass. [default: the engine's, or 0 with host_us]", flag=True
        ),
    ] = None
    front_end_us: Annotated[
        float | None,
        Setting("Microseconds per request outside of passes (HTTP, template), for roofline and tables.", flag=True),
    ] = None
    front_end_token_us: Annotated[
        float | None, Setting("Microseconds per prompt token outside of passes (tokenizing).", flag=True)
    ] = None
    launch_us: Annotated[
        float | None,
        Setting(
            "Minimum microseconds of a pass that computes prompts, for roofline and tables. [default: the engine's]"
        ),
    ] = None
    timing_speedup: Annotated[float, Setting("Divide the duration of every pass by this.")] = 1.0


class TierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One lower tier, in flat names that begin with its own."""

    heading: ClassVar[str] = "Memory below the device"
    blocks: Annotated[int | None, Setting("Blocks of {tier} per worker, such as 20k; 0 for none.", flag=True)] = None
    bytes: Annotated[
        int | None, Setting("Bytes of {tier} per worker, such as 200GiB, instead of blocks.", flag=True, parse=size)
    ] = None
    bandwidth: Annotated[
        tuple[int | None, int | None] | None,
        Setting("GB/s of a worker to {tier} and back. [default: {speed}/{speed}]", flag=True, parse=bandwidth),
    ] = None
    latency: Annotated[int | None, Setting("Time until the first byte from {tier} arrives.", parse=duration)] = None
    scope: Annotated[
        Literal["private", "shared"], Setting("One {tier} per worker, or one for all: {choices}.", flag=True)
    ] = "private"
    eviction: Annotated[str, Setting("Eviction policy of {tier}: {choices}.", choices=ORDERS.names)] = "lru"
    eviction_options: Annotated[
        dict[str, float], Setting("Options of that eviction policy, as NAME=VALUE,... .", parse=figures)
    ] = msgspec.field(default_factory=dict)


class LinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of links, apart from a tier's own speed."""

    heading: ClassVar[str] = "Memory below the device"
    link: Annotated[str | None, Setting("A measured link to host memory: h200 or h200-queued.", flag=True)] = None
    link_discipline: Annotated[Literal["fair", "fifo"], Setting("How transfers share a link: {choices}.")] = "fair"
    shared_bandwidth: Annotated[
        tuple[int | None, int | None] | None,
        Setting("GB/s of all workers together to a shared tier.", parse=bandwidth),
    ] = None


class RoleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Workers by role, if they are alike otherwise."""

    heading: ClassVar[str] = HandoverConfig.heading
    prefill: Annotated[
        int | None,
        Setting(
            "Prefill workers, which hand computed prompts over; with --decode.", also=("prefill_workers",), flag=True
        ),
    ] = None
    decode: Annotated[
        int | None, Setting("Decode workers, with --prefill instead of --workers.", also=("decode_workers",), flag=True)
    ] = None
    split: Annotated[
        str | None,
        Setting("prefill and decode as one setting, for studies: 2+6, or none for workers that do both."),
    ] = None


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Lower tiers and how they are filled, in one."""

    heading: ClassVar[str] = TierSettings.heading
    store: Annotated[
        str | None,
        Setting("Offload policy, or none to remove all lower tiers: one setting for studies."),
    ] = None


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Independent pools of one fleet."""

    heading: ClassVar[str] = "Fleet"
    pools: Annotated[
        tuple[dict[str, Any], ...] | None,
        Setting("In a file: a table per independent pool, with its model's name and its settings.", parse=as_it_is),
    ] = None


def _settings_of(tier: Tier) -> Settings:
    """Return settings of one lower tier."""
    settings = settings_of(TierSettings, f"{tier.label}_", tier=tier.place, speed=str(tier.entry.gb_s))
    scope = f"{tier.label}_scope"
    return Settings(settings, {scope: settings[scope]._replace(default=tier.entry.scope)})


OF_TIERS = Settings(
    *map(_settings_of, LOWER_TIERS),
    settings_of(LinkSettings),
    settings_of(OffloadConfig),
)
"""Settings that make sense only where there are lower tiers."""
OF_AN_ENGINE = Settings(settings_of(EngineConfig), settings_of(ModelSettings), settings_of(SpeculativeConfig), OF_TIERS)
"""Settings of one engine, by name."""
OF_A_WORKER = Settings(settings_of(WorkerConfig), OF_AN_ENGINE, left_out=LEFT_OUT)
"""Settings of a table of workers."""
SETTINGS = Settings(
    {"workers": settings_of(ReplayConfig)["workers"]},  # first in help
    settings_of(RouterConfig),
    settings_of(FlowConfig),
    settings_of(ReplayConfig),
    settings_of(RoleSettings),
    settings_of(StoreSettings),
    settings_of(PoolSettings),
    settings_of(HandoverConfig),
    {"dp_size": OF_A_WORKER["dp_size"]},
    OF_AN_ENGINE,
    left_out=LEFT_OUT,
    own="replay",
    tables={"router": settings_of(RouterConfig), "flow": settings_of(FlowConfig)},
    passed_over=("gateway", "prices"),
)
"""Settings by name. In a file that a gateway reads too, ``[router]`` is for both, ``[replay]`` for this alone."""

DEFAULTS: dict[str, Any] = {"workers": 8}
ONLY_WITH_MODEL = (
    "gpu",
    "gpu_memory",
    "gpu_memory_utilization",
    "vllm_version",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "weight_dtype",
    "dtype",
    "kv_cache_dtype",
)
ONLY_WITHOUT_MODEL = ("groups", "bytes_per_token", "bytes_per_block")
STATE_SHARE = 0.9 / 1.9
"""Share of SGLang's cache that states have."""
FREE_FRACTION = 0.9
"""Share of the memory that weights and activations leave which TensorRT-LLM takes for its cache by default
(``free_gpu_memory_fraction``)."""
MOST_SEQUENCES = {"sglang": 2048, "trtllm": 2048}
"""Requests in a pass by default: what SGLang allows at least (it caps its requests between 2,048 and 4,096, by memory), and
trtllm-serve's max_batch_size."""


def make_config(settings: Mapping[str, object]) -> ReplayConfig:
    """Return the replay that flat ``settings`` describe. Names that are left out have their defaults, and so has ``None``.

    Raises ``KvyardError`` for an unknown name, with the nearest one; for what this replay leaves out, by name; and for values
    that make no sense alone or together.
    """
    parsed = SETTINGS.parse(settings)
    if parsed.get("pools") is not None:
        raise KvyardError("pools are replayed by kvyard replay alone: take one of them here, without [[pools]]")
    parsed = _with_store(_with_split(parsed))
    given = DEFAULTS | parsed
    workers = given["workers"]
    if parsed.keys() & {"prefill", "decode"}:
        if "workers" in parsed:
            raise KvyardError(
                "workers and prefill/decode both say how many workers there are: leave one of the two out"
            )
        workers = [{"role": role, "name": role[0], "count": _of_role(role, parsed)} for role in ("prefill", "decode")]
    shared = {name: value for name, value in given.items() if name in OF_A_WORKER}
    if given.get("hints"):
        shared.setdefault("heed_hints", True)
    fields = chosen(ReplayConfig, given)
    fields["workers"] = tuple(_kinds(workers, shared, given.get("seed", 0)))
    fields["handover"] = HandoverConfig(**chosen(HandoverConfig, given))
    fields["flow"] = FlowConfig(**chosen(FlowConfig, given))
    config = ReplayConfig(router=RouterConfig(**chosen(RouterConfig, given)), **fields)
    config.check()
    if not config.disaggregated:
        of_the_network = settings_of(NetworkConfig).keys()
        for name in settings_of(HandoverConfig).keys() | {"decode_router"}:
            if name in parsed and not (config.peer_pull is not None and name in of_the_network):
                also = ", or with peer_pull" if name in of_the_network else ""
                raise KvyardError(
                    f"{name} is for fleets with prefill and decode workers{also}: say how many, or leave it out"
                )
    return config


def _with_split(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with ``split`` as ``prefill`` and ``decode``. Raises ``KvyardError`` for what contradicts it."""
    settings = dict(given)
    split = settings.pop("split", None)
    if split is None or split == "none":
        return settings
    if settings.keys() & {"prefill", "decode"}:
        raise KvyardError(
            "split and prefill/decode both say how many workers have which role: leave one of the two out"
        )
    parts = split.split("+")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise KvyardError(f"split is {split!r}: write none, or prefill and decode workers such as 2+6")
    prefill, decode = map(int, parts)
    workers = settings.pop("workers", prefill + decode)
    if isinstance(workers, list | tuple) or count("workers", workers) != prefill + decode:
        raise KvyardError(f"split {split} has {prefill + decode} workers, and workers is {workers}: make them agree")
    return {**settings, "prefill": prefill, "decode": decode}


def _with_store(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with ``store`` as ``offload_policy``, or without lower tiers. Raises ``KvyardError`` where that
    contradicts.
    """
    settings = dict(given)
    store = settings.pop("store", None)
    if store is None:
        return settings
    if "offload_policy" in settings:
        raise KvyardError("store and offload_policy both say what is stored when: leave one of the two out")
    if store == "none":
        return {name: value for name, value in settings.items() if name not in OF_TIERS}
    if store not in OFFLOADS:
        raise KvyardError(f"unknown store {store!r}: {suggest(store, ('none', *OFFLOADS))}")
    return {**settings, "offload_policy": store}


def _of_role(role: str, given: Mapping[str, Any]) -> int:
    if role not in given:
        raise KvyardError(f"prefill and decode go together: say how many {role} workers there are, too")
    number: int = given[role]
    if number < 1:
        raise KvyardError(f"{role} is {number}: there must be at least one such worker")
    return number


def _kinds(workers: object, shared: Mapping[str, Any], seed: int) -> Iterable[WorkerConfig]:
    if not isinstance(workers, list | tuple):
        number = count("workers", workers)
        if number < 1:
            raise KvyardError(f"workers is {number}: a fleet needs at least one worker")
        yield _kind({**shared, "count": number}, "", seed)
        return
    if not workers:
        raise KvyardError("workers is an empty list: a fleet needs at least one worker")
    for index, own in enumerate(workers):
        if not isinstance(own, Mapping):
            raise KvyardError(f"workers[{index}] is {own!r}: it must be a table of settings, such as {{count = 4}}")
        where = f" of workers[{index}]"
        yield _kind({**shared, **OF_A_WORKER.parse(own, where)}, where, seed)


def _kind(given: Mapping[str, Any], where: str, seed: int) -> WorkerConfig:
    mine = {name: value for name, value in given.items() if name in OF_AN_ENGINE}
    engine = engine_config(mine, seed, given.get("dp_size", 1))
    kind = WorkerConfig(engine=engine, **chosen(WorkerConfig, given))
    if kind.count < 1:
        raise KvyardError(f"count{where} is {kind.count}: it must be at least 1")
    return kind


def engine_config(given: Mapping[str, Any], seed: int = 0, ranks: int = 1) -> EngineConfig:
    """Return the configuration of one of ``ranks`` data-parallel ranks. Raises ``KvyardError`` for contradictions."""
    given = _with_weights(given)
    if "model" in given and Fields(find_config(given["model"])).integer("num_experts", 0):
        given = {**given, "data_parallel_size": ranks}  # they share the experts; ranks of other models share nothing
    options = chosen(EngineConfig, given) | (_from_model(given) if "model" in given else _from_numbers(given))
    tiers = _tiers(given)
    if tiers is not None and options.get("bytes_per_block") is None:
        raise KvyardError("lower tiers need to know what a block takes: say model, or bytes_per_block beside groups")
    speculative = chosen(SpeculativeConfig, given)
    config = EngineConfig(
        **options,
        tiers=tiers,
        speculative=SpeculativeConfig(**speculative) if speculative else None,
        timing=_timing(given),
        seed=seed,
    )
    config.check()
    return config


def _with_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with one name for what weights are stored in."""
    settings = dict(given)
    asked = settings.pop("dtype", None)
    if asked is not None and asked != "auto" and "model" in given:
        name = find_weight_dtype(asked)
        if name != "bf16":
            if "weight_dtype" in settings:
                raise KvyardError(f"dtype {asked} and weight_dtype {settings['weight_dtype']} contradict each other")
            settings["weight_dtype"] = name
    if "weight_dtype" in settings and "model" in given:
        settings["weight_dtype"] = find_weight_dtype(settings["weight_dtype"])
    return settings


def _timing(given: Mapping[str, Any]) -> TimingConfig:
    """Return the timing that was asked for, or the best there is for what is known of model and card."""
    deployment = None
    if "model" in given and "gpu" in given:
        deployment = Deployment(**{name: given[name] for name in Deployment.__struct_fields__ if name in given})
    engine = given.get("backend", "vllm")
    speedup, calibrate, asked = given.get("timing_speedup", 1.0), given.get("calibrate"), given.get("timing")
    if asked is None:
        if deployment is not None:
            asked = (
                "roofline"  # it beats tables on the measured runs that both were checked on (docs/explain/timing.md)
            )
        elif "model" in given:
            raise KvyardError(
                f"model {given['model']} says what is computed, but not on which card: add gpu, one of {', '.join(CARDS)}, "
                "or timing=profile:NAME; timing=polynomial has times that know neither"
            )
        else:
            asked = "polynomial"
    if calibrate is not None:
        if asked != "roofline":
            raise KvyardError(f"calibrate tightens timing roofline, not {asked}: leave one of the two out")
        asked = f"roofline:{calibrate}"
    timing = parse_timing(asked, speedup, deployment)
    if isinstance(timing, HostTiming):
        timing = msgspec.structs.replace(timing, engine=engine)
    for name in ("host_us", "host_sequence_us", "front_end_us", "front_end_token_us", "launch_us"):
        if name in given:
            if not isinstance(timing, HostTiming):
                raise KvyardError(f"{name} is for timing roofline and tables: {asked} has host work in its own times")
            timing = msgspec.structs.replace(timing, **{name: given[name]})
    timing.check()
    return timing


def _from_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in ONLY_WITH_MODEL:
        if name in given:
            raise KvyardError(f"{name} is for a model: say which, as in model=llama-3.1-8b, or leave it out")
    if "bytes_per_block" in given and "bytes_per_token" in given:
        raise KvyardError("bytes_per_token and bytes_per_block say the same: give one of the two")
    if "groups" in given:
        if "block_size" in given:
            raise KvyardError("block_size is for models with one group: leave it out, each of groups has its own")
        if "bytes_per_token" in given:
            raise KvyardError("bytes_per_token is for models with one group: say bytes_per_block beside groups")
        return {}
    size = given.get("block_size", BACKENDS.get(given.get("backend", "vllm")).block_size)
    if size < 1:
        raise KvyardError(f"block_size must be at least 1, got {size}")
    taken = given.get("bytes_per_block", size * given.get("bytes_per_token", BYTES_PER_TOKEN))
    if taken < 1:
        raise KvyardError(f"a block takes {taken} bytes: it must be at least 1")
    return {"block_size": size, "bytes_per_block": taken}


def _from_model(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in ONLY_WITHOUT_MODEL:
        if name in given:
            raise KvyardError(f"{name} follows from the model: leave one of the two out")
    if "gpu_memory" in given and "num_gpu_blocks" in given:
        raise KvyardError("gpu_memory and num_gpu_blocks both say how many blocks a worker has: give one of the two")
    if not given.keys() & {"gpu", "gpu_memory", "num_gpu_blocks"}:
        raise KvyardError(
            "how many blocks has a worker? Beside model say gpu, such as h100, or gpu_memory, or num_gpu_blocks"
        )
    # Where the blocks are given, the card is as large as it has to be.
    limits = find_card(given["gpu"]).limits if "gpu" in given and given.get("backend", "vllm") == "vllm" else {}
    card = {**limits, **{name: given[name] for name in PlanOptions.__struct_fields__ if name in given}}
    if limits and "max_num_seqs" not in given:
        card["max_num_seqs"] = min(card["max_num_seqs"], card["max_num_batched_tokens"])
    memory = 2**60 if "num_gpu_blocks" in given else given.get("gpu_memory") or find_card(given["gpu"]).memory
    if given.get("backend") == "sglang":
        card = _sglang_memory(memory, card, _chunk(given)) | card
    of_free = given.get("backend") == "trtllm" and "gpu" in given and "gpu_memory_utilization" not in given
    if of_free:
        card["gpu_memory_utilization"] = 1.0
    model_plan = plan(find_config(given["model"]), memory, **card)
    options = model_plan.engine_options()
    options |= {"groups": model_plan.groups, "block_size": None} | _of_backend(given, model_plan)
    if not _keeps_windows(given) and not any(spec.is_state for spec in model_plan.groups):
        options |= _as_full_attention(model_plan)
    if "num_gpu_blocks" in given:
        options["num_gpu_blocks"] = given["num_gpu_blocks"]
    elif of_free:
        options["num_gpu_blocks"] = max(1, int(FREE_FRACTION * options["num_gpu_blocks"]))
    return options | _of_release(given)


def _of_backend(given: Mapping[str, Any], model_plan: ModelPlan) -> dict[str, Any]:
    """Return the limits of a pass that servers of SGLang and TensorRT-LLM have by default on a known card."""
    backend, options = given.get("backend", "vllm"), dict[str, Any]()
    if "gpu" not in given or backend not in MOST_SEQUENCES:
        return options
    if "max_num_seqs" not in given and not any(spec.is_state for spec in model_plan.groups):
        options["max_num_seqs"] = MOST_SEQUENCES[backend]
    if backend == "sglang":
        options["sglang"] = _sglang(given)
    if backend == "sglang" and any(spec.is_state for spec in model_plan.groups):
        options |= _state_pools(given, model_plan)
    return options


def _state_pools(given: Mapping[str, Any], model_plan: ModelPlan) -> dict[str, Any]:
    """Return SGLang's two pools for a model with states: slots for them, and pages of one token of full attention.

    States have 0.9 times the memory of full attention (``mamba_full_memory_ratio``), and each running request three slots.
    """
    states = [group for group in model_plan.layer_groups if group.spec.is_state]
    full = [group for group in model_plan.layer_groups if group.spec.is_full]
    if not full:
        return {}
    settings = _sglang(given)
    of_token = sum(group.used_bytes // group.spec.block_size for group in full)
    slots = int(model_plan.cache_bytes * STATE_SHARE / sum(group.used_bytes for group in states))
    page, strategy = given.get("block_size", 1), settings.mamba_radix_cache_strategy
    of_request = STATES_PER_REQUEST + {"no_buffer": 0, "extra_buffer_lazy": 1, "extra_buffer": 2}[strategy]
    options: dict[str, Any] = {
        "groups": (GroupSpec(block_size=page), GroupSpec(kind="mamba", block_size=page)),
        "bytes_per_block": page * of_token,
        "num_gpu_blocks": int(model_plan.cache_bytes * (1 - STATE_SHARE) / (page * of_token)),
        "max_num_seqs": given.get("max_num_seqs", max(1, min(MOST_SEQUENCES["sglang"], slots // of_request))),
    }
    if settings.max_mamba_cache_size is None and "num_gpu_blocks" not in given:
        settings = msgspec.structs.replace(settings, max_mamba_cache_size=slots)
    if strategy == "no_buffer" and "async_scheduling" not in given:
        options["async_scheduling"] = False
    return options | {"sglang": settings}


def _sglang(given: Mapping[str, Any]) -> SglangSettings:
    """Return SGLang's settings, with prompts cut as by default on the card unless they say otherwise."""
    settings: SglangSettings = given.get("sglang") or SglangSettings()
    return msgspec.structs.replace(settings, chunked_prefill_size=_chunk(given))


def _chunk(given: Mapping[str, Any]) -> int:
    """Return the tokens that SGLang cuts prompts into: by the card, unless its settings say."""
    settings: SglangSettings = given.get("sglang") or SglangSettings()
    if settings.chunked_prefill_size is None and "gpu" in given:
        return find_card(given["gpu"]).chunk
    return settings.chunk


def _of_release(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options whose defaults in the release of vLLM differ from ours."""
    if "vllm_version" not in given or "async_scheduling" in given or given.get("backend", "vllm") != "vllm":
        return {}
    return {} if find_release(given["vllm_version"]).decides_ahead else {"async_scheduling": False}


def _sglang_memory(memory: int, card: Mapping[str, Any], chunk: int) -> dict[str, Any]:
    """Return SGLang's share of a card for weights and cache, and what it takes beside them."""
    ranks = card.get("tensor_parallel_size", 1)
    share = static_share(memory, chunk, ranks)
    return {"gpu_memory_utilization": share, "reserve": context_bytes(ranks)}


def _keeps_windows(given: Mapping[str, Any]) -> bool:
    """True if the engine is modelled with sliding windows, all its settings considered."""
    backend = given.get("backend", "vllm")
    if backend == "vllm":
        return not _has_connector(given) or find_release(given.get("vllm_version", NEWEST)).windows_beside_connectors
    if backend != "sglang":
        return False
    by_hash = given.get("heed_hints") or given.get("eviction", "lru") != "lru"
    return not by_hash and given.get("role", "both") == "both"


def _has_connector(given: Mapping[str, Any]) -> bool:
    """True if blocks leave the engine: for lower tiers, or for workers of the other role."""
    return given.get("role", "both") != "both" or any(_room(given, tier.label) for tier in LOWER_TIERS)


def _as_full_attention(model_plan: ModelPlan) -> dict[str, Any]:
    """Return the options of an engine that keeps window layers as long as full ones."""
    groups = len(model_plan.groups)
    return {
        "groups": (),
        "block_size": model_plan.groups[0].block_size,
        "bytes_per_block": model_plan.bytes_per_block * groups,
        "num_gpu_blocks": (model_plan.num_blocks - 1) // groups,
    }


def _tiers(given: Mapping[str, Any]) -> OffloadConfig | None:
    rooms = {tier: _room(given, tier.label) for tier in LOWER_TIERS}
    first = LOWER_TIERS[0]
    if rooms[first] is None:
        named = [name for name in given if name in OF_TIERS]
        if named:
            raise KvyardError(
                f"{named[0]} is about lower tiers: say {first.label}_blocks or {first.label}_bytes, or leave it out"
            )
        return None
    tiers: list[TierConfig] = []
    for closer, tier in pairwise(Tier):
        room = rooms[tier]
        if room and len(tiers) < tier - first:
            raise KvyardError(
                f"{tier.label} stands behind {closer.place}: say {closer.label}_blocks or {closer.label}_bytes above 0 too"
            )
        if room:
            tiers.append(_tier(given, tier, room))
    return OffloadConfig(tiers=tuple(tiers), **chosen(OffloadConfig, given)) if tiers else None


def _tier(given: Mapping[str, Any], tier: Tier, room: Mapping[str, Any]) -> TierConfig:
    scope = given.get(f"{tier.label}_scope", tier.entry.scope)
    return TierConfig(
        **room,
        link=_link(given, tier, scope),
        scope=scope,
        eviction=given.get(f"{tier.label}_eviction", "lru"),
        eviction_options=given.get(f"{tier.label}_eviction_options", {}),
    )


def _room(given: Mapping[str, Any], tier: str) -> dict[str, int] | None:
    """Return the capacity of a tier as ``TierConfig`` takes it; empty for none, ``None`` where it wasn't asked for."""
    sizes = {name: given[f"{tier}_{name}"] for name in ("blocks", "bytes") if f"{tier}_{name}" in given}
    if len(sizes) > 1:
        raise KvyardError(f"{tier}_blocks and {tier}_bytes say the same: give one of the two")
    for name, value in sizes.items():
        if value < 0:
            raise KvyardError(f"{tier}_{name} is {value}: it can't be negative; 0 is none")
        return {"num_blocks" if name == "blocks" else name: value} if value else {}
    return None


def _link(given: Mapping[str, Any], tier: Tier, scope: str) -> LinkConfig:
    """Return a worker's own link to a tier, or its share of a link that all workers use."""
    if tier == LOWER_TIERS[0] and "link" in given:
        for name in (f"{tier.label}_bandwidth", f"{tier.label}_latency", "link_discipline"):
            if name in given:
                raise KvyardError(f"link and {name} both describe the way to {tier.place}: give one of the two")
        return parse_link_config(given["link"])
    latency = given.get(f"{tier.label}_latency", tier.entry.latency_ns)
    speed = given.get(f"{tier.label}_bandwidth", (tier.entry.gb_s * GB,) * 2)
    together = given.get("shared_bandwidth", (SHARED_GB_S * GB,) * 2)
    lanes = [
        LaneConfig(client_bandwidth=own, bandwidth=both, first_byte_ns=latency)
        if scope == "shared"
        else LaneConfig(bandwidth=own, first_byte_ns=latency)
        for own, both in zip(speed, together, strict=True)
    ]
    return LinkConfig(discipline=given.get("link_discipline", "fair"), outward=lanes[0], inward=lanes[1])
