"""Sends probes to a live engine, and keeps when each token came. It fits nothing.

Prompts are new each time, so no cache has a part of them. Requests of one probe go out together; the next probe waits until all
have ended, so that nothing but the probe's own requests is in a pass, unless others use the engine too.
"""

import asyncio
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec

from kvyard.clock import MS, SECOND, WallClock, pause
from kvyard.engine.timing.measurements import Measurement, Measurements
from kvyard.errors import KvyardError
from kvyard.lab.calibrate.held_out import FEWEST, CalibrationSource
from kvyard.lab.calibrate.plan import PAUSE, CalibrationLimits, Probe, make_plan
from kvyard.lab.calibrate.prompts import HIGH, LOW, FreshPrompts
from kvyard.lab.calibrate.windows import lone_prompts, windows
from kvyard.lab.validate.reading import MeasuredRequest, MeasuredRun
from kvyard.replay.live.endpoint import AnswerBroken, AnswerRefused, Endpoint
from kvyard.replay.live.facts import EngineFacts, engine_facts, metrics_page, preemptions, served
from kvyard.replay.traces import TraceRequest

PATIENCE = 120.0
"""Seconds for one answer."""
FAILURES = 0.25
"""Share of requests that may fail."""
STREAMED = "text/event-stream"
KEY = (401, 403)
BAD_REQUEST = (400, 404, 422)
WAITED = (0.75, 1.25)
"""Passes that a prompt waits for beside others: fewer than the first, and the engine decides each pass when it starts; more
than the second, and it decides a pass ahead."""
NO_TOKEN = (1 << 31) - 1
"""An id that no vocabulary has."""
HIGHEST_ID = re.compile(r"keys in \[0, (\d+)\]")
"""In SGLang's refusal of a ``logit_bias`` for an unknown id."""
SHORT = 256
"""Prompts up to this surely take one pass."""
LATE = 8
"""Passes by which the first token of an answer may come later than those of others, as seen on a machine under heavy load."""
SEEN = 5
"""Prompts that must have given a measurement."""
LOOKS, LOOK = 20, 0.02
"""Number of polls, and seconds between them, until the engine has counted a request."""
CLEAR = 2.0
"""Least ratio of a pass to the time of a request outside the engine, without which waiting can't be measured."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of all probes."""

    facts: EngineFacts
    measurements: Measurements
    requests: int
    failed: int
    rounds: float
    """Completed rounds, of those asked for."""
    probes: list[list[MeasuredRequest]]
    """By probe, its requests. Each has times of its own."""
    source: CalibrationSource
    """The measurements, those before the last round, and the requests of that round, which are held out."""


Progress = Callable[[int, int, str], None]
"""Called before each probe with its number from 1, the total, and its description."""


async def probe_engine(
    url: str, limits: CalibrationLimits, *, model: str | None, token: str | None, budget: int | None, progress: Progress
) -> ProbeResult:
    """Probe the engine at ``url``. Raises ``KvyardError`` if it doesn't answer as an engine does."""
    limits.check()
    async with Endpoint(url, token) as endpoint:
        try:
            facts = await engine_facts(endpoint, model)
        except KvyardError as error:
            raise KvyardError(_with_key(str(error))) from None
        if facts.engines > 1:
            raise KvyardError(
                f"{url} has {facts.engines} engines behind it, and requests that go to different ones say nothing of one: "
                "calibrate a single engine, at an address of its own"
            )
        if budget is not None:
            facts.max_num_batched_tokens = budget
        prober = _Prober(endpoint, facts)
        await prober.settle()
        return await _all(prober, limits, progress)


async def _all(prober: "_Prober", limits: CalibrationLimits, progress: Progress) -> ProbeResult:
    facts = prober.facts
    plan = make_plan(limits, facts)
    clock, results = WallClock(), list[list[MeasuredRequest]]()
    rows, lone, notes = list[Measurement](), list[Measurement](), list[str]()
    outside: list[float] = []
    early: Measurements | None = None
    begun = clock.now()
    order = probe_order(len(plan), limits.rounds)
    last_round = len(order) - len(plan)
    for number, group in enumerate(order):
        if number == last_round and number:  # the last round is held out: this fit is judged by it
            early = _measured(prober, rows, lone, outside, ())
        if clock.now() - begun > limits.seconds * SECOND:
            which = ", the larger ones" if number < len(plan) else ""
            notes.append(f"{len(order) - number} of {len(order)} probes{which}: {limits.seconds:g} s were over.")
            break
        probe = plan[group]
        progress(number + 1, len(order), str(probe))
        before = await prober.served() if probe.tokens == 1 else None
        answered = await prober.send(probe)
        results.append(answered)
        if probe.tokens > 1:
            rows += windows(answered, facts.max_num_batched_tokens, group, LATE)
            continue
        # A single prompt is one pass. The engine's own counters time it without HTTP and tokenizing; the rest is `outside`.
        took = await prober.served_since(before)
        for row in lone_prompts(answered, facts.max_num_batched_tokens, group):
            if took is None or not 0 < took < row.ms:
                lone.append(row)
            else:
                rows.append(msgspec.structs.replace(row, ms=took))
                outside.append(row.ms - took)
    if prober.failed:
        notes.append(f"{prober.failed} of {prober.sent} requests, which failed: {prober.failure}.")
    if facts.running:
        notes.append(f"What {facts.running} requests of others did, which ran before the first probe.")
    now = preemptions(await metrics_page(prober.endpoint))
    if now is not None and facts.preemptions is not None and now > facts.preemptions:
        notes.append(f"{now - facts.preemptions} requests that were preempted, and computed twice.")
    if facts.max_num_batched_tokens is None:
        notes.append("How long prompts were cut: say --max-num-batched-tokens as the engine has it.")
    measurements = _measured(prober, rows, lone, outside, notes)
    late = sorted(
        (answer for requests in results[last_round:] for answer in requests),
        key=lambda measured: measured.request.arrival,
    )
    return ProbeResult(
        facts=facts,
        measurements=measurements,
        requests=prober.sent,
        failed=prober.failed,
        rounds=len(results) / len(plan),
        probes=results,
        source=_with_last_round(measurements, early, late),
    )


def _measured(
    prober: "_Prober",
    rows: Sequence[Measurement],
    lone: Sequence[Measurement],
    outside: Sequence[float],
    notes: Sequence[str],
) -> Measurements:
    facts = prober.facts
    return Measurements(
        f"{facts.model.rsplit('/', 1)[-1]} at {prober.endpoint.url.partition('//')[2]}",
        f"{facts.engine} {facts.version}".strip(),
        tuple(rows),
        tuple(lone),
        statistics.median(outside) if outside else None,
        tuple(notes),
    )


def _with_last_round(
    measurements: Measurements, early: Measurements | None, late: Sequence[MeasuredRequest]
) -> CalibrationSource:
    if early is None or len(late) < FEWEST:
        return CalibrationSource(measurements=measurements)
    start = late[0].request.arrival
    requests = [
        msgspec.structs.replace(
            answer,
            request=msgspec.structs.replace(answer.request, id=str(number), arrival=answer.request.arrival - start),
            first_token=None if answer.first_token is None else answer.first_token - start,
            ended=answer.ended - start,
        )
        for number, answer in enumerate(late)
    ]
    run = MeasuredRun(name="the last round", format="probes", requests=requests, client=True)
    return CalibrationSource(measurements=measurements, early=early, run=run)


def probe_order(probes: int, rounds: int) -> list[int]:
    """Return the order of probes: the first round small before large, later ones in random order, so that an engine that
    gets quicker or slower meanwhile doesn't look like one that takes more or less for large probes.
    """
    order = list(range(probes))
    for _ in range(rounds - 1):
        order += random.Random(_seed()).sample(range(probes), probes)
    return order


def _with_key(words: str) -> str:
    return f"{words}; give its API key with --token-file" if any(f"HTTP {code}" in words for code in KEY) else words


class _Answering:
    """One request in flight."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.changed = asyncio.Event()
        self.over = False


class _Prober:
    """Sends requests to one endpoint."""

    def __init__(self, endpoint: Endpoint, facts: EngineFacts) -> None:
        self.endpoint, self.facts = endpoint, facts
        self.sent = self.failed = 0
        self.failure = ""
        self._clock = WallClock()
        self._exact = True
        self._prompts = FreshPrompts(HIGH, _seed())
        self._streamed = True

    async def _id_ranges(self) -> list[tuple[int, int] | None]:
        """Ranges of token ids to try, ``None`` for text. SGLang is asked for its vocabulary, since an id that its model doesn't
        have ends it.
        """
        usual: list[tuple[int, int] | None] = [HIGH, LOW, None]
        if self.facts.engine != "SGLang":
            return usual
        body = {"model": self.facts.model, "prompt": [1], "max_tokens": 1, "logit_bias": {str(NO_TOKEN): 1}}
        try:
            async with asyncio.timeout(PATIENCE):
                await self.endpoint.complete(msgspec.json.encode(body), {}, lambda _: None, lambda _: None)
        except (AnswerRefused, AnswerBroken, TimeoutError) as error:
            if matched := HIGHEST_ID.search(str(error)):
                size = int(matched[1]) + 1
                return usual if size >= HIGH[1] else [(min(LOW[0], size // 8), size), None]
        return [LOW, None]

    async def settle(self) -> None:
        """Find out how it takes prompts, and warm it up. Raises ``KvyardError`` where it takes none."""
        url, reason = self.endpoint.url, ""
        ranges = await self._id_ranges()
        for exact in (True, False):
            for ids in ranges:
                self._prompts, self._exact = FreshPrompts(ids, _seed()), exact
                try:
                    for _ in range(2):
                        async with asyncio.timeout(PATIENCE):
                            await self._ask(24, 3, _Answering())
                    return
                except TimeoutError:
                    raise KvyardError(f"{url} doesn't end an answer of 3 tokens within {PATIENCE:g} s") from None
                except AnswerRefused as error:
                    if error.status in KEY:
                        raise KvyardError(_with_key(f"{url} refuses requests: {error}")) from None
                    if error.status not in BAD_REQUEST:
                        raise KvyardError(f"{url} refuses requests: {error}") from None
                    reason = reason or str(error)
                except AnswerBroken as error:
                    if not self._streamed:
                        raise KvyardError(
                            f"{url} answers in one piece: calibrate needs streamed answers, whose tokens can be timed"
                        ) from None
                    reason = reason or str(error)  # engines refuse in the stream too
        raise KvyardError(f"{url} completes neither token ids nor text: {reason}")

    async def served(self) -> tuple[int, float] | None:
        """Return requests that the engine has counted, and the seconds to their first tokens by its own clock, if it counts."""
        return served(await metrics_page(self.endpoint))

    async def served_since(self, before: tuple[int, float] | None) -> float | None:
        """Return milliseconds to the first token of the one request since ``before``, by the engine's own clock."""
        for _ in range(LOOKS):
            now = await self.served() if before is not None else None
            if before is None or now is None or now[0] > before[0] + 1:
                return None
            if now[0] == before[0] + 1:
                return (now[1] - before[1]) * 1e3
            await pause(LOOK)  # it counts a moment after the answer's end
        return None

    async def send(self, probe: Probe) -> list[MeasuredRequest]:
        """Send one probe, and wait for its end. Raises ``KvyardError`` where too many requests fail."""
        states = [_Answering() for _ in range(probe.batch)]
        answers: list[MeasuredRequest | None] = []
        tasks = [asyncio.create_task(self._try(probe.prompt, probe.tokens, state)) for state in states]
        try:
            for length in probe.beside:
                if not await _decoding(states):
                    break
                answers.append(await self._try(length, 1, _Answering()))
            answers += await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.failed > FAILURES * max(8, self.sent):
            raise KvyardError(f"{self.failed} of {self.sent} requests to {self.endpoint.url} failed: {self.failure}")
        return sorted(
            (answer for answer in answers if answer is not None), key=lambda measured: measured.request.arrival
        )

    async def _try(self, length: int, tokens: int, state: _Answering) -> MeasuredRequest | None:
        self.sent += 1
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._ask(length, tokens, state)
        except (AnswerRefused, AnswerBroken, TimeoutError) as error:
            self.failed += 1
            self.failure = str(error) or f"no end within {PATIENCE:g} s"
            return None
        finally:
            state.over = True
            state.changed.set()

    async def _ask(self, length: int, tokens: int, state: _Answering) -> MeasuredRequest:
        prompt = self._prompts.make(length)
        body: dict[str, object] = {
            "model": self.facts.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        if self._exact:
            body |= {"ignore_eos": True, "min_tokens": tokens}
        payload = msgspec.json.encode(body)

        def begun(headers: Mapping[str, str]) -> None:
            self._streamed = STREAMED in headers.get("Content-Type", "")

        def came(chunks: int) -> None:
            state.times += [self._clock.now()] * chunks
            state.changed.set()

        sent = self._clock.now()
        stream = await self.endpoint.complete(payload, {}, came, begun)
        if not state.times or not self._streamed:
            self._streamed = self._streamed and bool(state.times)
            raise AnswerBroken("an answer without tokens")
        usage = stream.usage
        counted = None if usage is None else usage.prompt_tokens
        if isinstance(prompt, str) and counted:
            self._prompts.learn(prompt, counted)
        times = state.times
        output = len(times) if usage is None or usage.completion_tokens is None else usage.completion_tokens
        return MeasuredRequest(
            request=TraceRequest(str(self.sent), sent, counted or length, max(1, output)),
            first_token=times[0],
            ended=times[-1],
            cached=None if usage is None else usage.cached_tokens,
            gaps=[after - before for before, after in pairwise(times)],
        )


def _seed() -> int:
    import secrets

    return secrets.randbits(64)


async def _decoding(states: Sequence[_Answering]) -> bool:
    """Wait until every request of ``states`` has decoded a few tokens more; false if one is over by then."""
    wanted = [len(state.times) + PAUSE for state in states]
    for state, count in zip(states, wanted, strict=True):
        while len(state.times) < count and not state.over:
            state.changed.clear()
            await state.changed.wait()
    if any(state.over for state in states):
        return False  # one that failed may have no times at all
    # In the middle of a pass: at its start, waiting for a whole one looks like waiting for two.
    times = states[0].times
    await pause((times[-1] - times[-PAUSE]) / (PAUSE - 1) / 2 / SECOND)
    return not any(state.over for state in states)


def waits_a_pass(probes: Sequence[Sequence[MeasuredRequest]], request_ms: float) -> tuple[bool | None, float]:
    """Return true if prompts beside decoding requests wait for a pass that was decided on already, and the passes that they
    wait for.

    ``None`` if it is unclear: a prompt waits half a pass for the current one to end, and one and a half where the next was
    decided on too. ``request_ms`` is the time of a request outside of the engine.
    """
    waited = []
    for requests in probes:
        observers = [answer for answer in requests if answer.gaps]
        for answer in requests:
            if answer.gaps or answer.first_token is None or answer.request.input_length > SHORT or not observers:
                continue
            observer = max(observers, key=lambda other: len(other.gaps or ()))
            assert observer.first_token is not None and observer.gaps is not None
            ends = [observer.first_token]
            for gap in observer.gaps:
                ends.append(ends[-1] + gap)
            step = statistics.median(observer.gaps)
            before = [end for end in ends if end < answer.first_token - step / 2]
            if before and step > CLEAR * request_ms * MS:
                waited.append((before[-1] - answer.request.arrival - request_ms * MS) / step)
    if len(waited) < SEEN:
        return None, 0.0
    middle = statistics.median(waited)
    return (False if middle < WAITED[0] else True if middle > WAITED[1] else None), middle
