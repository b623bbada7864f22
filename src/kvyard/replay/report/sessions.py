"""Sessions of a run: their durations and causes, from the rows of their requests.

The time of a session is followed back from its end: the request that ended last, then the request that ended last before its
arrival, and so on. The time between two of them is a tool's or a person's. So causes add up to the completion time, also
where sub-agents run side by side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvyard.clock import MS, SECOND
from kvyard.replay.records import CALLED_TOOL, RecordPart, Records
from kvyard.replay.report.idle import IdleFleet
from kvyard.replay.report.numbers import Share, share, spread
from kvyard.replay.report.session_report import CAUSES, Residency, SessionsReport, SessionTurn, SizeGroup, SlowSession
from kvyard.replay.report.totals import FINISHED

SLOWEST = 10
"""Sessions whose requests a report has one by one,"""
TURNS = 50
"""and how many requests of each, at most."""
GROUPS = 4
_CAUSES = tuple(CAUSES)
_QUEUE, _LOAD, _PREFILL, _TRANSFER, _DECODE = range(5)
_PLAIN = ("arrival", "due", "ended", "status", "miss", "input", "output", "cached", "own", "lost")

Column = npt.NDArray[np.int64]


class _Turns:
    """The requests of all sessions as columns, by session and then by arrival."""

    def __init__(self, records: Records) -> None:
        columns: dict[str, list[Column]] = {}
        tops = np.array(records.sessions.tops, dtype=np.int64)
        before = 0
        for part in records.parts():
            chosen = np.flatnonzero(part.rows["session"] >= records.first_session)
            if len(chosen):
                for name, values in (_columns(part, chosen, tops) | {"place": chosen + before}).items():
                    columns.setdefault(name, []).append(values)
            before += len(part.rows)
        joined = {name: np.concatenate(lots) for name, lots in columns.items()}
        if records.first_session and joined:  # a sub-agent may have come after the session at its top
            kept = joined["top"] >= records.first_session
            joined = {name: values[kept] for name, values in joined.items()}
        self.count = len(joined["top"]) if joined else 0
        if self.count:
            order = np.lexsort((joined["arrival"], joined["top"]))
            joined = {name: values[order] for name, values in joined.items()}
        self.column = joined

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """Yield each session's number, and where its rows begin and end."""
        tops = self.column["top"]
        starts = np.flatnonzero(np.diff(tops, prepend=tops[0] - 1))
        yield from zip(tops[starts].tolist(), starts.tolist(), [*starts[1:].tolist(), len(tops)], strict=True)


def _columns(part: RecordPart, chosen: npt.NDArray[np.intp], tops: Column) -> dict[str, Column]:
    rows = part.rows[chosen]
    columns = {name: rows[name].astype(np.int64) for name in _PLAIN}
    columns["session"] = rows["session"].astype(np.int64)
    columns["top"] = tops[columns["session"]]
    columns["tool"] = (rows["filled"] == CALLED_TOOL).astype(np.int64)
    columns["worker"] = columns["prefill_worker"] = rows["worker"].astype(np.int64)
    columns["loaded"] = np.maximum(rows["loaded"].astype(np.int64), 0).sum(axis=1)
    columns["admitted"] = rows["admitted"].astype(np.int64)
    times = _times(rows)
    if part.stages is not None:
        stages = part.stages[chosen]
        handed = (stages["prefill_worker"] >= 0) & (rows["first_token"] >= 0) & (stages["entered"] >= 0)
        columns["prefill_worker"] = np.where(handed, stages["prefill_worker"], columns["worker"])
        times = np.where(handed[:, None], _staged_times(rows, stages), times)
    for cause in range(5):
        columns[_CAUSES[cause]] = times[:, cause]
    return columns


def _times(rows: npt.NDArray[np.void]) -> Column:
    """Return nanoseconds of each request by cause; together they are its end-to-end latency."""
    arrival, ended = rows["arrival"], np.maximum(rows["ended"], rows["arrival"])
    first = np.where(rows["first_token"] >= 0, rows["first_token"], ended)
    # A live client sees no admission: for it, all that comes before the first token is prefill.
    seen = np.where(rows["first_token"] >= 0, arrival, ended)
    admitted = np.minimum(np.where(rows["admitted"] >= 0, rows["admitted"], seen), first)
    load = np.clip(rows["loading"], 0, admitted - arrival)
    times = np.zeros((len(rows), 5), dtype=np.int64)
    times[:, _QUEUE] = admitted - arrival - load
    times[:, _LOAD] = load
    times[:, _PREFILL] = first - admitted
    times[:, _DECODE] = ended - first
    return times


def _staged_times(rows: npt.NDArray[np.void], stages: npt.NDArray[np.void]) -> Column:
    """Like ``_times`` for requests that one worker handed over to another."""
    times = _times(rows)
    early = stages["reserved"] < stages["held"]
    ready = np.maximum(stages["reserved"], stages["held"])
    transfer = stages["activated"] - ready
    first_step = rows["first_token"] - stages["entered"]
    prefill = stages["held"] - rows["admitted"] + first_step
    waits = np.where(early, 0, stages["reserved"] - stages["held"]) + stages["entered"] - stages["activated"]
    times[:, _QUEUE] += waits
    times[:, _PREFILL] = prefill
    times[:, _TRANSFER] = transfer
    return times


class _Session:
    """One session that ended."""

    __slots__ = ("causes", "completion", "idle", "migrations", "service", "start", "stop", "top")

    def __init__(self, top: int, start: int, stop: int) -> None:
        self.top, self.start, self.stop = top, start, stop
        self.completion = 0
        """Nanoseconds from beginning to end,"""
        self.service = 0
        """those without tools and think time,"""
        self.idle = 0
        """and those on an idle fleet."""
        self.causes: list[int] = []
        self.migrations = 0

    @property
    def slowdown(self) -> float:
        """By which factor it is slower than alone."""
        return self.service / max(1, self.idle)


class _Reader:
    """Follows sessions through their requests."""

    def __init__(self, turns: _Turns, idle: IdleFleet | None) -> None:
        def column(name: str) -> list[int]:
            values: list[int] = turns.column[name].tolist()
            return values

        self._arrival, self._ended, self._due, self._tool = map(column, ("arrival", "ended", "due", "tool"))
        self._times = list(zip(*map(column, _CAUSES[:5]), strict=True))
        self._kept = np.minimum(turns.column["cached"], turns.column["own"]).tolist()
        self._admitted, self._worker, self._agent = map(column, ("admitted", "prefill_worker", "session"))
        self._idle: list[int] | None = None
        if idle is not None:
            sizes = (column("input"), column("own"), column("output"))
            self._idle = list(map(idle.request_ns, self._worker, column("worker"), *sizes))
        self.moves = self.follows = 0
        """Requests sent to another worker than the one before of the same agent, and all that had one before."""
        self.kept = 0
        """Token-nanoseconds that sessions' tokens lay idle until their next request found them."""

    def session(self, top: int, start: int, stop: int) -> _Session:
        """Return the session with rows ``start`` to ``stop``."""
        session = _Session(top, start, stop)
        arrival, ended = self._arrival, self._ended
        before = self._predecessors(start, stop)
        self._note_moves(session)
        last = max(range(start, stop), key=lambda row: (ended[row], row))
        session.completion = ended[last] - arrival[start]
        session.causes = self._causes(start, last, before)
        session.service = sum(session.causes[:5])
        if self._idle is not None:
            session.idle = self._idle_service(start, stop, before, self._idle)
        return session

    def _predecessors(self, start: int, stop: int) -> list[int]:
        """Return by row the row that ended last before its arrival; -1 if none had ended."""
        arrival, ended = self._arrival, self._ended
        ends: list[tuple[int, int]] = []
        before: list[int] = []
        latest: dict[int, int] = {}
        for row in range(start, stop):
            arrived_ns = arrival[row]
            ended_before = bisect_right(ends, (arrived_ns, stop))
            before.append(ends[ended_before - 1][1] if ended_before else -1)
            end = (ended[row], row)
            if not ends or end > ends[-1]:
                ends.append(end)
            else:
                ends.insert(bisect_right(ends, end), end)
            previous = latest.get(self._agent[row])
            if previous is not None and self._kept[row] > 0 and self._worker[row] == self._worker[previous]:
                self.kept += self._kept[row] * max(0, self._admitted[row] - ended[previous])
            latest[self._agent[row]] = row
        return before

    def _note_moves(self, session: _Session) -> None:
        latest: dict[int, int] = {}
        for row in range(session.start, session.stop):
            agent, worker = self._agent[row], self._worker[row]
            previous = latest.get(agent)
            if previous is not None:
                self.follows += 1
                if previous != worker:
                    session.migrations += 1
            latest[agent] = worker
        self.moves += session.migrations

    def _causes(self, start: int, last: int, before: Sequence[int]) -> list[int]:
        """Return nanoseconds by cause, from the end of row ``last`` back to the session's beginning."""
        arrival, ended = self._arrival, self._ended
        sums = [0] * len(_CAUSES)
        row, until = last, ended[last]
        while True:
            left = until - arrival[row]
            for cause, ns in enumerate(self._times[row]):
                part = ns if ns < left else left
                sums[cause] += part
                left -= part
            until = arrival[row]
            previous = before[row - start]
            if previous >= 0:
                sums[5 if self._tool[previous] else 6] += until - ended[previous]
                until = ended[previous]
            else:  # none had ended: another agent was busy
                previous = row - 1
                while previous >= start and arrival[previous] == until:
                    previous -= 1
            if previous < start:
                return sums
            row = previous

    def _idle_service(self, start: int, stop: int, before: Sequence[int], idle: Sequence[int]) -> int:
        """Return service time with each request as quick as alone, and tools and people as slow as they were."""
        arrival, ended, due = self._arrival, self._ended, self._due
        ends: list[int] = []
        served: list[int] = []
        for row in range(start, stop):
            previous = before[row - start]
            if previous >= 0:
                done = ends[previous - start]
                arrival_ns = max(done, due[row]) if due[row] >= 0 else done + arrival[row] - ended[previous]
                ns = served[previous - start]
            else:
                arrival_ns = arrival[row]
                ns = arrival_ns - arrival[start]
            ends.append(arrival_ns + idle[row])
            served.append(ns + idle[row])
        return served[max(range(stop - start), key=lambda turn: (ends[turn], turn))]


def make_sessions(
    records: Records, idle: IdleFleet | None, residency: Mapping[str, float] | None = None
) -> SessionsReport | None:
    """Return the sessions of ``records``; ``None`` if there are none. ``idle`` says how long requests take alone.
    ``residency`` has the token-seconds ``pool``, ``held`` and ``idle`` of a simulated fleet.
    """
    turns = _Turns(records) if records.sessions.names else None
    if turns is None or not turns.count:
        return None
    reader = _Reader(turns, idle)
    finished = turns.column["status"] == FINISHED
    through: list[_Session] = []
    count = 0
    for top, start, stop in turns.slices():
        count += 1
        if finished[start:stop].all():
            through.append(reader.session(top, start, stop))
    slowdowns = np.array([session.slowdown for session in through]) if idle is not None else None
    causes: Counter[str] = Counter()
    for session in through:
        causes.update(dict(zip(_CAUSES, session.causes, strict=True)))
    slowest = sorted(through, key=lambda session: (-session.completion, session.top))[:SLOWEST]
    return SessionsReport(
        count=count,
        finished=len(through),
        requests=turns.count,
        completion=spread([session.completion for session in through], MS),
        service=spread([session.service for session in through], MS),
        slowdown=None if slowdowns is None else spread(slowdowns),
        turns=spread([session.stop - session.start for session in through]),
        causes_ms={name: causes[name] / MS / max(1, len(through)) for name in CAUSES},
        migrations=share(
            reader.moves,
            reader.follows,
            "requests sent to another worker than the one before them / requests with one before them",
        ),
        reuse=_reuse(turns) if idle is not None else {},
        jain=None if slowdowns is None or not len(slowdowns) else jain(slowdowns),
        sizes=[] if slowdowns is None else _sizes(through, slowdowns),
        residency=None if residency is None else _residency(residency, reader.kept / SECOND),
        slowest=_slowest(records, turns, slowest, idle is not None),
    )


def jain(values: npt.NDArray[np.float64]) -> float:
    """Return Jain's fairness index."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def _reuse(turns: _Turns) -> dict[str, Share]:
    column = turns.column
    known = (column["admitted"] >= 0) & (column["own"] >= 0)
    prompts, own = column["input"][known], column["own"][known]
    reused = column["cached"][known] + column["loaded"][known]
    within = np.minimum(reused, own)
    of = "{} / prompt tokens of admitted requests of sessions"
    parts = {
        "within": (within, "prompt tokens found that the session had sent before"),
        "across": (reused - within, "prompt tokens found that only others had sent before"),
        "again": (np.maximum(own - reused, 0), "prompt tokens computed though the session had sent them before"),
    }
    return {name: share(int(part.sum()), int(prompts.sum()), of.format(words)) for name, (part, words) in parts.items()}


def _sizes(sessions: Sequence[_Session], slowdowns: npt.NDArray[np.float64]) -> list[SizeGroup]:
    order = sorted(range(len(sessions)), key=lambda number: (sessions[number].idle, sessions[number].top))
    groups = []
    for chosen in np.array_split(np.array(order, dtype=np.int64), GROUPS):
        if len(chosen):
            here = spread(slowdowns[chosen])
            some = [sessions[index] for index in chosen.tolist()]
            groups.append(
                SizeGroup(
                    sessions=len(some),
                    idle_ms=sum(session.idle for session in some) / len(some) / MS,
                    service_ms=sum(session.service for session in some) / len(some) / MS,
                    slowdown_mean=here.mean,
                    slowdown_p90=here.p90,
                )
            )
    return groups


def _residency(seconds: Mapping[str, float], kept: float) -> Residency:
    pool, held, idle = seconds["pool"], seconds["held"], seconds["idle"]
    return Residency(pool=pool, held=held, idle=idle, free=pool - held - idle, kept=kept)


def _slowest(records: Records, turns: _Turns, sessions: Sequence[_Session], simulated: bool) -> list[SlowSession]:
    column = turns.column
    if not sessions:
        return []
    first = int(column["arrival"].min())
    latency = column["ended"] - column["arrival"]
    shown: dict[int, list[int]] = {}
    for session in sessions:
        rows = np.arange(session.start, session.stop)
        if len(rows) > TURNS:
            rows = np.sort(rows[np.argsort(-latency[rows], kind="stable")[:TURNS]])
        shown[session.top] = rows.tolist()
    places = {row: int(column["place"][row]) for rows in shown.values() for row in rows}
    records_by_place = records.some(sorted(places.values()))
    slow = []
    for session in sessions:
        begun = int(column["arrival"][session.start])
        requests = []
        for row in shown[session.top]:
            record = records_by_place[places[row]]
            causes = {name: int(column[name][row]) / MS for name in _CAUSES[:5] if column[name][row]}
            requests.append(
                SessionTurn(
                    id=record.id,
                    agent=(record.request.session or "") if record.request.root is not None else "",
                    worker=record.prefilled_by,
                    at_s=(record.arrival - begun) / SECOND,
                    ms=causes,
                    held_ms=max(0, record.waited) / MS,
                    input=record.input,
                    output=record.output,
                    cached=max(0, record.cached),
                    loaded=int(column["loaded"][row]),
                    own=max(0, record.own),
                    evicted=max(0, record.lost),
                    miss=record.miss,
                    status=record.status,
                )
            )
        slow.append(
            SlowSession(
                id=records.sessions.names[session.top],
                start_s=(begun - first) / SECOND,
                completion_ms=session.completion / MS,
                idle_ms=session.idle / MS if simulated else None,
                slowdown=session.slowdown if simulated else None,
                requests=session.stop - session.start,
                migrations=session.migrations,
                causes_ms={name: ns / MS for name, ns in zip(_CAUSES, session.causes, strict=True)},
                turns=requests,
                left_out=session.stop - session.start - len(requests),
            )
        )
    return slow
