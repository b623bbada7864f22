"""The catalogue of metrics: vLLM 0.32's names, labels and buckets, and our own names. Values only.

``tests/server/mock/vectors`` has what vLLM's own logger registers, and a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
LAG = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

COUNTERS = {
    "vllm:prompt_tokens": "Number of prefill tokens processed.",
    "vllm:prompt_tokens_cached": "Number of cached prompt tokens, local and external.",
    "vllm:generation_tokens": "Number of generation tokens processed.",
    "vllm:num_preemptions": "Cumulative number of preemption from the engine.",
    "vllm:prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "vllm:prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "vllm:external_prefix_cache_queries": "External prefix cache queries, in terms of number of queried tokens.",
    "vllm:external_prefix_cache_hits": "External prefix cache hits, in terms of number of cached tokens.",
    "vllm:mm_cache_queries": "Multi-modal cache queries: none, since this takes text only.",
    "vllm:mm_cache_hits": "Multi-modal cache hits.",
    "vllm:estimated_flops_per_gpu": "Floating point operations: not estimated here.",
    "vllm:estimated_read_bytes_per_gpu": "Bytes read from memory: not estimated here.",
    "vllm:estimated_write_bytes_per_gpu": "Bytes written to memory: not estimated here.",
}
SPLIT: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "vllm:prompt_tokens_by_source": (
        "Number of prompt tokens by source.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "vllm:prompt_tokens_cached_by_source": (
        "Cached prompt tokens by the tier that had them, counted at admission.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    "vllm:request_success": (
        "Count of successfully processed requests.",
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
    ),
}
"""Counters with one label more, and the values it has from the start."""
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
SLEEP = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
CACHE_CONFIG = (
    *(
        "_block_size_resolved",
        "block_size",
        "cache_dtype",
        "cache_hit_alignment_tokens",
        "effective_attention_block_size",
    ),
    *("enable_mamba_shared_prefix_checkpoint", "enable_prefix_caching", "engine", "gpu_memory_utilization"),
    *(
        "hash_block_size",
        "is_attention_free",
        "kv_cache_dtype_skip_layers",
        "kv_cache_layout",
        "kv_cache_max_concurrency",
    ),
    *("kv_cache_memory_bytes", "kv_cache_size_tokens", "kv_offloading_backend", "kv_offloading_size"),
    *("kv_sharing_fast_prefill", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_page_size_padded"),
    *("mamba_ssm_cache_dtype", "num_cpu_blocks", "num_gpu_blocks", "num_gpu_blocks_override"),
    *("prefix_cache_retention_interval", "prefix_caching_hash_algo", "prefix_match_unit", "replayssm_buffer_len"),
    *("skip_page_size_padded", "sliding_window", "swa_bounded_replay", "use_kda_recoverssm", "use_replayssm"),
    "user_specified_block_size",
)
"""Labels of ``vllm:cache_config_info``: every setting of vLLM's cache. Those that we have no word for say None."""
HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "vllm:time_to_first_token_seconds": ("Histogram of time to first token in seconds.", FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", PER_TOKEN),
    "vllm:request_time_per_output_token_seconds": ("Histogram of time_per_output_token per request.", PER_TOKEN),
    "vllm:e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", REQUEST),
    "vllm:request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", REQUEST),
    "vllm:request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", REQUEST),
    "vllm:request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", REQUEST),
    "vllm:request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", REQUEST),
    "vllm:iteration_tokens_total": ("Histogram of number of tokens per engine_step.", ITERATION),
    "vllm:request_prompt_tokens": ("Number of prefill tokens processed.", None),
    "vllm:request_generation_tokens": ("Number of generation tokens processed.", None),
    "vllm:request_params_max_tokens": ("Histogram of the max_tokens request parameter.", None),
    "vllm:request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", None),
    "vllm:request_prefill_kv_computed_tokens": ("Histogram of new KV tokens computed during prefill.", None),
    "vllm:request_params_n": ("Histogram of the n request parameter.", CHOICES),
    "vllm:request_num_preemptions": ("Histogram of the number of times a request was preempted.", PREEMPTIONS),
}
"""Without buckets: 1, 2, 5, 10, 20, ... up to the longest request."""
OWN = {
    "kvyard_mock_lag_seconds": "How late, in real time, nominal instants were carried out.",
    "kvyard_mock_requests": "Requests answered, by path and status.",
    "kvyard_mock_events": "Batches of KV events, by rank and whether they were sent or withheld.",
}
GAUGES = {
    "vllm:num_requests_running": "Number of requests in model execution batches.",
    "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
    "vllm:num_requests_waiting_by_reason": "Number of waiting requests by reason.",
    "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "vllm:engine_sleep_state": "Engine sleep state: this one never sleeps.",
    "vllm:cache_config_info": "Information of the LLMEngine CacheConfig",
    "vllm:lora_requests_info": "Running stats on lora requests.",
}
TEXTS = {
    **COUNTERS,
    **{name: text for name, (text, *_) in (SPLIT | HISTOGRAMS).items()},
    **GAUGES,
    **OWN,
    "vllm:admission_rejections": "Number of admission attempts rejected by a queue limit, by reason.",
}
"""What each metric says of itself."""


def one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, ... up to ``most``: vLLM's buckets for token counts."""
    found: list[int] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return found
            found.append(digit * power)
        power *= 10
