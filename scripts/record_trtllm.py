"""Record what TensorRT-LLM's Python schedulers decide, pass by pass, in virtual time.

    python scripts/record_trtllm.py --checkout PATH OUT --family max-utilization --seed 1-20
    python scripts/record_trtllm.py --checkout PATH OUT --all --seed 1-20
    kvyard conform OUT/*

PATH is a checkout of TensorRT-LLM; nothing of it is built. ``scripts/trtllm_under_test.py`` names what is real and what stands
in; ``tests/golden/trtllm/README.md`` has the format.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from recorded_logs import Arguments, pass_ns, write_log
from trtllm_under_test import CapacitySchedulerPolicy, LlmRequestState, StandInManager, StandInRequest, load

FORMAT = "trtllm-log/1"
DEFAULTS: dict[str, Any] = {
    "tokens_per_block": 32,
    "num_blocks": 128,
    "max_batch_size": 8,
    "max_num_tokens": 1024,
    "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
    "enable_chunked_prefill": False,
    "context_chunking_policy": "FIRST_COME_FIRST_SERVED",
    "chunk_unit_size": 32,
    "enable_block_reuse": False,
    "overlap": False,
    "batch_wait_timeout_iters": 0,
    "batch_wait_max_tokens_ratio": 0.0,
}
MAX_SEQ_LEN = 1 << 20
FRESH, SPACING = 1 << 20, 1 << 14
"""Token ids that only one request has begin at ``FRESH``, ``SPACING`` apart."""
CHUNKED = {"enable_chunked_prefill": True}
MAX_UTILIZATION = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
REUSE = {"enable_block_reuse": True, "num_blocks": 4096}
OVERLAP = {"overlap": True}
SMALL = {"num_blocks": 40}


def sizes(rng: random.Random) -> dict[str, Any]:
    """Settings that every family varies."""
    block = rng.choice([16, 32, 64])
    return {"tokens_per_block": block, "chunk_unit_size": block, "max_batch_size": rng.choice([2, 4, 8, 16])}


def unit(rng: random.Random) -> dict[str, Any]:
    """A chunk unit of several blocks."""
    block = rng.choice([8, 16, 32])
    return {"tokens_per_block": block, "chunk_unit_size": block * rng.choice([2, 4]), "num_blocks": 256}


def tight(rng: random.Random) -> dict[str, Any]:
    """A pool for two to four requests."""
    block = rng.choice([16, 32])
    return {"tokens_per_block": block, "chunk_unit_size": block, "num_blocks": 1024 // block + rng.randrange(20)}


def waits(rng: random.Random) -> dict[str, Any]:
    """Prompts that wait for a fuller batch."""
    return {
        "batch_wait_timeout_iters": rng.choice([1, 3, 10]),
        "batch_wait_max_tokens_ratio": rng.choice([0.05, 0.3, 0.9]),
    }


def little(rng: random.Random) -> dict[str, Any]:
    """Few tokens in a pass."""
    return {"max_num_tokens": rng.choice([128, 192, 256, 300])}


Part = dict[str, Any] | Callable[[random.Random], dict[str, Any]]
EQUAL = {"context_chunking_policy": "EQUAL_PROGRESS"}
FAMILIES: dict[str, list[Part]] = {
    "no-evict": [sizes],
    "no-evict-tight": [tight],
    "no-evict-chunked": [sizes, CHUNKED, little],
    "no-evict-chunked-tight": [tight, CHUNKED, little],
    "chunk-unit": [unit, CHUNKED, little],
    "equal-progress": [sizes, CHUNKED, little, EQUAL],
    "equal-progress-unit": [unit, CHUNKED, little, EQUAL],
    "max-utilization": [sizes, MAX_UTILIZATION, SMALL],
    "max-utilization-tight": [tight, MAX_UTILIZATION],
    "max-utilization-chunked": [sizes, MAX_UTILIZATION, CHUNKED, little, SMALL],
    "max-utilization-chunked-tight": [tight, MAX_UTILIZATION, CHUNKED, little],
    "max-utilization-equal-progress": [tight, MAX_UTILIZATION, CHUNKED, little, EQUAL],
    "batch-wait": [sizes, waits],
    "batch-wait-chunked": [sizes, waits, CHUNKED, little],
    "batch-wait-max-utilization": [tight, waits, MAX_UTILIZATION],
    "reuse": [sizes, REUSE],
    "reuse-chunked": [sizes, REUSE, CHUNKED, little],
    "reuse-chunk-unit": [unit, REUSE, CHUNKED, little],
    "reuse-equal-progress": [sizes, REUSE, CHUNKED, little, EQUAL],
    "reuse-batch-wait": [sizes, REUSE, CHUNKED, waits, little],
    "reuse-max-utilization": [sizes, REUSE, MAX_UTILIZATION],
    "reuse-max-utilization-chunked": [sizes, REUSE, MAX_UTILIZATION, CHUNKED, little],
    "overlap": [sizes, OVERLAP],
    "overlap-tight": [tight, OVERLAP],
    "overlap-chunked": [sizes, OVERLAP, CHUNKED, little],
    "overlap-batch-wait": [sizes, OVERLAP, CHUNKED, waits, little],
    "overlap-reuse": [sizes, OVERLAP, REUSE, CHUNKED, little],
}


def workload(name: str, seed: int) -> tuple[dict[str, Any], dict[str, int], list[dict[str, Any]]]:
    """Settings, clock and requests of one log."""
    rng = random.Random(f"{name}@{seed}")
    settings = dict(DEFAULTS)
    for part in FAMILIES[name]:
        settings |= part if isinstance(part, dict) else part(rng)
    timing = {
        "base": rng.randrange(2_000_000, 9_000_000),
        "per_token": rng.randrange(2_000, 40_000),
        "per_request": rng.randrange(10_000, 100_000),
        "per_context": rng.randrange(0, 200),
    }
    return settings, timing, _requests(rng, settings)


def _requests(rng: random.Random, settings: dict[str, Any]) -> list[dict[str, Any]]:
    longest = (settings["num_blocks"] - 1) * settings["tokens_per_block"]
    if not settings["enable_chunked_prefill"]:
        # A request that was paused computes its answer so far again, in one pass.
        longest = min(longest, settings["max_num_tokens"])
    systems = [[index * SPACING, rng.randint(20, 300)] for index in range(rng.randint(1, 3))]
    requests: list[dict[str, Any]] = []
    now = 0
    for index in range(rng.randint(12, 40)):
        if rng.random() > 0.3:
            now += rng.randint(0, 60_000_000)
        fresh = FRESH + 2 * index * SPACING
        prompt = [list(rng.choice(systems))] if rng.random() < 0.6 else []
        if requests and rng.random() < 0.15:
            prompt = [list(run) for run in rng.choice(requests)["prompt"]]
        if not prompt or rng.random() < 0.8:
            prompt.append([fresh, rng.randint(1, 500)])
        output = rng.randint(1, 120)
        if sum(count for _, count in prompt) + output > longest:
            prompt, output = [[fresh, max(1, longest // 3)]], min(output, longest // 3)
        requests.append(
            {
                "request": f"r{index}",
                "arrival": now,
                "prompt": prompt,
                "output": [fresh + SPACING, output],
                "priority": 0,
                "abort": None,
            }
        )
    return requests


class Walk:
    """The executor's loop over the real schedulers, in virtual time."""

    def __init__(self, schedulers: Any, executor: type, settings: dict[str, Any], timing: dict[str, int]) -> None:
        self.settings, self.timing = settings, timing
        self.manager = StandInManager(
            settings["num_blocks"], settings["tokens_per_block"], settings["enable_block_reuse"], MAX_SEQ_LEN
        )
        chunking = (
            (settings["context_chunking_policy"], settings["chunk_unit_size"])
            if settings["enable_chunked_prefill"]
            else None
        )
        loop = self.loop = executor.__new__(executor)
        loop.scheduler = schedulers.SimpleUnifiedScheduler(
            settings["max_batch_size"],
            settings["max_num_tokens"],
            self.manager,
            None,
            CapacitySchedulerPolicy(settings["capacity_scheduler_policy"]),
            chunking,
        )
        loop.active_requests = []
        loop.inflight_req_ids = set()
        loop.enable_attention_dp = loop._scheduler_manages_kv_suspend = loop._is_kv_manager_v2 = False
        loop.kv_cache_manager = loop.kv_cache_transceiver = None
        loop.max_num_tokens = settings["max_num_tokens"]
        loop.batch_wait_iters_count = 0
        loop.batch_wait_timeout_iters = settings["batch_wait_timeout_iters"]
        loop.batch_wait_max_tokens_ratio = settings["batch_wait_max_tokens_ratio"]
        loop.enable_batch_waiting = loop.batch_wait_timeout_iters > 0 or loop.batch_wait_max_tokens_ratio > 0
        self.queue: list[StandInRequest] = []
        self.steps: list[dict[str, Any]] = []
        self.ends: dict[str, dict[str, Any]] = {}
        self.first_tokens: dict[str, int] = {}
        self.cached: dict[str, int] = {}

    def run(self, requests: list[dict[str, Any]]) -> None:
        arrivals = [(line["arrival"], self._request(index, line)) for index, line in enumerate(requests)]
        arrivals.reverse()
        now = 0
        flight: tuple[int, Any, dict[str, Any]] | None = None  # the end of the pass under way, its batch, its line
        while arrivals or self.queue or self.loop.active_requests or flight:
            self._fetch(arrivals, now)
            decided = self._decide(now)
            if decided is None and flight is None:
                assert arrivals, "requests wait, nothing runs and nothing is scheduled"
                now = arrivals[-1][0]
                continue
            if self.settings["overlap"]:
                # The next pass starts when the one under way ends, and is decided on before.
                started = decided and (max(now, flight[0]) if flight else now, *decided)
                if flight:
                    now = flight[0]
                    self._finish(flight[1], flight[2], now)
                flight = self._start(*started) if started else None
                if flight and started and started[0] > now:
                    now = started[0]
            else:
                assert decided is not None
                end, batch, line = self._start(now, *decided)
                now = end
                self._finish(batch, line, now)

    def _request(self, at: int, line: dict[str, Any]) -> StandInRequest:
        prompt = [token for first, count in line["prompt"] for token in range(first, first + count)]
        first, count = line["output"]
        return StandInRequest(at, line["request"], prompt, list(range(first, first + count)))

    def _fetch(self, arrivals: list[tuple[int, StandInRequest]], now: int) -> None:
        while arrivals and arrivals[-1][0] <= now:
            self.queue.append(arrivals.pop()[1])
        active = self.loop.active_requests
        while self.queue and len(active) < self.settings["max_batch_size"]:
            active.append(self.queue.pop(0))

    def _decide(self, now: int) -> tuple[Any, dict[str, Any]] | None:
        batch, _, _ = self.loop._schedule()
        for request in batch.paused_requests:
            self.manager.store(request, self._computed(request))
            self.manager.remove_sequence(request)
            request.pause()
        if not batch.batch_size:
            assert not batch.paused_requests
            return None
        context = batch.context_requests
        entering = [request for request in context if request.is_first_context_chunk]
        self.manager.add_sequences(entering)
        for request in batch.generation_requests:
            self.manager.add_token(request)
        batch.reset_context_requests(context)
        context = batch.context_requests
        line: dict[str, Any] = {
            "step": len(self.steps),
            "scheduled": now,
            "tokens": {
                **{request.name: request.context_chunk_size for request in context},
                **{request.name: 1 for request in batch.generation_requests},
            },
            "running": len(self.manager.sequences),
            "waiting": len(self.queue) + len(self.loop.active_requests) - len(self.manager.sequences),
            "free": self.manager.free,
            "line": None,
        }
        for field, again in (("new", False), ("resumed", True)):
            named = {r.name: r.prepopulated for r in entering if bool(r.pauses) is again}
            if named:
                line[field] = named
        if batch.paused_requests:
            line["preempted"] = [request.name for request in batch.paused_requests]
        for request in entering:
            self.cached.setdefault(request.name, request.prepopulated)
        self.steps.append(line)
        return batch, line

    def _computed(self, request: StandInRequest) -> int:
        """Tokens of a request whose keys and values are in its blocks."""
        return request.context_current_position if request.is_context_init_state else len(request.tokens) - 1

    def _start(self, start: int, batch: Any, line: dict[str, Any]) -> tuple[int, Any, dict[str, Any]]:
        lengths = [request.context_current_position + request.context_chunk_size for request in batch.context_requests]
        lengths += [self.manager.lengths[request.request_id] for request in batch.generation_requests]
        line["start"] = start
        line["ns"] = pass_ns(self.timing, sum(line["tokens"].values()), len(lengths), sum(lengths))
        if self.settings["overlap"]:
            self._advance_states(batch)
        return start + line["ns"], batch, line

    def _advance_states(self, batch: Any) -> None:
        batch.samples = []
        for request in batch.context_requests:
            request.move_to_next_context_chunk()
            if not request.context_remaining_length:
                batch.samples.append(request)
                ends = self.settings["overlap"] and request.max_new_tokens <= 1
                request.state = (
                    LlmRequestState.GENERATION_TO_COMPLETE if ends else LlmRequestState.GENERATION_IN_PROGRESS
                )
        if self.settings["overlap"]:
            for request in batch.generation_requests:
                if self.manager.lengths[request.request_id] - request.prompt_len + 1 >= request.max_new_tokens:
                    request.state = LlmRequestState.GENERATION_TO_COMPLETE

    def _finish(self, batch: Any, line: dict[str, Any], now: int) -> None:
        """The pass is over at ``now``: its tokens are known."""
        if not self.settings["overlap"]:
            self._advance_states(batch)
        finished = []
        for request in [*batch.samples, *batch.generation_requests]:
            request.produce()
            self.first_tokens.setdefault(request.name, now)
            if len(request.tokens) - request.prompt_len >= request.max_new_tokens:
                finished.append(request)
        for request in batch.context_requests:
            self.manager.store(request, request.context_current_position)
        for request in self.loop.active_requests:
            if request in finished:
                request.state = LlmRequestState.GENERATION_COMPLETE
                self.manager.store(request, len(request.tokens) - 1)
                self.manager.remove_sequence(request)
                self.ends[request.name] = {
                    "end": request.name,
                    "reason": "length",
                    "at": now,
                    "first_token": self.first_tokens[request.name],
                    "output": request.produced,
                    "cached": self.cached[request.name],
                    "preemptions": request.pauses,
                }
        if finished:
            line["finished"] = [request.name for request in self.loop.active_requests if request in finished]
            self.loop.active_requests = [each for each in self.loop.active_requests if each not in finished]


def record(name: str, seed: int, out: Path, schedulers: Any, executor: type, version: str) -> str:
    """Write one log and return its name with what it has."""
    settings, timing, requests = workload(name, seed)
    walk = Walk(schedulers, executor, settings, timing)
    walk.run(requests)
    header = {"format": FORMAT, "version": version, "config": settings, "timing": timing}
    lines = [header, *requests, *walk.steps, *walk.ends.values()]
    file = write_log(out, f"{name}@{seed}", lines)
    return f"{file}: {len(requests)} requests, {len(walk.steps)} steps"


def main() -> int:
    arguments = Arguments(__doc__ or "", FAMILIES)
    arguments.parser.add_argument("--checkout", type=Path, help="a checkout of TensorRT-LLM")
    parsed = arguments.parse()
    if parsed is None:
        return 0
    args, jobs = parsed
    if args.checkout is None:
        arguments.parser.error("give --checkout")
    schedulers, executor = load(args.checkout)
    version = re.findall(r'__version__ = "(.*)"', (args.checkout / "tensorrt_llm/version.py").read_text())[0]
    for name, seed in jobs:
        print(record(name, seed, args.out, schedulers, executor, version), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
