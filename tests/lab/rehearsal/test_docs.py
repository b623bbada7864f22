"""The examples of docs/how-to/live.md run."""

from __future__ import annotations

import re
import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.replay.traces.support import ROOT, SAMPLES
from tests.server.mock.support import Served

from kvyard.cli.app import main
from kvyard.router import Router, RouterConfig, RouteRequest
from kvyard.router.journal import JournalFile

PAGE = (ROOT / "docs" / "how-to" / "live.md").read_text()
ROOMY: dict[str, Any] = {"num_gpu_blocks": 20_000, "max_model_len": 200_000}


@pytest.mark.zmq
@pytest.mark.slow
def test_live_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_text((SAMPLES / "mooncake_synthetic.jsonl").read_text())
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    with Served(engine=ROOMY) as served:
        for command in commands:
            argv = shlex.split(command.replace("http://localhost:8000", served.url))
            assert argv.pop(0) == "kvyard"
            argv[argv.index("--limit") + 1] = "5"
            if "--speed" in argv:
                argv[argv.index("--speed") + 1] = "20"
            with pytest.raises(SystemExit) as exit_:
                main(argv)
            out, err = capsys.readouterr()
            # How late answers came is the machine's; what was decided is not.
            assert exit_.value.code == 0 or re.search(r"all \d+ decisions of 5 requests are equal", out), out + err
            assert "5 requests" in out and ("--prove" not in argv or "Live = offline" in out)
        names: dict[str, Any] = {}
        for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(example.replace("limit=200", "limit=5"), "live.md", "exec"), names)
        assert names["measure"](served.url) > 0
    with closing(JournalFile(tmp_path / "journal")) as file:
        router = Router(RouterConfig(policy="round-robin"), ["a", "b"], journal=file.write)
        for name in "xyz":
            router.route(RouteRequest(name, (), 10), 1)
    assert names["chosen"](tmp_path / "journal") == {"turn": 3}
    assert (tmp_path / "live.html").stat().st_size > 10_000
