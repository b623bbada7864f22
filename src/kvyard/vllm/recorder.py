"""A recording of a running engine, as files that kvyard reads. This part knows no vLLM: it receives events.

A recording is a folder:

- ``trace.jsonl``: when requests came, how long they were and took, and what their prompts had in common; for ``kvyard replay``.
- ``passes.jsonl``: what each pass computed and how long it took; for ``kvyard profile fit``. Not where pipeline stages overlap.
- ``decisions.jsonl.gz``: every decision of the scheduler; for ``kvyard conform``. Only of engines whose decisions kvyard's
  engine can be asked to repeat.
- ``summary.json``: what was counted so far, and what recording cost.

No text and no hashes are in them: prompts are numbered by what they share. Memory is bounded. It never stands in the way of
the engine: a file that can't be written ends, with one line in the log, and the others go on.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.clock import MS, SECOND, Clock
from kvyard.errors import KvyardError
from kvyard.hashing import wire_hash
from kvyard.server.gateway.recording import ArrivedRequest, TrafficRecorder
from kvyard.server.gateway.recording.prefix_ids import PrefixIds
from kvyard.vllm.recording_file import RecordingFile
from kvyard.vllm.token_runs import TokenRuns

log = logging.getLogger("vllm.kvyard")

LIMIT = 1 << 30
"""Bytes that each file may have."""
REMEMBERED = 1 << 22
"""Prefixes that are known again in the decisions."""
FLUSHED_EVERY = 5 * SECOND


class RecordingCounters(msgspec.Struct):
    """Counters of a recording, and its cost."""

    requests: int = 0
    passes: int = 0
    """Rows that are in the file."""
    decisions: int = 0
    """Steps that are in the file."""
    errors: int = 0
    """Failures to write; each ends a file."""
    spent_ns: int = 0
    """Time spent in the recorder, in the engine's own thread."""


class RecordedRequest:
    """One request, from its arrival to its end."""

    __slots__ = ("arrival", "cached", "ended", "first_token", "name", "output", "preemptions", "priority", "reason")

    def __init__(self, name: str, arrival: int, priority: int) -> None:
        self.name = name
        self.arrival = arrival
        """Arrival, or the later time at which the scheduler could first see it."""
        self.priority = priority
        self.cached: int | None = None
        """The hit of its first admission."""
        self.first_token = -1
        self.preemptions = 0
        self.output = 0
        self.reason = "unfinished"
        self.ended = -1
        """Time at which it was aborted, if it was; otherwise the end of its last step."""


class EndedRequest(msgspec.Struct):
    """A request's text at its end."""

    hashes: Sequence[bytes]
    """Of its full blocks, answer included."""
    prompt_tokens: int
    output_tokens: int
    max_tokens: int


class PassComposition(msgspec.Struct):
    """Content of a pass."""

    prefills: list[tuple[int, int]]
    """New tokens and the tokens before them, of each prompt."""
    batch: int
    """Requests that decode."""
    context: int
    """Their contexts, summed, the token being computed included."""
    longest: int


class _Decided(msgspec.Struct):
    """Step in flight."""

    line: dict[str, Any]
    shape: PassComposition
    start: int
    dispatched: int
    returned: int = 0
    over: int = 0
    """Time at which its output had been read; 0 before."""
    last: bool = False
    """True if it left no request behind. Otherwise it lasts until the next one begins."""
    ends: list[tuple[RecordedRequest, EndedRequest]] = []
    first_tokens: list[RecordedRequest] = []


class EngineRecorder:
    """Writes one recording. For one thread, the one that schedules."""

    def __init__(
        self,
        folder: Path,
        header: dict[str, Any] | None,
        *,
        clock: Clock,
        hash_block_size: int,
        limit: int = LIMIT,
        overlapping: bool = False,
        timed: bool = True,
    ) -> None:
        """Begin a recording in ``folder``, which is made and must not exist. ``header`` is the first line of the decisions;
        without it none are recorded. ``overlapping``: a step may be decided on before the one before it is over; their
        outputs come in the order of the steps. ``timed``: the time of a pass is known; otherwise none is recorded.

        Raises ``KvyardError`` where the folder exists or can't be written.
        """
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise KvyardError(f"{folder} exists: name another folder for the recording") from None
        except OSError as problem:
            raise KvyardError(f"can't make {folder}: {problem.strerror}") from None
        self.folder = folder
        self.counters = RecordingCounters()
        self._clock = clock
        self._size = hash_block_size
        self._overlapping = overlapping
        self._trace = TrafficRecorder(folder / "trace.jsonl", clock=clock, limit=limit, engine_times=True)
        self._passes = RecordingFile(folder / "passes.jsonl", limit) if timed else None
        self._decisions: RecordingFile | None = None
        if header is not None and not overlapping:
            self._decisions = RecordingFile(folder / "decisions.jsonl.gz", limit)
            self._decisions.add(_line(header), 0)
        self._ids = PrefixIds(REMEMBERED)
        self._numbered = 0
        self._steps = 0
        self._step: _Decided | None = None
        """The last one that was decided on and isn't written."""
        self._queue: list[_Decided] = []
        """If steps overlap: those in flight, oldest first."""
        self._waiting: list[RecordedRequest] = []
        """Came since the last step was decided on."""
        self._gone: list[tuple[RecordedRequest, EndedRequest]] = []
        """Given up since the last step was over."""
        self._gone_names: list[str] = []
        """Of those whose lines are written already; the next step names them."""
        self._free_at = 0
        """End of the last step, where steps overlap."""
        self._flushed = clock.now()
        self._summarises = True
        self._settled = False
        """True if the engine has been idle since the last event, and all is written."""
        self.open: dict[str, RecordedRequest] = {}
        """Requests that have not ended, by the engine's id."""

    # -- requests ------------------------------------------------------------------------------------------------------

    def arrived(self, id_: str, hashes: Sequence[bytes], tokens: Sequence[int], priority: int) -> None:
        """Record a request that arrived: the hashes of its full blocks, and its prompt's tokens."""
        self.counters.requests += 1
        self._settled = False
        self._numbered += 1
        request = self.open[id_] = RecordedRequest(f"r{self._numbered}", self._clock.now(), priority)
        self._waiting.append(request)
        keys = [wire_hash(key) for key in hashes]
        tail = tokens[len(keys) * self._size :] if keys or len(tokens) < self._size else None
        self._trace.arrived(ArrivedRequest(id=id_, keys=keys, num_tokens=len(tokens), key_tokens=self._size, tail=tail))

    def sampled(self, id_: str) -> None:
        """Note that the step whose output is being processed gave the request its first token."""
        request = self.open.get(id_)
        if request is not None and request.first_token < 0:
            request.first_token = self._clock.now()
            if self._step is not None:
                self._step.first_tokens.append(request)

    def preempted(self, id_: str) -> None:
        """Record a preemption."""
        request = self.open.get(id_)
        if request is not None:
            request.preemptions += 1

    def ended(self, id_: str, end: EndedRequest, *, aborted: bool, in_step: bool) -> None:
        """Record a request that ended or was cancelled; ``in_step``: while a step was in flight."""
        request = self.open.pop(id_, None)
        if request is None:
            return
        self._settled = False
        request.output = end.output_tokens
        request.reason = "aborted" if aborted else "length"
        request.ended = self._clock.now() if aborted else -1
        first = request.first_token if request.first_token >= 0 else None
        self._trace.ended(id_, end.output_tokens, first_token=first, cached=request.cached)
        if in_step and self._step is not None:
            self._step.line.setdefault("aborted" if aborted else "finished", []).append(request.name)
            self._step.ends.append((request, end))
        elif request in self._waiting:
            self._waiting.remove(request)  # it came and went between two steps: the scheduler never saw it
        else:
            self._gone.append((request, end))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def decided(
        self,
        start: int,
        tokens: dict[str, int],
        hits: dict[str, int],
        preempted: Sequence[str],
        counts: tuple[int, int, int],
        shape: PassComposition,
    ) -> None:
        """A step was decided on, from ``start`` until now: tokens by request, those let in with what was found cached, who
        was preempted, how many run, wait, and how many blocks are free.
        """
        now = self._clock.now()
        self._write_step(start)
        line: dict[str, Any] = {
            "step": self._steps,
            "start": start,
            "ns": 0,
            "tokens": {self._name(id_): count for id_, count in tokens.items()},
            "running": counts[0],
            "waiting": counts[1],
            "free": counts[2],
            "line": None,  # the order of free blocks: too long to look at in every step
        }
        self._steps += 1
        self._settled = False
        for seen in self._waiting:
            seen.arrival = start
        self._waiting.clear()
        for id_, cached in hits.items():
            request = self.open.get(id_)
            if request is not None:
                line.setdefault("resumed" if request.cached is not None else "new", {})[request.name] = cached
                if request.cached is None:
                    request.cached = cached
        if preempted:
            line["preempted"] = [self._name(id_) for id_ in preempted]
        step = _Decided(line, shape, start, now)
        if self._gone or self._gone_names:
            line["gone"] = [*self._gone_names, *(given_up.name for given_up, _ in self._gone)]
            self._gone_names.clear()
            for given_up, _ in self._gone:
                given_up.ended = start
            step.ends += self._gone
            self._gone = []
        if self._overlapping:
            self._queue.append(step)
        else:
            self._step = step
        if now - self._flushed > FLUSHED_EVERY:
            self.flush()

    def returned(self, start: int) -> None:
        """Note that the output of the oldest step returned at ``start`` and is about to be processed."""
        if self._overlapping and self._queue:
            self._step = self._queue.pop(0)
        if self._step is not None:
            self._step.returned = start

    def looked_at(self, busy: bool) -> None:
        """Note that the output was processed; ``busy``: requests are left, so that the next step follows at once."""
        step = self._step
        if step is None:
            return
        step.over = self._clock.now()
        step.last = not busy
        if self._overlapping:
            began = max(step.dispatched, self._free_at)
            self._free_at = step.returned
            self._write_pass(step.shape, step.returned - began, None)
            self._step = None

    def idle(self, now: int) -> None:
        """Write everything: the engine has no requests and no step in flight at ``now``. Nothing else may follow, since vLLM
        kills engines that take long to end.
        """
        if self._settled:
            return
        self._write_step(now)
        self._write_gone(now)
        self.flush()
        self._settled = True

    def _write_step(self, end: int) -> None:
        """Write down the step that ended at ``end``, or earlier if it was the last."""
        step = self._step
        if step is None or self._overlapping:
            return
        self._step = None
        if step.last:
            end = step.over
        spent = step.line["ns"] = end - step.start
        device = step.returned - step.dispatched
        self._write_pass(step.shape, device, spent - device)
        if self._decisions is None:
            return
        for request in step.first_tokens:
            request.first_token = end
        self._decisions.add(_line(step.line))
        for request, ended in step.ends:
            self._write_request(request, ended, end)

    def _write_gone(self, time: int) -> None:
        """Write the requests that were cancelled after the last step, which was over at ``time``."""
        for request, end in self._gone:
            request.ended = time
            self._write_request(request, end, time)
            self._gone_names.append(request.name)
        self._gone.clear()

    def _write_pass(self, shape: PassComposition, device: int, host: int | None) -> None:
        if device <= 0 or self._passes is None:
            return
        row: dict[str, Any] = {
            "kind": "mixed",
            "prefills": shape.prefills,
            "batch": shape.batch,
            "context": shape.context,
            "longest": shape.longest,
            "ms": device / MS,
        }
        if host is not None:
            row["host_ms"] = host / MS
        self._passes.add(_line(row))

    def _write_request(self, request: RecordedRequest, end: EndedRequest, now: int) -> None:
        """Write a request's own line, and the line of its end."""
        if self._decisions is None or self._decisions.ended:
            return
        text = TokenRuns(self._ids, self._size, end.hashes, end.prompt_tokens + end.output_tokens)
        complete = request.reason == "length"
        more = 0 if complete else max(0, end.max_tokens - end.output_tokens)
        asked = {
            "request": request.name,
            "number": int(request.name[1:]),
            "arrival": request.arrival,
            "prompt": text.cut(0, end.prompt_tokens),
            "output": text.cut(end.prompt_tokens, end.prompt_tokens + end.output_tokens, more),
            "priority": request.priority,
            "abort": request.ended if request.reason == "aborted" else None,
        }
        became = {
            "end": request.name,
            "reason": request.reason,
            "at": request.ended if request.reason == "aborted" else now,
            "first_token": request.first_token if request.first_token >= 0 else None,
            "output": request.output,
            "cached": request.cached,
            "preemptions": request.preemptions,
        }
        self._decisions.add(_line(asked) + _line(became), 0)

    def _name(self, id_: str) -> str:
        request = self.open.get(id_)
        return request.name if request is not None else "?"

    # -- files ---------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Let what was recorded survive this process."""
        if self._step is not None and self._step.last:
            self._write_step(self._step.over)
        self._flushed = self._clock.now()
        self._trace.flush()
        for file in (self._passes, self._decisions):
            if file is not None:
                file.flush()
        self._summarise()

    def close(self, unfinished: dict[str, EndedRequest]) -> None:
        """End the recording. ``unfinished`` are the requests that are still open, by the engine's id."""
        step = self._step
        broken = step is not None and not step.over and not self._overlapping
        if step is not None and not broken:
            self._write_step(step.over)
        if unfinished or broken:
            # The log is cut after the last whole step. Requests that ended later were in flight then.
            ends = [*(step.ends if step is not None and broken else ()), *self._gone]
            seen = ((self.open.pop(id_, None), end) for id_, end in unfinished.items())
            ends += [(request, end) for request, end in seen if request is not None and request not in self._waiting]
            for request, end in ends:
                request.reason = "unfinished"
                request.output = end.output_tokens
                self._write_request(request, end, -1)
            if self._decisions is not None:
                self._decisions.add(_line({"cut": True}), 0)
        elif step is not None:
            self._write_gone(step.over)
        self._step = None
        self._trace.close()
        for file in (self._passes, self._decisions):
            if file is not None:
                file.close()
        self._summarise()

    def _summarise(self) -> None:
        passes, decisions = self._passes, self._decisions
        self.counters.passes = passes.rows if passes is not None else 0
        self.counters.decisions = decisions.rows if decisions is not None else 0
        self.counters.errors = sum(file.errors for file in (passes, decisions) if file is not None)
        self.counters.errors += not self._summarises
        summary = {**msgspec.to_builtins(self.counters), "trace": msgspec.to_builtins(self._trace.counters)}
        steps = max(1, self._steps)
        summary["us_per_step"] = round(self.counters.spent_ns / steps / 1000, 2)
        if not self._summarises:
            return
        try:
            (self.folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
        except OSError as problem:
            self._summarises = False
            self.counters.errors += 1
            log.warning("kvyard: recording of summary.json ended: it can't be written: %s", problem.strerror)


def _line(row: dict[str, Any]) -> bytes:
    return msgspec.json.encode(row) + b"\n"
