"""Real runs from files: per request its lengths, when it came, and when its first and its last token came.

A kind of file is one ``RunReader`` of ``READERS``, recognised by content. Times become nanoseconds since the first arrival.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvyard.clock import MS, SECOND
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.replay.traces import Trace, TraceRequest
from kvyard.replay.traces.files import whole
from kvyard.replay.traces.formats.mooncake import BLOCK_SIZE

NO_TIMES = "a run to compare with needs when each request came, and its first and its last token"
IN_A_FOLDER = ("requests.jsonl", "vllm/requests.jsonl", "profile_export.jsonl")
"""Files that are read in a folder."""


class MeasuredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was answered. Times are nanoseconds since the run's first arrival."""

    request: TraceRequest
    first_token: int | None
    """``None`` where it wasn't seen, as in an answer that came in one piece."""
    ended: int
    cached: int | None = None
    """Prompt tokens that the engine found in its cache, if the run has them."""
    gaps: Sequence[int] | None = None
    """Between its tokens, where each was seen."""


class MeasuredRun(msgspec.Struct, kw_only=True):
    """A real run, in order of arrival."""

    name: str
    format: str
    requests: list[MeasuredRequest]
    settings: dict[str, object] = {}
    """Settings of the run's engine, by the names of replay settings."""
    closed_loop_s: float | None = None
    """Duration, if arrivals aren't known: each request began when another had ended."""
    client: bool = False
    """True if clients measured the times: then they include HTTP and tokenizing."""
    notes: list[str] = []
    """Remarks for readers of the comparison."""


class RunRow(NamedTuple):
    """A request as a file has it: times in nanoseconds of any clock, ``None`` if they are missing."""

    input: int
    output: int
    came: int | None
    first_token: int | None
    ended: int | None
    name: str | None = None
    cached: int | None = None
    gaps: Sequence[int] | None = None
    prompt: TraceRequest | None = None
    """Shared prompt, if known: only its ids and tokens count."""


class RunContent(NamedTuple):
    """Content of a file, as read."""

    rows: Iterable[RunRow]
    settings: Mapping[str, object] = {}
    closed_loop_s: float | None = None
    """Duration of the run, if arrivals aren't known."""


class RunReader(NamedTuple):
    """A kind of file."""

    name: str
    recognise: Callable[[Mapping[str, Any]], bool]
    """Return true if a file is of this kind, from its document or its first line."""
    read: Callable[[Path, list[Any]], RunContent]
    """Takes the file and its records: lines, or one document. Raises ``KvyardError``, ``msgspec.ValidationError``."""
    client: bool = False
    """True if the times are a client's."""


def read_run(path: str | Path, workload: Trace | None = None) -> MeasuredRun:
    """Return the run in a file, packed or not, or in a folder with a ``requests.jsonl``.

    ``workload`` is the trace that the run was driven with, in the same order: it says what prompts share.
    Raises ``KvyardError`` for what can't be read or isn't known, has no requests or no times, and for another run's workload.
    """
    given = Path(path)
    path = _file_in(given)
    records = _records(path)
    reader = next(
        (candidate for candidate in READERS if isinstance(records[0], dict) and candidate.recognise(records[0])), None
    )
    if reader is None:
        known = "; ".join(candidate.name for candidate in READERS)
        raise KvyardError(f"{path} is no run that kvyard knows; there are {known}")
    try:
        content = reader.read(path, records)
        rows = list(content.rows)
    except msgspec.ValidationError as error:
        raise KvyardError(f"{path} can't be read as {reader.name}: {error}") from None
    if not rows:
        raise KvyardError(f"{path} has no requests in it")
    if workload is not None:
        rows = _with_prefixes(path, rows, workload)
    requests, notes = _measured(path, rows)
    return MeasuredRun(
        name=given.resolve().name,
        format=reader.name,
        requests=requests,
        settings=dict(content.settings),
        closed_loop_s=content.closed_loop_s,
        client=reader.client,
        notes=notes,
    )


def _file_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    file = next((path / name for name in IN_A_FOLDER if (path / name).is_file()), None)
    if file is None:
        raise KvyardError(f"{path} has none of {', '.join(IN_A_FOLDER)}: name the file of the run")
    return file


def _records(path: Path) -> list[Any]:
    """Return the one document of a file, or its lines."""
    data = whole(path)
    if not data.strip():
        raise KvyardError(f"{path} has no requests in it: it is empty")
    # The standard library's, because benchmarks in Python write NaN if nothing was measured.
    try:
        return [json.loads(data)]
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        raise KvyardError(f"{path} is neither JSON nor lines of JSON") from None


def _measured(path: Path, rows: Sequence[RunRow]) -> tuple[list[MeasuredRequest], list[str]]:
    """Return the requests that were answered, by arrival, and a note on the others."""
    timed = [
        (index, row)
        for index, row in enumerate(rows)
        if row.came is not None and row.ended is not None and row.output > 0
    ]
    if not timed:
        raise KvyardError(f"none of the {len(rows):,} requests of {path} has times and an answer: {NO_TIMES}")
    start = min(row.came for _, row in timed if row.came is not None)
    requests = []
    names: set[str] = set()
    for index, row in timed:
        assert row.came is not None and row.ended is not None
        name = row.name or str(index)
        first = row.first_token
        if not row.came <= (row.ended if first is None else first) <= row.ended:
            raise KvyardError(f"request {name} of {path} has times that go back: {NO_TIMES}, in that order")
        if row.input < 1:
            raise KvyardError(
                f"request {name} of {path} has a prompt of {row.input} tokens: there must be one at least"
            )
        if name in names:
            raise KvyardError(f"{path} has two requests of the name {name}: names must be unique")
        names.add(name)
        request = TraceRequest(name, row.came - start, row.input, row.output)
        if row.prompt is not None:
            request = msgspec.structs.replace(
                request,
                **{field: getattr(row.prompt, field) for field in ("ids", "id_block_size", "tokens", "output_tokens")},
            )
        requests.append(
            MeasuredRequest(
                request=request,
                first_token=None if first is None else first - start,
                ended=row.ended - start,
                cached=row.cached,
                gaps=row.gaps,
            )
        )
    requests.sort(key=lambda measured: measured.request.arrival)
    left_out = len(rows) - len(requests)
    return requests, [
        f"{left_out:,} of {len(rows):,} requests have no times or no answer, and are left out."
    ] if left_out else []


def _with_prefixes(path: Path, rows: Sequence[RunRow], workload: Trace) -> list[RunRow]:
    """Return ``rows`` with what their prompts share, from a trace of the same requests in the same order."""
    advice = "pass the trace that the run was driven with"
    trace = list(islice(workload, len(rows) + 1))
    if len(trace) != len(rows):
        there = "more" if len(trace) > len(rows) else f"{len(trace):,}"
        raise KvyardError(f"{path} has {len(rows):,} requests, and {workload.name} {there}: {advice}")
    for index, (row, other) in enumerate(zip(rows, trace, strict=False)):
        if row.input != other.input_length:
            raise KvyardError(
                f"request {row.name or index} of {path} has {row.input:,} prompt tokens, "
                f"and {other.input_length:,} in {workload.name}: {advice}"
            )
    return [row._replace(prompt=other) for row, other in zip(rows, trace, strict=False)]


def _ns(value: float | None, unit: int = SECOND) -> int | None:
    """Return nanoseconds, ``None`` for what is no time."""
    return round(value * unit) if value is not None and math.isfinite(value) else None


def _later(arrived_ns: int | None, took: float | None, unit: int) -> int | None:
    """Return the time ``took`` after ``arrived_ns``, if both are known."""
    length = _ns(took, unit)
    return None if arrived_ns is None or length is None else arrived_ns + length


# -- LLMServingSim ------------------------------------------------------------------------------------------------------


class _ServingSimRow(msgspec.Struct):
    input_toks: int
    output_toks: int
    request_id: str | None = None
    arrival_time: float | None = None
    queued_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None


class _ServingSimEngine(msgspec.Struct, frozen=True):
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    kv_cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None


class _ServingSimCache(msgspec.Struct):
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None


class _ServingSimScheduler(msgspec.Struct):
    async_scheduling: bool | None = None


class _ServingSimResolved(msgspec.Struct, frozen=True):
    scheduler_config: _ServingSimScheduler | None = None


class _ServingSimMeta(msgspec.Struct):
    """``meta.json`` beside the requests, as far as it says what to replay with."""

    vllm_version: str | None = None
    engine_kwargs: _ServingSimEngine = _ServingSimEngine()
    kv_cache: _ServingSimCache | None = None
    resolved_config: _ServingSimResolved | None = None

    def settings(self) -> dict[str, object]:
        """In the names of replay settings; ``data_parallel_size`` stays, since ranks may be workers or ranks of one."""
        taken: dict[str, object] = {
            name: value for name, value in msgspec.structs.asdict(self.engine_kwargs).items() if value is not None
        }
        for name, usual in (
            ("pipeline_parallel_size", 1),
            ("enable_expert_parallel", False),
            ("kv_cache_dtype", "auto"),
        ):
            if taken.get(name) == usual:
                del taken[name]
        if self.kv_cache is not None and self.kv_cache.num_gpu_blocks is not None:
            # vLLM adds up what its data ranks have, and counts the null block of each, which holds nothing.
            taken["num_gpu_blocks"] = self.kv_cache.num_gpu_blocks // (self.engine_kwargs.data_parallel_size or 1) - 1
            taken["block_size"] = self.kv_cache.block_size
        elif "gpu_memory_utilization" not in taken and _version(self.vllm_version) < (0, 20):
            taken["gpu_memory_utilization"] = 0.9  # what it was by default until then
        if self.kv_cache is not None and self.kv_cache.enable_prefix_caching is not None:
            taken["enable_prefix_caching"] = self.kv_cache.enable_prefix_caching
        resolved = self.resolved_config
        if resolved is not None and resolved.scheduler_config is not None:
            taken["async_scheduling"] = resolved.scheduler_config.async_scheduling
        return {name: value for name, value in taken.items() if value is not None}


def _version(text: str | None) -> tuple[int, int]:
    """Return the first two numbers of a version; a high one if it isn't known."""
    matched = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(matched[1]), int(matched[2])) if matched else (1 << 30, 0)


def _serving_sim(path: Path, records: list[Any]) -> RunContent:
    rows = msgspec.convert(records, list[_ServingSimRow])
    settings: dict[str, object] = {}
    beside = path.with_name("meta.json")
    if beside.is_file():
        try:
            settings = msgspec.json.decode(beside.read_bytes(), type=_ServingSimMeta).settings()
        except DECODE_ERRORS as error:
            raise KvyardError(f"{beside} can't be read: {error}") from None
    replayed = (
        RunRow(
            row.input_toks,
            row.output_toks,
            _ns(row.queued_ts),
            _ns(row.first_token_ts),
            _ns(row.last_token_ts),
            row.request_id,
        )
        for row in rows
    )
    return RunContent(replayed, settings)


# -- an engine's own log ------------------------------------------------------------------------------------------------


class _LoggedRow(msgspec.Struct):
    inp: int
    out: int
    at: int | None = None
    first: int | None = None
    end: int | None = None
    got: int | None = None
    cached: int | None = None
    i: int | None = None


class _TruthLog(msgspec.Struct):
    requests: list[_LoggedRow]
    num_blocks: int | None = None
    max_seqs: int | None = None
    mbt: int | None = None


def _engine_log(path: Path, records: list[Any]) -> RunContent:
    log = msgspec.convert(records[0], _TruthLog)
    named = {"num_gpu_blocks": log.num_blocks, "max_num_seqs": log.max_seqs, "max_num_batched_tokens": log.mbt}
    rows = (
        RunRow(
            row.inp,
            row.out if row.got is None else row.got,
            row.at,
            row.first,
            row.end,
            None if row.i is None else str(row.i),
            row.cached,
        )
        for row in log.requests
    )
    return RunContent(rows, {name: value for name, value in named.items() if value is not None})


# -- vllm bench serve ---------------------------------------------------------------------------------------------------


class _VllmBench(msgspec.Struct):
    """``vllm bench serve --save-result --save-detailed``: seconds, one entry per request."""

    input_lens: list[int] | None = None
    output_lens: list[int] | None = None
    ttfts: list[float] | None = None
    itls: list[list[float]] | None = None
    start_times: list[float] | None = None
    latencies: list[float] | None = None
    """Older versions don't have them: a request took its TTFT and its gaps."""
    errors: list[str | None] | None = None
    request_rate: float | str | None = None
    max_concurrency: int | None = None
    duration: float | None = None


def _vllm_bench(path: Path, records: list[Any]) -> RunContent:
    bench = msgspec.convert(records[-1], _VllmBench)
    if bench.input_lens is None or bench.output_lens is None or bench.ttfts is None or bench.itls is None:
        raise KvyardError(
            f"{path} has no times of single requests: run vllm bench serve with --save-result --save-detailed"
        )
    count = len(bench.input_lens)
    for name in ("output_lens", "ttfts", "itls", "start_times", "latencies", "errors"):
        values = getattr(bench, name)
        if values is not None and len(values) != count:
            raise KvyardError(f"{path} has {count:,} input_lens and {len(values):,} {name}: there must be as many")
    starts, settings = bench.start_times, {}
    if starts is None:
        # All were ready at once, and a limit let some run: that can be repeated without knowing when each began.
        if bench.request_rate not in ("inf", math.inf) or bench.max_concurrency is None or not bench.duration:
            raise KvyardError(f"{path} has no start_times, so it isn't known when requests came: use a newer vLLM")
        starts, settings = [0.0] * count, {"concurrency": bench.max_concurrency}
    rows = []
    for index in range(count):
        failed = bool(bench.errors and bench.errors[index]) or bench.ttfts[index] <= 0
        first = starts[index] + bench.ttfts[index]
        took = bench.latencies[index] if bench.latencies else bench.ttfts[index] + sum(bench.itls[index])
        rows.append(
            RunRow(
                bench.input_lens[index],
                0 if failed else bench.output_lens[index],
                _ns(starts[index]),
                _ns(first),
                _ns(max(first, starts[index] + took)),
                gaps=[_ns(gap) or 0 for gap in bench.itls[index]],
            )
        )
    return RunContent(rows, settings, bench.duration if bench.start_times is None else None)


# -- AIPerf -------------------------------------------------------------------------------------------------------------


class _AiperfMetadata(msgspec.Struct):
    request_start_ns: int
    x_request_id: str | None = None


class _AiperfMetric(msgspec.Struct):
    value: float | list[float] | str | bool | None = None


class _AiperfRow(msgspec.Struct):
    """A line of ``profile_export.jsonl``; milliseconds and tokens."""

    metadata: _AiperfMetadata
    metrics: dict[str, _AiperfMetric] | None = None


def _aiperf(path: Path, records: list[Any]) -> RunContent:
    return RunContent(map(_aiperf_row, msgspec.convert(records, list[_AiperfRow])))


def _aiperf_row(row: _AiperfRow) -> RunRow:
    metrics = {name: metric.value for name, metric in (row.metrics or {}).items()}
    numbers = {name: value for name, value in metrics.items() if isinstance(value, float) and math.isfinite(value)}
    arrived_ns, gaps = row.metadata.request_start_ns, metrics.get("inter_chunk_latency")
    return RunRow(
        int(numbers.get("input_sequence_length", 0)),
        int(numbers.get("output_sequence_length", 0)),
        arrived_ns,
        _later(arrived_ns, numbers.get("time_to_first_token"), MS),
        _later(arrived_ns, numbers.get("request_latency"), MS),
        row.metadata.x_request_id,
        gaps=[_ns(gap, MS) or 0 for gap in gaps] if isinstance(gaps, list) else None,
    )


# -- the gateway's recording --------------------------------------------------------------------------------------------


class _RecordedRow(msgspec.Struct):
    """A line of ``kvyard gateway --record`` or of an engine's recorder: Mooncake's, and how many milliseconds it took."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    block_size: int = BLOCK_SIZE
    ttft: float | None = None
    e2e: float | None = None
    cached: int | None = None


def _recording(path: Path, records: list[Any]) -> RunContent:
    rows = msgspec.convert(records, list[_RecordedRow])
    if all(row.e2e is None for row in rows):
        raise KvyardError(
            f"{path} is a trace without ttft and e2e in its rows: {NO_TIMES}; kvyard replay takes it as it is"
        )
    return RunContent(map(_recorded, rows))


def _recorded(row: _RecordedRow) -> RunRow:
    arrived_ns = _ns(row.timestamp, MS)
    prompt = None
    if row.hash_ids is not None:
        prompt = TraceRequest("", 0, row.input_length, row.output_length, row.hash_ids, row.block_size)
    return RunRow(
        row.input_length,
        row.output_length,
        arrived_ns,
        _later(arrived_ns, row.ttft, MS),
        _later(arrived_ns, row.e2e, MS),
        cached=row.cached,
        prompt=prompt,
    )


def _has(*fields: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda head: all(field in head for field in fields)


def _is_engine_recording(head: Mapping[str, Any]) -> bool:
    return head.get("clock") == "engine" and _has("timestamp", "input_length", "output_length")(head)


READERS = (
    RunReader("LLMServingSim's requests.jsonl", _has("input_toks", "output_toks"), _serving_sim),
    RunReader("a result of vllm bench serve --save-detailed", _has("request_throughput"), _vllm_bench, True),
    RunReader("AIPerf's profile_export.jsonl", _has("metadata", "metrics"), _aiperf, True),
    RunReader("the trace that an engine recorded (kvyard.vllm)", _is_engine_recording, _recording),
    RunReader(
        "a recording of kvyard gateway --record", _has("timestamp", "input_length", "output_length"), _recording, True
    ),
    RunReader("a log of requests (at, first, end, inp, out)", _has("requests"), _engine_log),
)
