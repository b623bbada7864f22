"""Totals of a run's records in one pass over their rows: sums, counts and samples of values, for a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvyard.clock import MS
from kvyard.events.tier import LOWER_TIERS
from kvyard.replay.records import BATCH, MISS_NAMES, STATUSES, RecordPart, Records, Rows
from kvyard.replay.report.report import Slo
from kvyard.replay.report.sketch import MOST_EXACT, Values
from kvyard.replay.report.slo import good_requests
from kvyard.replay.report.words import STAGES

Column = npt.NDArray[np.int64]

FINISHED = STATUSES.index("finished")
REJECTED_STATUS = STATUSES.index("rejected")
_RANK = re.compile(r"@\d+$")
"""Behind the name of a worker that has several; what is before it, as the model of a pool, may have an @ too."""
WIDE = 64
"""Bytes of ids that are sorted at a fixed width."""
_EARLY = ("room", "prefill_queue", "prefill", "transfer", "decode_queue", "first_step")
"""The order of stages where room was made first, and the prompt waited for that."""


class WorkerSums(msgspec.Struct):
    """Sums of the requests that a worker had anything to do with."""

    requests: int = 0
    input: int = 0
    """Prompt tokens of those whose prompt it computed."""
    output: int = 0
    """Tokens of its answers."""
    cached: int = 0
    loaded: int = 0
    unknown: int = 0
    """Requests of which it isn't known how much was cached."""


def good_rows(slo: Slo, rows: Rows) -> npt.NDArray[np.bool_]:
    """Return which of ``rows``, all of finished requests, are within ``slo``."""
    gaps = rows["output"].astype(np.int64) - 1
    tpot = np.full(len(rows), np.nan)
    longer = gaps > 0
    tpot[longer] = (rows["ended"] - rows["first_token"])[longer] / gaps[longer]
    return good_requests(slo, rows["first_token"] - rows["arrival"], rows["ended"] - rows["arrival"], tpot)


class RecordTotals:
    """Sums over all records of a run."""

    def __init__(self, records: Records, *, block_size: int = 0, slo: Slo | None = None) -> None:
        """``block_size`` is the router's; ``slo`` says which requests are good."""
        self.count = len(records)
        self.levels = records.levels
        """Number of lower tiers that requests may have been loaded from."""
        self.exact = self.count <= MOST_EXACT
        """True if percentiles are exact, too."""
        self.start, self.end = 0, 0
        """Nanoseconds: the first arrival, and the last that happened to a request."""
        self.statuses: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        """Reasons of misses of admitted requests."""
        self.all: Counter[str] = Counter()
        """Sums of fields over all requests, ..."""
        self.admitted: Counter[str] = Counter()
        """... and over those that were admitted, of which ``requests`` is how many there are."""
        self.known: Counter[str] = Counter()
        """``sums`` over requests whose cached tokens are known."""
        self.good: Counter[str] = Counter()
        """Finished requests within the SLO, and their ``output``."""
        names = ("ttft", "tpot", "e2e", "queue", "loading")
        self.latency = {name: Values(MS, exact=self.exact) for name in names}
        self.lengths = {name: Values(exact=self.exact) for name in ("input", "output")}
        self.stages = {name: Values(MS, exact=self.exact) for name in STAGES}
        self.sent = self.queued = 0
        """Bytes that finished requests sent from worker to worker, and nanoseconds that others cost them there."""
        self._size = block_size
        self._slo = slo
        self._bases: list[str] = []
        """Names of workers, without ranks."""
        self._base_of: Column = np.zeros(0, dtype=np.int64)
        """By number of a name in the records."""
        self._sums: Column = np.zeros((0, 6), dtype=np.int64)
        self._map_names(records)
        began: list[int] = []
        for part in records.parts():
            self._add(part)
            began.append(int(part.rows["arrival"].min()))
        self.start = min(began, default=0)
        self.end = max(self.end, self.start)

    def workers(self) -> dict[str, WorkerSums]:
        """By the workers' names; only those that had a request."""
        all_sums = {name: WorkerSums(*row) for name, row in zip(self._bases, self._sums.tolist(), strict=True)}
        return {name: sums for name, sums in all_sums.items() if name and sums.requests}

    def involved(self, part: RecordPart, numbers: Sequence[int] | Column) -> Iterator[tuple[Column, Column]]:
        """Yield pairs of rows and workers that had to do with them: a worker once for each of its requests. ``numbers`` says
        what to call each of ``names``.
        """
        first, second = self._pair(part)
        called = np.asarray(numbers, dtype=np.int64)
        for workers in (second, np.where(first == second, 0, first)):
            rows = np.flatnonzero(workers)
            yield rows, called[workers[rows]]

    @property
    def names(self) -> list[str]:
        """Return the names of all workers in the records, without ranks; the first is empty."""
        return self._bases

    # -- inside -----------------------------------------------------------------------------------------------------

    def _map_names(self, records: Records) -> None:
        for record in records.open.values():  # those in flight may have no number for their worker yet
            records.workers.number(record.worker)
            if record.stages is not None:
                records.workers.number(record.stages.prefill_worker)
        numbers: dict[str, int] = {"": 0}
        bases = [numbers.setdefault(_RANK.sub("", name), len(numbers)) for name in records.workers.names]
        self._bases = list(numbers)
        self._base_of = np.array(bases, dtype=np.int64)
        self._sums = np.zeros((len(numbers), 6), dtype=np.int64)

    def _pair(self, part: RecordPart) -> tuple[Column, Column]:
        """For each row the worker that another one got the prompt from, 0 if there is none, and the one that answered."""
        second = self._base_of[part.rows["worker"]]
        if part.stages is None:
            return np.zeros(len(second), dtype=np.int64), second
        return self._base_of[np.maximum(part.stages["prefill_worker"], 0)], second

    def _add(self, part: RecordPart) -> None:
        rows = part.rows
        for number, count in enumerate(np.bincount(rows["status"], minlength=len(STATUSES)).tolist()):
            self.statuses[STATUSES[number] or "unfinished"] += count
        last = np.maximum.reduce([rows[name] for name in ("arrival", "admitted", "first_token", "ended")])
        self.end = max(self.end, int(last.max()))
        for name in ("input", "output", "best_overlap", "overlap", "retries", "preemptions"):
            self.all[name] += _sum(rows[name])
        informed = rows[rows["best_overlap"] != 0]
        self.all["informed"] += len(informed)
        self.all["best"] += int((informed["overlap"] == informed["best_overlap"]).sum())
        self._add_admitted(rows[rows["admitted"] >= 0])
        known = rows[rows["cached"] >= 0]
        self.known.update(requests=len(known), input=_sum(known["input"]), cached=_sum(known["cached"]))
        loading = rows["loading"]
        self.latency["loading"].add(loading[loading > 0])
        self._add_finished(rows[rows["status"] == FINISHED])
        self._add_workers(part)
        if part.stages is not None:
            ways = part.stages
            handed = (ways["prefill_worker"] >= 0) & (rows["status"] == FINISHED)
            self._add_stages(rows[handed], ways[handed])

    def _add_admitted(self, rows: Rows) -> None:
        for number, count in enumerate(np.bincount(rows["miss"], minlength=len(MISS_NAMES)).tolist()):
            self.misses[MISS_NAMES[number]] += count
        sums = self.admitted
        sums["requests"] += len(rows)
        for name in ("input", "cached", "pulled", "gone", "overlap"):
            sums[name] += _sum(rows[name])
        for level, tier in enumerate(LOWER_TIERS[: self.levels]):
            sums[tier.label] += _sum(rows["loaded"][:, level])
        reused = rows["cached"].astype(np.int64) + rows["loaded"].sum(axis=1, dtype=np.int64)
        sums["believed_found"] += _sum(np.minimum(rows["overlap"].astype(np.int64) * self._size, reused))

    def _add_finished(self, rows: Rows) -> None:
        ttft, e2e = rows["first_token"] - rows["arrival"], rows["ended"] - rows["arrival"]
        gaps = rows["output"].astype(np.int64) - 1
        longer = gaps > 0
        tpot = (rows["ended"] - rows["first_token"])[longer] / gaps[longer]
        self.latency["ttft"].add(ttft)
        self.latency["tpot"].add(tpot)
        self.latency["e2e"].add(e2e)
        self.latency["queue"].add(rows["admitted"] - rows["arrival"])
        for name, lot in self.lengths.items():
            lot.add(rows[name])
        if self._slo is not None:
            good = good_rows(self._slo, rows)
            self.good.update(requests=int(good.sum()), output=_sum(rows["output"][good]))

    def _add_workers(self, part: RecordPart) -> None:
        rows = part.rows
        first, second = self._pair(part)
        whole = part.stages is None or part.stages["prefill_worker"] < 0
        prompts = np.where(whole, second, first)
        sums = self._sums
        np.add.at(sums[:, 0], second, 1)
        apart = (first != 0) & (first != second)
        np.add.at(sums[:, 0], first[apart], 1)
        np.add.at(sums[:, 1], prompts, rows["input"])
        np.add.at(sums[:, 2], second, rows["output"])
        np.add.at(sums[:, 3], prompts, rows["cached"])
        np.add.at(sums[:, 4], prompts, rows["loaded"].sum(axis=1, dtype=np.int64))
        np.add.at(sums[:, 5], prompts, rows["cached"] < 0)

    def _add_stages(self, rows: Rows, ways: Rows) -> None:
        """Add each stage of requests that were handed over; the stages of a request add up to its TTFT."""
        self.sent += _sum(ways["sent"])
        self.queued += _sum(ways["queued"])
        early = ways["reserved"] < ways["held"]
        late = (ways["activated"], ways["entered"], rows["first_token"])
        usual = (rows["arrival"], rows["admitted"], ways["held"], ways["reserved"], *late)
        other = (rows["arrival"], ways["reserved"], rows["admitted"], ways["held"], *late)
        for chosen, names, marks in ((~early, STAGES, usual), (early, _EARLY, other)):
            for name, before, mark in zip(names, marks, marks[1:], strict=False):
                self.stages[name].add((mark - before)[chosen])


def _sum(values: npt.NDArray[np.generic]) -> int:
    return int(values.sum(dtype=np.int64))


def digest(records: Records) -> str:
    """Return the digest of the requests' ids and lengths, by the order of ids."""
    lengths = np.concatenate(
        [np.zeros((0, 2), dtype=np.int32)]
        + [np.stack((part.rows["input"], part.rows["wanted"]), axis=1) for part in records.parts()]
    )
    ids, order = _sorted_ids(records)
    hashed = xxhash.xxh3_64(b"[")
    for first in range(0, len(order), BATCH):
        some = order[first : first + BATCH]
        rows = [
            (bytes(ids[number]).decode("utf-8", "surrogatepass"), *lengths[number].tolist()) for number in some.tolist()
        ]
        hashed.update(b"," * (first > 0) + msgspec.json.encode(rows)[1:-1])
    hashed.update(b"]")
    return hashed.hexdigest()


def _sorted_ids(records: Records) -> tuple[Sequence[bytes] | npt.NDArray[np.bytes_], Column]:
    """Return all ids, and their numbers in order."""
    widest = max((int(part.rows["name_size"].max()) for part in records.parts()), default=0)
    if widest > WIDE or any(b"\0" in part.names for part in records.parts()):
        ids = [name for part in records.parts() for name in part.ids()]
        return ids, np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
    # At a fixed width, padded with zero bytes, they take a fraction of the room.
    packed = [np.array(part.ids(), dtype=f"S{max(1, widest)}") for part in records.parts()]
    joined = np.concatenate(packed) if packed else np.zeros(0, dtype="S1")
    return joined, np.argsort(joined, kind="stable")
