"""A live run from a trace to its report: what ``kvyard replay --live URL`` and Python call. No client can see everything."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvyard.clock import MS, WallClock
from kvyard.errors import KvyardError
from kvyard.replay.live.config import LiveConfig
from kvyard.replay.live.driver import LiveDriver
from kvyard.replay.live.endpoint import Endpoint
from kvyard.replay.records import Records
from kvyard.replay.report.common import Observations
from kvyard.replay.report.numbers import Share, share, spread
from kvyard.replay.report.report import LiveReport, Report, Slo, WorkerReport
from kvyard.replay.report.sessions import make_sessions
from kvyard.replay.report.slo import read_slo
from kvyard.replay.report.totals import WorkerSums
from kvyard.replay.run import Progress, ReplayOutcome, describe, hinted, limited
from kvyard.replay.traces import Trace, TraceRequest


class LiveRun(ReplayOutcome):
    """A live replay that is over, with its ``driver`` for a closer look."""

    def __init__(self, report: Report, driver: LiveDriver, trace: Trace | None) -> None:
        super().__init__(report, driver.records, not driver.interrupted, trace)
        self.driver = driver


def replay_live(
    trace: str | Path | Trace | Iterable[TraceRequest],
    url: str,
    config: LiveConfig | None = None,
    *,
    token: str | None = None,
    slo: Slo | Mapping[str, float] | str | None = None,
    label: str = "",
    progress: Progress | None = None,
) -> LiveRun:
    """Drive the OpenAI endpoint at ``url`` with ``trace`` and report on it. Not to be called on a running event loop.

    Ctrl-C ends the run, and the report covers what happened until then; a second one raises ``KeyboardInterrupt``. Raises
    ``KvyardError`` where the endpoint can't be reached or serves nothing, and where no request at all had an answer.
    """

    async def run() -> LiveRun:
        async with Endpoint(url, token) as endpoint:
            return await drive(trace, endpoint, config or LiveConfig(), slo=slo, label=label, progress=progress)

    return asyncio.run(run())


async def drive(
    trace: str | Path | Trace | Iterable[TraceRequest],
    endpoint: Endpoint,
    config: LiveConfig,
    *,
    clock: WallClock | None = None,
    slo: Slo | Mapping[str, float] | str | None = None,
    label: str = "",
    progress: Progress | None = None,
    settings: Mapping[str, object] | None = None,
    name: str | None = None,
    longest: int | None = None,
) -> LiveRun:
    """Like ``replay_live`` on a running loop. ``clock`` is the endpoint's, if it is in this process; it must pass at
    ``config.speed``. ``settings`` and ``name`` describe the endpoint in the report, in place of its address. Answers are
    cut to the room in a context of ``longest`` tokens: an endpoint would refuse requests for more.
    """
    config.check()
    wanted = read_slo(slo)
    source = hinted(limited(trace, config.limit, config.max_tokens), config)
    model = config.model or await _model(endpoint)
    driver = LiveDriver(endpoint, config, model=model, clock=clock or WallClock(0, config.speed), longest=longest)
    with _interruptible(driver.stop):
        await driver.run(source, progress)
    _check_answered(driver, endpoint.url)
    report = make_live_report(
        driver,
        endpoint=name or endpoint.url,
        model=model,
        label=label,
        trace=describe(source),
        slo=wanted,
        config=settings,
    )
    return LiveRun(report, driver, source if isinstance(source, Trace) else None)


async def _model(endpoint: Endpoint) -> str:
    models = await endpoint.models()
    if not models:
        raise KvyardError(f"{endpoint.url} serves no model: start one, or name it with --served-model-name")
    return models[0]


def _check_answered(driver: LiveDriver, url: str) -> None:
    """Raise ``KvyardError`` where every single request failed: there is nothing to report then."""
    records = driver.records
    if driver.interrupted or not records or any(record.status == "finished" for record in records.values()):
        return
    reason, count = driver.errors.most_common(1)[0]
    raise KvyardError(f"none of the {len(records):,} requests to {url} had an answer; {count:,} of them: {reason}")


@contextmanager
def _interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """Within the context, the first Ctrl-C calls ``stop`` and the second ends everything. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def asked() -> None:
        stop()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, asked)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


ABSENT = ("queue time", "why prefixes ended", "preemptions", "tiers and transfers", "what the router saw")
ANSWERED = "prompt tokens of requests whose answer says what was cached"
MOST_REASONS = 20
"""Different reasons for errors that a report names; the others are put together."""


def make_live_report(
    driver: LiveDriver,
    *,
    endpoint: str,
    model: str | None,
    label: str = "",
    trace: Mapping[str, object] | None = None,
    slo: Slo | None = None,
    config: Mapping[str, object] | None = None,
) -> Report:
    """Make the report of ``driver``. ``config`` are the settings, if they are more than the driver's own."""
    now = driver.now() if driver.interrupted else None
    seen = Observations(Records.of(driver.records.values()), simulated=False, now=now, slo=slo)
    workers = [_worker(name, mine) for name, mine in sorted(seen.by_worker.items())]
    known = seen.totals.known
    reuse, computed = _cached(known)
    absent = list(ABSENT)
    if not known["requests"]:
        absent.append("what was cached, which this endpoint doesn't say")
    if not workers:
        absent.append("workers")
    return Report(
        **seen.fields(
            workers, driver.gaps.columns(), label=label, trace=trace, sessions=make_sessions(seen.records, None)
        ),
        config=dict(config) if config is not None else msgspec.to_builtins(driver.config),
        reuse=reuse,
        misses={},
        missed_tokens=computed,
        live=LiveReport(
            endpoint=endpoint,
            model=model,
            speed=driver.config.speed,
            lateness=spread(driver.lateness, MS),
            errors=_reasons(driver),
            inexact=driver.inexact,
            absent=absent,
        ),
    )


def _cached(usage: Mapping[str, int]) -> tuple[dict[str, Share], dict[str, Share]]:
    """Return the reused and the computed share of prompts, as far as the endpoint reports them."""
    if not usage["requests"]:
        return {}, {}
    part, whole = usage["cached"], usage["input"]
    cached = share(part, whole, f"prompt tokens that the endpoint says were cached / {ANSWERED}")
    computed = share(whole - part, whole, f"prompt tokens that were computed / {ANSWERED}")
    return {"cached": cached, "all": cached}, {"unknown": computed}


def _worker(name: str, mine: WorkerSums) -> WorkerReport:
    return WorkerReport(
        name=name,
        requests=mine.requests,
        input_tokens=mine.input,
        output_tokens=mine.output,
        cached_tokens=None if mine.unknown else mine.cached,
        evicted_blocks=None,
    )


def _reasons(driver: LiveDriver) -> dict[str, int]:
    reasons = sorted(driver.errors.items(), key=lambda item: (-item[1], item[0]))
    named = dict(reasons[:MOST_REASONS])
    others = sum(count for _, count in reasons[MOST_REASONS:])
    return named | {f"{len(reasons) - MOST_REASONS} other reasons": others} if others else named
