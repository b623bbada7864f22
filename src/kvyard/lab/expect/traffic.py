"""The traffic of an expectation: requests, what prompts share before any cache is considered, and counts per request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.hashing.prefix_tree import common_length
from kvyard.replay.traces import Trace, TraceRequest
from kvyard.replay.traces.files import records

Tokens = npt.NDArray[np.int64]

SHINGLE = 24
"""Tokens of a passage that is recognised wherever it stands in a prompt."""
SAMPLED = 8
"""One of this many passages is remembered."""
SHIFT = 64
"""Tokens by which a passage moves where something before it changes its length, as a date does, at most."""
CHOICE = "#choice"
"""In the id of a request that stands for a further choice (n > 1) of another."""
_WEIGHTS = np.random.default_rng(29).integers(1, 1 << 62, SHINGLE, dtype=np.int64) | 1


class MediaItem(msgspec.Struct, frozen=True):
    """An image, clip or recording of a prompt."""

    at: int
    """Its first placeholder token."""
    length: int = 1
    hash: str = ""
    """The engine's key of its content; an item without one is like no other."""


class _Columns(msgspec.Struct):
    """Columns of a row that only an expectation reads."""

    request_id: str | int | None = None
    cached: int | None = None
    n: int = 1
    images: tuple[MediaItem, ...] = ()
    salt: str | None = None
    lora: str | None = None


class Traffic(msgspec.Struct, kw_only=True):
    """Requests in order of arrival, those for further choices included."""

    name: str
    requests: list[TraceRequest]
    cached: dict[str, int] = {}
    """Prompt tokens that the engine reported as cached, by request id."""
    media: dict[str, tuple[MediaItem, ...]] = {}
    """By request id."""
    texts: dict[str, Sequence[int]] = {}
    """Tokens of prompts with media, placeholders as they are, by request id."""
    choices: int = 0
    """Requests for further choices."""
    notes: list[str] = []

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.input_length for request in self.requests)


def read_traffic(
    source: Trace | Sequence[TraceRequest], limit: int | None = None, max_tokens: int | None = None
) -> Traffic:
    """Read a trace or a recording, with counts per request if it has any.

    Raises ``KvyardError`` as reading the trace does, and for a trace without requests.
    """
    rows = list(source) if limit is None else [row for row, _ in zip(source, range(limit), strict=False)]
    if max_tokens is not None:
        rows = [row for row in rows if row.input_length + row.output_length <= max_tokens]
    if not rows:
        raise KvyardError("the trace has no requests: there is nothing to expect")
    traffic = Traffic(name="requests", requests=[], cached={}, media={}, texts={}, notes=[])
    columns: dict[str, _Columns] = {}
    if isinstance(source, Trace):
        traffic.name = Path(source.name).name
        columns = _columns(Path(source.name))
    for row in rows:
        more = columns.get(row.id)
        traffic.requests += [row] if more is None else _with_columns(traffic, row, more)
    return traffic


def _columns(path: Path) -> dict[str, _Columns]:
    """Read the extra columns of JSON lines, by request id; none where the file has other rows."""
    decode = msgspec.json.Decoder(_Columns).decode
    columns: dict[str, _Columns] = {}
    try:
        for number, record in records(path):
            row = decode(record)
            columns[str(number if row.request_id is None else row.request_id)] = row
    except DECODE_ERRORS:
        return {}
    return columns


def _with_columns(traffic: Traffic, row: TraceRequest, more: _Columns) -> list[TraceRequest]:
    if more.cached is not None:
        traffic.cached[row.id] = more.cached
    row = replace(row, salt=row.salt or more.salt, lora=row.lora or more.lora)
    if more.images:
        if row.tokens is None:
            raise KvyardError(f"request {row.id} has images and no tokens: positions of images need a trace of tokens")
        traffic.media[row.id], traffic.texts[row.id] = more.images, row.tokens
        row = replace(row, tokens=_with_media(row.id, row.tokens, more.images))
    if more.n < 1:
        raise KvyardError(f"request {row.id} asks for n = {more.n}: it must be at least 1")
    traffic.choices += more.n - 1
    siblings = [replace(row, id=f"{row.id}{CHOICE}{number}", session=None) for number in range(2, more.n + 1)]
    return [row, *siblings]


def _with_media(name: str, tokens: Sequence[int], images: Iterable[MediaItem]) -> list[int]:
    """Return ``tokens`` with placeholders that are equal where the engine's keys of the items are."""
    keyed = list(tokens)
    for number, image in enumerate(images):
        key = xxhash.xxh3_64_intdigest((image.hash or f"{name} {number}").encode()) >> 1
        keyed[image.at : image.at + image.length] = [key] * len(keyed[image.at : image.at + image.length])
    return keyed


# -- what prompts share ---------------------------------------------------------------------------------------------------


class _Run:
    """Consecutive tokens (or ids) of prompts, after those of its parent."""

    __slots__ = ("children", "text")

    def __init__(self, text: array[int]) -> None:
        self.text = text
        self.children: dict[int, _Run] = {}
        """By their first tokens."""


def _enter(root: _Run, names: Sequence[int]) -> int:
    """Enter a prompt; return how many of its tokens an earlier one began with."""
    text = array("Q", names)
    run, position = root, 0
    while position < len(text):
        child = run.children.get(text[position])
        if child is None:
            run.children[text[position]] = _Run(text[position:])
            break
        alike = common_length(child.text, text[position:])
        position += alike
        if alike < len(child.text):
            if position < len(text):
                rest = _Run(child.text[alike:])
                rest.children, child.text = child.children, child.text[:alike]
                child.children = {rest.text[0]: rest, text[position]: _Run(text[position:])}
            break
        run = child
    return position


def shared_tokens(requests: Iterable[TraceRequest], *, adapters: bool = True, salts: bool = True) -> Tokens:
    """Return, per request, the tokens it begins with that an earlier prompt (or answer) began with.

    That is the most a cache can find: at token granularity, with room for everything. Without ``adapters`` or ``salts``,
    prompts that differ in these alone count as equal.
    """
    roots: dict[tuple[object, ...], _Run] = {}
    shared: list[int] = []
    for request in requests:
        size = request.id_block_size if request.ids is not None else 1
        space = (size, request.lora if adapters else None, request.salt if salts else None)
        names = request.ids if request.ids is not None else request.tokens or ()
        root = roots.setdefault(space, _Run(array("Q")))
        shared.append(min(_enter(root, names) * size, request.input_length))
        if request.ids is None and request.output_tokens:
            _enter(root, [*names, *request.output_tokens])
    return np.array(shared, dtype=np.int64)


class Repeated(NamedTuple):
    """About how many tokens of each request stood in an earlier prompt."""

    tokens: Tokens
    """At any position."""
    moved: Tokens
    """At another position, by more than ``SHIFT`` tokens."""


def repeated_tokens(requests: Iterable[TraceRequest]) -> Repeated:
    """Return what prompts repeat of earlier ones.

    By its passages if tokens are known. By its session otherwise: a turn repeats the turn before it.
    """
    passages: dict[int, int] = {}
    turns: dict[str, int] = {}
    repeated: list[int] = []
    elsewhere: list[int] = []
    for request in requests:
        moved = 0
        if request.tokens is not None:
            known, moved = _repeated(request.tokens, passages)
        elif request.session is not None:
            known = min(turns.get(request.session, 0), request.input_length)
            turns[request.session] = request.input_length
        else:
            known = 0
        repeated.append(known)
        elsewhere.append(moved)
    return Repeated(np.array(repeated, dtype=np.int64), np.array(elsewhere, dtype=np.int64))


def _repeated(tokens: Sequence[int], passages: dict[int, int]) -> tuple[int, int]:
    """Return the tokens of a prompt that ``passages`` has, and of those the tokens at other positions; enter the prompt."""
    text = np.array(array("Q", tokens), dtype=np.uint64).view(np.int64)
    if len(text) < SHINGLE:
        return 0, 0
    sums = np.zeros(len(text) - SHINGLE + 1, dtype=np.int64)
    for offset, weight in enumerate(_WEIGHTS):
        sums += text[offset : offset + len(sums)] * weight
    sums ^= sums >> 29
    positions = np.nonzero(sums % SAMPLED == 0)[0]
    sampled: dict[int, int] = dict(zip(sums[positions].tolist(), positions.tolist(), strict=True))
    if not sampled:
        return 0, 0
    shifts = [abs(passages[passage] - at) for passage, at in sampled.items() if passage in passages]
    passages.update(sampled)
    each = len(text) / len(sampled)
    return round(each * len(shifts)), round(each * sum(shift > SHIFT for shift in shifts))
