"""Traces to files: Mooncake JSON lines, and the custom dataset of ``vllm bench serve``. Fields that a format can't carry are
reported.
"""

import gzip
import hashlib
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from kvyard.blocks import NO_HINTS, Hints, Retention
from kvyard.clock import MS, SECOND
from kvyard.errors import KvyardError, suggest
from kvyard.files import whole_file
from kvyard.replay.traces.identity import prefix_ids
from kvyard.replay.traces.request import TraceRequest
from kvyard.replay.traces.trace import Trace

MOONCAKE_BLOCK = 512
"""Tokens of an id in a Mooncake file, unless its readers are configured otherwise."""


class Written(NamedTuple):
    """Result of writing, and caveats for readers."""

    rows: int
    notes: list[str]


class Target(NamedTuple):
    """A format to write."""

    name: str
    summary: str
    write: Callable[[Trace, Path, int, bool], Written]
    """Takes the trace, the file, the tokens to a block where the trace has tokens only, and whether to leave out what the
    format can't say."""


def write_trace(
    trace: Trace, path: str | Path, to: str = "mooncake", *, token_block: int = 16, lossy: bool = False
) -> Written:
    """Write a trace to a new file, packed if its name ends in .gz or .xz. Nothing is left behind if that fails.

    Raises ``KvyardError`` for an unknown format, for a file that exists or can't be written, for a trace that can't be
    read, and, unless ``lossy``, for requests whose order the format can't say.
    """
    target = TARGETS.get(to)
    if target is None:
        raise KvyardError(f"{to!r} is no format that kvyard writes: {suggest(to, TARGETS)}")
    return target.write(trace, Path(path), token_block, lossy)


def write_mooncake(trace: Trace, path: Path, token_block: int, lossy: bool) -> Written:
    """Mooncake JSON lines with Dynamo's fields for sessions. See ``write_trace``."""
    rows = size = 0
    notes: dict[str, None] = {}
    begun: set[str] = set()
    with packed_file(path) as file:
        for rows, request in enumerate(trace, 1):
            row: dict[str, Any] = {}
            if request.delay is None or request.arrival:
                row["timestamp"] = _milliseconds(request.arrival)
            row |= {"input_length": request.input_length, "output_length": request.output_length}
            ids, per_id = prefix_ids(request, token_block)
            if ids is not None:
                row["hash_ids"] = list(ids)
                size = _same_size(trace, size, per_id)
                if size != MOONCAKE_BLOCK:
                    row["block_size"] = size
            if request.tokens is not None:
                notes["tokens are left out: ids stand for them"] = None
            if request.id != str(rows) or request.session is not None:
                row["request_id"] = request.id
            if request.delay is None and (request.session in begun or request.after):
                # The format's sessions and wait_for have delays only: a turn at its time, or later, is beyond them.
                notes["turns keep their times, but don't wait for those before them: Mooncake can't say both"] = None
            else:
                _add_waits(row, request, notes)
            if request.session is not None:
                begun.add(request.session)
            for field in ("priority", "lora", "salt", "tenant", "model"):
                if value := getattr(request, field):
                    row[field] = value
                    if field in ("lora", "salt"):
                        notes[f"{field} is read by kvyard only"] = None
            if request.tool_call:
                row["tool_call"] = True
            if request.hints != NO_HINTS:
                row |= hint_columns(request.hints)
                notes["hints are read by kvyard only"] = None
            file.write(msgspec.json.encode(row) + b"\n")
    if size and size != MOONCAKE_BLOCK:
        notes[f"an id stands for {size} tokens, as each row says: set that in other readers"] = None
    return Written(rows, list(notes))


def hint_columns(hints: Hints) -> dict[str, Any]:
    """Return the columns of a row that say ``hints``; those that say nothing are left out."""
    columns: dict[str, Any] = {"conversation": hints.session, "session_end": hints.session_end}
    if hints.ttl is not None:
        columns["ttl"] = _milliseconds(hints.ttl)
        columns["ttl_then"] = hints.ttl_then if hints.ttl_then != "ordinary" else ""
    columns["retention"] = [_kept(wish) for wish in hints.retention]
    return {name: value for name, value in columns.items() if value}


def _kept(wish: Retention) -> dict[str, int | float]:
    duration = None if wish.duration is None else _milliseconds(wish.duration)
    columns = {"start": wish.start, "stop": wish.stop, "priority": wish.priority, "duration": duration}
    return {name: value for name, value in columns.items() if value is not None}


def write_vllm_custom(trace: Trace, path: Path, token_block: int, lossy: bool) -> Written:
    """Return prompts in words and output lengths, for ``vllm bench serve --dataset-name custom``. See ``write_trace``."""
    if not path.name.endswith(".jsonl"):
        raise KvyardError(f"{path}: vLLM reads custom datasets from names that end in .jsonl only")
    rows = last = 0
    unknown = waits = False
    with packed_file(path) as file:
        for request in trace:
            rows += 1
            if request.delay is not None and not lossy:
                raise KvyardError(
                    f"request {request.id} waits for others, which a custom dataset can't say; pass --lossy to write it as if "
                    "it didn't, or write Mooncake lines"
                )
            waits = waits or request.delay is not None
            ids, per_id = prefix_ids(request, token_block)
            if ids is None:
                unknown = True
                prompt = block_words(f"request {request.id}", request.input_length).lstrip()
            else:
                prompt = prompt_words(ids, per_id, request.input_length)
            row = {"prompt": prompt, "output_tokens": max(1, request.output_length)}
            file.write(msgspec.json.encode(row) + b"\n")
            last = max(last, request.arrival)
    notes = ["prompts are words, about one a token: check the lengths that vLLM reports against the trace"]
    if unknown:
        notes.append("nothing is known of what prompts share, so they share nothing")
    if waits:
        notes.append("who waits for whom is left out")
    rate = f" --request-rate {rows * SECOND / last:.4g}" if last else ""
    notes.append("times are left out" + (": the rate below is the mean" if rate else ""))
    notes.append(
        f"vllm bench serve --dataset-name custom --dataset-path {path} --num-prompts {rows} --custom-output-len -1 "
        f"--skip-chat-template --disable-shuffle --ignore-eos{rate}"
    )
    return Written(rows, notes)


TARGETS = {
    target.name: target
    for target in (
        Target("mooncake", "Mooncake JSON lines; vLLM (timed_trace), Dynamo and AIPerf read them too.", write_mooncake),
        Target("vllm-custom", "The custom dataset of vllm bench serve: prompts in words.", write_vllm_custom),
    )
}


@contextmanager
def packed_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, as ``whole_file`` does it, packed if its name says so."""
    with whole_file(path) as raw, _packed(raw, path.suffix) as file:
        yield file


@contextmanager
def _packed(raw: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    if suffix == ".gz":
        # Neither name nor time: the same trace makes the same file.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
            yield cast("IO[bytes]", file)
    elif suffix == ".xz":
        with lzma.open(raw, "wb") as packed:
            yield cast("IO[bytes]", packed)
    else:
        yield raw


def _add_waits(row: dict[str, Any], request: TraceRequest, notes: dict[str, None]) -> None:
    if request.session is not None:
        row["session_id"] = request.session
    if request.root is not None:
        row["root_session_id"] = request.root
    if request.delay is not None:
        row["delay"] = _milliseconds(request.delay)
    if request.after:
        row["wait_for"] = request.after
        notes["wait_for is read by kvyard, and by Dynamo as agentic_mooncake"] = None


def _same_size(trace: Trace, size: int, new: int) -> int:
    if size not in (0, new):
        raise KvyardError(f"{trace.name}: its ids stand for {size} tokens and for {new}; one file can't hold both")
    return new


def _milliseconds(ns: int) -> int | float:
    return ns // MS if ns % MS == 0 else ns / MS


_COMMON = """
    the and for are but not you all any can her was one our out day get has him his how man new now old see two way who
    boy did its let put say she too use time year work back call came come each even find from give good hand have here
    high home into just know last life line long look
"""
WORDS = tuple(_COMMON.split())
MASK = len(WORDS) - 1
CACHED = 4096
"""Blocks of text that are remembered."""


@lru_cache(maxsize=CACHED)
def block_words(name: object, tokens: int) -> str:
    """Return ``tokens`` words for what is named ``name``, each with a space before it."""
    noise = hashlib.shake_128(repr(name).encode()).digest(tokens)
    return "".join([" " + WORDS[byte & MASK] for byte in noise])


def prompt_words(ids: Sequence[int], block_size: int, tokens: int) -> str:
    """Return the text of a prompt of which only ids are known: about one common word per token, the same words for the same id.

    The words are short, frequent and written with a space before, which byte-pair tokenizers trained on English keep as one
    token each. How many tokens they are in the end is up to the tokenizer.
    """
    whole, rest = divmod(tokens, block_size)
    parts = [block_words(id_, block_size) for id_ in ids[:whole]]
    if rest:
        parts.append(block_words(ids[whole], rest))
    return "".join(parts).lstrip()
