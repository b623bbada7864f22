"""Metrics with the names, labels and buckets of vLLM 0.32, so that dashboards and routers read them unchanged. And our own.

A test compares them with what vLLM's own logger registers. They also count what vLLM counts, when it does: prompts with their
first token, requests with their last. One thing differs on purpose: a client that hangs up is counted as ``abort``, where vLLM
drops the request before it gets that far. Durations are nominal: with ``speed`` other than 1 a client sees shorter or longer
ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvyard.clock import SECOND, WallClock
from kvyard.engine.job import Job, JobState
from kvyard.engine.models.memory import tokens_in_flight
from kvyard.engine.models.planning import requests_that_fit
from kvyard.events.tier import LOWER_TIERS
from kvyard.index.metrics import Sample
from kvyard.server.metrics import Metrics, read_catalog

if TYPE_CHECKING:
    from kvyard.server.mock.choice import MockChoice
    from kvyard.server.mock.worker import MockWorker


CATALOG = read_catalog(Path(__file__).with_name("catalog.toml"))
TEXTS: dict[str, str] = {
    **CATALOG["counters"],
    **CATALOG["gauges"],
    **CATALOG["others"],
    **{name: split["text"] for name, split in CATALOG["split"].items()},
    **{name: text for name, (text, _) in CATALOG["histograms"].items()},
}
NULL_BLOCKS = 1
"""Block 0, which holds nothing: vLLM counts it."""
LAG = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
SLEEP = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
ASLEEP = {"awake": 0, "weights_offloaded": 1, "discard_all": 0}


def one_two_five(most: int) -> list[int]:
    """Return 1, 2, 5, 10, ... up to ``most``: vLLM's buckets for token counts."""
    bounds: list[int] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return bounds
            bounds.append(digit * power)
        power *= 10


class MockMetrics(Metrics):
    """One registry per worker: each is an engine of its own to Prometheus."""

    def __init__(self, worker: MockWorker, model: str, longest: int) -> None:
        super().__init__(TEXTS)
        self.worker = worker
        self._wall = WallClock.since_epoch()
        self.model = model
        labels = ("model_name", "engine")
        self.counters = {name: self.counter(name, *labels) for name in CATALOG["counters"]}
        self.split = {name: self.counter(name, *labels, split["label"]) for name, split in CATALOG["split"].items()}
        rejections = self.counter("vllm:admission_rejections", "model_name", "reason")
        self._rejected = {reason: rejections[model, reason] for reason in REJECTIONS}
        buckets = CATALOG["buckets"] | {"tokens": one_two_five(longest)}
        self.histograms = {
            name: self.histogram(name, buckets[which], *labels) for name, (_, which) in CATALOG["histograms"].items()
        }
        self._requests = self.counter("kvyard_mock_requests", "path", "status")
        self._events = self.counter("kvyard_mock_events", "engine", "fate")
        self.lagged = self.histogram("kvyard_mock_lag_seconds", LAG).metric.observe
        self.sources.append(self._samples)

    def seen(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests[path, str(status)].inc()

    def rejected(self) -> None:
        """Count a request that was refused because too many wait."""
        self._rejected["max_num_queued_reqs"].inc()

    def announced(self, rank: int, withheld: bool) -> None:
        """Count a batch of events that was sent, or ``withheld``."""
        self._events[str(rank), "withheld" if withheld else "sent"].inc()

    def _samples(self) -> Iterator[Sample]:
        worker, engine = self.worker, self.worker.config.engine
        blocks = engine.num_gpu_blocks + NULL_BLOCKS
        in_flight = tokens_in_flight(engine.max_num_batched_tokens, ahead=engine.async_scheduling is not False)
        concurrency = requests_that_fit(engine.specs, worker.longest, in_flight, blocks)
        facts = dict.fromkeys(CATALOG["cache_config"], "None") | {
            "block_size": str(worker.faults.told_block_size or worker.block_size),
            "num_gpu_blocks": str(blocks),
            "enable_prefix_caching": str(engine.enable_prefix_caching),
            "prefix_caching_hash_algo": worker.config.hash_algorithm,
            "kv_cache_size_tokens": str(int(concurrency * worker.longest)),
            "kv_cache_max_concurrency": str(concurrency),
        }
        for rank, core in enumerate(worker.cores):
            named = {"model_name": self.model, "engine": str(rank)}
            scheduler = core.scheduler
            parked = len(scheduler.jobs.parked)
            yield "vllm:num_requests_running", named, len(scheduler.running)
            yield "vllm:num_requests_waiting", named, len(scheduler.waiting) + parked
            by_reason = {"capacity": len(scheduler.waiting), "deferred": parked}
            for reason, waiting in by_reason.items():
                yield "vllm:num_requests_waiting_by_reason", named | {"reason": reason}, waiting
            yield "vllm:kv_cache_usage_perc", named, scheduler.manager.usage
            states = ASLEEP if worker.faults.asleep else SLEEP
            for state, value in states.items():
                yield "vllm:engine_sleep_state", named | {"sleep_state": state}, value
            yield "vllm:cache_config_info", facts | {"engine": str(rank)}, 1
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for watcher in worker.watchers:
            for choice in watcher.choices.values():
                name = choice.job.chain.namespace.lora_name
                if name is not None:
                    names[choice.job.state in (JobState.PREFILL, JobState.DECODE)].add(name)
        adapters = {
            "max_lora": str(worker.config.max_loras),
            "running_lora_adapters": ",".join(sorted(names[True])),
            "waiting_lora_adapters": ",".join(sorted(names[False])),
        }
        # vLLM sets it to the time, so that readers find the newest of several.
        yield "vllm:lora_requests_info", adapters, self._wall.now() / SECOND


class RankMeasures:
    """Metrics of one rank's watcher, with the labels looked up once."""

    def __init__(self, of: MockMetrics, rank: int) -> None:
        named = (of.model, str(rank))
        self._worker = of.worker
        # All of them at once, so that they are there from the start.
        splits = {
            name.removeprefix("vllm:"): {value: of.split[name][*named, value].inc for value in split["values"]}
            for name, split in CATALOG["split"].items()
        }
        self._success = splits["request_success"]
        self._source = splits["prompt_tokens_by_source"]
        self._tier = splits["prompt_tokens_cached_by_source"]
        self._count = {name.removeprefix("vllm:"): metric[named].inc for name, metric in of.counters.items()}
        self._observe = {name.removeprefix("vllm:"): metric[named].observe for name, metric in of.histograms.items()}
        self._between = self._observe["inter_token_latency_seconds"]
        self._generated = self._count["generation_tokens"]
        self._iteration = self._observe["iteration_tokens_total"]
        self._end = self._tokens = 0
        """The pass whose tokens are being counted, by its end."""

    def admitted(self, job: Job, cached: int, external: int, lower: bool) -> None:
        """Count a job that begins to run for the first time; ``lower``: there are tiers below the device,
        which were asked too.
        """
        count = self._count
        caching = self._worker.config.engine.enable_prefix_caching
        if caching:  # without it vLLM counts no look-ups
            count["prefix_cache_queries"](job.num_prompt_tokens)
            count["prefix_cache_hits"](cached)
        more, size = self._worker.faults.choices - 1, self._worker.block_size
        if more and caching:  # further choices find all whole blocks of the first one
            count["prefix_cache_queries"](more * job.num_prompt_tokens)
            count["prefix_cache_hits"](more * ((job.num_prompt_tokens - 1) // size * size))
        count["mm_cache_queries"](len(job.chain.namespace.media))  # of a fault: each is new
        self._tier["device"](cached)
        if lower:
            count["external_prefix_cache_queries"](job.num_prompt_tokens - cached)
            count["external_prefix_cache_hits"](external)
            for tier, tokens in zip(LOWER_TIERS, job.tier_tokens, strict=False):
                self._tier[tier.entry.metric_source](tokens)

    def produced(self, choice: MockChoice, tokens: int, end: int) -> None:
        """Count new tokens; the choice doesn't have them yet."""
        self._generated(tokens)
        if end != self._end:
            self.settle()
            self._end = end
        self._tokens += tokens
        if choice.first < 0:
            job = choice.job
            cached, external = max(0, job.cached_tokens), job.external_tokens
            computed = job.num_prompt_tokens - cached - external
            self._tokens += computed
            self._count["prompt_tokens"](job.num_prompt_tokens)
            self._count["prompt_tokens_cached"](cached + external)
            self._source["local_compute"](computed)
            self._source["local_cache_hit"](cached)
            self._source["external_kv_transfer"](external)
            self._observe["time_to_first_token_seconds"]((end - choice.arrival) / SECOND)
        else:
            self._between((end - choice.last) / SECOND)

    def settle(self) -> None:
        """Count a pass that ended. As in vLLM, a pass that produced nothing isn't counted, and a prompt counts as a whole with
        its first token, however many passes computed it.
        """
        if self._tokens:
            self._iteration(self._tokens)
            self._tokens = 0

    def preempted(self) -> None:
        """Count a preemption."""
        self._count["num_preemptions"](1)

    def ended(self, choice: MockChoice, now: int) -> None:
        """Count a choice that ended."""
        job = choice.job
        if job.state is not JobState.FINISHED:
            self._success["abort" if job.state is JobState.CANCELLED else "error"]()
            return
        self._success[choice.answer.finish]()
        observe = self._observe
        observe["request_prompt_tokens"](job.num_prompt_tokens)
        observe["request_generation_tokens"](choice.produced)
        observe["request_params_max_tokens"](choice.asked)
        observe["request_num_preemptions"](job.preemptions)
        observe["request_prefill_kv_computed_tokens"](
            job.num_prompt_tokens - max(0, job.cached_tokens) - job.external_tokens
        )
        decode = (choice.last - choice.first) / SECOND
        observe["e2e_request_latency_seconds"]((now - choice.arrival) / SECOND)
        observe["request_queue_time_seconds"]((choice.admitted - choice.arrival) / SECOND)
        observe["request_inference_time_seconds"]((choice.last - choice.admitted) / SECOND)
        observe["request_prefill_time_seconds"]((choice.first - choice.admitted) / SECOND)
        observe["request_decode_time_seconds"](decode)
        observe["request_time_per_output_token_seconds"](decode / max(1, choice.produced - 1))
        siblings = choice.siblings
        if all(sibling.ended >= 0 for sibling in siblings):
            observe["request_params_n"](len(siblings))
            observe["request_max_num_generation_tokens"](max(sibling.produced for sibling in siblings))
