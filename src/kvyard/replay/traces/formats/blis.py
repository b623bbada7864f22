"""Traces of BLIS (inference-sim), version 2 and 3: CSV with one row a request, and a YAML header beside it.

Requests of a prefix group begin with the same tokens. With ``session_context_growth: accumulate`` in the header a row states
the new tokens of a round, which its prompt appends to the session's conversation; otherwise each round is a prompt of its own.
A round with a recorded think time starts that long after the previous round; others keep their recorded times, and wait for the
previous round. Rows whose request failed are left out and counted.
"""

from collections.abc import Iterator
from pathlib import Path

from kvyard.clock import US
from kvyard.replay.traces.errors import BadRow
from kvyard.replay.traces.files import open_bytes
from kvyard.replay.traces.formats.growing import GrowingPrompts
from kvyard.replay.traces.formats.table import Fields, integer, read_table
from kvyard.replay.traces.reading import Reading, checked_lengths, ns, span
from kvyard.replay.traces.registry import Format
from kvyard.replay.traces.request import TraceRequest

COLUMNS = (
    "request_id",
    "session_id",
    "round_index",
    "prefix_group",
    "input_tokens",
    "output_tokens",
    "arrival_time_us",
)
MOST_HEADER = 1 << 20
"""Bytes of the header that are read."""


def read(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of the file."""
    grows = _accumulates(reading.path)
    prompts = GrowingPrompts(reading.block_size)
    lengths: dict[str, tuple[int, int]] = {}
    """By session: tokens of its latest prompt, and of that prompt with its answer."""

    def row(number: int, fields: Fields) -> TraceRequest | None:
        status = fields.get("status", "")
        if status not in ("", "ok"):
            reading.leave_out(f"requests with status {status[:40]}")
            return None
        session = fields["session_id"].strip() or None
        group = fields["prefix_group"].strip()
        prefix = _number(fields, "prefix_length") if group else 0
        new, output = integer(fields, "input_tokens"), integer(fields, "output_tokens")
        if not group:
            new = _number(fields, "server_input_tokens") or new  # with the chat template's tokens
        if new < 0 or prefix < 0:
            raise BadRow("input_tokens and prefix_length can't be negative")
        latest = lengths.get(session) if session is not None and grows else None
        length = prefix + new if latest is None else latest[1] + new
        checked_lengths(length, output, ("input_tokens", "output_tokens"))
        think = span(_number(fields, "think_time_us"), US, "think_time_us") if session in lengths else 0
        time = ns(_number(fields, "send_time_us") or integer(fields, "arrival_time_us"), US, "arrival_time_us")
        arrival = reading.offset(time) if think else reading.arrive(time)
        name = reading.name(number, fields["request_id"].strip() or None)
        if latest is None:
            ids = prompts.ids(session if grows else None, length, prefix, common=group or None)
        else:
            ids = prompts.ids(session, length, latest[0])
        if session is not None:
            lengths[session] = length, length + output
        return TraceRequest(
            name,
            arrival,
            length,
            output,
            ids,
            prompts.block_size,
            session=session,
            delay=think or None,
            lora=fields.get("adapter") or None,
            model=fields.get("model") or None,
            tenant=fields.get("tenant_id") or None,
        )

    return read_table(reading, COLUMNS, row)


def _number(fields: Fields, column: str) -> int:
    """Return the whole number in ``column``, 0 if the column is missing or empty."""
    return integer(fields, column) if fields.get(column) else 0


def _accumulates(path: Path) -> bool:
    """Return true if the header beside a CSV declares that prompts of a session grow."""
    for suffix in (".yaml", ".yml"):
        header = path.with_suffix(suffix)
        if header.is_file():
            with open_bytes(header) as file:
                lines = file.read(MOST_HEADER).decode(errors="replace").splitlines()
            return any(
                line.partition(":")[0] == "session_context_growth" and "accumulate" in line.partition(":")[2]
                for line in lines
            )
    return False


FORMAT = Format(
    name="blis",
    summary="BLIS trace v2 and v3, CSV with a YAML header beside it: rounds, prefix groups, tenants, adapters, think times.",
    recognise=lambda head: set(COLUMNS) <= set(head.columns),
    read=read,
)
