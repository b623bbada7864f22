"""Fuzzed functions: they take any bytes and raise nothing but ``AssertionError``, where a promise isn't kept.

A target lets the errors pass that its reader documents, and where there is a slow obvious way to the same answer, compares.
It keeps nothing between two calls, so that an input alone shows what it showed. ``scripts/fuzz.py`` makes inputs that reach
new code; those worth keeping are in ``corpus``, with all that ever broke a target, and ``test_corpus.py`` runs them.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from kvyard import openai
from kvyard.clock import SECOND, VirtualClock
from kvyard.engine.models.fields import read_config
from kvyard.engine.timing.measurements import parse_measurements
from kvyard.engine.timing.profile import load_profile
from kvyard.errors import KvyardError
from kvyard.events import packed
from kvyard.events.mirror import restates
from kvyard.events.recording import Recording
from kvyard.events.transport.frames import Frame, Reply, read_live, read_reply
from kvyard.events.transport.subscription import Subscription
from kvyard.events.wire import Decoder, dialects, trtllm, vllm
from kvyard.hashing import PLAIN
from kvyard.index import Holder, Identity
from kvyard.index.redis import directory, shared
from kvyard.lab.conform import conform
from kvyard.lab.conform.scheduler import conform as conform_scheduler
from kvyard.lab.validate.reading import read_run
from kvyard.replay.report.files import from_json
from kvyard.replay.settings import SETTINGS, make_config
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.registry import OURS
from kvyard.router.journal import read_journal
from kvyard.server.application import Application
from kvyard.server.connection import PIPELINED_REQUESTS, ClientConnection, ServerState
from kvyard.server.gateway import config as gateway_config
from kvyard.server.gateway import reading
from kvyard.server.gateway.access.keys import read_keys
from kvyard.server.gateway.config import GatewayEngine
from kvyard.server.gateway.connections import EngineAddress, EngineConnection, EngineConnections
from kvyard.server.gateway.failures import EngineFailed
from kvyard.server.gateway.homes import ResponseHome, ResponseHomes
from kvyard.server.gateway.prompting import Prompting, read_body
from kvyard.server.gateway.reading import PromptReader, ReadPrompt
from kvyard.server.gateway.schemas import ExplainRoute
from kvyard.server.gateway.usage import answer_tokens
from kvyard.server.hinting import peek_hints
from kvyard.server.http import ANY_METHOD, JSON, Bounds, Operation, Raw, Refusal, decode, decode_as_vllm
from kvyard.server.indexer.config import load
from kvyard.server.indexer.names import LocalNames
from kvyard.server.indexer.schemas import Register, ScoreRequest
from kvyard.server.request import HttpRequest

Target = Callable[[bytes], None]
LATER = {"picked": "kvyard.server.epp.service", "redis": "kvyard.server.gateway.sharing.peers"}
"""Modules that targets import when they are called; who measures coverage imports them before."""
MOST_ROWS = 2_000
"""Rows of a trace that are looked at: a short file can't have many, unless it is packed."""
DIALECTS = dialects()
FORMATS = [None, *OURS]
LOOP = asyncio.new_event_loop()
"""For all targets: making one takes longer than what most inputs need it for."""
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


def large_events(data: bytes) -> None:
    """A payload read as large ones are, packed: what it has in full is what it has as a small one."""
    how, payload = data[0] if data else 0, data[1:]
    dialect = DIALECTS[how % len(DIALECTS)]
    whole, decoder = Decoder(dialect).decode(payload), Decoder(dialect)
    with ExitStack() as stack:
        for module, name in ((vllm, "LARGE"), (trtllm, "LARGE"), (packed, "PIECE")):
            stack.enter_context(mock.patch.object(module, name, how // len(DIALECTS) % 3))
        decoded = decoder.decode(payload)
    for problem in decoded.problems:
        assert not problem.reason.startswith("unexpected"), problem
        assert len(problem.reason) <= 260, problem
    if not whole.problems and not decoded.problems:
        assert repr(list(decoded.events)) == repr(list(whole.events))
        parts, others = decoded.by_rank(), whole.by_rank()
        assert [(part.rank, repr(list(part.events))) for part in parts] == [
            (part.rank, repr(list(part.events))) for part in others
        ]
    assert restates(decoded.events) == restates(list(decoded.events))


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
    cuts, text = data[:2], data[2:160].decode("utf-8", "replace")
    reader = _reader()
    with mock.patch.object(reading, "RUN_BYTES", 16):
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


def answer(data: bytes) -> None:
    """An engine's answer over HTTP: cut anywhere it is the same as in one piece, and what it says of itself can be read."""
    steps, wire = data[:2] or b"\xff", data[2:]
    whole = LOOP.run_until_complete(_answered([wire]))
    pieces, at = list[bytes](), 0
    for step in itertools.cycle(steps):
        if at >= len(wire):
            break
        pieces.append(wire[at : at + step + 1])
        at += step + 1
    assert LOOP.run_until_complete(_answered(pieces)) == whole
    said = whole[2]
    ResponseHomes().saw(said, ResponseHome("model", "engine"))
    assert all(part is None or part >= 0 for part in answer_tokens(said))


async def _answered(pieces: list[bytes]) -> tuple[int, list[tuple[bytes, bytes]], bytes, bool]:
    """Status, headers, body and whether it is whole, of an answer that comes in these pieces on a connection that then ends."""
    transport = Wire()
    connection = EngineConnection(_connections(), EngineAddress.of("http://engine:8000"))
    connection.connection_made(transport)
    connection.busy = True
    asking = asyncio.ensure_future(connection.ask("POST", b"/v1/completions", [], b"{}"))
    await asyncio.sleep(0)
    for piece in pieces:
        if transport.is_closing():
            break
        connection.data_received(piece)
    connection.connection_lost(None)
    body = list[bytes]()
    with suppress(EngineFailed):
        await asking
        while piece := await connection.read():
            body.append(piece)
    assert connection.content_type == connection.content_type.strip()
    return connection.status, connection.headers if connection.status else [], b"".join(body), connection.complete


class Wire(asyncio.Transport):
    """A connection without a socket: it takes what is written, and can be ended."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = False

    def write(self, data: Any) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self._ended = True

    def is_closing(self) -> bool:
        return self._ended


@cache
def _connections() -> EngineConnections:
    return EngineConnections(connect_seconds=1.0, silent_seconds=1e6)


def requests(data: bytes) -> None:
    """Requests on a client's connection: cut anywhere they are those of one piece, as far as both are read, and nothing of them
    is held when the connection has ended.
    """
    steps, wire = data[:2] or b"\xff", data[2:]
    whole = LOOP.run_until_complete(_received([wire]))
    pieces, at = list[bytes](), 0
    for step in itertools.cycle(steps):
        if at >= len(wire):
            break
        pieces.append(wire[at : at + 1 + step % 64])
        at += 1 + step % 64
    parts = LOOP.run_until_complete(_received(pieces))
    assert all(one == other for one, other in zip(whole, parts, strict=False)), (whole, parts)
    assert abs(len(whole) - len(parts)) <= (len(whole) > PIPELINED_REQUESTS) * len(whole), (whole, parts)


Received = tuple[str, str, bytes, list[tuple[bytes, bytes]], bytes]


async def _received(pieces: list[bytes]) -> list[Received]:
    """Requests that an application gets of these pieces, on a connection that then ends."""
    received = list[Received]()

    async def take(body: bytes | None, request: HttpRequest) -> Raw:
        received.append((request.method, request.path, request.query, request.raw, body or b""))
        announced = [value for name, value in request.raw if name == b"content-length"]
        assert not announced or all(int(value) == len(body or b"") for value in announced)
        return Raw(b"", "text/plain")

    with_body: Any = {"path": "/{path}", "summary": "", "handler": take, "body": dict, "raw": True}
    bounds = Bounds(body_bytes=8 << 10)
    app = Application([], title="it", bounds=bounds, unknown=Operation(method=ANY_METHOD, **with_body))
    state = ServerState(app, keep_alive_seconds=60)
    connection, transport = ClientConnection(state), ClientWire()
    connection.connection_made(transport)
    for piece in pieces:
        if transport.is_closing():
            break
        connection.data_received(piece)
        for _ in range(4):
            await asyncio.sleep(0)
    turns = 0
    while connection.request is not None and not connection.request.gone and turns < 8 * PIPELINED_REQUESTS:
        turns += 1
        await asyncio.sleep(0)
    task = None if connection.request is None else connection.request.task
    connection.connection_lost(None)
    if task is not None:
        await asyncio.wait([task])
    assert app.held.bytes == 0
    assert not state.connections
    return received


class ClientWire(Wire):
    """The server's side of a connection without a socket, to a client that reads everything."""

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        self._ended = True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


BODIES: list[Any] = [openai.CompletionRequest, openai.ChatRequest, GatewayEngine, Register, ScoreRequest, ExplainRoute]


def posted(data: bytes) -> None:
    """A typed body of the mock, the index service and the gateway: it is of its type, or refused in few words."""
    kind = BODIES[data[0] % len(BODIES)] if data else BODIES[0]
    for read in (lambda: decode(kind, data[1:]), lambda: decode_as_vllm(kind, data[1:], JSON)):
        try:
            assert isinstance(read(), kind)
        except Refusal as refusal:
            assert refusal.status in (400, 422)
            assert len(refusal.problem.error) + len(refusal.problem.fix) < 2_000
        except KvyardError as error:
            assert len(str(error)) < 2_000


def picked(data: bytes) -> None:
    """What an Envoy proxy says to the endpoint picker, message by message: JSON of messages in lines, or messages behind their
    lengths. Whatever comes, every message of a stream that goes on is answered, and nothing is held when it is over.
    """
    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError

    said = list[Any]()
    if data[:1] == b"{":
        for line in data.split(b"\n"):
            with suppress(json_format.ParseError, UnicodeDecodeError, RecursionError):
                said.append(json_format.Parse(line, ProcessingRequest()))
    else:
        at = 0
        while at + 2 <= len(data):
            end = at + 2 + int.from_bytes(data[at : at + 2])
            message = ProcessingRequest()
            with suppress(DecodeError):
                message.ParseFromString(data[at + 2 : end])
                said.append(message)
            at = end
    LOOP.run_until_complete(_picked(said))


async def _picked(said: list[Any]) -> None:
    from kvyard.server.epp.stream import RequestStream

    picker = await _picker()
    gateway = picker.gateway
    for engine in gateway.members.engines.values():
        gateway.health.well(engine)
    _PICKERS.clear()  # only one that is as it was gets the next input
    answers = list[Any]()

    async def write(message: Any) -> None:
        answers.append(message)

    failed = picker.opened["read"] + picker.opened["choice"]
    stream = RequestStream(picker, write)
    try:
        for message in said:
            if not await stream.take(message):
                assert answers[-1].WhichOneof("response") == "immediate_response"
                break
    finally:
        stream.close()
    assert picker.opened["read"] + picker.opened["choice"] == failed, picker.conditions()
    assert (picker.streams, picker.held, gateway.traffic.counters.under_way) == (0, 0, 0)
    assert all(engine.in_flight == 0 for engine in gateway.members.engines.values())
    for pool in gateway.members.pools.values():
        assert not pool.router.loads.active
        assert not pool.waiting
    _PICKERS.append(picker)


_PICKERS = list[Any]()
"""The one that is used again, as making one takes longer than what inputs do with it."""


async def _picker() -> Any:
    """A picker of two engines that need not be asked, nor are: no process is behind them."""
    if not _PICKERS:
        from kvyard.server.epp.config import convert
        from kvyard.server.epp.service import build

        engines = [
            {"name": name, "url": f"http://127.0.0.1:{port}", "model": "model", "block_size": 4}
            for name, port in (("a", 1), ("b", 2))
        ]
        settings = {
            "engines": engines,
            "tokenizer": "bytes",
            "conformance": True,
            "fallbacks": 1,
            "sheddable": ["batch"],
        }
        _, service = build(convert({**settings, "health_seconds": 3600.0, "recovery_seconds": 3600.0}, "it"))
        for engine in service.config.engines:
            await service.gateway.members.add(engine)
        await service.gateway.members.stop()  # no looks at them
        return service.picker
    return _PICKERS[0]


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
    LOOP.run_until_complete(peers.take([(b"other", b"1", data), (data, b"1", b"\x90")]))
    peers.forget_all()
    assert not peers.counts()


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        events,
        large_events,
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
        answer,
        requests,
        posted,
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
    path = Path(_folder().name) / f"file{suffix}"
    path.write_bytes(content)
    try:
        yield path
    finally:
        path.unlink()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """For the files of all inputs, which come one at a time; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="kvyard-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


def _plain_json(text: bytes) -> Any:
    """Return the value by Python's own reader; ``None`` where it differs by design, as in NaN or a name that comes twice."""

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

    quick, whole = LOOP.run_until_complete(both())
    assert quick.tokens == whole.tokens
    assert list(quick.keys) == list(whole.keys)
    if whole.ids is not None and whole.keys:
        assert list(whole.keys) == list(IDENTITY.keys(list(whole.ids), PLAIN))
