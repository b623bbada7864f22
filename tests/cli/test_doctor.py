"""``kvyard doctor``: every link that can break is broken here, and it has to say which one it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.index.fleet import PRESETS
from tests.ports import free_ports
from tests.server.support import LiveRank
from tests.server.wire import Wire

from kvyard.cli.app import main
from kvyard.events.recording import About, RecordingWriter
from kvyard.events.transport.frames import Frame
from kvyard.hashing import Namespace, TokenChain, algorithm

pytestmark = pytest.mark.zmq

TEXT = list(range(100, 140))
TOKENS = ",".join(map(str, TEXT))


class Seen:
    """Output of the doctor: the exit code, findings by code, and the whole answer."""

    def __init__(self, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
        with pytest.raises(SystemExit) as exit_:
            main(["doctor", *argv, "--json"])
        self.code = int(exit_.value.code or 0)
        self.all = json.loads(capsys.readouterr().out)
        for finding in self.all["findings"]:
            assert finding["seen"] and finding["means"] and finding["fix"], finding
        self.findings = {finding["code"]: finding for finding in self.all["findings"]}
        self.broken = {code for code, finding in self.findings.items() if finding["broken"]}

    def says(self, code: str, words: str = "", part: str = "seen") -> bool:
        return code in self.findings and words in self.findings[code][part]


def see(capsys: pytest.CaptureFixture[str], *argv: str, until: Callable[[Seen], object]) -> Seen:
    """Watch until it is seen, longer each time: a short while is enough on a machine that isn't busy."""
    for seconds in ("0.25", "1", "6"):
        seen = Seen(capsys, (*argv, "--seconds", seconds))
        if until(seen):
            return seen
    raise AssertionError(seen.all)


@contextmanager
def talking(say: Callable[[], object]) -> Iterator[None]:
    """Says something again and again, so that whoever comes later hears it."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.03):
            say()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def blocks(tokens: list[int], size: int = 4, space: Namespace | None = None, seed: str = "a seed") -> list[int]:
    chain = TokenChain(tokens, size, algorithm("sha256_cbor", seed), space or Namespace())
    return [int.from_bytes(key[-8:], "big") for key in chain.hashes(0, len(chain.keys))]


def said(wire: Wire, tokens: list[int] = TEXT, size: int = 4, **fields: object) -> Callable[[], None]:
    full = tokens[: len(tokens) // size * size]
    return lambda: wire.stored(blocks(full, size), full, size, **fields)


# -- nothing is broken ----------------------------------------------------------------------------------------------


def test_nothing_is_broken(capsys) -> None:
    with LiveRank("a", 0, PRESETS["full+window"]) as rank:
        rank.run(TEXT)
        longest = rank.engine.longest(TEXT)
        argv = [rank.endpoint, "--replay", rank.replay, "--tokens", TOKENS]
        seen = see(capsys, *argv, until=lambda seen: seen.all["matched"] == {rank.endpoint: longest})
        assert longest > 0 and seen.code == 0 and seen.all["healthy"] and not seen.broken
        assert seen.all["tokens"] == len(TEXT)


def test_for_people(capsys) -> None:
    with LiveRank("a", 0, PRESETS["full"]) as rank:
        rank.run(TEXT)
        argv = [rank.endpoint, "--replay", rank.replay]

        def read(tokens: str, words: str) -> tuple[object, str]:
            for seconds in ("0.25", "1", "6"):
                with pytest.raises(SystemExit) as exit_:
                    main(["doctor", *argv, "--tokens", tokens, "--seconds", seconds])
                out = capsys.readouterr().out
                if words in out:
                    return exit_.value.code, out
            raise AssertionError(out)

        code, out = read(TOKENS, "matches 36 of 40 tokens")
        assert code == 0 and out.endswith("Nothing is broken.\n")
        assert "  capacity wasn't checked, " in out and "http:// URL, or use kvyard events check with --blocks\n" in out
        code, out = read("1 2", "\nBroken\n  below-one-block: ")
        assert code == 1 and "      fix: " in out and out.endswith("1 thing is broken.\n")


# -- each link ------------------------------------------------------------------------------------------------------


def test_nobody_is_there(capsys) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)}"
    seen = see(capsys, endpoint, "--tokens", TOKENS, until=lambda seen: seen.says("unreachable", "No publisher"))
    assert seen.code == 1 and set(seen.findings) == {"unreachable"}


def test_no_events_at_all(capsys) -> None:
    with Wire() as wire:
        seen = see(capsys, wire.endpoint, until=lambda seen: seen.says("no-events", "prefix caching", "fix"))
        assert seen.code == 1 and set(seen.findings) == {"no-events"}


def test_a_topic_that_never_comes(capsys) -> None:
    with Wire(topic=b"kv@pod-7") as wire, talking(said(wire)):
        seen = see(capsys, wire.endpoint, "--topic", "kv-events", until=lambda seen: seen.says("topic", "kv@pod-7"))
        assert seen.code == 1


@pytest.mark.parametrize(
    "say",
    [
        lambda wire: wire.payload(b'{"some": "thing else"}'),
        lambda wire: wire.payload(b"\x00\x01\x02"),
        lambda wire: wire.batch({"type": "PageLoaded", "page": 3}),
        lambda wire: wire.raw(b"", b"12", b"payload"),
    ],
)
def test_an_encoding_that_nobody_knows(say, capsys) -> None:
    with Wire() as wire, talking(lambda: say(wire)):
        argv = [wire.endpoint, "--tokens", TOKENS]
        assert see(capsys, *argv, until=lambda seen: seen.says("encoding", "isn't an encoding", "means")).code == 1


def test_another_block_size_than_expected(capsys) -> None:
    with LiveRank("a", 0, PRESETS["full"]) as rank:
        rank.run(TEXT)
        argv = [rank.endpoint, "--replay", rank.replay, "--tokens", TOKENS, "--block-size"]
        words = "The engine's blocks have 4 tokens; 16 is expected."
        assert see(capsys, *argv, "16", until=lambda seen: seen.says("block-size", words)).code == 1
        assert see(capsys, *argv, "4", until=lambda seen: seen.all["healthy"]).code == 0


def test_a_prompt_below_one_block(capsys) -> None:
    with LiveRank("a", 0, PRESETS["mla"]) as rank:
        rank.run(TEXT)
        argv = [rank.endpoint, "--replay", rank.replay, "--tokens"]
        short, enough = (",".join(map(str, TEXT[:count])) for count in (8, 9))
        words = "has 8 tokens, and a block has 8"
        assert see(capsys, *argv, short, until=lambda seen: seen.says("below-one-block", words)).code == 1
        assert see(capsys, *argv, enough, until=lambda seen: seen.all["healthy"]).code == 0


@pytest.mark.parametrize(
    ("cached", "asked", "code", "words"),
    [
        (Namespace(salt="tenant-1"), [], "salt", "with a salt; asked for was none"),
        (Namespace(), ["--salt", "x"], "salt", "none of adapter, salt and media; asked for was a salt"),
        (Namespace(salt="tenant-1"), ["--salt", "tenant-2"], "salt", "asked for was another salt"),
        (Namespace(lora_name="poet", lora_path="/p"), [], "lora", "with adapter 'poet'"),
        (Namespace(lora_name="poet", lora_path="/p"), ["--lora", "critic"], "lora", "asked for was adapter 'critic'"),
        (Namespace(), ["--lora", "poet"], "lora", "asked for was adapter 'poet'"),
    ],
)
def test_another_salt_or_adapter(cached: Namespace, asked, code, words, capsys) -> None:
    with Wire() as wire:
        extras = None if cached.plain else [list(one) if one else None for one in cached.wire_extras(0, 10, 4)]
        names = blocks(TEXT, 4, cached)
        fields = {"lora_name": cached.lora_name, "extra_keys": extras}
        argv = [wire.endpoint, "--tokens", TOKENS]
        with talking(lambda: wire.stored(names, TEXT, 4, **fields)):
            seen = see(capsys, *argv, *asked, until=lambda seen: seen.says(code, words))
            assert seen.code == 1 and "tenant-1" not in json.dumps(seen.all)  # a salt is a secret
            right = ["--lora", cached.lora_name] if cached.lora_name else []
            right += ["--salt", cached.salt] if cached.salt else []
            seen = see(capsys, *argv, *right, until=lambda seen: seen.all["matched"] == {wire.endpoint: 36})
            assert not {"salt", "lora"} & set(seen.findings)


def test_hashes_that_are_not_the_expected_ones(capsys) -> None:
    """An engine with a seed of its own; and one whose hashes can be computed, if one knows how."""
    with Wire() as wire, talking(said(wire)):
        argv = [wire.endpoint, "--tokens", TOKENS, "--algorithm", "sha256_cbor"]
        words = "not those of sha256_cbor with its default seed"
        assert see(capsys, *argv, until=lambda seen: seen.says("hash-seed", words)).code == 1
        seen = see(capsys, *argv, "--seed", "a seed", until=lambda seen: seen.says("hashes"))
        assert "hash-seed" not in seen.findings
    names = TokenChain(TEXT, 4, algorithm("xxhash_cbor", "0", {})).hashes(0, 10)
    with Wire() as wire, talking(lambda: wire.stored([int.from_bytes(key[-8:], "big") for key in names], TEXT, 4)):
        words = "but of xxhash_cbor with seed '0'"
        see(capsys, wire.endpoint, "--algorithm", "sha256", until=lambda seen: seen.says("hash-seed", words))
        seen = see(capsys, wire.endpoint, until=lambda seen: seen.says("hashes", "those of xxhash_cbor"))
        assert "hashes" not in seen.broken


def test_engines_whose_seeds_differ(capsys) -> None:
    other = blocks(TEXT, 4, seed="another")
    with Wire() as one, Wire() as two, talking(said(one)), talking(lambda: two.stored(other, TEXT, 4)):
        seen = see(capsys, one.endpoint, two.endpoint, until=lambda seen: seen.says("seeds-differ", "two hashes"))
        assert "seeds-differ" not in seen.broken


def test_a_stream_with_gaps_and_nobody_to_ask(capsys) -> None:
    with Wire() as wire:
        speak = said(wire)

        def with_gap() -> None:
            speak()
            wire.seq += 1

        with talking(with_gap):
            argv = [wire.endpoint, "--tokens", TOKENS]
            seen = see(capsys, *argv, until=lambda seen: "gap" in seen.broken)
            assert seen.code == 1 and seen.says("gap", "replay_endpoint", "fix")


def test_a_stream_that_was_joined_late(capsys) -> None:
    with Wire(first=1000) as wire, talking(lambda: wire.stored([1], list(range(4)), 4)):
        argv = [wire.endpoint, "--tokens", TOKENS]
        seen = see(capsys, *argv, until=lambda seen: seen.says("stale", "joined at batch 10"))
        assert seen.code == 1 and "stale" in seen.broken


def test_a_replay_socket_that_does_not_answer(capsys) -> None:
    """Even where nothing was missed so far: the next loss could not be made good."""
    nobody = f"tcp://127.0.0.1:{free_ports(1)}"
    with Wire() as wire, talking(said(wire)):
        argv = [wire.endpoint, "--replay", nobody, "--tokens", TOKENS]
        assert see(capsys, *argv, until=lambda seen: seen.says("replay-silent", nobody)).code == 1


def test_a_group_that_never_matches(capsys) -> None:
    """Full attention is announced, the window's blocks are elsewhere; and a kind that nobody knows."""
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    far = list(range(9000, 9008))
    with Wire() as wire:

        def speak() -> None:
            wire.stored(blocks(TEXT), TEXT, 4, **full)
            wire.stored(blocks(far), far, 4, **full)
            wire.stored(blocks(far), far, 4, **window)

        with talking(speak):
            words = "group 1 (sliding_window) matches nothing"
            argv = [wire.endpoint, "--tokens", TOKENS]
            assert see(capsys, *argv, until=lambda seen: seen.says("group", words)).code == 1
    with Wire() as wire:
        odd = {"group_idx": 0, "kv_cache_spec_kind": "holographic"}
        with talking(lambda: wire.stored(blocks(TEXT), TEXT, 4, **odd)):
            argv = [wire.endpoint, "--tokens", TOKENS]
            assert see(capsys, *argv, until=lambda seen: seen.says("group", "kind that isn't known")).code == 1


def test_a_cache_that_is_cleared_all_the_time(capsys) -> None:
    with Wire() as wire:
        speak = said(wire)

        def storm() -> None:
            speak()
            wire.cleared()

        with talking(storm):
            assert see(capsys, wire.endpoint, until=lambda seen: "clear-storm" in seen.broken).code == 1


@pytest.mark.parametrize(
    ("engine", "code", "words"),
    [
        ([1, *TEXT], "first-token", "one token more at its start"),
        (TEXT[1:], "first-token", "one token less at its start"),
        ([*TEXT[:2], 7, *TEXT[3:]], "not-announced", "part at token 2"),
        (list(range(5000, 5040)), "not-announced", "None of"),
    ],
)
def test_another_text(engine: list[int], code: str, words: str, capsys) -> None:
    with Wire() as wire, talking(said(wire, engine)):
        argv = [wire.endpoint, "--tokens", TOKENS]
        assert see(capsys, *argv, until=lambda seen: seen.says(code, words)).code == 1


def test_a_prompt_that_was_evicted(capsys, tmp_path) -> None:
    """From a recording, too."""
    path = tmp_path / "recording"
    names = blocks(TEXT)
    store = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": TEXT,
        "block_size": 4,
    }
    with RecordingWriter(path, About(endpoint="tcp://somewhere:1")) as writer:
        for seq, event in enumerate([store, {"type": "BlockRemoved", "block_hashes": names}]):
            payload = msgspec.msgpack.encode([1.0, [event], 0])
            writer.write(seq * 1000, Frame(b"", seq, payload).parts())
    seen = Seen(capsys, (str(path), "--tokens", TOKENS))
    assert seen.code == 1 and seen.says("evicted", "36 tokens of the prompt were cached for a while")


# -- use ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tcp://x"], "has no port"),
        (["nowhere"], "can't read nowhere"),
        (["localhost:1"], "say http://localhost:1 for an engine, tcp://localhost:1 for its events"),
        (["tcp://127.0.0.1:9", "--replay", "y"], "not an endpoint"),
        (["tcp://127.0.0.1:9", "--replay", "tcp://x:1", "--replay", "tcp://x:2"], "one for each"),
        (["tcp://127.0.0.1:9", "--tokens", "a"], "no token ids"),
        (["tcp://127.0.0.1:9", "--tokens", ""], "empty"),
        (["tcp://127.0.0.1:9", "--tokens", "1", "--text", "a"], "in one way"),
        (["tcp://127.0.0.1:9", "--seed", "1"], "--algorithm"),
        (["tcp://127.0.0.1:9", "--algorithm", "md5"], "unknown hash algorithm"),
    ],
)
def test_wrong_use_is_refused(argv, message, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", *argv])
    err = capsys.readouterr().err
    assert exit_.value.code == 2 and err.startswith("Error: ") and message in err and err.count("\n") == 1


def test_an_interrupt_ends_it_with_what_was_learnt(tmp_path) -> None:
    """When it has learnt can't be seen from outside: on a busy machine the interrupt comes later."""
    assert any(_interrupted_after(seconds, tmp_path / f"after {seconds}") for seconds in (0.3, 3, 20))


def _interrupted_after(seconds: float, out: Path) -> bool:
    """Return true if it had learnt all, ``seconds`` after it was sent a snapshot."""
    with LiveRank("a", 0, PRESETS["full"]) as rank:
        rank.run(TEXT)
        with open(out, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvyard", "doctor", rank.endpoint, "--replay", rank.replay, "--tokens", TOKENS,
                 "--seconds", "600", "--json"],
                stdout=file,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            try:
                eventually(lambda: rank.publisher.counters().get("snapshots", 0))
                time.sleep(seconds)
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0
            finally:
                if process.poll() is None:
                    process.kill()
        return bool(json.loads(out.read_text())["matched"] == {rank.endpoint: 36})
