"""A load from wrk, a plain HTTP client that knows nothing of us: every request answered, none cut."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.support import front
from tests.server.mock.support import PATIENCE, Served

WRK = shutil.which("wrk")
SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local number = 0
request = function()
  number = number + 1
  local body = '{"prompt": "question ' .. number % 20 .. ' of a client that is in a hurry", "max_tokens": 4}'
  return wrk.format(nil, "/v1/completions", nil, body)
end
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.wrk,
    pytest.mark.zmq,
    pytest.mark.skipif(WRK is None, reason="needs wrk: scripts/setup-test-deps.sh"),
]


def hammered(url: str, folder: Path) -> int:
    """Requests answered in two seconds over 16 connections. Fails on anything but answers."""
    script = folder / "ask.lua"
    script.write_text(SCRIPT)
    assert WRK is not None
    ran = subprocess.run(
        [WRK, "-t", "2", "-c", "16", "-d", "2s", "--timeout", "30s", "-s", str(script), url],
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=True,
    )
    said = ran.stdout + ran.stderr
    print(said)
    # wrk names these only where there were any.
    assert "Socket errors" not in said and "Non-2xx" not in said, said
    found = re.search(r"(\d+) requests in", said)
    assert found is not None, said
    return int(found[1])


def test_the_mock(tmp_path: Path) -> None:
    with Served() as served:
        answered = hammered(served.url, tmp_path)
        served.check()
        done = served.get("/dashboard/view")["totals"]
    # What was under way when wrk hung up was answered to nobody.
    assert answered > 16 and answered <= done["finished"] <= answered + 32
    assert done["failed"] == done["refused"] == 0


def test_the_gateway(tmp_path: Path) -> None:
    with front(2) as (gated, served):
        answered = hammered(gated.url, tmp_path)
        gated.idle()
        served.check()
        done = gated.client.get("/dashboard/view").json()["totals"]
    assert answered > 16 and done["failed"] == done["refused"] == done["retried"] == 0
    assert answered <= done["finished"] + done["cancelled"] <= answered + 32
