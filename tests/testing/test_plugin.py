"""The pytest plugin as its users have it: in a pytest of its own, by its entry point's module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

import httpx
from tests.testing.support import OPTIONS

from kvyard import testing
from kvyard.errors import KvyardError
from kvyard.events.types import Stored

EXAMPLE = Path(__file__).parents[2] / "examples" / "router_under_test"


def complete(url: str, model: str, prompt: str) -> dict[str, object]:
    body = {"model": model, "prompt": prompt, "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.zmq
def test_a_fleet_a_gateway_and_a_stream_in_this_process() -> None:
    with testing.fleet(workers=2, block_size=16, speed=100) as engines:
        assert all(len(engines.streams(worker)) == 1 for worker in range(2))
        with testing.gateway(engines, router="kv") as front, testing.stream(engines, worker=0) as first:
            with testing.stream(engines, worker=1) as second:
                complete(front.url, engines.model, "a prompt that is longer than two blocks of sixteen")
                readers = [first, second]
                # Whichever worker got it; what it stores comes in several batches.
                eventually(lambda: sum(map(_stored, readers)) >= 3, lambda: [reader.events for reader in readers])
        engines.kill(1)
        assert [len(state.streams) for state in engines.fleet.states()] == [1, 1], "a dead worker's stream is known"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{engines.urls[1]}/health", trust_env=False)
        engines.revive(1)
        assert httpx.get(f"{engines.urls[1]}/health", trust_env=False).status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{engines.url}/health", trust_env=False)


def _stored(reader: testing.StreamReader) -> int:
    return sum(len(event.hashes) for update in reader._updates for event in update.events if isinstance(event, Stored))


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(KvyardError, match="did you mean workers"):
        testing.fleet(wokers=2)
    with pytest.raises(KvyardError, match="policy"):
        testing.gateway(router="no-such-policy")


def test_faults_begin_change_and_end() -> None:
    def status(url: str) -> int:
        body = {"model": engines.model, "prompt": "hello", "max_tokens": 1}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code

    with testing.fleet(workers=2, speed=100, faults={"error_rate": 1.0, "error_status": 503}) as engines:
        assert [status(url) for url in engines.urls] == [503, 503]
        engines.set_faults(worker=1, error_rate=0.0)
        assert [status(url) for url in engines.urls] == [503, 200]
        engines.set_faults(error_rate=0.0)
        assert [status(url) for url in engines.urls] == [200, 200]
        with pytest.raises(KvyardError, match="error_rat"):
            engines.set_faults(error_rat=1.0)
        with pytest.raises(KvyardError, match="a share from 0 to 1"):
            engines.set_faults(error_rate=2.0)
    with pytest.raises(KvyardError, match="a share from 0 to 1"):
        testing.fleet(faults={"event_loss": -1.0})


def test_waiting_for_events_times_out() -> None:
    with testing.fleet(block_size=16) as engines, testing.stream(engines) as seen:
        with pytest.raises(TimeoutError, match=r"not seen within 0\.01 s"):
            seen.wait_for(lambda events: False, 0.01)


@pytest.mark.slow
@pytest.mark.zmq
def test_the_example_suite_passes() -> None:
    alone = ["-c", "/dev/null", "--rootdir", str(EXAMPLE), str(EXAMPLE)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *OPTIONS, *alone],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_pytest_loads_the_plugin_without_its_servers() -> None:
    code = "import sys, kvyard.testing.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("kvyard")} == {
        "kvyard",
        "kvyard.testing",
        "kvyard.testing.plugin",
    }
    assert not loaded & {"aiohttp", "starlette", "zmq", "numpy", "msgspec"}
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = testing.nope
