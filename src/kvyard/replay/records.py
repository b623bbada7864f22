"""The records of a run: objects for requests in flight, packed rows for those that are through.

A row takes 140 bytes, four more for each lower tier, and its name. Rows have the order in which requests came. Complete
rows are passed on during the run (``sink``), and beyond ``RESIDENT`` rows the oldest wait in a temporary file until the report:
so memory depends on the requests in flight.
"""

import struct
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import groupby
from operator import attrgetter
from typing import IO, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard.errors import KvyardError
from kvyard.replay.record import MISSES, Record, Stages
from kvyard.replay.traces.request import TraceRequest

Rows = npt.NDArray[np.void]
Sink = Callable[[list[Record]], object]

CHUNK: Final = 1 << 14
"""Rows that are kept together."""
RESIDENT: Final = 1 << 18
"""Rows in memory, about; the oldest complete chunks beyond them are in a file."""
BATCH: Final = 20_000
"""Rows that a sink is given at a time."""

CALLED_TOOL: Final = 2
STATUSES = ("", "finished", "rejected", "cancelled", "failed")
_TIMES = ("arrival", "due", "admitted", "first_token", "ended", "loading", "waited")
_RESULTS = (
    *("output", "cached", "pulled", "lost", "left", "elsewhere", "own", "gone"),
    *("preemptions", "overlap", "best_overlap", "retries"),
)
_COUNTS = ("input", "wanted", *_RESULTS)
_STAMPS = ("held", "reserved", "activated", "entered", "released", "sent", "queued")
STAGE_ROW = np.dtype([("prefill_worker", "<i4")] + [(name, "<i8") for name in _STAMPS])
"""Stages from a prefill worker to a decode worker; ``prefill_worker`` is -1 if there was none."""


def _packing(row: np.dtype[np.void]) -> struct.Struct:
    """Return the packing of one ``row``, which is quicker than an assignment to a numpy row."""
    codes = {"i8": "q", "i4": "i", "u4": "I", "i1": "b", "u1": "B"}
    columns = [row[name] for name in row.names or ()]
    packing = struct.Struct(
        "<" + "".join(codes[column.base.str[1:]] * (column.itemsize // column.base.itemsize) for column in columns)
    )
    assert packing.size == row.itemsize
    return packing


class RowLayout:
    """The layout of a request's row in a fleet with a number of lower tiers."""

    __slots__ = ("dtype", "filled", "pack_into", "size")

    def __init__(self, levels: int) -> None:
        self.dtype = np.dtype(
            [(name, "<i8") for name in _TIMES]
            + [(name, "<i4") for name in (*_COUNTS, "worker", "reason", "tenant", "session")]
            + [("loaded", "<i4", (levels,)), ("name_at", "<u4"), ("name_size", "<u4")]
            + [("levels", "<i1"), ("status", "<u1"), ("miss", "<u1"), ("filled", "<u1")]
        )
        """``worker``, ``reason``, ``tenant`` and ``session`` are numbers of names, -1 without a session; ``filled`` is 0 while
        a request is in flight, and ``CALLED_TOOL`` if its answer called a tool."""
        self.size = self.dtype.itemsize
        self.filled = self.size - 1
        """Position of ``filled`` in a row."""
        self.pack_into = _packing(self.dtype).pack_into


_PACK_STAGES: Final = _packing(STAGE_ROW)
_numbers_of: Final[Callable[[Record], tuple[int, ...]]] = attrgetter(
    *_TIMES, "request.input_length", "request.output_length", *_RESULTS
)
_stamps_of: Final[Callable[[Stages], tuple[int, ...]]] = attrgetter(*_STAMPS)
_STATUS: Final = {name: number for number, name in enumerate(STATUSES)}
MISS_NAMES = ("", *MISSES)
_MISS: Final = {name: number for number, name in enumerate(MISS_NAMES)}
_NO_STAGES: Final = _PACK_STAGES.pack(-1, *(-1,) * len(_STAMPS))


class NameTable:
    """Names by number; 0 is the empty one."""

    __slots__ = ("_numbers", "names")

    def __init__(self) -> None:
        self.names = [""]
        self._numbers = {"": 0}

    def number(self, name: str) -> int:
        """Return the number of ``name``, a new one if need be."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number


class SessionTable:
    """Names of sessions by number, and the session at the top of each: a sub-agent's is its caller."""

    __slots__ = ("_numbers", "names", "tops")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tops: list[int] = []
        """By session, the number of the session at its top; its own number where no other called it."""
        self._numbers: dict[str, int] = {}

    def number(self, name: str, root: str | None = None) -> int:
        """Return the number of the session ``name``, a new one if need be; ``root`` is the session at its top, if that is
        another."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
            self.tops.append(number)
            if root is not None and root != name:
                self.tops[number] = self.number(root)
        return number

    def root(self, number: int) -> str | None:
        """Return the name of the session at the top of another one; ``None`` for a session that no other called."""
        top = self.tops[number]
        return None if top == number else self.names[top]


class RecordPart:
    """Some records in the order in which their requests came, as rows."""

    __slots__ = ("names", "rows", "stages")

    def __init__(self, rows: Rows, stages: Rows | None, names: bytes | bytearray) -> None:
        self.rows = rows
        self.stages = stages
        self.names = names
        """Names of requests, by ``name_at``."""

    def ids(self) -> list[bytes]:
        """Return the requests' ids, UTF-8."""
        names = bytes(self.names)
        ends = self.rows["name_at"] + self.rows["name_size"]
        return [names[start:end] for start, end in zip(self.rows["name_at"].tolist(), ends.tolist(), strict=True)]


class PackedRecords(msgspec.Struct, frozen=True):
    """All records of a run as they are sent to another process."""

    levels: int
    workers: list[str]
    reasons: list[str]
    tenants: list[str]
    sessions: list[tuple[str, str | None]]
    """Names, and those of the sessions at the top of sub-agents."""
    parts: list[tuple[bytes, bytes, bytes]]
    """Rows, stages, names."""


class _RowBlock:
    __slots__ = ("closed", "names", "place", "rows", "stages")

    def __init__(self, row_size: int) -> None:
        self.rows = bytearray(CHUNK * row_size)
        self.stages: bytearray | None = None
        self.names = bytearray()
        self.closed = 0
        self.place: tuple[int, int, int, int] | None = None
        """In the file: where, and how many bytes of rows, stages and names."""


class _RecordValues(ValuesView[Record]):
    _mapping: "Records"

    def __iter__(self) -> Iterator[Record]:
        return self._mapping.read()


class Records(Mapping[str, Record]):
    """Records by the ids of their requests, in the order in which these came."""

    def __init__(self, levels: int = 0, resident: int = RESIDENT) -> None:
        """``levels`` is the number of lower tiers that requests may be loaded from."""
        self.levels = levels
        self._layout = RowLayout(levels)
        self.open: dict[str, Record] = {}
        """Records of requests in flight, by id."""
        self.workers = NameTable()
        self.reasons = NameTable()
        self.tenants = NameTable()
        self.sessions = SessionTable()
        self._resident = max(1, resident // CHUNK)
        self._numbers: dict[str, int] = {}
        """Rows of those, by id."""
        self._count = 0
        self._chunks: list[_RowBlock] = []
        self._complete: list[int] = []
        """Chunks in memory without a request in flight, oldest first."""
        self._file: IO[bytes] | None = None
        self._index: dict[str, int] | None = None
        self._sink: Sink | None = None
        self._given = 0
        self.warming = False
        """True while requests come that won't be counted."""
        self._first = 0
        """Rows before this one were for warming up."""
        self.first_session = 0
        """Sessions before this one began while warming up."""
        self._through = 0
        """Before this row all are through."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Records":
        """Return ``records``, finished or not, as rows. They are packed and can't change any more."""
        kept = list(records)
        packed = cls(max((len(record.loaded) for record in kept), default=0))
        for record in kept:
            packed.begin(record)
            packed._pack(record, packed._numbers.pop(record.id))
            del packed.open[record.id]
        return packed

    def packed(self) -> PackedRecords:
        """Return all records, those in flight as they are."""
        parts = [
            (part.rows.tobytes(), b"" if part.stages is None else part.stages.tobytes(), bytes(part.names))
            for part in self.parts()
        ]
        sessions = [(name, self.sessions.root(number)) for number, name in enumerate(self.sessions.names)]
        tables = (self.workers.names, self.reasons.names, self.tenants.names)
        return PackedRecords(self.levels, *tables, sessions, parts)

    @classmethod
    def unpacked(cls, packed: PackedRecords) -> "Records":
        """Return the records that ``packed`` returned; only for reading."""
        records = cls(packed.levels)
        tables = (
            (records.workers, packed.workers),
            (records.reasons, packed.reasons),
            (records.tenants, packed.tenants),
        )
        for table, names in tables:
            for name in names:
                table.number(name)
        for name, root in packed.sessions:
            records.sessions.number(name, root)
        for rows, stages, text in packed.parts:
            chunk = _RowBlock(0)
            chunk.rows, chunk.stages, chunk.names = bytearray(rows), bytearray(stages) or None, bytearray(text)
            records._chunks.append(chunk)
            records._count += len(rows) // records._layout.size
        return records

    def begin_window(self) -> None:
        """Leave out the requests so far: from now on only later requests count."""
        self._first = self._given = self._count
        self.first_session = len(self.sessions.names)
        self.warming = False

    def begin(self, record: Record) -> None:
        """Add the record of a request that arrived."""
        number = self._count
        if number % CHUNK == 0:
            self._chunks.append(_RowBlock(self._layout.size))
        self._count = number + 1
        request = record.request
        self.open[request.id] = record
        self._numbers[request.id] = number
        if request.session is not None:
            self.sessions.number(request.session, request.root)

    def close(self, name: str) -> None:
        """Close the record of a request that ended. Raises ``KvyardError`` if a disk is full."""
        record = self.open.pop(name)
        number = self._numbers.pop(name, -1)
        if number < 0:
            return  # it isn't counted
        self._pack(record, number)
        self._index = None
        if self._sink is not None and number == self._through:
            self._advance()

    def stream(self, sink: Sink) -> None:
        """Pass records to ``sink`` from now on, in their order, as soon as they and all before them are complete."""
        self._sink = sink

    def finish(self) -> None:
        """Give the sink the records that it hasn't received, those in flight included."""
        if self._sink is not None:
            while self._given < self._count:
                self._give(min(self._count, self._given + BATCH))
            self._sink = None

    def __len__(self) -> int:
        return self._count - self._first

    def __iter__(self) -> Iterator[str]:
        return (record.id for record in self.read())

    def __getitem__(self, name: str) -> Record:
        if name in self.open:
            return self.open[name]
        if self._index is None:
            self._index = {id_: number for number, id_ in enumerate(self, self._first) if id_ not in self.open}
        number = self._index[name]
        return next(self.read(number, number + 1))

    def values(self) -> ValuesView[Record]:
        return _RecordValues(self)

    def read(self, start: int | None = None, stop: int | None = None) -> Iterator[Record]:
        """Yield the records of rows ``start`` to ``stop``."""
        start = self._first if start is None else start
        stop = self._count if stop is None else stop
        in_flight = {number: self.open[name] for name, number in self._numbers.items()}
        while start < stop:
            upto = min(stop, (start // CHUNK + 1) * CHUNK)
            part = self._part(start // CHUNK)
            low, high = start % CHUNK, upto - start // CHUNK * CHUNK
            names = bytes(part.names)
            stages = [None] * (high - low) if part.stages is None else part.stages[low:high].tolist()
            for place, (row, stage) in enumerate(zip(part.rows[low:high].tolist(), stages, strict=True), start):
                yield in_flight[place] if place in in_flight else self._unpack(row, stage, names)
            start = upto

    def some(self, places: Sequence[int]) -> dict[int, Record]:
        """Return the records at ``places``, counted from the first and in order, by place."""
        by_place: dict[int, Record] = {}
        numbers = [self._first + place for place in places]
        in_flight = {number: self.open[name] for name, number in self._numbers.items()}
        for chunk, chosen in groupby(numbers, key=lambda number: number // CHUNK):
            part = self._part(chunk)
            names = bytes(part.names)
            for number in chosen:
                row = number % CHUNK
                stage = None if part.stages is None else part.stages[row].item()
                record = in_flight.get(number) or self._unpack(part.rows[row].item(), stage, names)
                by_place[number - self._first] = record
        return by_place

    def parts(self) -> Iterator[RecordPart]:
        """Yield all records as rows, some at a time. Packs those in flight as they are, without an end."""
        for name, number in self._numbers.items():
            self._pack(self.open[name], number, closes=False)
        for number in range(self._first // CHUNK, len(self._chunks)):
            count = min(CHUNK, self._count - number * CHUNK)
            skipped = max(0, self._first - number * CHUNK)
            part = self._part(number)
            stages = None if part.stages is None else part.stages[skipped:count]
            yield RecordPart(part.rows[skipped:count], stages, part.names)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _pack(self, record: Record, number: int, closes: bool = True) -> None:
        chunk = self._chunks[number // CHUNK]
        row = number % CHUNK
        layout, loaded = self._layout, record.loaded
        request = record.request
        name, session, tenant = request.id.encode("utf-8", "surrogatepass"), request.session, record.tenant
        names = chunk.names
        place = len(names)
        names += name
        try:
            layout.pack_into(
                chunk.rows,
                row * layout.size,
                *_numbers_of(record),
                self.workers.number(record.worker),
                self.reasons.number(record.reason) if record.reason else 0,
                self.tenants.number(tenant) if tenant else 0,
                -1 if session is None else self.sessions.number(session, request.root),
                *loaded,
                *(0,) * (self.levels - len(loaded)),
                place,
                len(name),
                len(loaded),
                _STATUS[record.status],
                _MISS[record.miss],
                CALLED_TOOL if request.tool_call else 1,
            )
        except struct.error as error:
            raise KvyardError(f"request {record.id[:60]!r} has a number too large for a record: {error}") from None
        if record.stages is not None:
            self._pack_stages(chunk, row, record.stages)
        if closes:
            chunk.closed += 1
            if chunk.closed == CHUNK:
                self._complete.append(number // CHUNK)
                if len(self._complete) > self._resident:
                    self._spill(self._complete.pop(0))

    def _pack_stages(self, chunk: _RowBlock, row: int, stages: Stages) -> None:
        if chunk.stages is None:
            chunk.stages = bytearray(_NO_STAGES * CHUNK)
        worker = self.workers.number(stages.prefill_worker)
        _PACK_STAGES.pack_into(chunk.stages, row * _PACK_STAGES.size, worker, *_stamps_of(stages))

    def _unpack(self, row: tuple[Any, ...], stage: tuple[int, ...] | None, names: bytes) -> Record:
        *numbers, worker, reason, tenant, session, loaded, name_at, size, levels, status, miss, filled = row
        values = dict(zip((*_TIMES, *_COUNTS), numbers, strict=True))
        stages = None
        if stage is not None and stage[0] >= 0:
            stages = Stages(prefill_worker=self.workers.names[stage[0]], **dict(zip(_STAMPS, stage[1:], strict=False)))
        request = TraceRequest(
            id=names[name_at : name_at + size].decode("utf-8", "surrogatepass"),
            arrival=values["arrival"],
            input_length=values.pop("input"),
            output_length=values.pop("wanted"),
            session=None if session < 0 else self.sessions.names[session],
            root=None if session < 0 else self.sessions.root(session),
            tool_call=filled == CALLED_TOOL,
            tenant=self.tenants.names[tenant] or None,
        )
        return Record(
            request=request,
            worker=self.workers.names[worker],
            reason=self.reasons.names[reason],
            status=STATUSES[status],
            miss=MISS_NAMES[miss],
            loaded=tuple(loaded[:levels].tolist()),
            stages=stages,
            **values,
        )

    def _part(self, number: int) -> RecordPart:
        chunk = self._chunks[number]
        rows, stages, names = chunk.rows, chunk.stages, chunk.names
        if chunk.place is not None:
            assert self._file is not None
            offset, *sizes = chunk.place
            self._file.seek(offset)
            rows, stages, names = (bytearray(self._file.read(size)) for size in sizes)
        stage_rows = np.frombuffer(stages, dtype=STAGE_ROW) if stages else None
        return RecordPart(np.frombuffer(rows, dtype=self._layout.dtype), stage_rows, names)

    def _spill(self, number: int) -> None:
        chunk = self._chunks[number]
        stages = chunk.stages or b""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="kvyard-")  # noqa: SIM115 - closed with this object
                weakref.finalize(self, self._file.close)
            offset = self._file.seek(0, 2)
            for data in (chunk.rows, stages, chunk.names):
                self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise KvyardError(
                f"can't keep records in {tempfile.gettempdir()}: {error.strerror}; let TMPDIR name a directory with room"
            ) from None
        chunk.place = (offset, len(chunk.rows), len(stages), len(chunk.names))
        chunk.rows, chunk.stages, chunk.names = bytearray(), None, bytearray()

    def _advance(self) -> None:
        """Advance to the first incomplete row, and pass earlier ones to the sink in whole batches."""
        through = self._through
        while through < self._count and self._is_closed(through):
            through += 1
        self._through = through
        while not self.warming and through - self._given >= BATCH:
            self._give(self._given + BATCH)

    def _is_closed(self, number: int) -> bool:
        chunk = self._chunks[number // CHUNK]
        return chunk.place is not None or chunk.rows[number % CHUNK * self._layout.size + self._layout.filled] > 0

    def _give(self, upto: int) -> None:
        assert self._sink is not None
        self._sink(list(self.read(self._given, upto)))
        self._given = upto
