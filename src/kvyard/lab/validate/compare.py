"""Replays a measured run and compares request by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard.clock import MS, SECOND
from kvyard.engine.models import find_config
from kvyard.engine.models.fields import Fields
from kvyard.errors import KvyardError
from kvyard.lab.validate.client import find_closed_loop, with_prefixes
from kvyard.lab.validate.reading import MeasuredRequest, MeasuredRun
from kvyard.replay.record import Record
from kvyard.replay.report.numbers import Spread, spread, weighted
from kvyard.replay.report.words import timing_text
from kvyard.replay.run import Progress, SimulatedRun, replay
from kvyard.replay.settings import ONLY_WITH_MODEL, SETTINGS, make_config

COLUMNS = ("mean", "p50", "p90", "p99")
Values = npt.NDArray[np.float64]


class ComparedLatency(msgspec.Struct, kw_only=True):
    """One kind of latency, in milliseconds; errors are shares of the measured value (0.02 is 2 % too long)."""

    measured: Spread
    replayed: Spread
    error: dict[str, float]
    """Error of the mean and of percentiles."""
    scatter: Spread | None = None
    """Absolute error of single requests. ``None`` if requests can't be compared one by one."""


class ComparedRate(msgspec.Struct, kw_only=True):
    """One figure of the whole run."""

    measured: float
    replayed: float
    error: float
    """A share of the measured value; of a share itself, the difference."""


class RequestPair(msgspec.Struct, kw_only=True):
    """Times of one request, in milliseconds: ``[measured, replayed]``."""

    id: str
    arrival_s: float
    input: int
    output: int
    e2e: tuple[float, float]
    ttft: tuple[float, float] | None = None
    """``None`` where the run doesn't have its first token."""
    tpot: tuple[float, float] | None = None
    """``None`` for answers of one token too."""


class Validation(msgspec.Struct, kw_only=True):
    """A run beside its replay."""

    kind: str = "kvyard validation"
    version: int = 1
    run: str
    format: str
    complete: bool
    """True if the replay went to the end."""
    requests: int
    """Number of compared requests."""
    timing: str
    """Source of the replay's times, and their known error."""
    timing_error: float | None = None
    """Error of the timing, as a share; null if unknown."""
    latency: dict[str, ComparedLatency]
    """``ttft``, ``tpot``, ``e2e``; ``itl`` where the run has every gap."""
    throughput: dict[str, ComparedRate]
    hit_share: ComparedRate | None = None
    """Share of prompt tokens that were hits; ``None`` if the run doesn't have it."""
    preemptions: int
    """In the replay."""
    settings: dict[str, object]
    """Settings taken from the run itself."""
    notes: list[str]
    config: dict[str, Any]
    pairs: list[RequestPair]

    @property
    def worst(self) -> float:
        """The largest error of means and percentiles, without sign. ITL is left out: clients see chunks rather than tokens."""
        return max(
            abs(error) for name, latency in self.latency.items() if name != "itl" for error in latency.error.values()
        )

    def errors(self) -> dict[tuple[str, str], float]:
        """Return all errors that are shares of a measured value, by metric and statistic (empty for rates)."""
        errors = {
            (name, which): error for name, latency in self.latency.items() for which, error in latency.error.items()
        }
        return errors | {(name, ""): rate.error for name, rate in self.throughput.items()}


def validate(run: MeasuredRun, settings: Mapping[str, object], progress: Progress | None = None) -> Validation:
    """Replay ``run`` with ``settings`` on top of its engine's, on one worker unless they name more, and compare.

    Raises ``KvyardError`` for settings that can't be, and where no request of the replay was answered.
    """
    if settings.get("speedup") is not None:
        raise KvyardError("speedup changes when requests come, and then there is nothing to compare: leave it out")
    run = _as_sent(run, settings)
    taken = _from_run(run, settings)
    config = make_config({"workers": 1, **taken, **settings})
    done = replay([measured.request for measured in run.requests], config=config, progress=progress)
    return _compared(run, done, taken)


def _as_sent(run: MeasuredRun, settings: Mapping[str, object]) -> MeasuredRun:
    """Return ``run`` with what it shows of its client and of what prompts share."""
    requests, notes, more = run.requests, list(run.notes), dict[str, object]()
    loop = None
    if run.closed_loop_s is None and not any(settings.get(name) for name in ("concurrency", "client", "turnaround")):
        loop = find_closed_loop(requests)
    if loop is not None:
        more = {"concurrency": loop.concurrency, "turnaround": f"{loop.turnaround}ns"}
        notes.append(
            f"Never more than {loop.concurrency:,} requests were in flight, and the next one came "
            f"{loop.turnaround / MS:.1f} ms after another had ended: the replay sends them so, not at the recorded times."
        )
    if any(measured.cached for measured in requests) and all(
        measured.request.ids is measured.request.tokens is None for measured in requests
    ):
        requests = with_prefixes(requests)
        notes.append(
            "The run doesn't say what prompts share: prefixes are made up by the cached tokens that it counts. "
            "--workload TRACE has the real ones."
        )
    return msgspec.structs.replace(run, requests=requests, settings={**more, **run.settings}, notes=notes)


def _from_run(run: MeasuredRun, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the run's own settings of its engine that ``settings`` lack."""
    taken = {name: value for name, value in run.settings.items() if settings.get(name) is None}
    ranks = taken.pop("data_parallel_size", 1)
    model = settings.get("model")
    mixture = model is not None and Fields(find_config(str(model))).integer("num_experts", 0) > 0
    if not mixture:
        taken.pop("enable_expert_parallel", None)
    if isinstance(ranks, int) and ranks > 1 and not any(settings.get(name) for name in ("workers", "dp_size")):
        # vLLM's ranks are in step where they share experts, and otherwise have nothing to do with one another.
        taken["dp_size" if mixture else "workers"] = ranks
        if settings.get("router") is None:
            taken |= {"router": "least-loaded", "router_load": "requests"}  # its front end balances by requests
    if model is None:
        for name in ONLY_WITH_MODEL:
            taken.pop(name, None)
    if settings.get("gpu_memory") is not None:
        taken.pop("num_gpu_blocks", None)
    if "num_gpu_blocks" in taken or settings.get("num_gpu_blocks") is not None:
        taken.pop("gpu_memory_utilization", None)
    if settings.get("groups") is not None:
        taken.pop("block_size", None)
    SETTINGS.check_names(taken)
    return taken


def _compared(run: MeasuredRun, done: SimulatedRun, taken: dict[str, object]) -> Validation:
    records = {record.id: record for record in done.records}
    pairs = [(measured, records[measured.request.id]) for measured in run.requests if measured.request.id in records]
    answered = [(request, record) for request, record in pairs if record.status == "finished"]
    if not answered:
        raise KvyardError("no request of the replay was answered: there is nothing to compare")
    notes = list(run.notes)
    if len(answered) < len(pairs):
        lost = next(record for _, record in pairs if record.status != "finished")
        reason = f", the first, {lost.id}, because {lost.reason}" if lost.reason else ""
        notes.append(f"{len(pairs) - len(answered):,} requests got no answer in the replay and are left out{reason}.")
    if not done.complete:
        notes.append("The replay was interrupted: only what had been answered until then is compared.")
    measured = _times(
        [
            (request.request.arrival, request.first_token, request.ended, request.request.output_length)
            for request, _ in answered
        ]
    )
    more = _seen_by_clients(done) if run.client else 0
    if more:
        notes.append(f"{more / MS:.1f} ms a request are added to the replay for HTTP and tokenizing, as calibrated.")
    replayed = _times(
        [(record.arrival, record.first_token + more, record.ended + more, record.output) for _, record in answered]
    )
    errors = {name: _latency(measured[name], replayed[name]) for name in measured}
    latency = {name: error for name, error in errors.items() if error.measured.count}
    unseen = sum(request.first_token is None for request, _ in answered)
    if unseen:
        notes.append(f"{unseen:,} answers came in one piece: they count in E2E alone.")
    itl = _gaps(answered, done)
    if itl is not None:
        latency["itl"] = itl
    return Validation(
        run=run.name,
        format=run.format,
        complete=done.complete,
        requests=len(answered),
        timing="; ".join(map(timing_text, done.report.timing)),
        timing_error=done.report.timing_error,
        latency=latency,
        throughput=_throughput(answered, run.closed_loop_s),
        hit_share=_hit_share(answered),
        preemptions=sum(record.preemptions for _, record in answered),
        settings=taken,
        notes=notes,
        config=done.report.config,
        pairs=_pairs(answered, measured, replayed),
    )


def _seen_by_clients(done: SimulatedRun) -> int:
    """Return nanoseconds that clients wait for once per request, beyond the engine."""
    return round(max(kind.engine.timing.request_ms() for kind in done.fleet.config.workers) * MS)


def _times(rows: Sequence[tuple[int, int | None, int, int]]) -> dict[str, Values]:
    """Return milliseconds of each request, from its arrival, first token, end and length; nan if there is none."""
    arrived, first, ended, tokens = np.array(rows, dtype=np.float64).T
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return {"ttft": (first - arrived) / MS, "tpot": (ended - first) / gaps / MS, "e2e": (ended - arrived) / MS}


def _latency(measured: Values, replayed: Values) -> ComparedLatency:
    both = ~(np.isnan(measured) | np.isnan(replayed))
    measured, replayed = measured[both], replayed[both]
    seen = measured > 0
    off = np.abs(replayed[seen] / measured[seen] - 1)
    return _latency_of(spread(measured), spread(replayed), spread(off))


def _latency_of(measured: Spread, replayed: Spread, scatter: Spread | None) -> ComparedLatency:
    errors = {name: _error(getattr(measured, name), getattr(replayed, name)) for name in COLUMNS}
    return ComparedLatency(measured=measured, replayed=replayed, error=errors, scatter=scatter)


def _error(measured: float, replayed: float) -> float:
    return replayed / measured - 1 if measured else 0.0 if not replayed else float("inf")


def _gaps(answered: Sequence[tuple[MeasuredRequest, Record]], done: SimulatedRun) -> ComparedLatency | None:
    """Return the gaps between tokens. Those of requests have no order across runs, so only their spreads are compared."""
    seen = [gap for measured, _ in answered for gap in measured.gaps or ()]
    if not seen or any(measured.gaps is None for measured, _ in answered):
        return None
    return _latency_of(spread(seen, MS), weighted(*done.fleet.gaps.columns(), MS), None)


def _throughput(
    answered: Sequence[tuple[MeasuredRequest, Record]], closed_loop_s: float | None
) -> dict[str, ComparedRate]:
    took = (
        max(request.ended for request, _ in answered) - min(request.request.arrival for request, _ in answered)
        if closed_loop_s is None
        else round(closed_loop_s * SECOND),
        max(record.ended for _, record in answered) - min(record.arrival for _, record in answered),
    )
    amounts = {
        "requests_per_s": (len(answered), len(answered)),
        "output_tokens_per_s": (
            sum(request.request.output_length for request, _ in answered),
            sum(record.output for _, record in answered),
        ),
    }
    rates = {}
    for name, both in amounts.items():
        measured, replayed = (amount * SECOND / max(1, time) for amount, time in zip(both, took, strict=False))
        rates[name] = ComparedRate(measured=measured, replayed=replayed, error=_error(measured, replayed))
    return rates


def _hit_share(answered: Sequence[tuple[MeasuredRequest, Record]]) -> ComparedRate | None:
    if any(answer.cached is None for answer, _ in answered):
        return None
    prompts = sum(answer.request.input_length for answer, _ in answered)
    measured = sum(answer.cached or 0 for answer, _ in answered) / prompts
    replayed = sum(record.cached + sum(record.loaded) for _, record in answered) / prompts
    return ComparedRate(measured=measured, replayed=replayed, error=replayed - measured)


def _pairs(
    answered: Sequence[tuple[MeasuredRequest, Record]], measured: Mapping[str, Values], replayed: Mapping[str, Values]
) -> list[RequestPair]:
    def both(name: str, index: int) -> tuple[float, float] | None:
        pair = float(measured[name][index]), float(replayed[name][index])
        return None if np.isnan(pair).any() else pair

    return [
        RequestPair(
            id=request.request.id,
            arrival_s=request.request.arrival / SECOND,
            input=request.request.input_length,
            output=request.request.output_length,
            ttft=both("ttft", index),
            e2e=(float(measured["e2e"][index]), float(replayed["e2e"][index])),
            tpot=both("tpot", index),
        )
        for index, (request, _) in enumerate(answered)
    ]
