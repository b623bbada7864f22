"""docs/how-to/extending.md is a real package: its code is installed as written there, and each of its six parts is used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvyard
from kvyard.blocks.eviction import ORDERS
from kvyard.blocks.spec import ATTENTION
from kvyard.engine.timing.registry import TIMINGS
from kvyard.events.wire.format import WIRES
from kvyard.registry import Registry
from kvyard.replay.traces.registry import FORMATS
from kvyard.router.policies import POLICIES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "extending.md"
REGISTRIES: dict[str, Registry[object]] = {
    registry.group: registry for registry in (POLICIES, ORDERS, TIMINGS, WIRES, FORMATS, ATTENTION)
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's package, as pip leaves one; its folder."""
    folder = tmp_path_factory.mktemp("site")
    text = PAGE.read_text()
    (folder / "my_fleet.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", text, re.S)))
    project = tomllib.loads(re.findall(r"```toml\n(.*?)```", text, re.S)[0])["project"]
    info = folder / "my_fleet-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every registry looks again, now and afterwards."""
    monkeypatch.syspath_prepend(str(package))
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "_plugins", None)
        monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    yield
    sys.modules.pop("my_fleet", None)


def run(package: Path, *words: str) -> str:
    paths = os.pathsep.join([str(package), str(Path(kvyard.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "kvyard", *words],
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.usefixtures("installed")
def test_the_table_names_every_registry_and_its_entry_points_load() -> None:
    text = PAGE.read_text()
    points = tomllib.loads(re.findall(r"```toml\n(.*?)```", text, re.S)[0])["project"]["entry-points"]
    assert set(points) == set(REGISTRIES)
    for group, registry in REGISTRIES.items():
        assert f"`{group}`" in text
        for name in points[group]:
            assert name in registry.names()
            assert registry.get(name) is not None


def test_names_are_in_the_help(package: Path) -> None:
    shown = run(package, "replay", "--help") + run(package, "replay", "--list-settings")
    for name in ("hottest", "linear:PASS_US,TOKEN_US", "gateway-log", "newest"):
        assert name in shown, name
    assert "lines" in run(package, "events", "check", "--help")


def test_policy_order_timing_and_trace_format_run_together(package: Path, tmp_path: Path) -> None:
    trace, report = tmp_path / "yesterday.log", tmp_path / "report.json"
    trace.write_text("".join(f"{at * 10**8};{1400 + at};5;7,8,{100 + at}\n" for at in range(20)))
    chosen = ("--router", "hottest", "--timing", "linear:5000,12", "--workers", "2", "--host-blocks", "64")
    orders = ("--set", "eviction=newest", "--set", "host_eviction=newest")
    run(package, "replay", str(trace), *chosen, *orders, "-q", "--report", str(report))
    found = json.loads(report.read_text())
    assert found["trace"]["format"] == "gateway-log"
    assert found["requests"]["finished"] == 20
    # A prompt by itself takes a pass, and so does each token after the first.
    assert found["latency"]["ttft"]["max"] == pytest.approx(5 + 0.012 * 1400)
    assert found["latency"]["ttft"]["min"] == pytest.approx(5 + 0.012 * 377), "1,024 tokens were there"
    assert found["reuse"]["all"]["part"] == 19 * 1024
    assert found["latency"]["itl"]["min"] == pytest.approx(5.012)


def test_rows_of_the_page_share_what_it_says(package: Path, tmp_path: Path) -> None:
    rows = re.search(r"```text\n(.*?)```", PAGE.read_text().partition("### A trace format")[2], re.S)
    assert rows is not None
    (tmp_path / "yesterday.log").write_text(rows[1])
    found = json.loads(run(package, "replay", str(tmp_path / "yesterday.log"), "--workers", "1", "--json"))
    assert found["requests"]["finished"] == 3 and found["reuse"]["all"]["part"] == 1024


@pytest.mark.usefixtures("installed")
def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand there, with files of those names."""
    from kvyard.cli.app import main
    from kvyard.events.recording import About, RecordingWriter
    from kvyard.events.transport.frames import Frame

    monkeypatch.chdir(tmp_path)
    rows = [
        {"timestamp": 100 * at, "input_length": 600, "output_length": 3, "hash_ids": [0, 1 + at]} for at in range(4)
    ]
    Path("trace.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("yesterday.log").write_text("".join(f"{at * 10**8};{400 + at};5;1\n" for at in range(4)))
    groups = '[{kind = "sink", window = 1024, block_size = 16}, {block_size = 16}]'
    Path("hybrid.toml").write_text(f"groups = {groups}\nbytes_per_block = 1000000\n")
    with RecordingWriter(Path("recording.kve"), About()) as writer:
        for seq, lines in enumerate((b"stored - 2 11,12 1,2,3,4", b"removed 12")):
            writer.write(seq, Frame(b"", seq, b"lines/1\n" + lines + b"\n").parts())
    commands = re.findall(r"^    kvyard (.*?)(?: +#.*)?$", PAGE.read_text(), re.M)
    assert len(commands) == 6
    for command in commands:
        with pytest.raises(SystemExit) as end:
            main(command.split())
        said = capsys.readouterr()
        assert end.value.code == 0, (command, said.err)
        assert ("One event a line" if "events" in command else "4 requests of") in said.out, (command, said.out)


@pytest.mark.usefixtures("installed")
def test_the_wire_format_is_read() -> None:
    from kvyard.events import Removed, Stored
    from kvyard.events.wire import Decoder

    payload = b"lines/1\nstored - 2 11,12 1,2,3,4\nremoved 12\n"
    decoded = Decoder("lines").decode(payload)
    assert not decoded.problems
    assert [type(event) for event in decoded.events] == [Stored, Removed]
    assert list(decoded.events[1].hashes) == [12]


@pytest.mark.usefixtures("installed")
def test_the_attention_kind_serves_a_manager() -> None:
    from tests.blocks.support import cache, make

    from kvyard.blocks import BlockManager, GroupSpec

    kinds = {}
    for kind in ("sink", "sliding_window"):
        manager = BlockManager(40, [GroupSpec(block_size=4), GroupSpec(kind=kind, window=8, block_size=4)])
        cache(manager, "a", range(28))
        kinds[kind] = manager.lookup(make(manager, "b", range(30))).tokens
        manager.check_integrity()
    assert kinds == {"sink": 28, "sliding_window": 28}
