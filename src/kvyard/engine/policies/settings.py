"""Settings that one backend has and the others don't. Values only; the policies interpret them."""

from math import inf
from typing import Literal

import msgspec

from kvyard.blocks.spec import ConfigError

CHUNK = 8192
"""Prompt tokens that SGLang cuts prompts into on a card with 60 to 160 GB."""


class SglangSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admission of the ``sglang`` backend. Names and defaults are SGLang's."""

    schedule_policy: Literal["fifo", "lpm", "dfs-weight", "lof", "random", "hrrn", "shortest-prefill-first"] = "fifo"
    """Order of waiting requests: first come (SGLang's fcfs), longest cached prefix, ..."""
    max_prefill_tokens: int = 16384
    """Prompt tokens in a pass, all requests together."""
    chunked_prefill_size: int | None = None
    """Prompt tokens in a pass that requests can be cut at; -1 never cuts them. By default SGLang's for the card, 8192 without
    one."""
    enable_mixed_chunk: bool = False
    """True if requests decode in passes that compute prompts."""
    scheduler_recv_interval: int = 1
    """Decode passes between two looks for requests that have come; after prompts, and when idle, it always looks."""
    prefill_max_requests: int | None = None
    """Requests whose prompts are in a pass."""
    ignore_eos: bool = False
    """True if answers are known to have all their tokens, so that room is set aside for all of them."""
    radix_eviction_policy: Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"] = "lru"
    """Order in which leaves of the radix tree are evicted."""
    enable_priority_scheduling: bool = False
    """True if requests with a higher priority go first."""
    schedule_low_priority_values_first: bool = False
    """True if a lower value is a higher priority."""
    disable_priority_preemption: bool = False
    """True if no request is preempted for one with a higher priority."""
    priority_scheduling_preemption_threshold: int = 10
    """By how much a priority must be higher for that."""
    clip_max_new_tokens: int = 4096
    """Room is set aside for at most this many output tokens per request, however many it may produce."""
    swa_full_tokens_ratio: float = 0.8
    """Tokens that sliding-window layers have room for, as a share of those that full attention has room for."""
    max_mamba_cache_size: int | None = None
    """Slots for states of recurrent layers, beside num_gpu_blocks of full attention; by default as many as requests need at
    once."""
    mamba_radix_cache_strategy: Literal["no_buffer", "extra_buffer", "extra_buffer_lazy"] = "no_buffer"
    """Cache the state of a request's last token, or states inside it in slots of their own, taken ahead or lazily."""
    mamba_track_interval: int = 256
    """Tokens of an answer between two states, with extra_buffer and extra_buffer_lazy."""
    speculative_eagle_topk: int = 1
    """Drafts at a position, in a tree of them."""
    speculative_num_draft_tokens: int | None = None
    """Tokens that a request verifies in a pass, its last one included; by default one more than num_speculative_tokens."""
    hicache_storage_prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """Policy for waiting on the prefetch from storage behind the host."""
    hicache_storage_prefetch_retry_poll_interval: int = 8
    """Passes after which a request that storage had nothing for asks again; 0 for never."""
    hicache_storage_prefetch_retry_max_attempts: int = 8
    """Times that it asks again at most."""
    prefetch_threshold: int = 256
    """Tokens that a request must lack, and storage have, for a prefetch."""
    prefetch_timeout_base: float = 1.0
    """Seconds that a request waits with the policy timeout, ..."""
    prefetch_timeout_per_ki_token: float = 0.25
    """... and for each 1,024 tokens that it lacks."""
    schedule_conservativeness: float = 1.0
    """Above 1, more room is set aside for the output of running requests; below, less."""
    books_sampled: bool = False
    """True if a token has its page booked as soon as it is sampled, a pass before it is computed. SGLang doesn't; the
    Dynamo mocker does, and its results are met to the millisecond with it.
    """

    @property
    def chunk(self) -> int:
        """Return ``chunked_prefill_size``, or its default without a card."""
        return CHUNK if self.chunked_prefill_size is None else self.chunked_prefill_size

    def check(self, block_size: int) -> None:
        """Raise ``ConfigError`` if a value makes no sense for pages of ``block_size`` tokens."""
        chunk = self.chunk
        for name in ("max_prefill_tokens", "clip_max_new_tokens", "scheduler_recv_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"sglang.{name} must be at least 1, got {getattr(self, name)}")
        if chunk < 1 and chunk != -1:
            raise ConfigError(f"sglang.chunked_prefill_size must be at least 1, got {chunk}")
        if self.prefill_max_requests is not None and self.prefill_max_requests < 1:
            raise ConfigError(f"sglang.prefill_max_requests must be at least 1, got {self.prefill_max_requests}")
        if not 0 <= self.schedule_conservativeness < inf:
            raise ConfigError(
                f"sglang.schedule_conservativeness must be finite and not be negative, got {self.schedule_conservativeness}"
            )
        for name in ("retry_poll_interval", "retry_max_attempts"):
            name = f"hicache_storage_prefetch_{name}"
            if getattr(self, name) < 0:
                raise ConfigError(f"sglang.{name} must not be negative, got {getattr(self, name)}")
        if self.prefetch_threshold < 1:
            raise ConfigError(f"sglang.prefetch_threshold must be at least 1, got {self.prefetch_threshold}")
        for name in ("prefetch_timeout_base", "prefetch_timeout_per_ki_token"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"sglang.{name} must be finite and not be negative, got {getattr(self, name)}")
        if self.speculative_eagle_topk < 1:
            raise ConfigError(f"sglang.speculative_eagle_topk must be at least 1, got {self.speculative_eagle_topk}")
        if not 0 < self.swa_full_tokens_ratio <= 1:
            raise ConfigError(
                f"sglang.swa_full_tokens_ratio must be above 0 and at most 1, got {self.swa_full_tokens_ratio}"
            )
        if chunk == -1:
            return
        if chunk % block_size:
            raise ConfigError(
                f"sglang.chunked_prefill_size ({chunk}) must be a multiple of the page size "
                f"({block_size}), or prompts would never end"
            )
        if self.max_prefill_tokens < chunk:
            raise ConfigError(
                f"sglang.max_prefill_tokens ({self.max_prefill_tokens}) must be at least chunked_prefill_size "
                f"({chunk}), or a whole chunk would never get in"
            )


class TrtllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admission and chunking of the ``trtllm`` backend. Names and defaults are TensorRT-LLM's."""

    capacity_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    """Admit only requests that can run to their end, or all that fit now; then later arrivals may be paused."""
    enable_chunked_prefill: bool = False
    """True if prompts are cut into chunks. Otherwise a prompt longer than max_num_batched_tokens is refused."""
    context_chunking_policy: Literal["first_come_first_served", "equal_progress"] = "first_come_first_served"
    """Let the first prompt take as much of a pass as it can, or let all prompts advance by the same number of tokens."""
    chunk_unit_size: int | None = None
    """Tokens that chunks are multiples of; ``None`` for the block size."""
    batch_wait_timeout_iters: int = 0
    """Passes that prompts may wait for a fuller batch while others decode."""
    batch_wait_max_tokens_ratio: float = 0.0
    """Share of max_num_batched_tokens from which on a batch is full enough."""
    mocker: bool = False
    """True if passes are formed as NVIDIA Dynamo's mocker forms them: prompts in chunks of any length, by vLLM's rules."""

    def check(self, block_size: int) -> None:
        """Raise ``ConfigError`` if a value makes no sense for blocks of ``block_size`` tokens."""
        unit = self.chunk_unit_size
        if unit is not None and (unit < 1 or unit % block_size):
            raise ConfigError(f"trtllm.chunk_unit_size ({unit}) must be a multiple of the block size ({block_size})")
        if self.batch_wait_timeout_iters < 0:
            raise ConfigError(
                f"trtllm.batch_wait_timeout_iters must not be negative, got {self.batch_wait_timeout_iters}"
            )
        if not 0 <= self.batch_wait_max_tokens_ratio <= 1:
            raise ConfigError(
                f"trtllm.batch_wait_max_tokens_ratio is a share from 0 to 1, got {self.batch_wait_max_tokens_ratio}"
            )
