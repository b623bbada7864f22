"""Description of an engine as people write it. A value: it makes nothing, and ``kvyard.engine.build`` makes an engine of
it.

Names follow vLLM where vLLM has one.
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from kvyard.blocks import GroupSpec
from kvyard.blocks.eviction import ORDERS, eviction_with_hints
from kvyard.blocks.eviction.learning import learning_order
from kvyard.blocks.eviction.quota import check_quota_order
from kvyard.blocks.quotas import Quotas
from kvyard.blocks.spec import ConfigError
from kvyard.engine.policies.backend import SchedulerBackend
from kvyard.engine.policies.settings import SglangSettings, TrtllmSettings
from kvyard.engine.role import Role
from kvyard.engine.timing import PolynomialTiming, TimingConfig, read_timing
from kvyard.registry import Registry
from kvyard.settings import Setting, figures, size
from kvyard.tiers.config import OffloadConfig

REAL_TIMINGS = ("profile", "roofline", "tables")
"""Kinds of timing that stand for a real engine on a GPU."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Draft tokens: how many per step, and how likely each is accepted given that those before it were."""

    num_speculative_tokens: Annotated[int, Setting("Draft tokens per step.")]
    acceptance_rates: tuple[float, ...] = (0.85, 0.3, 0.0, 0.0, 0.0)
    eagle: bool = True
    """True if the drafter needs hidden states, so that the last block of a hit is computed again."""

    def check(self) -> None:
        """Raise ``ConfigError`` if a value makes no sense."""
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}")
        if len(self.acceptance_rates) < self.num_speculative_tokens:
            raise ConfigError(
                f"acceptance_rates has {len(self.acceptance_rates)} entries for {self.num_speculative_tokens} draft tokens"
            )
        if any(not 0 <= rate <= 1 for rate in self.acceptance_rates):
            raise ConfigError(f"acceptance_rates are shares from 0 to 1, got {self.acceptance_rates}")


MOST = {
    "num_gpu_blocks": 1 << 40,
    "max_num_seqs": 1 << 24,
    "max_num_batched_tokens": 1 << 24,
    "block_size": 1 << 20,
    "max_model_len": 1 << 30,
}
"""Counts that no engine goes beyond."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine rank."""

    heading: ClassVar[str] = "Engine"
    backend: "Annotated[str, Setting('Engine whose scheduler is simulated: {choices}.', choices=BACKENDS.names)]" = (
        "vllm"
    )
    role: Annotated[Role, Setting("Part of a request that the worker computes: {choices}.")] = "both"
    num_gpu_blocks: Annotated[
        int, Setting("Usable blocks on each device. [default: with --gpu what the card holds, else 16384]", flag=True)
    ] = 16384
    """The null block is not counted."""
    block_size: Annotated[
        int | None, Setting("Tokens per block. [default: with --model vLLM's, else 64; kvyard mock: 16]", flag=True)
    ] = None
    """Tokens per block of a model with one group; ``None`` for the backend's default."""
    groups: Annotated[tuple[GroupSpec, ...], Setting("Attention groups of a hybrid model, one table per group.")] = ()
    """Empty means one group of full attention."""
    bytes_per_block: Annotated[int | None, Setting("Bytes of a block of one group, without a model.", parse=size)] = (
        None
    )
    """Lower tiers need it."""
    max_model_len: Annotated[
        int | None, Setting("Tokens of the longest request. [default: with --model the model's, else any]", flag=True)
    ] = None
    max_num_seqs: Annotated[
        int, Setting("Requests per pass. [default: with --gpu the engine's for the card, else 256]", flag=True)
    ] = 256
    max_num_batched_tokens: Annotated[
        int, Setting("Tokens per pass. [default: with --gpu the engine's for the card, else 8192]", flag=True)
    ] = 8192
    long_prefill_token_threshold: Annotated[int, Setting("Most tokens of a prompt per pass; 0: no limit.")] = 0
    long_prefill_token_threshold_adaptive: Annotated[
        bool, Setting("Raise long_prefill_token_threshold to an even share of the pass.")
    ] = False
    max_num_scheduled_tokens: Annotated[
        int | None, Setting("Tokens scheduled per pass, if fewer than max_num_batched_tokens.")
    ] = None
    max_loras: Annotated[int | None, Setting("LoRA adapters per pass. [default: any number]")] = None
    """A request whose adapter is one too many is passed over by those behind it."""
    enable_prefix_caching: Annotated[
        bool, Setting("Cache prefixes on the device. Lower tiers cache them either way.")
    ] = True
    enable_chunked_prefill: Annotated[bool, Setting("Cut prompts into chunks.")] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Setting("Order of waiting requests: {choices}.", flag=True)
    ] = "fcfs"
    preemption_mode: Annotated[
        Literal["newest", "oldest"], Setting("Running request that is preempted first: {choices}.")
    ] = "newest"
    scheduler_reserve_full_isl: bool = True
    """Admit a request only when its whole known sequence fits, not just the first chunk of it."""
    watermark: Annotated[float, Setting("Share of blocks that admissions leave free.")] = 0.0
    retention_interval: Annotated[
        int | None,
        Setting(
            "Keep windows and states every N tokens; 0: only where prompts end or diverge (vLLM 0.32's default). "
            "[default: keep all]",
            also=("prefix_cache_retention_interval",),
        ),
    ] = None
    eviction: Annotated[str, Setting("Eviction policy of the device: {choices}.", flag=True, choices=ORDERS.names)] = (
        "lru"
    )
    eviction_options: Annotated[
        dict[str, float],
        Setting("Options of that eviction policy, as NAME=VALUE,... .", parse=figures, options=ORDERS),
    ] = msgspec.field(default_factory=dict)
    """``docs/how-to/retention.md`` names each order's."""
    heed_hints: Annotated[bool, Setting("Let session hints of requests change the order of eviction.", flag=True)] = (
        False
    )
    """With ``eviction`` lru or priority, which then hold for lower tiers too."""
    cache_quota: Annotated[
        Literal["off", "borrowed", "hard", "isolated"],
        Setting("How each tenant's share of every cache tier is enforced: {choices}.", flag=True),
    ] = "off"
    """With ``eviction`` lru or priority; see ``kvyard.blocks.quotas``."""
    tenant_quotas: Annotated[
        dict[str, float],
        Setting(
            "Cache shares by tenant, as NAME=SHARE,...; * is every other tenant. [default: what the named ones leave]",
            parse=figures,
        ),
    ] = msgspec.field(default_factory=dict)
    speculative: SpeculativeConfig | None = None
    timing: TimingConfig = PolynomialTiming()
    tiers: OffloadConfig | None = None
    sglang: Annotated[SglangSettings | None, Setting("A table of what only that backend has.")] = None
    trtllm: Annotated[TrtllmSettings | None, Setting("A table of what only that backend has.")] = None
    async_scheduling: Annotated[bool | None, Setting("Schedule a pass while the previous one runs.")] = None
    """``None`` for what engines do on a GPU where timing is a real engine's: on, except with what it isn't modelled with."""
    seed: int = 0

    @property
    def specs(self) -> tuple[GroupSpec, ...]:
        """The attention groups, the implied one included."""
        if self.groups:
            return self.groups
        return (GroupSpec(kind="full", block_size=self.block_size or BACKENDS.get(self.backend).block_size),)

    @property
    def block_groups(self) -> tuple[GroupSpec, ...]:
        """Groups with block tables and events of their own. SGLang has one table, of full attention, and no other events."""
        if self.backend != "sglang" or len(self.specs) == 1:
            return self.specs
        return tuple([spec for spec in self.specs if spec.is_full][:1]) or self.specs

    @property
    def decides_ahead(self) -> bool:
        """Return true if passes are decided on while the ones before them run."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        modelled = self.backend == "vllm" if self.role != "both" else True
        return self.overlaps_host and modelled and (self.tiers is None or self.backend == "sglang")

    @property
    def overlaps_host(self) -> bool:
        """True if the host prepares a pass while the card computes the one before it.

        Engines do so on a GPU with roles and lower tiers, too, where deciding ahead itself isn't modelled.
        """
        if self.async_scheduling is not None:
            return self.async_scheduling
        usual = self.backend in ("vllm", "sglang") or (
            self.backend == "trtllm" and not (self.trtllm and self.trtllm.mocker)
        )
        real = type(self.timing).__struct_config__.tag in REAL_TIMINGS
        return real and usual and (self.speculative is None or self.backend == "sglang")

    @property
    def capacity_tokens(self) -> int:
        """Return the capacity of the device in tokens, by the largest group."""
        return self.num_gpu_blocks * max(spec.block_size for spec in self.specs)

    @property
    def tokens_per_pass(self) -> int:
        """Return the most prompt tokens that one pass computes."""
        if self.backend == "sglang":
            chunk = (self.sglang or SglangSettings()).chunk
            return chunk if chunk > 0 else (self.sglang or SglangSettings()).max_prefill_tokens
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def eviction_orders(self) -> list[str]:
        """Return the eviction policies of the device and of every lower tier."""
        return [self.eviction, *(tier.eviction for tier in (self.tiers.tiers if self.tiers is not None else ()))]

    @property
    def quotas(self) -> Quotas | None:
        """Return the quotas of tenants; ``None`` without quotas. Raises ``ConfigError`` for impossible shares."""
        if self.cache_quota == "off":
            if self.tenant_quotas:
                raise ConfigError("tenant_quotas are shares of the cache: say what they mean with cache_quota=borrowed")
            return None
        return Quotas(mode=self.cache_quota, shares=self.tenant_quotas)

    @property
    def needs_future(self) -> str | None:
        """The eviction policy, of any tier, that needs to know the future, if there is one."""
        for name in self.eviction_orders:
            order = learning_order(name)
            if order is not None and order.needs_future:
                return name
        return None

    @property
    def reads_facts(self) -> bool:
        """Return true if the eviction policy of any tier may read ``RequestFacts``."""
        return any(learning_order(name) is not None for name in self.eviction_orders)

    def check(self) -> None:
        """Raise ``ConfigError`` for a value or a combination that no engine can honour."""
        ORDERS.check(self.eviction, self.eviction_options)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must leave room for a prompt and an answer, got {self.max_model_len}")
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                bound = "at least 1" if value < 1 else f"at most {most:,}"
                raise ConfigError(f"{name} must be {bound}, got {value:,}")
        if self.block_size is not None and self.groups:
            raise ConfigError("block_size is for models with one group: with groups, each has its own")
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError(
                "long_prefill_token_threshold cuts prompts into chunks: enable_chunked_prefill must be on"
            )
        if self.scheduling_policy == "priority" and self.preemption_mode == "oldest":
            raise ConfigError(
                "preemption_mode oldest is for scheduling_policy fcfs: by priority, the lowest goes first"
            )
        if self.bytes_per_block is not None and self.bytes_per_block < 1:
            raise ConfigError(f"bytes_per_block must be at least 1, got {self.bytes_per_block}")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError("long_prefill_token_threshold must not be negative; 0 turns it off")
        scheduled = self.max_num_scheduled_tokens
        if scheduled is not None and not self.max_num_seqs <= scheduled <= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_scheduled_tokens ({scheduled}) must be from max_num_seqs ({self.max_num_seqs}) to "
                f"max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if self.max_loras is not None and self.max_loras < 1:
            raise ConfigError(f"max_loras must be at least 1, got {self.max_loras}; leave it out for no limit")
        if self.speculative is not None:
            self.speculative.check()
        if self.heed_hints:
            for order in self.eviction_orders:
                eviction_with_hints(order)
        if self.quotas is not None:
            for order in self.eviction_orders:
                check_quota_order(order)
        if self.tiers is not None:
            if not self.enable_prefix_caching and self.backend != "vllm":
                raise ConfigError(
                    f"lower tiers of {self.backend} hold cached prefixes of the device: enable_prefix_caching must be on"
                )
            if self.bytes_per_block is None:
                raise ConfigError("lower tiers need bytes_per_block, the size of a device block over all layers")
            if self.tiers.wait_for_save and self.speculative is not None:
                raise ConfigError("wait_for_save is not modelled with draft tokens: leave one of the two out")
        for name in BACKENDS.ours:
            if name != self.backend and getattr(self, name, None) is not None:
                raise ConfigError(f"{name} settings are for backend {name}, not for {self.backend}")
        if self.async_scheduling and self.backend != "sglang":
            for name, reason in (("tiers", "lower tiers"), ("speculative", "draft tokens")):
                if getattr(self, name) is not None:
                    raise ConfigError(f"async_scheduling is not modelled with {reason}: turn one of them off")
        BACKENDS.get(self.backend).check(self)
        self.timing.check()

    # -- for backends, which check what only they care about --------------------------------------------------------

    def check_token_budget(self) -> None:
        """Raise ``ConfigError`` unless a pass has a token for every request that may decode in it."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs a token per pass"
            )

    def check_plain_model(self) -> None:
        """Raise ``ConfigError`` for settings that are modelled for vLLM's scheduler only."""
        self.check_no_extras()
        groups = self.specs
        if len(groups) > 1 or not groups[0].is_full:
            raise ConfigError(
                f"backend {self.backend} is modelled for one group of full attention; hybrid models need vllm"
            )

    def check_no_extras(self) -> None:
        """Raise ``ConfigError`` for drafts and lower tiers, which are modelled with vLLM's way of scheduling only."""
        if self.speculative is not None:
            raise ConfigError(f"speculative tokens are modelled for backend vllm, not for {self.backend}")
        if self.tiers is not None:
            raise ConfigError(f"offloading to lower tiers is modelled for backend vllm, not for {self.backend}")

    def refuse(self, unused: Mapping[str, str]) -> None:
        """Raise ``ConfigError``, with the reason, if one of these settings isn't at its default: the backend has no use for
        it, and a figure that silently changed nothing would be believed.
        """
        usual = _usual_values()
        for name, why in unused.items():
            if getattr(self, name) != usual[name]:
                raise ConfigError(f"{name} is not a setting of backend {self.backend}: {why}")


@functools.cache
def _usual_values() -> Mapping[str, object]:
    return {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}


BACKENDS: Registry[SchedulerBackend[EngineConfig]] = Registry(
    "backend",
    "kvyard.backends",
    {
        "vllm": "kvyard.engine.policies.vllm:VLLM",
        "sglang": "kvyard.engine.policies.sglang:SGLANG",
        "trtllm": "kvyard.engine.policies.trtllm:TRTLLM",
    },
)
"""Ways to schedule. An installed package adds one by an entry point that names a ``SchedulerBackend``."""


def read_engine_config(value: Mapping[str, Any]) -> EngineConfig:
    """Return a config from plain values, such as a decoded JSON file; its timing may be of any kind in the registry.

    Raises ``msgspec.ValidationError`` or ``KvyardError`` for what can't be read; ``check`` says whether it makes sense.
    """
    rest = dict(value)
    timing = rest.pop("timing", None)
    config = msgspec.convert(rest, EngineConfig)
    return config if timing is None else msgspec.structs.replace(config, timing=read_timing(timing))
