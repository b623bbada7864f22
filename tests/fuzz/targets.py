"""What is fuzzed: functions that take any bytes and raise nothing but ``AssertionError``, where a promise isn't kept.

A target lets the errors pass that its reader documents, and where there is a slow obvious way to the same answer, compares. It
keeps nothing between two calls, so that an input alone shows what it showed. ``scripts/fuzz.py`` makes inputs that reach new
code; those worth keeping are in ``corpus``, with all that ever broke a target, and ``test_corpus.py`` runs them.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from kvyard.blocks.conform import conform
from kvyard.clock import SECOND, VirtualClock
from kvyard.engine.conform import conform as conform_scheduler
from kvyard.engine.models.fields import read_config
from kvyard.engine.timing.measurements import parse_measurements
from kvyard.engine.timing.profile import load_profile
from kvyard.errors import KvyardError
from kvyard.events.recording import Recording
from kvyard.events.transport.frames import Frame, Reply, read_live, read_reply
from kvyard.events.transport.subscription import Subscription
from kvyard.events.wire import Decoder, dialects
from kvyard.hashing import PLAIN
from kvyard.index import Holder, Identity
from kvyard.index.redis import directory, shared
from kvyard.replay.report.files import from_json
from kvyard.replay.settings import SETTINGS, make_config
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.registry import OURS
from kvyard.replay.validate.reading import read_run
from kvyard.router.journal import read_journal
from kvyard.server.gateway import config as gateway_config
from kvyard.server.gateway import reading
from kvyard.server.gateway.access.keys import read_keys
from kvyard.server.gateway.prompting import Prompting, read_body
from kvyard.server.gateway.reading import PromptReader, ReadPrompt
from kvyard.server.gateway.traffic import answer_tokens
from kvyard.server.hinting import peek_hints
from kvyard.server.http import Refusal
from kvyard.server.indexer.config import load
from kvyard.server.indexer.names import LocalNames

Target = Callable[[bytes], None]
LATER = ("kvyard.server.epp.messages", "kvyard.server.gateway.sharing.peers")
"""Modules that targets import when they are called; who measures coverage imports them before."""
MOST_ROWS = 2_000
"""Rows of a trace that are looked at: a short file can't have many, unless it is packed."""
DIALECTS = dialects()
FORMATS = [None, *OURS]
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]


# -- events -----------------------------------------------------------------------------------------------------------


def events(data: bytes) -> None:
    """A dialect and a payload that comes twice: nothing raises, and what is wrong is said in few words."""
    how, payload = data[0] if data else 0, data[1:]
    dialect, narrow = DIALECTS[how % len(DIALECTS)], how >= 128
    decoder, other = Decoder(dialect, narrow=narrow), Decoder(dialect, narrow=narrow)
    for _ in range(2):
        decoded = decoder.decode(payload)
        for problem in decoded.problems:
            assert not problem.reason.startswith("unexpected"), problem
            assert len(problem.reason) <= 260, problem
        assert decoded.events or decoded.problems or decoded.dialect == "none"
        # Read ahead, as by a thread: the same.
        other.prepare(payload)
        assert repr(other.decode(payload)) == repr(decoded)  # NaN isn't equal to itself
    assert len(decoder.stats.unknown) <= 65
    assert decoder.stats == other.stats


def frames(data: bytes) -> None:
    """Messages of a live and of a replay socket, by turns: a subscription takes them all, and counts what it can't read."""
    clock = 0
    subscription = Subscription("engine", source=True)
    subscription.start(clock)
    bad = 0
    for kind, parts in _messages(data):
        clock += SECOND // 4
        if kind % 2:
            found = read_reply(parts)
            assert isinstance(found, Reply | str)
            for number in list(subscription.requests):
                subscription.reply(number, parts, clock)
        else:
            live = read_live(parts)
            assert isinstance(live, Frame | str)
            bad += isinstance(live, str)
            subscription.message(parts, clock)
        subscription.tick(clock)
    assert subscription.counters.malformed >= bad


def recording(data: bytes) -> None:
    """A file of recorded messages, packed or not."""
    with _file(data, (".kvev", ".kvev.gz", ".jsonl")) as path, suppress(KvyardError):
        for message in itertools.islice(Recording(path), MOST_ROWS):
            assert isinstance(message.frame(), Frame | str)


# -- files ------------------------------------------------------------------------------------------------------------


def trace(data: bytes) -> None:
    """A trace in a format, or in one to be recognised: rows that follow each other, or a reason."""
    how = data[:1] or b"\0"
    format = FORMATS[how[0] % len(FORMATS)]
    with _file(data[1:], (".jsonl", ".json", ".jsonl.gz", ".csv")) as path:
        try:
            strict = list(itertools.islice(open_trace(path, format), MOST_ROWS))
        except KvyardError:
            strict = None
        try:
            lax = open_trace(path, format, skip_bad=True, sort=how[0] >= 128)
            rows = list(itertools.islice(lax, MOST_ROWS))
        except KvyardError:
            return
        assert strict is None or how[0] >= 128 or rows == strict, "skipping what is bad changed what is good"
        assert len({row.id for row in rows}) == len(rows)
        assert all(row.input_length > 0 and row.output_length >= 0 for row in rows)
        assert lax.tally.skipped or strict is not None or how[0] >= 128


def run(data: bytes) -> None:
    """A measured run, of whatever load generator."""
    with _file(data, (".jsonl", ".json", ".csv")) as path, suppress(KvyardError):
        read_run(path)


def journal(data: bytes) -> None:
    """A router's journal, packed or not."""
    with _file(data, (".jsonl", ".jsonl.gz")) as path, suppress(KvyardError):
        for _ in itertools.islice(read_journal(path), MOST_ROWS):
            pass


def logs(data: bytes) -> None:
    """Logs of block managers and of schedulers."""
    with _file(data, (".jsonl", ".jsonl.xz")) as path:
        for reader in (conform, conform_scheduler):
            with suppress(KvyardError):
                reader(path)


def settings(data: bytes) -> None:
    """A fleet's file, a gateway's and one with keys: TOML that makes a configuration, or a sentence."""
    with _file(data, (".toml",)) as path:
        with suppress(KvyardError):
            make_config(SETTINGS.merge(path, {}))
        with suppress(KvyardError):
            gateway_config.convert(gateway_config.own_part(load(path), str(path)), str(path))
        with suppress(KvyardError):
            read_keys(str(path))


def documents(data: bytes) -> None:
    """A profile, measurements, a model's configuration, a report."""
    with _file(data, (".json",)) as path:
        with suppress(KvyardError):
            load_profile(path=path)
        with suppress(KvyardError):
            read_config(path)
    with suppress(UnicodeDecodeError, KvyardError):
        parse_measurements(data.decode(), "it")
    with suppress(KvyardError):
        from_json(data)


# -- requests ---------------------------------------------------------------------------------------------------------


def body(data: bytes) -> None:
    """A request's body: the model's name is the one that a plain JSON reader finds, and nothing but a refusal is raised."""
    path, text = PATHS[data[0] % len(PATHS)] if data else PATHS[0], data[1:]
    try:
        asked = read_body(path, text)
    except Refusal as refusal:
        assert refusal.status == 400
        return
    assert read_body(path, text, prompts=False).model == asked.model
    whole = _plain_json(text)
    if isinstance(whole, dict):
        assert whole.get("model") == asked.model
    peek_hints(text, {}, 10)
    with suppress(msgspec.MsgspecError, ValueError):
        _agree(asked)


def continuation(data: bytes) -> None:
    """Prompts that go on from one another, cut anywhere: the same names and tokens as if each were read whole."""
    cuts, text = data[:3], data[3:1500].decode("utf-8", "replace")
    reader = _reader()
    with mock.patch.object(reading, "STRETCH", 16):
        for cut in (*cuts, 255):
            prompt = text[: len(text) * cut // 255]
            _agree(read_body(PATHS[0], json.dumps({"prompt": prompt}).encode()), reader)
            ids = json.dumps({"prompt": list(prompt.encode())}, separators=(",", ":"))
            _agree(read_body(PATHS[0], ids.encode()), reader)


def usage(data: bytes) -> None:
    """The end of an answer: what it says of tokens, if a plain reader finds it too."""
    found = answer_tokens(data)
    assert all(part is None or part >= 0 for part in found)
    whole = _plain_json(data)
    if isinstance(whole, dict) and data.count(b'"usage"') == 1 and set(whole) == {"usage"}:
        said = whole["usage"]
        if isinstance(said, dict) and set(said) <= {"prompt_tokens", "completion_tokens"}:
            for name, ours in (("prompt_tokens", found.prompt), ("completion_tokens", found.output)):
                if isinstance(said.get(name), int) and not isinstance(said[name], bool) and said[name] >= 0:
                    assert ours == (said[name] if said[name] < 10**12 else None), (name, ours)


def picked(data: bytes) -> None:
    """What an Envoy proxy says to the endpoint picker."""
    from envoy.service.ext_proc.v3 import external_processor_pb2
    from google.protobuf.message import DecodeError

    from kvyard.server.epp import messages

    message = external_processor_pb2.ProcessingRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    headers = messages.read_headers(message.request_headers)
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in headers.items())
    messages.modes(message, 0)
    subset = messages.subset(message)
    assert subset is None or all(isinstance(one, str) for one in subset)
    served = messages.served(message)
    assert served is None or isinstance(served, str)
    for value in headers.values():
        messages.endpoints_in(value)


# -- what others write ------------------------------------------------------------------------------------------------


def redis(data: bytes) -> None:
    """Values that other replicas keep on a server: records, names of places, peers' requests."""
    shared.read(data)
    place = directory.decode(data)
    assert place is None or directory.decode(directory.encode(place)) == place
    _peers(data)


def _peers(data: bytes) -> None:
    from kvyard.router import Router, RouterConfig
    from kvyard.server.gateway.sharing.peers import Peers, SharingCounters

    clock = VirtualClock()
    books = Router(RouterConfig(policy="least-loaded"), [Holder("a", 0)], Identity(4))
    peers = Peers(books, clock, SharingCounters())
    peers.meet({"other": "1"})
    asyncio.run(peers.take([(b"other", b"1", data), (data, b"1", b"\x90")]))
    peers.forget_all()
    assert not peers.counts()


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        events,
        frames,
        recording,
        trace,
        run,
        journal,
        logs,
        settings,
        documents,
        body,
        continuation,
        usage,
        picked,
        redis,
    )
}


# -- helpers ----------------------------------------------------------------------------------------------------------


def _messages(data: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Messages of frames: of each a byte about it, the number of frames, and each frame behind its length."""
    at = 0
    while at + 2 <= len(data):
        kind, count = data[at], data[at + 1] % 6
        at += 2
        parts = []
        for _ in range(count):
            length = data[at] if at < len(data) else 0
            parts.append(data[at + 1 : at + 1 + length])
            at += 1 + length
        yield kind, parts


@contextmanager
def _file(data: bytes, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """A file with ``data`` but for the first byte, which chooses how it is called. What is to be packed is packed where the
    byte is even, so that its reader gets past the packing.
    """
    how, content = data[0] if data else 0, data[1:]
    suffix = suffixes[how // 2 % len(suffixes)]
    if suffix.endswith(".gz") and how % 2 == 0:
        content = gzip.compress(content, 1, mtime=0)
    with tempfile.TemporaryDirectory(prefix="kvyard-fuzz-", dir=_SHM) as folder:
        path = Path(folder) / f"file{suffix}"
        path.write_bytes(content)
        yield path


_SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None


def _plain_json(text: bytes) -> Any:
    """What Python's own reader makes of it; ``None`` where it differs by design, as in NaN or a name that comes twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError
        return dict(pairs)

    try:
        return json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError):
        return None


async def _no_engine(body: dict[str, Any]) -> list[int] | None:
    return None


IDENTITY = Identity(4, LocalNames())


def _reader() -> PromptReader:
    return PromptReader(Prompting("bytes", _no_engine), IDENTITY, 1 << 20)


def _agree(asked: Any, reader: PromptReader | None = None) -> None:
    """Read a prompt as the gateway does and whole: the same."""

    async def both() -> tuple[ReadPrompt, ReadPrompt]:
        quick = await (reader or _reader()).read(asked, PLAIN, lambda tokens: tokens > 100_000)
        return quick, await _reader().read(asked, PLAIN, lambda tokens: tokens > 100_000, whole=True)

    quick, whole = asyncio.run(both())
    assert quick.tokens == whole.tokens
    assert list(quick.keys) == list(whole.keys)
    if whole.ids is not None and whole.keys:
        assert list(whole.keys) == list(IDENTITY.keys(list(whole.ids), PLAIN))
