"""Expectations of live traffic: the end of a growing recording is compared periodically, with the results as metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from kvyard.clock import SECOND, WallClock, cpu_seconds, pause
from kvyard.errors import KvyardError
from kvyard.index.metrics import Sample
from kvyard.lab.expect.counted import Counted
from kvyard.lab.expect.expectation import TOLERANCE, Expectation, expect
from kvyard.lab.expect.gateway_link import CpuBudget, GatewayLink
from kvyard.lab.expect.traffic import Traffic
from kvyard.server.application import Application
from kvyard.server.dashboard.view import ExpectationView
from kvyard.server.http import Bounds, Raw, get
from kvyard.server.metrics import Metrics
from kvyard.server.running import AsyncService

log = logging.getLogger(__name__)

P = "kvyard_expect_"
NAMES = {
    P + "prompt_tokens": "Prompt tokens of the requests that were compared.",
    P + "owed_tokens": "Prompt tokens that engines owe them from caches.",
    P + "counted_tokens": "Prompt tokens that engines reported as cached.",
    P + "compared_requests": "Requests that were compared.",
    P + "exact_requests": "Of those, requests whose count is what they are owed.",
    P + "fault": "1 if engines count something else than they owe.",
    P + "cause": "1 for the cause that is named now.",
    P + "looks_total": "Looks at the recording.",
    P + "failed_looks_total": "Of those, looks that came to no result.",
    P + "cpu_seconds_total": "Processor time since the start of the watch.",
}


def latest(traffic: Traffic, requests: int) -> tuple[Traffic, Counted]:
    """Return the latest ``requests`` that have counts, and as many before them that warm caches up and aren't compared."""
    rows = traffic.requests[-2 * requests :]
    start = rows[0].arrival
    # Turns whose predecessors were cut off come when they came.
    rows = [replace(row, arrival=max(0, row.arrival - start), delay=None, after=()) for row in rows]
    compared = {row.id for row in rows[-requests:]}
    by_request = {name: cached for name, cached in traffic.cached.items() if name in compared}
    if not by_request:
        raise KvyardError(
            f"the latest {requests:,} requests of {traffic.name} have no counts: engines have to report cached_tokens "
            "(vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report)"
        )
    traffic = replace(traffic, requests=rows)
    return traffic, Counted(source="cached_tokens of answers", by_request=by_request, warmed=True)


class ExpectWatch(AsyncService):
    """Compares the end of a recording again and again, in a thread. A look has as many requests as its budget allows."""

    def __init__(
        self,
        read: Callable[[int], Traffic],
        settings: Mapping[str, object],
        *,
        every_s: float,
        requests: int,
        tolerance: float = TOLERANCE,
        report: Callable[[Expectation], None] = lambda expectation: None,
        gateway: GatewayLink | None = None,
    ) -> None:
        """``read`` reads the latest requests, as many as it is asked for; ``report`` receives each result, and the dashboard of
        ``gateway`` shows it. A look compares ``requests`` at most. Looks take a small share of the gateway's processor time,
        or of one core if none is given.
        """
        self.expectation: Expectation | None = None
        self.looks = self.failed = 0
        self.metrics = Metrics(NAMES)
        self.metrics.sources.append(self._samples)
        self._read = read
        self._settings = settings
        self._every_s = every_s
        self._requests = requests
        self._tolerance = tolerance
        self._report = report
        self._gateway = gateway
        self._clock = WallClock.since_epoch()
        self._budget = CpuBudget()
        self._asked = self._clock.now()
        self._began_s = cpu_seconds()
        self._task: asyncio.Task[None] | None = None

    @property
    def cpu_s(self) -> float:
        """Processor time since the start, looks and everything else."""
        return cpu_seconds() - self._began_s

    def look(self, requests: int | None = None) -> None:
        """Compare the latest ``requests``, as many as a look has at most if left out."""
        requests = requests or self._requests
        began = cpu_seconds()
        self.looks += 1
        try:
            traffic, counted = latest(self._read(2 * requests), requests)
            self.expectation = expect(traffic, self._settings, counted, tolerance=self._tolerance)
            self._report(self.expectation)
            if self._gateway is not None:
                self._gateway.show(self.view(self.expectation))
        except KvyardError as error:
            self.failed += 1
            log.warning("no expectation: %s", error)
        self._budget.request_s = (cpu_seconds() - began) / requests

    def view(self, expectation: Expectation) -> ExpectationView:
        """Return a result as a dashboard shows it: of the requests that were compared."""
        rows = [row for row in expectation.rows if row.counted is not None]
        return ExpectationView(
            at=self._clock.now() / SECOND,
            requests=expectation.compared or 0,
            exact=expectation.equal or 0,
            prompt_tokens=sum(row.input for row in rows),
            owed=sum(row.owed for row in rows),
            counted=expectation.counted or 0,
            cause=expectation.cause,
            fault=expectation.fault,
            sentence=expectation.sentence[:2000],
        )

    async def start(self) -> None:
        self._task = asyncio.create_task(self._go_on())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _go_on(self) -> None:
        while True:
            await asyncio.to_thread(self._observe)
            requests = self._budget.requests(self._requests)
            if requests:
                await asyncio.to_thread(self.look, requests)
                self._budget.spent_s = self.cpu_s
            await pause(self._budget.pause_s(self._every_s, self._requests))

    def _observe(self) -> None:
        """Count what the gateway has used meanwhile; one that doesn't answer is taken to have used one core."""
        now = self._clock.now()
        elapsed, self._asked = (now - self._asked) / SECOND, now
        try:
            if self._gateway is not None:
                self._budget.observe(self._gateway.cpu_seconds(), elapsed)
                return
        except KvyardError as error:
            log.warning("%s", error)
        finally:
            self._budget.spent_s = self.cpu_s
        self._budget.observe_core(elapsed)

    def _samples(self) -> Iterator[Sample]:
        yield P + "looks_total", {}, self.looks
        yield P + "failed_looks_total", {}, self.failed
        yield P + "cpu_seconds_total", {}, self.cpu_s
        if self.expectation is None:
            return
        view = self.view(self.expectation)
        yield P + "prompt_tokens", {}, view.prompt_tokens
        yield P + "owed_tokens", {}, view.owed
        yield P + "counted_tokens", {}, view.counted
        yield P + "compared_requests", {}, view.requests
        yield P + "exact_requests", {}, view.exact
        yield P + "fault", {}, view.fault
        if view.cause:
            yield P + "cause", {"cause": view.cause, "kind": "fault" if view.fault else "limit"}, 1

    def application(self) -> Application:
        """Return the page of metrics over HTTP."""

        async def metrics(body: None, headers: Mapping[str, str]) -> Raw:
            """Owed and counted hits, for Prometheus."""
            return Raw(*self.metrics.text())

        return Application(
            [get("/metrics", metrics, None, media_types=("text/plain",))], title="kvyard expect", bounds=Bounds()
        )
