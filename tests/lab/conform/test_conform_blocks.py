"""``kvyard conform``: identical logs are said to be, a difference is shown with what led there, a bad file is refused."""

from __future__ import annotations

import json
import lzma
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.support import exit_code

from kvyard.blocks import BlockManager
from kvyard.lab.conform import LogError, conform

GOLDEN = sorted((Path(__file__).resolve().parents[2] / "golden" / "blocks").glob("*.xz"))
NOT_OURS = {"rswa"}
"""Families of a kind of attention that we don't have."""

Entry = dict[str, dict[str, Any]]


run = partial(exit_code, "conform")


def family(name: str) -> Path:
    return next(path for path in GOLDEN if path.name.startswith(f"{name}@"))


def read(path: Path) -> list[Entry]:
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]


def write(path: Path, entries: list[Entry]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


# -- identical --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name.removesuffix(".jsonl.xz"))
def test_our_manager_does_what_vllm_did(path: Path) -> None:
    if path.name.partition("@")[0] in NOT_OURS:
        with pytest.raises(LogError, match="this configuration can't be replayed: group 0: unknown kind"):
            conform(path)
        return
    verdict = conform(path)
    assert verdict.difference is None, verdict.difference
    assert verdict.operations == len(read(path))


def test_one_line_a_file_and_a_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain or packed makes no difference."""
    packed = family("full")
    plain = write(tmp_path / "plain@1.jsonl", read(packed)[:100])
    assert run(packed, plain) == 0
    count = len(read(packed))
    assert capsys.readouterr().out.splitlines() == [
        f"{packed.name.removesuffix('.jsonl.xz')}: {count} operations, identical",
        "plain@1: 100 operations, identical",
        f"2 of 2 logs identical, {count + 100} operations",
    ]


def test_blank_lines_are_nothing(tmp_path: Path) -> None:
    entries = read(family("full"))[:5]
    path = tmp_path / "airy@1.jsonl"
    path.write_text("\n\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    assert conform(path).difference is None


# -- different --------------------------------------------------------------------------------------------------------


def falsify(entries: list[Entry], op: str, field: str, value: Any, nth: int = 0) -> int:
    """Change one field of the nth recorded result of ``op`` that has it; returns its line number."""
    found = [at for at, entry in enumerate(entries) if entry["op"]["op"] == op and field in entry["result"]]
    entries[found[nth]]["result"][field] = value
    return found[nth] + 1


@pytest.mark.parametrize(
    ("op", "field", "value"),
    [
        ("get_computed", "hit_tokens", 12345),
        ("get_computed", "hit_blocks", [[7]]),
        ("allocate", "allocated", "perhaps"),
        ("allocate", "blocks", [[1, 1]]),
        ("allocate", "new_blocks", []),
        ("allocate", "num_free", -1),
        ("new", "hashes", ["00"]),
        ("free", "queue", [3, 2, 1]),
        ("append", "refs", {"1": 9}),
        ("take_events", "events", [{"type": "AllBlocksCleared"}]),
        ("state", "cached", {}),
        ("config", "none_hash", "beef"),
        ("config", "num_free", 1),
    ],
)
def test_every_field_is_compared(tmp_path: Path, op: str, field: str, value: Any) -> None:
    entries = read(family("full+swa"))
    line = falsify(entries, op, field, value)
    verdict = conform(write(tmp_path / "false@1.jsonl", entries))
    assert verdict.difference is not None
    assert (verdict.operations, verdict.difference.line) == (line, line)
    assert verdict.difference.op == entries[line - 1]["op"]
    assert (verdict.difference.field, verdict.difference.recorded) == (field, value)
    assert verdict.difference.ours != value
    before = [entry["op"] for entry in entries[: line - 1]]
    shown = verdict.difference.before
    assert len(shown) == min(len(before), 5)
    assert shown == before[len(before) - len(shown) :]


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_field_too_few_or_too_many(tmp_path: Path, change: str) -> None:
    entries = read(family("full"))[:40]
    result = entries[20]["result"]
    if change == "missing":
        del result["num_free"]
    else:
        result["surprise"] = 1
    verdict = conform(write(tmp_path / "false@1.jsonl", entries))
    assert verdict.difference is not None
    assert (verdict.difference.line, verdict.difference.field) == (
        21,
        "num_free" if change == "missing" else "surprise",
    )


def test_a_difference_is_shown_with_both_results_and_what_led_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = read(family("full"))[:100]
    line = falsify(entries, "allocate", "num_free", 999, nth=8)
    false = write(tmp_path / "false@1.jsonl", entries)
    assert run(false, family("mla")) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"false@1: differs at operation {line}, in num_free"
    op = json.dumps(entries[line - 1]["op"], separators=(",", ":"))
    assert out[1] == f"  operation  {op}"
    assert out[2] == "  recorded   num_free = 999"
    assert re.fullmatch(r"  ours       num_free = \d+", out[3])
    led_there = [line.removeprefix("  before     ") for line in out if line.startswith("  before")]
    assert led_there == [
        json.dumps(entry["op"], separators=(",", ":")) for entry in entries[line - 1 - len(led_there) : line - 1]
    ]
    assert len(led_there) >= 3
    assert out[-2].endswith("operations, identical"), "the other logs are compared all the same"
    assert out[-1].startswith("1 of 2 logs identical, ")


def test_long_results_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = read(family("full"))[:30]
    falsify(entries, "allocate", "queue", list(range(5000)))
    assert run(write(tmp_path / "false@1.jsonl", entries)) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) < 600
    assert "characters)" in out


def test_a_refusal_by_one_side_is_a_difference(tmp_path: Path) -> None:
    entries = read(family("full"))[:2]
    refused = {"error": "AssertionError: no"}
    ok = [*entries, {"op": {"op": "evict", "blocks": [10**6]}, "result": refused}]
    assert conform(write(tmp_path / "ok.jsonl", ok)).difference is None, "both refuse, each in its own words"
    bad = [*entries, {"op": {"op": "evict", "blocks": []}, "result": refused}]
    difference = conform(write(tmp_path / "bad.jsonl", bad)).difference
    assert difference is not None
    assert difference.field == "error"
    bad = [*entries, {"op": {"op": "evict", "blocks": [10**6]}, "result": {"num_free": 1}}]
    difference = conform(write(tmp_path / "bad.jsonl", bad)).difference
    assert difference is not None
    assert "no block 1000000" in str(difference.ours)


def test_a_broken_manager_does_not_conform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way round: not a changed log but a changed manager."""
    monkeypatch.setattr(BlockManager, "evict", lambda self, block_ids: None)
    logs = [path for path in GOLDEN if path.name.partition("@")[0] not in NOT_OURS]
    assert any(conform(path).difference is not None for path in logs)


# -- unreadable -------------------------------------------------------------------------------------------------------

CONFIG = '{"op": {"op": "config", "num_blocks": 8}, "result": {}}\n'
PACKED = lzma.compress((CONFIG * 50).encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "the log is empty"),
        ("blank.jsonl", b"\n\n", "the log is empty"),
        ("nothing.jsonl.xz", lzma.compress(b""), "the log is empty"),
        ("empty.jsonl.xz", b"", "can't be read: "),
        ("cut.jsonl.xz", PACKED[: len(PACKED) // 2], "can't be read: "),
        ("garbled.jsonl.xz", PACKED[:30] + b"?" * 20 + PACKED[50:], "can't be read: "),
        ("plain.jsonl.xz", CONFIG.encode(), "can't be read: "),
        ("binary.jsonl", b"\xff\xfe\x00", "can't be read: "),
        ("packed.jsonl", PACKED, "can't be read: "),
        ("prose.jsonl", b"no JSON\n", ':1: expected a line of {"op": ..., "result": ...}'),
        ("number.jsonl", b"7\n", ':1: expected a line of {"op": ..., "result": ...}'),
        ("half.jsonl", b'{"op": {"op": "config"}}\n', ':1: expected a line of {"op": ..., "result": ...}'),
        ("flat.jsonl", b'{"op": "config", "result": {}}\n', ':1: expected a line of {"op": ..., "result": ...}'),
        ("late.jsonl", b'{"op": {"op": "new"}, "result": {}}\n', ":1: the first operation must be config, not 'new'"),
        (
            "kind.jsonl",
            b'{"op": {"op": "config", "groups": [{"type": "odd"}]}, "result": {}}\n',
            ":1: this configuration can't be replayed: group 0: unknown kind 'odd'",
        ),
        (
            "key.jsonl",
            b'{"op": {"op": "config", "colour": "red"}, "result": {}}\n',
            ":1: this configuration can't be replayed: ",
        ),
        (
            "typeless.jsonl",
            b'{"op": {"op": "config", "groups": [{"window": 3}]}, "result": {}}\n',
            ":1: this configuration can't be replayed: ",
        ),
        (
            "algorithm.jsonl",
            b'{"op": {"op": "config", "hash_algo": "md5"}, "result": {}}\n',
            ":1: this configuration can't be replayed: unknown hash algorithm 'md5'",
        ),
    ],
)
def test_a_file_that_is_no_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert run(path) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith(f"Error: {path}")
    assert message in streams.err
    assert len(streams.err.splitlines()) == 1
    assert streams.out == "0 of 1 logs identical, 1 can't be replayed, 0 operations\n"


def started() -> list[Entry]:
    return read(family("full"))[:2]


@pytest.mark.parametrize(
    "op", [{"op": "dance"}, {"op": "new", "req": "a", "tokens": 5}, {"op": "evict", "blocks": None}], ids=str
)
def test_an_operation_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str], op: dict[str, Any]) -> None:
    path = write(tmp_path / "odd@1.jsonl", [*started(), {"op": op, "result": {}}])
    assert run(path) == 2
    assert capsys.readouterr().err.startswith(f"Error: {path}:3: this operation can't be replayed: ")


def test_a_missing_file_and_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "absent.jsonl") == 2
    assert "can't be read: " in capsys.readouterr().err
    assert run(tmp_path) == 2
    assert "can't be read: " in capsys.readouterr().err


def test_no_file_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "missing argument 'files" in capsys.readouterr().err.lower()


def test_a_bad_file_does_not_keep_the_others_from_being_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = read(family("full"))[:50]
    good = write(tmp_path / "good@1.jsonl", entries)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no log\n")
    assert run(bad, tmp_path / "absent.jsonl", good) == 2
    streams = capsys.readouterr()
    assert streams.out.splitlines() == [
        "good@1: 50 operations, identical",
        "1 of 3 logs identical, 2 can't be replayed, 50 operations",
    ]
    assert [line.split(": ")[1] for line in streams.err.splitlines()] == [f"{bad}:1", str(tmp_path / "absent.jsonl")]
    falsify(entries, "allocate", "blocks", [[1, 1]])
    assert run(bad, write(tmp_path / "false@1.jsonl", entries), good) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 3 logs identical, 1 can't be replayed, ")
