"""Probes of a live engine: a mock whose times are known, over real HTTP, is found again on passes that no probe had."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import pytest
from tests.lab.calibrate.virtual_time import run_virtually

from kvyard.engine.config import EngineConfig
from kvyard.engine.timing import ProfileTiming
from kvyard.engine.timing.profile import load_profile, pass_ms
from kvyard.errors import KvyardError
from kvyard.lab.calibrate import probing
from kvyard.lab.calibrate.calibration import fit_profile
from kvyard.lab.calibrate.held_out import replay_held_out
from kvyard.lab.calibrate.plan import CalibrationLimits, Probe, make_plan
from kvyard.lab.calibrate.probing import ProbeResult, probe_engine, probe_order, waits_a_pass
from kvyard.replay.live.endpoint import Endpoint
from kvyard.replay.live.facts import EngineFacts, engine_facts, served
from kvyard.replay.live.metrics_page import MetricsPage
from kvyard.server.mock.config import MockConfig
from kvyard.server.mock.fleet import MockFleet

T = TypeVar("T")
KNOWN = "h200-llama3-8b"
LIMITS = CalibrationLimits(max_prompt=1024, max_batch=20, rounds=2)
UNSEEN = [
    ((), 3, 3 * 300, 300),
    ((), 12, 12 * 700, 700),
    ((), 15, 15 * 1000, 1000),
    (((300, 0),), 0, 0, 0),
    (((900, 0),), 0, 0, 0),
    (((700, 0),), 10, 10 * 500, 500),
    (((200, 0), (500, 0)), 14, 14 * 600, 600),
]
"""Passes that no probe makes."""


async def probed(async_scheduling: bool, limits: CalibrationLimits, said: list[str]) -> ProbeResult:
    engine = EngineConfig(
        block_size=16,
        num_gpu_blocks=6000,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        timing=ProfileTiming(name=KNOWN),
        async_scheduling=async_scheduling,
    )
    fleet = MockFleet(MockConfig(engine=engine, drain_seconds=1.0))
    async with fleet:
        found = await probe_engine(
            fleet.urls[0],
            limits,
            model=None,
            token=None,
            budget=2048,
            progress=lambda number, of, what: said.append(f"{number}/{of} {what}"),
        )
        assert sum(core.scheduler.manager.usage for core in fleet.workers[0].cores) == 0
        return found


@pytest.mark.parametrize("async_scheduling", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_mock_of_known_times_is_found_again(monkeypatch: pytest.MonkeyPatch, async_scheduling: bool) -> None:
    said: list[str] = []
    seen = run_virtually(monkeypatch, probed(async_scheduling, LIMITS, said))
    plan = make_plan(LIMITS, seen.facts)
    assert seen.requests == LIMITS.rounds * sum(probe.requests for probe in plan)
    assert not seen.failed
    assert said[0] == f"1/{2 * len(plan)} a prompt of 16"
    assert len(said) == 2 * len(plan)
    assert (seen.facts.block_size, seen.facts.num_gpu_blocks, seen.facts.max_model_len) == (16, 6000, 4096)
    assert all(not one.cached for requests in seen.probes for one in requests)
    found = fit_profile([seen.measurements], "mine")
    truth = load_profile(name=KNOWN).form
    off = [pass_ms(found.profile.form, *shape) / pass_ms(truth, *shape) - 1 for shape in UNSEEN]
    assert max(map(abs, off)) < 0.05, off
    assert found.profile.errors["all"].unseen < 0.03
    assert found.profile.request_ms < 0.1  # on this loop HTTP takes no time
    assert waits_a_pass(seen.probes, found.profile.request_ms)[0] is async_scheduling
    settings = {"block_size": 16, "num_gpu_blocks": 5999, "max_num_batched_tokens": 2048}
    held = replay_held_out([seen.source], settings | {"async_scheduling": async_scheduling})
    assert held is not None and held.requests == seen.requests // 2
    assert max(map(abs, held.errors.values())) < 0.05, held.errors
    assert any("Beyond 16 decoding requests" in note for note in found.unknown)
    assert any("host's time" in note for note in found.unknown)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run_virtually(monkeypatch, probed(False, CalibrationLimits(max_prompt=64, max_batch=4, seconds=0.3), []))
    assert 0 < seen.rounds < 2
    larger = ", the larger ones" if seen.rounds < 1 else ""
    assert any(f"probes{larger}: 0.3 s were over" in note for note in seen.measurements.notes)


def test_later_rounds_are_in_random_order() -> None:
    order = probe_order(40, 3)
    assert order[:40] == list(range(40))
    assert sorted(order[40:80]) == sorted(order[80:]) == list(range(40))
    assert order[40:80] != order[:40]


def test_probes_fit_into_the_engine() -> None:
    small = EngineFacts(model="m", max_model_len=600, block_size=16, num_gpu_blocks=100, max_num_seqs=8)
    for probe in make_plan(CalibrationLimits(), small):
        assert probe.batch <= 8
        assert probe.prompt + probe.tokens <= 600
        assert probe.batch * (probe.prompt + probe.tokens) + sum(probe.beside) <= 0.7 * 1600
    shortest = make_plan(CalibrationLimits(), EngineFacts(model="m", max_model_len=100))
    assert {(probe.prompt, probe.tokens) for probe in shortest} == {(16, 1), (48, 40)}
    for facts in (
        EngineFacts(model="m", max_model_len=80),
        EngineFacts(model="m", max_model_len=20),
        EngineFacts(model="m", block_size=16, num_gpu_blocks=6),
    ):
        with pytest.raises(KvyardError, match="too small to be probed: requests of 88 tokens must fit"):
            make_plan(CalibrationLimits(), facts)
    kinds = {(probe.tokens > 1, bool(probe.beside)) for probe in make_plan(CalibrationLimits(), EngineFacts(model="m"))}
    assert kinds == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("change", [{"max_prompt": 8}, {"max_batch": 1}, {"rounds": 0}, {"seconds": 0.0}])
def test_limits_that_make_no_sense(change: dict[str, float]) -> None:
    with pytest.raises(KvyardError):
        CalibrationLimits(**change).check()


class _Pages(http.server.BaseHTTPRequestHandler):
    """An engine's pages, as SGLang has them, and vLLM in its development mode."""

    pages: ClassVar[dict[str, object]] = {
        "/v1/models": {"data": [{"id": "org/m", "max_model_len": 4096}]},
        "/get_server_info": {
            "version": "0.5.9",
            "page_size": 64,
            "max_total_num_tokens": 6400,
            "chunked_prefill_size": 8192,
            "max_running_requests": 48,
            "disable_overlap_schedule": False,
        },
    }

    def do_GET(self) -> None:
        found = self.pages.get(self.path)
        body = json.dumps(found).encode() if not isinstance(found, str) else found.encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _VllmPages(_Pages):
    pages: ClassVar[dict[str, object]] = {
        "/v1/models": {"data": [{"id": "a"}, {"id": "b", "max_model_len": 2048}]},
        "/version": {"version": "0.32.0"},
        "/metrics": 'vllm:cache_config_info{block_size="32",num_gpu_blocks="400"} 1.0\n'
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_preemptions_total{engine="0"} 2.0\n',
        "/server_info?config_format=json": {
            "vllm_config": {
                "scheduler_config": {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "async_scheduling": False}
            }
        },
    }


class _OddPages(_VllmPages):
    """Two data-parallel ranks, one of which has no numbers yet."""

    pages: ClassVar[dict[str, object]] = {
        **_VllmPages.pages,
        "/metrics": 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="400"} 1.0\n'
        'vllm:num_requests_running{engine="0",model_name="b"} NaN\nvllm:num_requests_running{engine="1"} 2.0\n'
        'vllm:num_preemptions_total{engine="0"} NaN\nvllm:num_preemptions_total{engine="1"} 4.0\n'
        'vllm:request_queue_time_seconds_count{engine="0"} NaN\nvllm:request_queue_time_seconds_sum{engine="0"} +Inf\n',
    }


def serve(handler: type[_Pages], work: Callable[[str], Coroutine[Any, Any, T]]) -> T:
    """Return the result of ``work`` for the address of a server with these pages."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            return asyncio.run(work(f"http://127.0.0.1:{server.server_port}"))
        finally:
            server.shutdown()
            thread.join()


def facts_of(handler: type[_Pages], model: str | None) -> EngineFacts:
    async def ask(url: str) -> EngineFacts:
        async with Endpoint(url) as endpoint:
            return await engine_facts(endpoint, model)

    return serve(handler, ask)


def test_settings_reported_by_engines() -> None:
    assert facts_of(_Pages, None) == EngineFacts(
        model="org/m",
        engine="SGLang",
        version="0.5.9",
        max_model_len=4096,
        block_size=64,
        num_gpu_blocks=100,
        max_num_batched_tokens=8192,
        max_num_seqs=48,
        async_scheduling=True,
    )
    assert facts_of(_VllmPages, "b") == EngineFacts(
        model="b",
        engine="vLLM",
        version="0.32.0",
        max_model_len=2048,
        block_size=32,
        num_gpu_blocks=399,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        async_scheduling=False,
        running=3,
        preemptions=2,
    )


def test_metrics_of_two_ranks_one_without_numbers() -> None:
    facts = facts_of(_OddPages, None)
    assert (facts.engines, facts.running, facts.preemptions) == (2, 2, 4)
    assert served(MetricsPage(str(_OddPages.pages["/metrics"]))) == (0, 0.0)


def probe_pages(handler: type[_Pages]) -> ProbeResult:
    async def probe(url: str) -> ProbeResult:
        return await probe_engine(url, LIMITS, model=None, token=None, budget=None, progress=lambda *_: None)

    return serve(handler, probe)


def test_several_engines_are_refused() -> None:
    with pytest.raises(KvyardError, match=r"has 2 engines behind it, .*: calibrate a single engine"):
        probe_pages(_OddPages)


class _Failing(_VllmPages):
    """Streams answers, a token every 5 ms, and refuses the third request: after two that warm it up, the first of a probe."""

    asked: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked["max_tokens"])
        if len(self.asked) == 3:
            self.send_error(500)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(asked["max_tokens"]):
            time.sleep(0.005)
            finish = "length" if number + 1 == asked["max_tokens"] else None
            self.wfile.write(
                b"data: %s\n\n" % json.dumps({"choices": [{"text": "x", "finish_reason": finish}]}).encode()
            )
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


def test_a_failed_request_of_a_mixed_probe_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of four is refused while the prompts beside them wait for its tokens."""
    monkeypatch.setattr(probing, "make_plan", lambda limits, facts: [Probe(48, 4, 20, (32, 64)), Probe(48, 1, 12)])
    found = probe_pages(_Failing)
    assert found.failed == 1
    assert len(found.probes[0]) == 3


class _SmallVocabulary(_Pages):
    """SGLang with 1,024 tokens, which an id that it doesn't have would end."""

    highest: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "logit_bias" in asked:
            body = json.dumps({"message": "logit_bias must has keys in [0, 1023], got 2147483647."}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.highest.append(max(asked["prompt"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(asked["max_tokens"]):
            finish = "length" if number + 1 == asked["max_tokens"] else None
            self.wfile.write(
                b"data: %s\n\n" % json.dumps({"choices": [{"text": "x", "finish_reason": finish}]}).encode()
            )
        self.wfile.write(b"data: [DONE]\n\n")


def test_prompts_have_no_ids_that_sglang_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "make_plan", lambda limits, facts: [Probe(512, 1, 2), Probe(48, 1, 2)])
    probe_pages(_SmallVocabulary)
    assert 900 < max(_SmallVocabulary.highest) < 1024


class _Silent(_VllmPages):
    """Takes requests and never answers."""

    over: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        self.over.wait(30)


def test_an_engine_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PATIENCE", 0.2)
    try:
        with pytest.raises(KvyardError, match=r"doesn't end an answer of 3 tokens within 0\.2 s"):
            probe_pages(_Silent)
    finally:
        _Silent.over.set()


class _NoModels(_Pages):
    pages: ClassVar[dict[str, object]] = {"/metrics": ""}


def test_a_missing_list_of_models_is_reported() -> None:
    with pytest.raises(KvyardError, match="404"):
        facts_of(_NoModels, None)
