"""``kvyard doctor --gateway``: gateways with something wrong, each on purpose, and it has to say what."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
from tests.waiting import eventually

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.cli.test_doctor import Seen
from tests.ports import free_ports
from tests.server.gateway.scripted_engine import ScriptedEngine, answer, gated
from tests.server.gateway.support import Gated, front
from tests.server.mock.support import Served

from kvyard.cli.app import main
from kvyard.server.dashboard.view import FleetView, PromisesView, StreamView, Totals, WorkerStatus
from kvyard.server.doctor.finding import broken
from kvyard.server.doctor.gateway_rules import about_gateway
from kvyard.server.doctor.gateway_visit import GatewayVisit
from kvyard.server.gateway.promises import CAUSES

pytestmark = pytest.mark.zmq


def asked(capsys: pytest.CaptureFixture[str], gate: Gated, *more: str) -> Seen:
    return Seen(capsys, ("--gateway", gate.url, *more))


def test_a_gateway_that_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with front(2) as (gate, _):
        text = "a prompt that fills some blocks of sixteen, and a few more of them."
        gate.complete(text)
        eventually(lambda: gate.post("/explain", body={"prompt": text}).json()["hit_blocks"] == 4)
        gate.complete(text)
        gate.idle()
        seen = asked(capsys, gate)
        assert seen.code == 0 and not seen.findings
        assert seen.all["gateway"]["view"]["totals"]["promises"]["delivered"] == 64
        with pytest.raises(SystemExit) as end:
            main(["doctor", "--gateway", gate.url])
        assert end.value.code == 0
        said = capsys.readouterr().out
        assert (
            "policy least-time, 2 of 2 engines ready, 2 of 2 streams whole" in said
            and "found 64 of 64 promised" in said
        )


def test_no_gateway_and_none_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen(capsys, ("--gateway", f"http://127.0.0.1:{free_ports(1)}"))
    assert seen.code == 1 and seen.broken == {"gateway-unreachable"}
    with Served(workers=1) as served:
        seen = Seen(capsys, ("--gateway", served.url))
        assert seen.says("gateway-unreachable", "it is a kvyard mock")
    for argv in ([], ["--gateway", "localhost:1"]):
        with pytest.raises(SystemExit) as end:
            main(["doctor", *argv])
        assert end.value.code == 2 and capsys.readouterr().err.count("\n") <= 3


def test_a_token(capsys: pytest.CaptureFixture[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(workers=1) as served, Gated(engines=[{"url": served.url}], admin_token="s3cret") as gate:
        gate.ready(1)
        assert asked(capsys, gate).broken == {"gateway-token"}
        monkeypatch.setenv("KVYARD_TOKEN", "s3cret")
        assert asked(capsys, gate).broken == {"gateway-policy"}


def test_no_engine_and_one_that_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)}"
    with Gated(engines=[{"url": dead, "name": "dead", "model": "m"}]) as gate:
        eventually(lambda: gate.engines()["dead"]["state"] == "down")
        assert asked(capsys, gate).says("gateway-no-engine", "dead is down")
    with front(1) as (gate, _):
        gate.post("/admin/engines", 201, url=dead, name="dead", model="mock", events="tcp://127.0.0.1:9")
        eventually(lambda: gate.engines()["dead"]["state"] == "down")
        seen = asked(capsys, gate)
        assert seen.says("gateway-engine", "Engine dead is down")


def test_engines_without_events(capsys: pytest.CaptureFixture[str]) -> None:
    with Served(workers=1) as deaf:
        with Gated(engines=[{"url": deaf.url, "name": "deaf"}]) as gate:
            gate.ready(1)
            assert asked(capsys, gate).says("gateway-policy", "reads engines' events, and no engine sends any")
        with front(1) as (gate, _):
            gate.post("/admin/engines", 201, url=deaf.url, name="deaf")
            gate.ready(2)
            assert asked(capsys, gate).says("gateway-deaf", "1 of 2 engines have no event stream here: deaf")


def test_promises_that_are_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    text = "x" * 2000

    def script(head: str, body: bytes) -> Sequence[bytes]:
        usage = {"prompt_tokens": 2000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 160}}
        return [answer("200 OK", json.dumps({"usage": usage}).encode())]

    with ScriptedEngine(script) as engine, gated(engine, router={"policy": "approx", "block_size": 16}) as gate:
        gate.ready(1)
        gate.complete(text)
        gate.complete(text)
        gate.idle()
        seen = asked(capsys, gate)
        assert seen.code == 1 and seen.broken == {"gateway-promises"}
        assert seen.says(
            "gateway-promises", "found 160 of 1,984 promised tokens (8%); 1,824 are missing because it announces"
        )


def test_policies_that_fit_nothing() -> None:
    worker = WorkerStatus(name="e", promises=PromisesView())
    stream = StreamView(name="e", worker="e")

    def codes(**fields: object) -> dict[str, str]:
        plain = {"kind": "gateway", "at": 1.0, "since": 0.0, "workers": [worker], "streams": [stream], "reads": "index"}
        plain["totals"] = Totals(promises=PromisesView())
        view = FleetView(**{**plain, **fields})  # type: ignore[arg-type]
        return {one.code: one.seen for one in about_gateway(GatewayVisit(url="u", view=view))}

    def totals(prompts: dict[str, int], **promises: int) -> Totals:
        return Totals(prompts=prompts, promises=PromisesView(**promises))  # type: ignore[arg-type]

    assert codes() == {}
    assert "by what was sent where" in codes(reads="memory")["gateway-policy"]
    passed = totals({"device": 0, "elsewhere": 4000, "computed": 1000})
    assert "passed over 4,000 prompt tokens" in codes(reads="load", totals=passed)["gateway-policy"]
    chance = totals({"computed": 9000}, unpromised=5000)
    assert "by chance" in codes(reads="load", streams=[], totals=chance)["gateway-policy"]
    assert "promised none" in codes(totals=chance)["gateway-nothing-matches"]
    assert codes(streams=[], remote_index=True) == {}
    stale = msgspec.structs.replace(stream, state="stale", reason="2 batches are gone", endpoint="tcp://e:1")
    assert codes(streams=[stale])["gateway-stream"] == "The stream of e (tcp://e:1) is stale: 2 batches are gone."
    for role, code in (("prefill", "gateway-no-decode"), ("decode", "gateway-no-prefill")):
        alone = msgspec.structs.replace(worker, role=role, model="m")
        assert "All engines of m" in codes(workers=[alone])[code]
        assert codes(workers=[alone, msgspec.structs.replace(worker, role="both", model="m")]) == {}
    assert "3 gaps" in codes(streams=[msgspec.structs.replace(stream, gaps=3)])["gateway-gaps"]
    silent = msgspec.structs.replace(worker, promises=PromisesView(promised=2000, missing={"unreported": 2000}))
    assert "can't be checked" in codes(workers=[silent])["gateway-unreported"]


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "unreported"])
def test_every_cause_has_its_words(cause: str) -> None:
    found = broken(
        f"gateway-promises.{cause}", "u", engine="e", delivered=1, promised=2, share=0.5, tokens=1, words=CAUSES[cause]
    )
    assert found.code == "gateway-promises" and CAUSES[cause] in found.seen and found.means and found.fix
