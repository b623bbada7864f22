"""Metrics with the names, labels and buckets of vLLM 0.32, so that dashboards and routers read them unchanged. And our own.

A test compares them with what vLLM's own logger registers. They also count what vLLM counts, when it does: prompts with their
first token, requests with their last. One thing differs on purpose: a client that hangs up is counted as ``abort``, where vLLM
drops the request before it gets that far. Durations are nominal: with ``speed`` other than 1 a client sees shorter or longer
ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvyard.clock import SECOND, WallClock
from kvyard.engine.job import Job, State
from kvyard.errors import KvyardError
from kvyard.server.mock.catalog import (
    CACHE_CONFIG,
    COUNTERS,
    HISTOGRAMS,
    LAG,
    OWN,
    REJECTIONS,
    SLEEP,
    SPLIT,
    one_two_five,
)

if TYPE_CHECKING:
    from kvyard.server.mock.choice import Choice
    from kvyard.server.mock.worker import Worker


class Measures:
    """One registry per worker: each is an engine of its own to whoever scrapes."""

    def __init__(self, worker: Worker, model: str, longest: int) -> None:
        """Raises ``KvyardError`` where prometheus-client isn't installed."""
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram
        except ImportError:
            raise KvyardError("serving needs prometheus-client: pip install 'kvyard[server]'") from None
        self._worker = worker
        self._wall = WallClock.since_epoch()
        self.model = model
        self.registry = CollectorRegistry(auto_describe=False)
        labels = ["model_name", "engine"]
        self.counters = {name: Counter(name, text, labels, registry=self.registry) for name, text in COUNTERS.items()}
        self.split = {
            name: Counter(name, text, [*labels, label], registry=self.registry)
            for name, (text, label, _) in SPLIT.items()
        }
        rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._rejected = {reason: rejections.labels(model, reason) for reason in REJECTIONS}
        self.histograms = {
            name: Histogram(name, text, labels, buckets=buckets or one_two_five(longest), registry=self.registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._lag = Histogram(
            "kvyard_mock_lag_seconds", OWN["kvyard_mock_lag_seconds"], buckets=LAG, registry=self.registry
        )
        self._requests = Counter(
            "kvyard_mock_requests", OWN["kvyard_mock_requests"], ["path", "status"], registry=self.registry
        )
        self._events = Counter(
            "kvyard_mock_events", OWN["kvyard_mock_events"], ["engine", "fate"], registry=self.registry
        )
        self.lagged = self._lag.observe
        self.registry.register(self)

    def seen(self, path: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(path, str(status)).inc()

    def rejected(self) -> None:
        """A request was turned away because too many wait."""
        self._rejected["max_num_queued_reqs"].inc()

    def announced(self, rank: int, withheld: bool) -> None:
        """A batch of events was sent, or wasn't."""
        self._events.labels(str(rank), "withheld" if withheld else "sent").inc()

    def text(self) -> tuple[bytes, str]:
        """Everything, and the type of that."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """For the registry: what is read when somebody asks."""
        from prometheus_client.core import GaugeMetricFamily

        worker, labels = self._worker, ["model_name", "engine"]
        running = GaugeMetricFamily(
            "vllm:num_requests_running", "Number of requests in model execution batches.", labels=labels
        )
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting", "Number of requests waiting to be processed.", labels=labels
        )
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", labels=[*labels, "reason"]
        )
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", labels=labels
        )
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "Engine sleep state: this one never sleeps.", labels=[*labels, "sleep_state"]
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(CACHE_CONFIG)
        )
        engine = worker.config.engine
        facts = dict.fromkeys(CACHE_CONFIG, "None") | {
            "block_size": str(worker.block_size),
            "num_gpu_blocks": str(engine.num_gpu_blocks),
            "enable_prefix_caching": str(engine.enable_prefix_caching),
            "prefix_caching_hash_algo": worker.config.hash_algorithm,
            "kv_cache_size_tokens": str(engine.capacity_tokens),
        }
        for rank, core in enumerate(worker.cores):
            named = [self.model, str(rank)]
            scheduler = core.scheduler
            parked = len(scheduler.loads.parked) if scheduler.loads is not None else 0
            running.add_metric(named, len(scheduler.running))
            waiting.add_metric(named, len(scheduler.waiting) + parked)
            by_reason.add_metric([*named, "capacity"], len(scheduler.waiting))
            by_reason.add_metric([*named, "deferred"], parked)
            usage.add_metric(named, scheduler.manager.usage)
            for state, value in SLEEP.items():
                sleep.add_metric([*named, state], value)
            info.add_metric(list((facts | {"engine": str(rank)}).values()), 1)
        yield from (running, waiting, by_reason, usage, sleep, info)
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for desk in worker.desks:
            for choice in desk.choices.values():
                name = choice.job.chain.namespace.lora_name
                if name is not None:
                    names[choice.job.state in (State.PREFILL, State.DECODE)].add(name)
        # vLLM sets it to the time, so that readers find the newest of several.
        now = self._wall.now() / SECOND
        adapters = [",".join(sorted(names[which])) for which in (True, False)]
        lora.add_metric([str(worker.config.max_loras), *adapters], now)
        yield lora


class RankMeasures:
    """What one rank's desk reports, with the labels looked up once."""

    def __init__(self, of: Measures, rank: int) -> None:
        named = (of.model, str(rank))
        # All of them at once, so that they are there from the start.
        split = {
            name.removeprefix("vllm:"): {value: of.split[name].labels(*named, value).inc for value in values}
            for name, (_, _, values) in SPLIT.items()
        }
        self._success = split["request_success"]
        self._source = split["prompt_tokens_by_source"]
        self._tier = split["prompt_tokens_cached_by_source"]
        counters = {name.removeprefix("vllm:"): made.labels(*named) for name, made in of.counters.items()}
        histograms = {name.removeprefix("vllm:"): made.labels(*named) for name, made in of.histograms.items()}
        self._count = {name: counter.inc for name, counter in counters.items()}
        self._observe = {name: histogram.observe for name, histogram in histograms.items()}
        self._between = self._observe["inter_token_latency_seconds"]
        self._generated = self._count["generation_tokens"]
        self._iteration = self._observe["iteration_tokens_total"]
        self._end = self._tokens = 0
        """The pass whose tokens are being counted, by its end."""

    def admitted(self, job: Job, cached: int, external: int, lower: bool) -> None:
        """A job begins to run, for the first time; ``lower``: there are tiers below the device, which were asked too."""
        count = self._count
        count["prefix_cache_queries"](job.num_prompt_tokens)
        count["prefix_cache_hits"](cached)
        self._tier["device"](cached)
        if lower:
            count["external_prefix_cache_queries"](job.num_prompt_tokens - cached)
            count["external_prefix_cache_hits"](external)
            self._tier["host"](external - job.storage_tokens)
            self._tier["disk"](job.storage_tokens)

    def produced(self, choice: Choice, tokens: int, end: int) -> None:
        """More tokens are out; the choice doesn't know yet."""
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
        """A pass is over. As in vLLM, one that produced nothing isn't counted, and a prompt counts as a whole with its first
        token, however many passes computed it.
        """
        if self._tokens:
            self._iteration(self._tokens)
            self._tokens = 0

    def preempted(self) -> None:
        """A job was pushed out."""
        self._count["num_preemptions"](1)

    def ended(self, choice: Choice, now: int) -> None:
        """A choice is through."""
        job = choice.job
        if job.state is not State.FINISHED:
            self._success["abort" if job.state is State.CANCELLED else "error"]()
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
        if all(one.ended >= 0 for one in siblings):
            observe["request_params_n"](len(siblings))
            observe["request_max_num_generation_tokens"](max(one.produced for one in siblings))
