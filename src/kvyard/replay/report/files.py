"""A report and its requests as files: canonical JSON, and a row per request as JSONL or Parquet."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec

from kvyard.clock import MS
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.events.tier import reported_tiers
from kvyard.files import IsWhole, always, encode_json, is_regular, whole_file, write_whole
from kvyard.replay.record import Record
from kvyard.replay.records import BATCH
from kvyard.replay.report.report import VERSION, Report


class _ReportHead(msgspec.Struct):
    kind: str = ""
    version: int = 0


def _known(value: int) -> int | None:
    return value if value >= 0 else None


def _between(start: int, end: int) -> float | None:
    return (end - start) / MS if end >= 0 else None


def _mean_gap(record: Record) -> float | None:
    gaps = record.output - 1
    return (
        (record.ended - record.first_token) / gaps / MS
        if gaps > 0 and record.ended >= record.first_token >= 0
        else None
    )


def _loaded(record: Record, level: int) -> int | None:
    return _known(record.loaded[level]) if level < len(record.loaded) else 0


def _stage(record: Record, name: str) -> int | None:
    return None if record.stages is None else _known(getattr(record.stages, name))


Column: TypeAlias = tuple[type, Callable[[Record], object]]
"""The type of a column's values, and how a record's is read."""


@cache
def columns(levels: int = 0) -> dict[str, Column]:
    """Return columns of a request as it is written down, in a fleet with ``levels`` lower tiers. Times are nanoseconds of the
    replay's clock; what never came is null.
    """
    tiers: dict[str, Column] = {
        f"{tier.label}_tokens": (int, partial(_loaded, level=level))
        for level, tier in enumerate(reported_tiers(levels))
    }
    return _COLUMNS | tiers | _MORE


_COLUMNS: dict[str, Column] = {
    "id": (str, lambda record: record.id),
    "session": (str, lambda record: record.request.session),
    "tenant": (str, lambda record: record.tenant or None),
    "worker": (str, lambda record: record.worker or None),
    "status": (str, lambda record: record.status or "unfinished"),
    "reason": (str, lambda record: record.reason or None),
    "arrival_ns": (int, lambda record: record.arrival),
    "admitted_ns": (int, lambda record: _known(record.admitted)),
    "first_token_ns": (int, lambda record: _known(record.first_token)),
    "ended_ns": (int, lambda record: _known(record.ended)),
    "ttft_ms": (float, lambda record: _between(record.arrival, record.first_token)),
    "itl_ms": (float, _mean_gap),
    "e2e_ms": (float, lambda record: _between(record.arrival, record.ended)),
    "queue_ms": (float, lambda record: _between(record.arrival, record.admitted)),
    "flow_wait_ms": (float, lambda record: record.waited / MS if record.waited >= 0 else None),
    "loading_ms": (float, lambda record: record.loading / MS if record.loading >= 0 else None),
    "input_tokens": (int, lambda record: record.input),
    "wanted_tokens": (int, lambda record: record.wanted),
    "output_tokens": (int, lambda record: record.output),
    # This and what follows is null in a live run, as far as only the engine knows it.
    "cached_tokens": (int, lambda record: _known(record.cached)),
}
"""Before the tokens by tier ..."""
_MORE: dict[str, Column] = {
    "pulled_tokens": (int, lambda record: _known(record.pulled)),
    "miss": (str, lambda record: record.miss or None),
    "lost_tokens": (int, lambda record: _known(record.lost)),
    "elsewhere_tokens": (int, lambda record: _known(record.elsewhere)),
    "gone_tokens": (int, lambda record: _known(record.gone)),
    "overlap_blocks": (int, lambda record: _known(record.overlap)),
    "best_overlap_blocks": (int, lambda record: _known(record.best_overlap)),
    # Where prompts are handed over; null for requests that weren't.
    "prefill_worker": (str, lambda record: record.stages and (record.stages.prefill_worker or None)),
    "source_held_ns": (int, lambda record: _stage(record, "held")),
    "destination_reserved_ns": (int, lambda record: _stage(record, "reserved")),
    "destination_activated_ns": (int, lambda record: _stage(record, "activated")),
    "decode_admitted_ns": (int, lambda record: _stage(record, "entered")),
    "source_released_ns": (int, lambda record: _stage(record, "released")),
    "sent_bytes": (int, lambda record: _stage(record, "sent")),
    "preemptions": (int, lambda record: _known(record.preemptions)),
    "retries": (int, lambda record: _known(record.retries)),
}
"""... and after them."""


def to_json(report: Report) -> bytes:
    """Return the canonical form: the same report gives the same bytes."""
    return encode_json(report, order="deterministic") + b"\n"


def from_json(data: bytes | str, name: str = "this") -> Report:
    """Return the report that ``to_json`` wrote. Raises ``KvyardError``, calling it ``name``, for anything else."""
    try:
        head = msgspec.json.decode(data, type=_ReportHead)
    except DECODE_ERRORS as error:
        raise KvyardError(f"{name} is not a report of kvyard: {error}") from None
    if head.kind != Report.__struct_defaults__[0]:
        raise KvyardError(f"{name} is not a report of kvyard: it doesn't say so in its key 'kind'")
    if head.version != VERSION:
        raise KvyardError(
            f"{name} is a report of version {head.version}, and this kvyard reads version {VERSION}: run the replay again"
        )
    try:
        return msgspec.json.decode(data, type=Report)
    except DECODE_ERRORS as error:
        raise KvyardError(f"{name} is not a whole report of kvyard: {error}") from None


def read_report(path: str | Path) -> Report:
    """Return the report in a file. Raises ``KvyardError`` if it can't be read or isn't one."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise KvyardError(f"can't read {path}: {error.strerror}") from None
    return from_json(data, str(path))


def write_report(report: Report, path: str | Path) -> None:
    """Write the canonical form, in place of what was there. Raises ``KvyardError`` if that can't be done."""
    write_whole(path, to_json(report))


def write_requests(records: Iterable[Record], path: str | Path, is_whole: IsWhole = always, *, levels: int = 0) -> None:
    """Write a row per request of a fleet with ``levels`` lower tiers. Raises as ``request_rows`` does."""
    left = iter(records)
    with request_rows(path, is_whole, levels=levels) as write:
        while some := list(islice(left, BATCH)):
            write(some)


@contextmanager
def request_rows(
    path: str | Path, is_whole: IsWhole = always, *, levels: int = 0
) -> Iterator[Callable[[Sequence[Record]], None]]:
    """Yield a function that writes a row for each of some requests, in the format of the name: ``.jsonl`` or ``.parquet``.
    To stdout, pipes and devices go JSON lines. A file has its name when this ends; if ``is_whole`` denies it then, it has
    another (``kvyard.files.whole_file``).

    Raises ``KvyardError`` for another name, if the file can't be written, and for Parquet without pyarrow.
    """
    path = Path(path)
    if path.suffix == ".jsonl" or not (path.suffix == ".parquet" or is_regular(path)):
        encoder = msgspec.json.Encoder()
        with whole_file(path, is_whole) as file:
            yield lambda records: _write(file, encoder.encode_lines([row(record, levels) for record in records]))
    elif path.suffix == ".parquet":
        with _parquet(path, is_whole, levels) as write:
            yield write
    else:
        raise KvyardError(f"can't tell how to write requests to {path}: let its name end in .jsonl or .parquet")


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(data)


def row(record: Record, levels: int = 0) -> dict[str, object]:
    """Return a record as it is written down, by the names of ``columns``."""
    return {name: get(record) for name, (_, get) in columns(levels).items()}


@contextmanager
def _parquet(path: Path, is_whole: IsWhole, levels: int) -> Iterator[Callable[[Sequence[Record]], None]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise KvyardError("Parquet needs pyarrow: pip install 'kvyard[parquet]', or write .jsonl") from None
    kinds: dict[type, Any] = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    schema = pa.schema([(name, kinds[kind]) for name, (kind, _) in columns(levels).items()])
    with whole_file(path, is_whole) as file, pq.ParquetWriter(file, schema) as writer:
        yield lambda records: writer.write_table(
            pa.Table.from_pylist([row(record, levels) for record in records], schema)
        )
