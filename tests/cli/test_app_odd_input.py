"""Odd command lines and odd files, five hundred of them: each ends in an exit code and words, none in a traceback."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvyard.cli.app import COMMANDS, build, main
from kvyard.replay.settings import SETTINGS as REPLAY
from kvyard.server.mock.config import SETTINGS as MOCK

pytestmark = pytest.mark.slow

IN_PROCESS = 470
AS_PROCESSES = 30
SECONDS = 20
CODES = {0, 1, 2, 130, 141}

VALUES = (
    *(
        "",
        " ",
        "0",
        "1",
        "-1",
        "2",
        "3.5",
        "1e26",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "9" * 40,
        "0x10",
        "1_000",
        "20k",
        "1.5m",
        "80GiB",
    ),
    *(
        "-80GiB",
        "10ms",
        "-",
        "--",
        "=",
        "a=b",
        "a=",
        "=b",
        ",",
        ",,",
        "1,2,,3",
        "true",
        "null",
        "None",
        "[]",
        "{}",
        '{"a": 1}',
        "ü",
    ),
    *(
        "🙂",
        "\udcff",
        "a b",
        "../..",
        "/",
        ".",
        "/dev/null",
        "/nowhere/x",
        "tcp://",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:99999",
    ),
    *(
        "http://",
        "http://127.0.0.1:1",
        "http://[",
        "ttft=500",
        "ttft=-1",
        "ttft",
        "ttft_p99<1s",
        "kv",
        "round-robin",
        "mooncake",
    ),
    *(
        "llama-3.1-8b",
        "qwen3-8b",
        "h100",
        "polynomial",
        "profile:x",
        "unlimited",
        "32/24",
        "0/0",
        "workers=1,2",
        "workers=x",
        "-5",
    ),
    *("'", '"', "\\", "%s", "{x}", "[" * 3000),
)

GROUPS = {
    "events": ("check", "play"),
    "index": ("query",),
    "profile": ("fit", "show", "list"),
    "trace": ("info", "convert", "slice", "scale", "generate", "hint", "formats"),
}
"""Sub-commands that end by themselves."""
SERVES = {"mock", "gateway", "epp", "serve", "record", "tail", "proxy", "play"}
"""Commands that may go on until they are interrupted, so only wrong ones of them are tried: with an unknown value of a flag."""

ROW = {"timestamp": 0, "input_length": 600, "output_length": 8, "hash_ids": [1, 2]}


def odd_files(folder: Path, dice: random.Random) -> list[str]:
    """Files of all sorts, most of them wrong."""
    fields: list[object] = [
        None,
        -1,
        0,
        1e26,
        10**40,
        1.5,
        "x",
        [],
        {},
        True,
        float("inf"),
        [None],
        ["x"],
        [1e30],
        [2**64],
        [-1],
    ]
    made: dict[str, bytes] = {
        "empty.jsonl": b"",
        "blank.jsonl": b"\n\n \n",
        "nul.jsonl": b"\0" * 100,
        "bytes.jsonl": bytes(dice.randrange(256) for _ in range(500)),
        "latin.jsonl": '{"timestamp": 0, "input_length": 1, "x": "\xff"}\n'.encode("latin-1"),
        "list.json": b"[1, 2, 3]",
        "null.json": b"null",
        "deep.json": b"[" * 5000 + b"]" * 5000,
        "cut.jsonl": json.dumps(ROW).encode()[:-4],
        "cut.jsonl.gz": gzip.compress(json.dumps(ROW).encode() * 99)[:-9],
        "false.jsonl.xz": b"not packed",
        "good.jsonl": b"".join(json.dumps({**ROW, "timestamp": at}).encode() + b"\n" for at in range(5)),
        "good.jsonl.xz": lzma.compress(json.dumps(ROW).encode() + b"\n"),
        "table.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,5,x\n",
        "half.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00\n",
        "config.toml": b"workers = 2\n",
        "wrong.toml": b"workers = = 2",
        "odd.toml": b'workers = "x"\nnope = 3\n',
        "events": b"kvyard-events/1\n{}\n" + bytes(50),
        "report.json": b'{"kvyard": "report", "version": 1}',
        "passes.jsonl": b'{"kind": "prefill", "new": 0, "past": -1, "ms": 0}\n',
        "engine.json": b'{"passes": [[1, 2], null, {"ms": "x"}]}',
        "model.json": b'{"architectures": ["X"], "hidden_size": 0, "num_hidden_layers": -3}',
    }
    for number in range(60):
        name = dice.choice(list(ROW))
        rows = [dict(ROW), {**ROW, name: dice.choice(fields)}]
        if dice.random() < 0.3:
            del rows[1][dice.choice(list(ROW))]
        made[f"row{number}.jsonl"] = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    model = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for number in range(12):
        wrong = {**model, dice.choice(list(model)): dice.choice(fields)}
        made[f"model{number}.json"] = json.dumps(wrong).encode()
    for name, data in made.items():
        (folder / name).write_bytes(data)
    (folder / "a folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    return [*made, "a folder", "loop", "missing.jsonl", ".", *["good.jsonl"] * 60]


def odd_lines(files: list[str], dice: random.Random, count: int) -> Iterator[list[str]]:
    """Command lines: real flags with any values, wrong flags, too many and too few arguments."""
    commands = build().commands
    settings = {name: [*REPLAY] for name in ("replay", "sweep", "league", "hints", "validate")} | {"mock": [*MOCK]}
    loaded = {name: commands[name].load() for name in COMMANDS}
    for _ in range(count):
        name = dice.choice([*COMMANDS, "replay", "trace", "trace", "replay", "model"])
        line, command = [name], loaded[name]
        if name in GROUPS:
            sub = dice.choice(GROUPS[name])
            line.append(sub)
            command = command.commands[sub]
        for one in command.params:
            if one.param_type_name == "argument" and dice.random() < 0.95:
                line += dice.choices(files, k=dice.choice((1, 1, 2)) if one.nargs != 1 else 1)
        flags = [one for one in command.params if one.param_type_name == "option" and one.name != "help"]
        some = dice.sample(flags, min(len(flags), dice.randrange(4)))
        for one in [*some, *(flag for flag in flags if flag.name == "set_" and dice.random() < 0.5)]:
            line.append(dice.choice(one.opts + one.secondary_opts))
            if one.name == "set_" and name in settings:
                line.append(f"{dice.choice(settings[name])}={dice.choice(VALUES)}")
            elif not one.is_flag:
                line.append(dice.choice(VALUES if dice.random() < 0.8 else files))
        if dice.random() < 0.1:
            line.insert(dice.randrange(len(line)), dice.choice(VALUES))
        if SERVES & set(line[:2]):
            line += ["--port" if name in ("mock", "gateway", "epp") else "--speed", "x"]
        if name in ("sweep", "league", "hints") and "--jobs" not in line and "-j" not in line:
            line += ["--jobs", "1"]
        if name == "calibrate" and "--seconds" not in line:
            line += ["--seconds", "1"]
        if name == "doctor" and "--seconds" not in line:
            line += ["--seconds", "0.1"]
        yield line


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Ends what takes too long as Ctrl-C would: a command may take its time, as long as it can be ended."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(line: list[str]) -> str:
    """Return what is wrong with how ``line`` ended; empty for nothing."""
    try:
        with limited(SECONDS):
            main(line)
    except SystemExit as end:
        return "" if end.code in CODES else f"exit code {end.code}"
    except BaseException:
        return traceback.format_exc()


def test_no_odd_command_line_ends_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(18)
    monkeypatch.chdir(tmp_path)
    files = odd_files(tmp_path, dice)
    wrong: list[tuple[list[str], str]] = []
    for line in odd_lines(files, dice, IN_PROCESS):
        found = outcome(line)
        if found:
            wrong.append((line, found))
        capfd.readouterr()
    assert not wrong, "\n\n".join(f"{line}\n{found}" for line, found in wrong)


def test_no_odd_process_ends_in_a_traceback(tmp_path: Path) -> None:
    dice = random.Random(19)
    files = odd_files(tmp_path, dice)
    environments: list[dict[str, str]] = [
        {},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"COLUMNS": "1"},
    ]
    outputs: list[Callable[[], int]] = [
        lambda: os.open("/dev/full", os.O_WRONLY),
        lambda: os.open("/dev/null", os.O_WRONLY),
    ]
    wrong = []
    for line in odd_lines(files, dice, AS_PROCESSES):
        out = dice.choice(outputs)()
        done = subprocess.run(
            [sys.executable, "-m", "kvyard", *(one.encode("utf-8", "surrogateescape") for one in line)],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            env={**os.environ, **dice.choice(environments)},
            timeout=120,
            check=False,
        )
        os.close(out)
        said = done.stderr.decode(errors="replace")
        if done.returncode not in CODES or "Traceback" in said or "Exception ignored" in said:
            wrong.append((line, done.returncode, said))
    assert not wrong, "\n\n".join(map(str, wrong))
