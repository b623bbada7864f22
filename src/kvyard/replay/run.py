"""One replay from a trace to its report: what ``kvyard.replay(...)``, the command line and the sweep call."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from kvyard.errors import KvyardError
from kvyard.replay.config import DrivingConfig, ReplayConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.garbage import rarely_collected
from kvyard.replay.record import Record
from kvyard.replay.report import Report, Slo, make_report
from kvyard.replay.report.slo import read_slo
from kvyard.replay.settings import SETTINGS, make_config
from kvyard.replay.traces import Trace, TraceRequest, open_trace
from kvyard.replay.traces.changes import prefetched, without_long
from kvyard.replay.traces.hinting import with_hints

Progress = Callable[[int, int, int], None]
"""Called now and then with requests that came, requests through, and the virtual time in nanoseconds."""


class ReplayOutcome:
    """A replay that is over: its ``report``, and the ``records`` of its requests."""

    def __init__(self, report: Report, records: Mapping[str, Record], complete: bool, trace: Trace | None) -> None:
        self.report = report
        self.complete = complete
        """True if it went to the end of the trace."""
        self.trace = trace
        """The trace, if it can be read again."""
        self._records = records

    @cached_property
    def records(self) -> list[Record]:
        """One for each request, in the order they came or were due. Made when first asked for, and then all in memory."""
        return list(self._records.values())

    def first_rejected(self) -> Record | None:
        """Return the first request that was turned away, if any was."""
        if not self.report.requests.get("rejected"):
            return None
        return next(record for record in self._records.values() if record.status == "rejected")

    def show(self) -> None:
        """Print the report's table."""
        from kvyard.replay.report.table import print_report

        print_report(self.report)

    def save(
        self, report: str | Path | None = None, per_request: str | Path | None = None, html: str | Path | None = None
    ) -> None:
        """Write the report as JSON, a row per request (.jsonl or .parquet), and the page. Raises ``KvyardError``."""
        from kvyard.replay.report.files import write_report, write_requests
        from kvyard.replay.report.page import write_html

        if report is not None:
            write_report(self.report, report)
        if per_request is not None:
            lower = len(self.report.tiers.keys() - {"device"})
            write_requests(self._records.values(), per_request, lambda: self.complete, levels=lower)
        if html is not None:
            write_html(self.report, html)

    def __repr__(self) -> str:
        from kvyard.replay.report.words import summary

        return f"<{type(self).__name__}: {summary(self.report)}>"


class SimulatedRun(ReplayOutcome):
    """A simulated replay that is over, with its ``fleet`` for a closer look."""

    def __init__(self, report: Report, fleet: Fleet, trace: Trace | None) -> None:
        super().__init__(report, fleet.records, not fleet.interrupted, trace)
        self.fleet = fleet


def replay(
    trace: str | Path | Trace | Iterable[TraceRequest],
    *,
    config: ReplayConfig | str | Path | Mapping[str, object] | None = None,
    slo: Slo | Mapping[str, float] | str | None = None,
    label: str = "",
    bounds: bool = False,
    progress: Progress | bool | None = None,
    per_request: str | Path | None = None,
    format: str | None = None,
    skip_bad: bool = False,
    sort: bool = False,
    trace_block_size: int | None = None,
    chain_ids: bool = False,
    **settings: Any,
) -> SimulatedRun:
    """Replay ``trace`` through a fleet and report on it.

    ``settings`` are those of ``kvyard.replay.settings.SETTINGS``: ``workers=8, router="kv", block_size=64,
    num_gpu_blocks=16384, host_blocks="20k", ...``. ``config`` is where they start from, a TOML file or a mapping; or it is a
    whole ``ReplayConfig``, and then there are no others. ``slo`` says what a good request is: ``"ttft=500,itl=20"``, in
    milliseconds. ``bounds`` looks at the trace once more for what caches could have reached. ``progress=True`` draws a bar.
    ``per_request`` names a file (.jsonl or .parquet) to which a row per request is written while the run goes on.

    The same arguments give the same report, byte for byte. A KeyboardInterrupt ends the run, and the report covers what
    happened until then. Raises ``KvyardError`` for what can't be read or can't be, and where no request at all fits.
    """
    replay_config = as_config(config, settings)
    wanted = read_slo(slo)
    reading = {"format": format, "skip_bad": skip_bad, "sort": sort, "chain_ids": chain_ids}
    source = limited(trace, replay_config.limit, replay_config.max_tokens, trace_block_size=trace_block_size, **reading)
    source = hinted(source, replay_config)
    rows, before = as_sent(source, replay_config, reading)
    if bounds and replay_config.warm_up is not None:
        raise KvyardError("bounds are those of a whole trace: leave out warm_up, or bounds")
    if bounds and replay_config.prefetch:
        raise KvyardError("bounds are those of the trace's own requests: leave out prefetch, or bounds")
    if bounds and not isinstance(rows, Trace):
        rows = list(rows)  # they are looked at twice
    fleet = Fleet(replay_config)
    with streamed(fleet, per_request), _within_time():
        if progress is True:
            from kvyard.replay.progress import ProgressBar

            with ProgressBar(source, replay_config.limit) as bar:
                fleet.run(rows, bar.update, before)
        else:
            fleet.run(rows, progress or None, before)
        check_served(fleet)
    limits = None
    if bounds and not fleet.interrupted:
        from kvyard.replay.report.bounds import make_bounds

        limits = make_bounds(fleet, rows)
    with rarely_collected():
        report = make_report(fleet, label=label, trace=describe(source), bounds=limits, slo=wanted)
    return SimulatedRun(report, fleet, source if isinstance(source, Trace) else None)


def as_sent(
    source: Trace | Iterable[TraceRequest], config: ReplayConfig, reading: Mapping[str, Any]
) -> tuple[Iterable[TraceRequest], Iterable[TraceRequest] | None]:
    """Return requests as the client sends them, and those that warm up before, if any. ``reading`` is how a file is read."""
    client, warm_up = config.load_client, config.warmed_by.trace
    rows: Iterable[TraceRequest] = source
    before: list[Iterable[TraceRequest]] = []
    if warm_up:
        before.append(open_trace(warm_up, **reading))
    if config.client is not None:
        if isinstance(source, Trace):
            first = source.first
        else:
            rest = iter(source)
            first = next(rest)
            source = chain([first], rest)
        warming = list(client.warm_up(first, config.concurrency))
        if warming:
            before.append(warming)
        rows = client.requests(source, config.concurrency, Random(config.seed))
    return rows, chain.from_iterable(before) if before else None


@contextmanager
def _within_time() -> Iterator[None]:
    """Raise ``KvyardError`` for times that aren't within 292 years: nanoseconds in 64 bits."""
    try:
        yield
    except OverflowError:
        raise KvyardError(
            "a time of this run is more than 292 years away: look at speedup, timing and the trace's arrival times"
        ) from None


@contextmanager
def streamed(fleet: Fleet, per_request: str | Path | None) -> Iterator[None]:
    """Within the context, rows of complete requests go to a file, if one is named; at the end all others, too.

    Raises ``KvyardError`` as ``request_rows`` does.
    """
    if per_request is None:
        yield
        return
    from kvyard.replay.report.files import request_rows

    with request_rows(per_request, lambda: not fleet.interrupted, levels=fleet.records.levels) as write:
        fleet.records.stream(write)
        yield
        fleet.records.finish()


def hinted(source: Trace | Iterable[TraceRequest], config: DrivingConfig) -> Trace | Iterable[TraceRequest]:
    """Return ``source`` with the hints that ``config`` wishes for, if any; then it is read more than once, or held. And with
    the requests that prefetch, if there are to be any.
    """
    if config.hints is not None:
        if not isinstance(source, Trace):
            kept = list(source)
            source = Trace("requests", "", lambda tally: iter(kept))
        source = with_hints(source, config.hints, config.seed)
    lead = config.prefetch
    if not lead:
        return source
    if not isinstance(source, Trace):
        return prefetched(source, lead)
    trace = source
    return Trace(trace.name, trace.format, lambda tally: prefetched(trace.rows(tally), lead), grouped=trace.grouped)


def as_config(
    config: ReplayConfig | str | Path | Mapping[str, object] | None, settings: Mapping[str, object]
) -> ReplayConfig:
    """Return the replay that ``config`` and the ``settings`` on top of it describe. Raises ``KvyardError``."""
    if isinstance(config, ReplayConfig):
        if settings:
            raise KvyardError(
                f"config is a whole ReplayConfig: put {next(iter(settings))} into it instead of beside it"
            )
        config.check()
        return config
    return make_config(SETTINGS.merge(config, settings))


def limited(
    trace: str | Path | Trace | Iterable[TraceRequest],
    limit: int | None,
    max_tokens: int | None = None,
    **reading: Any,
) -> Trace | Iterable[TraceRequest]:
    """Return the first ``limit`` requests of ``trace`` without those of more than ``max_tokens``; ``reading`` is how a file is
    read, as in ``open_trace``. Raises ``KvyardError`` if there are none.
    """
    if isinstance(trace, str | Path):
        opened = without_long(open_trace(trace, limit=limit, **reading), max_tokens)
        opened.first  # noqa: B018 - refuses an empty one before anything is built
        return opened
    if any(reading.values()):
        raise KvyardError(
            "format, skip_bad, sort, chain_ids and trace_block_size are for files: pass a path, or open_trace(...) itself"
        )
    if isinstance(trace, Trace):
        if limit is not None:
            whole = trace
            trace = Trace(
                whole.name, whole.format, lambda tally: islice(whole.rows(tally), limit), grouped=whole.grouped
            )
        return without_long(trace, max_tokens)
    rows = iter(trace) if limit is None else islice(trace, limit)
    if max_tokens is not None:
        given = rows
        rows = iter(without_long(Trace("requests", "", lambda tally: given), max_tokens))
    first = next(rows, None)
    if first is None:
        raise KvyardError("the trace has no requests in it")
    return chain([first], rows)


def describe(source: Trace | Iterable[TraceRequest]) -> dict[str, object]:
    """Return the facts of a trace for its report: none that depends on where the file lies."""
    if not isinstance(source, Trace):
        return {}
    tally = source.tally
    facts: dict[str, object] = {"name": Path(source.name).name, "format": source.format}
    if tally.skipped:
        facts["skipped"] = tally.skipped
    if tally.left_out:
        facts["left_out"] = dict(sorted(tally.left_out.items()))
    return facts


def check_served(fleet: Fleet) -> None:
    """Raise ``KvyardError`` where every single request was turned away: there is nothing to report then."""
    records = fleet.records
    if fleet.interrupted or not records or any(record.status != "rejected" for record in records.values()):
        return  # as a rule the first record says so
    smallest = min(records.values(), key=lambda record: record.input)
    raise KvyardError(
        f"none of the {len(records):,} requests fits a worker; of the smallest, {smallest.id}, {smallest.reason}: "
        "give workers more room (a larger card, tensor_parallel_size, FP8 weights; without a card num_gpu_blocks) "
        "or a larger max_model_len"
    )
