"""Wire formats are found by name, ours and other people's; one from outside carries a stream from publisher to index."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.events.fake_map import FakeMap, token_chain
from tests.events.transport.live import QUICK

from kvyard.errors import KvyardError
from kvyard.events import Batcher, GroupMeta, Tier
from kvyard.events.check import Checker, judge
from kvyard.events.transport import Publisher, State, Subscriber
from kvyard.events.transport.frames import Frame
from kvyard.events.wire import WIRES, Decoder, Encoder, EngineGuess, dialects, written_dialects
from kvyard.hashing import Run
from kvyard.index import Identity, Indexer, Source
from kvyard.registry import Registry

LINES = '''
"""One event a line, in plain words: a format of somebody else's."""

from kvyard.events import Cleared, Removed, Stored
from kvyard.events.wire import Decoded, StreamRules, WireFormat

WORD = b"lines/1\\n"


class Reader:
    def __init__(self, narrow, block_size):
        pass

    def read(self, payload, stats):
        if not isinstance(payload, bytes) or not payload.startswith(WORD):
            return None
        events = [self.event(*line.split()) for line in payload.decode().splitlines()[1:]]
        return Decoded(rank=0, events=events, dialect="lines")

    def event(self, word, *rest):
        if word == "gone":
            return Cleared()
        if word == "out":
            return Removed(hashes=[*map(int, rest)], group=0)
        parent, size, hashes, tokens = rest
        return Stored(
            hashes=[*map(int, hashes.split(","))],
            parent=None if parent == "-" else int(parent),
            tokens=[*map(int, tokens.split(","))],
            block_size=int(size),
            group=0,
            kind="full_attention",
        )


class Writer:
    def __init__(self, integers, groups):
        pass

    def encode(self, batch):
        return WORD + "\\n".join(map(self.line, batch.events)).encode()

    def line(self, event):
        if isinstance(event, Cleared):
            return "gone"
        hashes = [str(key) for key in event.hashes]
        if isinstance(event, Removed):
            return " ".join(["out", *hashes])
        parent = "-" if event.parent is None else event.parent
        return f"in {parent} {event.block_size} {','.join(hashes)} {','.join(map(str, event.tokens))}"


def look(payload, guess):
    if not isinstance(payload, bytes) or not payload.startswith(WORD):
        return False
    guess.encodings["lines"] += payload.count(b"\\n")
    return True


FORMAT = WireFormat(
    title="Liner",
    reader=Reader,
    writer=Writer,
    look=look,
    likeness=lambda guess: 100 if guess.encodings["lines"] else 0,
    rules=StreamRules(cautions=("It says nothing of tiers.",)),
)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[object]]:
    """A package with a format of its own, as pip leaves one."""
    (tmp_path / "liner.py").write_text(LINES)
    info = tmp_path / "liner-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: liner\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvyard.wires]\nlines = liner:FORMAT\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(WIRES, "_plugins", None)
    yield WIRES
    WIRES._loaded.pop("lines", None)
    sys.modules.pop("liner", None)


def test_names_are_the_tables() -> None:
    assert dialects() == ["auto", "vllm", "vllm-array", "sglang", "trtllm", "kvyard"]
    assert written_dialects() == ["vllm", "vllm-array", "trtllm", "kvyard"]


def test_a_polled_format_is_not_streamed() -> None:
    with pytest.raises(KvyardError, match="'trtllm' is fetched, not streamed"):
        Publisher("tcp://127.0.0.1:0", lambda now: None, dialect="trtllm")  # type: ignore[arg-type,return-value]


def test_unreadable_payloads_look_like_nothing() -> None:
    guess = EngineGuess()
    for payload in (b"", b"\xc1", b"[", msgspec.msgpack.encode(7), msgspec.msgpack.encode({})):
        guess.look(payload)
    assert guess.engine() == "unknown"


class TestFromOutside:
    def test_a_registered_format_is_named_in_help(self, installed, tmp_path: Path) -> None:
        assert dialects()[-1] == "lines" == written_dialects()[-1]
        path = os.pathsep.join([str(tmp_path), *sys.path])
        command = [sys.executable, "-m", "kvyard", "events", "check", "--help"]
        env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert "trtllm, kvyard, lines" in " ".join(shown.stdout.split())

    def test_a_stream_is_checked_by_its_rules(self, installed) -> None:
        checker, writer = Checker(), Encoder("lines")
        for batch in batches():
            checker.frame(Frame(b"", batch.seq, writer.encode(batch)))
        report = judge(checker.facts())
        assert (report.engine, report.title, report.clean) == ("lines", "Liner", True), report
        assert report.cautions == ["It says nothing of tiers."]

    def test_auto_reads_it_beside_ours(self, installed) -> None:
        decoder, writers = Decoder(), {dialect: Encoder(dialect) for dialect in written_dialects()}
        for batch in batches():
            for dialect, writer in writers.items():
                decoded = decoder.decode(writer.encode(batch))
                assert not decoded.problems and len(decoded.events) == len(batch.events), dialect

    @pytest.mark.zmq
    @pytest.mark.parametrize("dialect", ["auto", "lines"])
    def test_a_registered_format_carries_a_stream_to_the_index(self, installed, dialect: str) -> None:
        pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
        held, batcher = engine()
        anywhere = "tcp://127.0.0.1:0"
        indexer = Indexer(Identity(1))
        indexer.register(Source(stream="s", worker="w"))

        def matched() -> int:
            return max((match.tokens for match in indexer.score(range(1, 100)).workers.values()), default=0)

        async def follow() -> None:
            endpoints = {"endpoint": publisher.endpoint, "replay": publisher.replay_endpoint, "stream": "s"}
            async with Subscriber(**endpoints, dialect=dialect, limits=QUICK) as subscriber:
                published = 1
                # The state is that of what has arrived, which may still wait to be received.
                while matched() < 2 or subscriber.state != State.FRESH or "lines" not in {u.dialect for u in seen}:
                    update = await subscriber.receive()
                    assert update is not None
                    seen.append(update)
                    indexer.apply(update)
                    # What there was comes by a snapshot, and on a busy machine what was published meanwhile too.
                    if matched() == published:
                        published += 1
                        held.enter(Run(token_chain(*range(1, published + 1))), 0, Tier.G1)
                        publisher.publish(batcher.end_iteration(published), published)

        seen: list = []
        with Publisher(anywhere, batcher.resync, replay=anywhere, dialect="lines") as publisher:
            held.enter(Run(token_chain(1)), 0, Tier.G1)
            publisher.publish(batcher.end_iteration(0), 0)
            asyncio.run(asyncio.wait_for(follow(), 30))
        assert matched() >= 2


def engine() -> tuple[FakeMap, Batcher]:
    held = FakeMap()
    held.sink = batcher = Batcher((GroupMeta(block_size=1, kind="full_attention"),), snapshot=held.snapshot)
    return held, batcher


def batches() -> list:
    held, batcher = engine()
    made = []
    for at in range(6):
        held.enter(Run(token_chain(at, at + 100)), 0, Tier.G1)
        if at > 2:
            held.leave(Run(token_chain(at - 2, at + 98))[1:], 0, Tier.G1)
        made.append(batcher.end_iteration(at))
    return made


def test_a_single_event_of_tensorrt_llm_is_known_as_well_as_a_list() -> None:
    event = {"event_id": 0, "data": {"type": "removed", "block_hashes": [-1, 2]}}
    for payload in (event, [event]):
        guess = EngineGuess()
        guess.look(msgspec.json.encode(payload))
        assert guess.engine() == "trtllm" and guess.encodings["trtllm"] == 1
