"""Metrics with the names, labels and buckets of vLLM 0.32, so that dashboards and routers read them unchanged. And our own.

Durations are nominal: with ``speed`` other than 1 a client sees shorter or longer ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvyard.clock import SECOND
from kvyard.engine.job import Job, State
from kvyard.errors import KvyardError

if TYPE_CHECKING:
    from kvyard.server.mock.choice import Choice
    from kvyard.server.mock.worker import Worker

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
}
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
}
"""Without buckets: 1, 2, 5, 10, 20, ... up to the longest request."""
OWN = {
    "kvyard_mock_lag_seconds": "How late, in real time, nominal instants were carried out.",
    "kvyard_mock_requests": "Requests answered, by path and status.",
    "kvyard_mock_events": "Batches of KV events, by rank and whether they were sent or withheld.",
}


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


class Measures:
    """One registry per worker: each is an engine of its own to whoever scrapes."""

    def __init__(self, worker: Worker, model: str, longest: int) -> None:
        """Raises ``KvyardError`` where prometheus-client isn't installed."""
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram
        except ImportError:
            raise KvyardError("serving needs prometheus-client: pip install 'kvyard[server]'") from None
        self._worker = worker
        self.model = model
        self.registry = CollectorRegistry(auto_describe=False)
        labels = ["model_name", "engine"]
        self.counters = {name: Counter(name, text, labels, registry=self.registry) for name, text in COUNTERS.items()}
        self.success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            [*labels, "finished_reason"],
            registry=self.registry,
        )
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
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", labels=labels
        )
        for rank, core in enumerate(worker.cores):
            named = [self.model, str(rank)]
            scheduler = core.scheduler
            parked = len(scheduler.loads.parked) if scheduler.loads is not None else 0
            running.add_metric(named, len(scheduler.running))
            waiting.add_metric(named, len(scheduler.waiting) + parked)
            usage.add_metric(named, scheduler.manager.usage)
        yield from (running, waiting, usage)
        engine = worker.config.engine
        facts = {
            "block_size": str(worker.block_size),
            "num_gpu_blocks": str(engine.num_gpu_blocks),
            "enable_prefix_caching": str(engine.enable_prefix_caching),
            "prefix_caching_hash_algo": worker.config.hash_algorithm,
            "engine": "0",
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(facts)
        )
        info.add_metric(list(facts.values()), 1)
        yield info
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
        lora.add_metric([str(worker.config.max_loras), *(",".join(sorted(names[which])) for which in (True, False))], 1)
        yield lora


class RankMeasures:
    """What one rank's desk reports, with the labels looked up once."""

    def __init__(self, of: Measures, rank: int) -> None:
        named = (of.model, str(rank))
        # All of them at once, so that they are there from the start.
        self._success = {reason: of.success.labels(*named, reason) for reason in ("stop", "length", "abort", "error")}
        counters = {name.removeprefix("vllm:"): made.labels(*named) for name, made in of.counters.items()}
        histograms = {name.removeprefix("vllm:"): made.labels(*named) for name, made in of.histograms.items()}
        self._count = {name: counter.inc for name, counter in counters.items()}
        self._observe = {name: histogram.observe for name, histogram in histograms.items()}
        self._between = self._observe["inter_token_latency_seconds"]
        self._generated = self._count["generation_tokens"]
        self.iteration = self._observe["iteration_tokens_total"]

    def admitted(self, job: Job, cached: int, external: int) -> None:
        """A job begins to run, for the first time."""
        count = self._count
        count["prefix_cache_queries"](job.num_prompt_tokens)
        count["prefix_cache_hits"](cached)
        count["external_prefix_cache_queries"](job.num_prompt_tokens - cached)
        count["external_prefix_cache_hits"](external)
        count["prompt_tokens_cached"](cached + external)

    def produced(self, choice: Choice, tokens: int, end: int) -> None:
        """More tokens are out; the choice doesn't know yet."""
        self._generated(tokens)
        if choice.first < 0:
            self._count["prompt_tokens"](choice.job.num_prompt_tokens)
            self._observe["time_to_first_token_seconds"]((end - choice.arrival) / SECOND)
        else:
            self._between((end - choice.last) / SECOND)

    def preempted(self) -> None:
        """A job was pushed out."""
        self._count["num_preemptions"](1)

    def ended(self, choice: Choice, now: int) -> None:
        """A choice is through."""
        job = choice.job
        if job.state is State.FINISHED:
            self._success[choice.answer.finish].inc()
        else:
            self._success["abort" if job.state is State.CANCELLED else "error"].inc()
        observe = self._observe
        observe["request_prompt_tokens"](job.num_prompt_tokens)
        observe["request_generation_tokens"](choice.produced)
        observe["request_max_num_generation_tokens"](job.max_tokens)
        observe["e2e_request_latency_seconds"]((now - choice.arrival) / SECOND)
        if choice.admitted >= 0:
            observe["request_prefill_kv_computed_tokens"](
                job.num_prompt_tokens - max(0, job.cached_tokens) - job.external_tokens
            )
            observe["request_queue_time_seconds"]((choice.admitted - choice.arrival) / SECOND)
            observe["request_inference_time_seconds"]((now - choice.admitted) / SECOND)
        if choice.first >= 0:
            observe["request_prefill_time_seconds"]((choice.first - choice.admitted) / SECOND)
            observe["request_decode_time_seconds"]((choice.last - choice.first) / SECOND)
            if choice.produced > 1:
                observe["request_time_per_output_token_seconds"](
                    (choice.last - choice.first) / (choice.produced - 1) / SECOND
                )

    def asked(self, n: int, max_tokens: int) -> None:
        """A request has come in."""
        self._observe["request_params_n"](n)
        self._observe["request_params_max_tokens"](max_tokens)
