"""The driver: sends a trace's requests to a live endpoint, each when it is due, and records the answers.

Free of coordinated omission: a request's latency counts from when it should have been sent, not from when the driver sent
it, and a slow endpoint doesn't slow the sending. The lateness of requests is measured too, so that a slow endpoint can be
distinguished from a slow driver.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xxhash
from msgspec.structs import replace

from kvyard.clock import SECOND, WallClock
from kvyard.events.tier import ALWAYS_REPORTED
from kvyard.openai import TokenUsage
from kvyard.replay.arrivals import TraceArrivals
from kvyard.replay.gaps import Gaps
from kvyard.replay.live.config import LiveConfig
from kvyard.replay.live.endpoint import AnswerBroken, AnswerRefused, Endpoint
from kvyard.replay.live.prompts import PromptMaker, answer_length, body_of
from kvyard.replay.record import Record
from kvyard.replay.traces import TraceRequest

DECISION = re.compile(r"worker=(?P<worker>[^;\s]+)(?:.*\bhit=(?P<hit>\d+)/\d+)?(?:.*\bbest=(?P<best>\d+))?")
"""A gateway's decision in ``x-kvyard-decision``."""
PREFILLED = re.compile(r"\bcached=(\d+)")
"""Cached tokens of the engine that computed the prompt, in ``x-kvyard-prefill``."""
TRIES = re.compile(r"\btries=(\d+)")
NUMBERS = re.compile(r"(?<!HTTP )\b\d+\b")
"""In the words of a refusal: with them, each would be a reason of its own."""
TENANT_HEADER = "X-Gateway-Inference-Fairness-Id"
"""Names the tenant of a request, as for llm-d and kvyard's gateway."""
PRINTABLE = re.compile(r"[\x21-\x7e]{1,128}")
UNTOLD: dict[str, Any] = {
    "loaded": (-1,) * ALWAYS_REPORTED,
    **dict.fromkeys(
        (
            "cached",
            "pulled",
            "lost",
            "elsewhere",
            "own",
            "preemptions",
            "loading",
            "waited",
            "overlap",
            "best_overlap",
            "retries",
        ),
        -1,
    ),
}
"""Fields that only an engine knows, in the record of a request that was sent to one."""


class LiveDriver:
    """Drives one run. Used on one event loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: LiveConfig,
        *,
        model: str | None,
        clock: WallClock,
        longest: int | None = None,
    ) -> None:
        """``clock`` passes as fast as the endpoint's time does; all times of records are its nanoseconds. Answers are cut to
        what there is room for in ``longest`` tokens, the prompt included.
        """
        self.config = config
        self.records: dict[str, Record] = {}
        self._uncounted: list[str] = []
        """Requests that prefetch; their records are dropped in the end."""
        self.gaps = Gaps()
        """Between tokens of one answer, as they came: 0 between those of one chunk."""
        self.lateness: list[int] = []
        """Per request that was sent: by how much too late."""
        self.errors: Counter[str] = Counter()
        """Why requests have no answer."""
        self.inexact = 0
        """Answers of another length than was asked for."""
        self.interrupted = False
        self.origin = 0
        """Clock time at the trace's time 0."""
        self._endpoint = endpoint
        self._model = model
        self._longest = longest
        self._clock = clock
        self._prompts = PromptMaker(config.seed, config.vocabulary)
        self._tasks: set[asyncio.Task[None]] = set()
        self._through = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def now(self) -> int:
        """Return the trace's time."""
        return self._clock.now() - self.origin

    def stop(self) -> None:
        """Have ``run`` end now, with what there is."""
        self.interrupted = True
        self._changed.set()

    async def run(self, rows: Iterable[TraceRequest], progress: Callable[[int, int, int], None] | None = None) -> None:
        """Send everything and wait for the answers. ``progress`` receives (sent, ended, now) now and then."""
        config = self.config
        self._arrivals = arrivals = TraceArrivals(
            rows, speedup=config.speedup, concurrency=config.concurrency, jitter=config.jitter
        )
        self.origin = self._clock.now() - (arrivals.peek() or 0)  # no waiting for a trace that begins late
        try:
            while not self.interrupted:
                if self._error is not None:
                    raise self._error
                self._send()
                due = arrivals.peek()
                if due is None and self._through == len(self.records):
                    break
                if progress is not None:
                    progress(len(self.records), self._through, self.now())
                await self._wait(due)
        finally:
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            for record in self.records.values():
                if not record.status:
                    record.ended = -1
            for name in self._uncounted:
                del self.records[name]
        if not self.interrupted:
            arrivals.check_empty()

    def _send(self) -> None:
        """Start every request that is due."""
        arrivals = self._arrivals
        while (due := arrivals.peek()) is not None and due <= self.now():
            for row in arrivals.take(due):
                request = replace(row, ids=None, tokens=None, output_tokens=None)  # the record outlives the prompt
                record = Record(request=request, arrival=due, due=arrivals.recorded(row), **UNTOLD)
                self.records[row.id] = record
                if row.prefetch:
                    self._uncounted.append(row.id)
                task = asyncio.create_task(self._ask(row, record))
                self._tasks.add(task)
                task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error  # it would be lost otherwise
            self._changed.set()

    async def _wait(self, due: int | None) -> None:
        """Wait until something is due or something has ended."""
        changed = self._changed
        seconds = None if due is None else max(0.0, (due - self.now()) / self.config.speed / SECOND)
        try:
            await asyncio.wait_for(changed.wait(), seconds)
        except TimeoutError:
            return
        changed.clear()

    async def _ask(self, row: TraceRequest, record: Record) -> None:
        config = self.config
        tokens = self._prompts.tokens(row)
        body = body_of(row, tokens, self._model, exact=config.exact, longest=self._longest)
        del tokens
        last = 0
        handed_over = False

        def begun(headers: Mapping[str, str]) -> None:
            nonlocal handed_over
            handed_over = _note_headers(record, headers)

        def came(chunks: int) -> None:
            nonlocal last
            now = self.now()
            if record.first_token < 0:
                record.first_token = now
            else:
                self.gaps.add_one(now - last, 1)
            if chunks > 1:
                self.gaps.add_one(0, chunks - 1)
            last = record.ended = now
            record.output += chunks

        headers = {"X-Request-Id": _header(row.id)}
        if row.session is not None:
            headers["X-Session-Id"] = _header(row.session)
        if record.tenant:
            headers[TENANT_HEADER] = _header(record.tenant)
        sent = self.now()
        self.lateness.append(sent - record.arrival)
        left = config.timeout_s - (sent - record.arrival) / config.speed / SECOND
        try:
            async with asyncio.timeout(max(0.0, left)):
                stream = await self._endpoint.complete(body, headers, came, begun)
        except TimeoutError:
            self._failed(record, "failed", f"no end within {config.timeout_s:g} s")
        except AnswerRefused as error:
            client = 400 <= error.status < 500 and error.status not in (408, 429)
            self._failed(record, "rejected" if client else "failed", str(error))
        except AnswerBroken as error:
            self._failed(record, "failed", str(error))
        else:
            self._finished(record, stream.usage, handed_over)
            self.inexact += record.output != answer_length(row, self._longest)
        self._through += 1
        self._arrivals.ended(row, self.now())
        self._changed.set()

    def _finished(self, record: Record, usage: TokenUsage | None, handed_over: bool) -> None:
        """Note an answer's end; ``usage`` is the endpoint's own count, if it sent one."""
        record.status = "finished"
        if usage is not None:
            if usage.completion_tokens is not None:
                if usage.completion_tokens > record.output:  # tokens that shared a chunk came together
                    self.gaps.add_one(0, usage.completion_tokens - record.output)
                record.output = usage.completion_tokens
            if usage.cached_tokens is not None and not handed_over:
                record.cached = usage.cached_tokens
        if record.first_token < 0:  # an answer without a single chunk: it ended, at least
            record.first_token = record.ended = self.now()

    def _failed(self, record: Record, status: str, why: str) -> None:
        record.status, record.reason, record.ended = status, why, self.now()
        self.errors[NUMBERS.sub("N", why) if status == "rejected" else why] += 1


def _note_headers(record: Record, headers: Mapping[str, str]) -> bool:
    """Note what an answer's headers say of its worker. Return true if another worker had computed the prompt."""
    prefill = headers.get("x-kvyard-prefill")
    if prefill:
        # The decode engine has all of the prompt from the prefill engine, and counts it as cached.
        cached = PREFILLED.search(prefill)
        record.cached = -1 if cached is None else int(cached[1])
    decision = DECISION.match(headers.get("x-kvyard-decision", ""))
    if decision is None:
        record.worker = headers.get("x-mock-worker", "")  # a mock engine by itself
        return bool(prefill)
    record.worker = decision["worker"]
    tries = TRIES.search(headers["x-kvyard-decision"])
    record.retries = 0 if tries is None else int(tries[1]) - 1
    if decision["hit"] is not None and decision["best"] is not None:
        record.overlap, record.best_overlap = int(decision["hit"]), int(decision["best"])
    return bool(prefill)


def _header(name: str) -> str:
    """Return a name of the trace's as headers can have it: itself, or a digest if it can't be one."""
    return name if PRINTABLE.fullmatch(name) else xxhash.xxh3_64_hexdigest(name.encode())
