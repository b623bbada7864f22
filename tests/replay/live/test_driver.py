"""A trace against real HTTP: what is sent when, what is counted, and what is said of failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.replay.support import SECOND, most_at_once, request, sessions
from tests.server.mock.support import Served

from kvyard.clock import MS
from kvyard.errors import KvyardError
from kvyard.lab.compare import compare
from kvyard.replay import replay
from kvyard.replay.live.config import LiveConfig
from kvyard.replay.live.endpoint import Endpoint
from kvyard.replay.live.run import LiveRun, drive, replay_live
from kvyard.replay.report.files import from_json, read_report, to_json
from kvyard.replay.report.page import page
from kvyard.replay.report.table import report_text
from kvyard.replay.traces import TraceRequest
from kvyard.server.mock.faults import MockFaults

ROOMY: dict[str, Any] = {"num_gpu_blocks": 4096, "max_model_len": 8192}


def rows(count: int = 20, gap: float = 0.02, **more: Any) -> list[TraceRequest]:
    """Requests that share their first 64 tokens."""
    return [
        request(
            str(at), at * gap, ids=[0, 100 + at], id_block_size=64, **{"input_length": 128, "output_length": 5, **more}
        )
        for at in range(count)
    ]


def driven(served: Served, trace: Iterable[TraceRequest], **config: Any) -> LiveRun:
    return replay_live(trace, served.url, LiveConfig(**config))


def test_every_request_has_its_answer() -> None:
    with Served(engine=ROOMY) as served:
        done = driven(served, rows())
        again = driven(served, rows())
        served.check()
    records = done.records
    assert done.complete and [record.id for record in records] == [str(at) for at in range(20)]
    assert [record.arrival for record in records] == [at * 20 * MS for at in range(20)]
    for record in records:
        assert record.status == "finished" and record.output == record.wanted == 5
        assert record.arrival < record.first_token <= record.ended
        assert record.worker == "worker0"
    assert records[0].cached == 0 and {record.cached for record in records} <= {0, 64}, "what they share, at most"
    assert all(record.cached == 112 for record in again.records), "all but the block that is always computed"
    report = done.report
    assert report.requests == {"all": 20, "finished": 20}
    assert report.live is not None and report.live.endpoint == served.url and report.live.model == "mock"
    assert report.live.lateness.count == 20 and report.live.lateness.min >= 0
    assert not report.live.errors and not report.live.inexact
    assert report.latency["itl"].count == 20 * 4
    assert report.reuse["all"].part == sum(record.cached for record in records)
    assert report.reuse["all"].whole == 20 * 128
    assert report.workers[0].requests == 20


def test_figures_of_simulations_alone_are_absent(tmp_path: Path) -> None:
    with Served(engine=ROOMY) as served:
        done = driven(served, rows(5))
    report = done.report
    assert "queue" not in report.latency and report.router is None and report.preemptions is None
    assert not report.tiers and not report.transfers and not report.misses and not report.timeline.times_s
    assert report.workers[0].busy is None and report.workers[0].passes is None
    assert from_json(to_json(report)) == report
    text = report_text(report)
    assert "Not to be seen from outside" in text and "queue time" in text
    assert "Preemptions" not in text and "Regret" not in text and "simulated" not in text
    assert "Lateness (ms)" in text and "Reused" in text
    files = [tmp_path / name for name in ("r.json", "q.jsonl", "p.html")]
    done.save(*files)
    assert read_report(files[0]) == report
    row = __import__("json").loads(files[1].read_text().splitlines()[0])
    assert row["cached_tokens"] == 0 and row["output_tokens"] == 5 and row["ttft_ms"] > 0
    for name in ("admitted_ns", "queue_ms", "loading_ms", "host_tokens", "miss", "lost_tokens", "preemptions"):
        assert row[name] is None, name
    html = files[2].read_text()
    assert "Sent after it was due" in html and "Cache use by tier" not in html and html == page(report)
    # Beside a simulated run of the same requests.
    simulated = replay(rows(5), workers=1, block_size=16, num_gpu_blocks=4096).report
    assert simulated.digest == report.digest
    both = compare([simulated, report], ["simulated", "live"])
    assert any("measured live" in note for note in both.notes)
    values = {line["key"]: line["values"] for line in both.facts["lines"]}
    assert values["ttft.mean"][1] and values["queue.mean"][1] is None
    assert values["reuse.all"][1] == report.reuse["all"].value


def thawed_once(served: Served, load: int) -> threading.Thread:
    """Freeze the engine until it has so many requests; returns the thread that waits for that."""
    worker = served.fleet.workers[0]
    served.inside(worker.driver.freeze)

    def wait() -> None:
        eventually(lambda: served.inside(lambda: worker.load) == load)
        served.inside(worker.driver.thaw)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_latency_counts_from_when_it_was_due() -> None:
    """No coordinated omission: an engine that stands still for a while shows in all requests that came meanwhile."""
    with Served(engine=ROOMY) as served:
        thread = thawed_once(served, 10)
        done = driven(served, rows(10, 0.1))
        thread.join()
    records = done.records
    assert [record.arrival for record in records] == [at * 100 * MS for at in range(10)]
    ends = [record.first_token for record in records]
    sent = [record.arrival + late for record, late in zip(records, done.driver.lateness, strict=True)]
    assert max(sent) < min(ends), "sending didn't wait for answers"
    assert all(record.ttft == end - record.arrival for record, end in zip(records, ends, strict=True))
    assert records[0].ttft > records[-1].ttft + 300 * MS, "who came first has waited longest"


def test_closed_loop_keeps_its_number_in_flight() -> None:
    with Served(engine=ROOMY) as served:
        done = driven(served, rows(30, 5.0), concurrency=3)
    spans = [(record.arrival, record.ended) for record in done.records]
    assert done.report.requests["finished"] == 30
    assert most_at_once(spans) == 3
    assert max(record.ended for record in done.records) < 30 * SECOND, "recorded times don't count"


def test_turns_wait_for_their_answers() -> None:
    trace = list(sessions(30, arrivals="poisson:rate=40", think="fixed:0.05", input="fixed:100"))
    assert any(row.delay for row in trace)
    with Served(engine=ROOMY) as served:
        done = driven(served, trace, speedup=2.0)
    by_session: dict[str, list[Any]] = {}
    for record in done.records:
        by_session.setdefault(record.request.session, []).append(record)
    talks = [turns for turns in by_session.values() if len(turns) > 1]
    assert talks
    for turns in talks:
        for before, after in pairwise(turns):
            assert after.arrival >= before.ended + 25 * MS, "think time, at twice the speed"


def test_prompts_that_called_a_tool_are_sent_again_before_it_ends() -> None:
    """Two turns with a tool of 0.5 s between them: the mock gets three requests, and the report has two."""
    prompt = {"ids": [0, 1, 2], "id_block_size": 64, "input_length": 192, "output_length": 5}
    trace = [request("a", session="s", tool_call=True, **prompt), request("b", session="s", delay=0.5, **prompt)]
    with Served(engine=ROOMY) as served:
        done = driven(served, trace, prefetch=300 * MS)
        metrics = served.client.get("/metrics").text
    assert [record.id for record in done.records] == ["a", "b"] and done.report.requests["finished"] == 2
    ended = [line.split() for line in metrics.splitlines() if line.startswith("vllm:request_success_total")]
    assert sum(float(value) for _, value in ended) == 3


def test_a_fast_clock_measures_in_its_own_time() -> None:
    """An engine that is ten times as fast: 100 ms of prefill pass in 10 real ones, and are reported as 100."""
    from kvyard.engine.timing import FixedTiming

    slow = {**ROOMY, "timing": FixedTiming(prefill_ms=100, decode_ms=50)}
    with Served(engine=slow, speed=10.0) as served:
        done = driven(served, rows(4, 1.0), speed=10.0)
    assert all(record.ttft >= 100 * MS for record in done.records)
    assert all(record.ended - record.arrival >= (100 + 4 * 50) * MS for record in done.records)
    assert done.report.live is not None and done.report.live.speed == 10.0


class TestFailures:
    """Every request that has no answer is counted, with why."""

    def test_some_are_refused(self) -> None:
        with Served(engine=ROOMY, faults=MockFaults(error_rate=0.5, error_status=503)) as served:
            done = driven(served, rows(30))
        counts = done.report.requests
        assert counts["failed"] + counts["finished"] == 30 and counts["failed"] > 3
        assert done.report.live is not None
        assert done.report.live.errors == {"HTTP 503: this error was asked for": counts["failed"]}
        assert f"{counts['failed']} without an answer: HTTP 503" in report_text(done.report)

    def test_connections_are_cut(self) -> None:
        with Served(engine=ROOMY, faults=MockFaults(abort_rate=0.5, abort_after=2)) as served:
            done = driven(served, rows(30))
        cut = [record for record in done.records if record.status == "failed"]
        assert cut and all("connection was cut" in record.reason for record in cut)

    @pytest.mark.slow
    def test_a_stream_that_falls_silent(self) -> None:
        with Served(engine=ROOMY, faults=MockFaults(stall_rate=0.3, stall_after=2)) as served:
            done = driven(served, rows(20), timeout_s=4.0)
            served.check()
        failed = [record for record in done.records if record.status == "failed"]
        assert failed and {record.reason for record in failed} == {"no end within 4 s"}
        assert all(record.output >= 1 and record.first_token > 0 for record in failed)

    def test_too_long_for_the_model(self) -> None:
        trace = [*rows(3), *(request(f"long{at}", input_length=9000 + at) for at in range(3))]
        with Served(engine=ROOMY) as served:
            done = driven(served, trace)
        assert done.report.requests == {"all": 6, "finished": 3, "rejected": 3}
        assert done.report.live is not None
        (reason,) = done.report.live.errors
        assert "HTTP 400" in reason and "maximum context length" in reason

    def test_all_of_them(self) -> None:
        with (
            Served(engine=ROOMY, faults=MockFaults(error_rate=1.0)) as served,
            pytest.raises(KvyardError, match="none of the 3 requests"),
        ):
            driven(served, rows(3))

    def test_nobody_there(self) -> None:
        with pytest.raises(KvyardError, match="can't be reached"):
            replay_live(rows(1), "http://127.0.0.1:9")

    @pytest.mark.parametrize(
        "url", ["localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x?y=1", "selfish"]
    )
    def test_no_address(self, url: str) -> None:
        with pytest.raises(KvyardError, match="is no address of an endpoint: give one such as http"):
            replay_live(rows(1), url)

    def test_a_token(self) -> None:
        with Served(engine=ROOMY, token="sesame") as served:
            with pytest.raises(KvyardError, match="401"):
                replay_live(rows(1), served.url)
            assert replay_live(rows(2), served.url, token="sesame").report.requests["finished"] == 2

    @pytest.mark.parametrize("name", ["speedup", "speed", "timeout_s", "concurrency", "limit"])
    def test_settings_that_make_no_sense(self, name: str) -> None:
        with pytest.raises(KvyardError, match=name):
            LiveConfig(**{name: 0}).check()


def test_answers_of_another_length_are_owned_up_to() -> None:
    with Served(engine=ROOMY, mean_output_tokens=3) as served:
        done = driven(served, rows(20, output_length=40), exact=False)
    assert done.report.live is not None and done.report.live.inexact > 5
    assert "another length" in report_text(done.report)


def test_an_end_in_the_middle() -> None:
    """``stop`` leaves records whole up to there, and the report says so."""
    with Served(engine={**ROOMY, "max_num_seqs": 4}) as served:

        async def run() -> LiveRun:
            async with Endpoint(served.url) as endpoint:
                return await drive(
                    rows(200, 0.05, output_length=40), endpoint, LiveConfig(), progress=stop_after(5, lambda: holder[0])
                )

        holder: list[Any] = []
        from kvyard.replay.live import run as module

        class Kept(module.LiveDriver):
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **named)
                holder.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "LiveDriver", Kept)
            done = asyncio.run(run())
        served.check()
    report = done.report
    assert not done.complete and not report.complete
    assert all((record.ended < 0) == (not record.status) for record in done.records)
    assert 5 <= report.requests["all"] < 200
    assert report.requests["finished"] >= 5
    assert "interrupted" in report_text(report)
    assert from_json(to_json(report)) == report


def stop_after(through: int, driver: Callable[[], Any]) -> Callable[[int, int, int], None]:
    def told(came: int, done: int, now: int) -> None:
        if done >= through:
            driver().stop()

    return told


def test_names_that_no_header_can_have() -> None:
    trace = [
        request(name, session="a talk\n", input_length=40) for name in ("with a space", "tab\t", "ünïcode", "x" * 300)
    ]
    with Served(engine=ROOMY) as served:
        done = driven(served, trace)
    assert done.report.requests == {"all": 4, "finished": 4}
    assert [record.id for record in done.records] == [row.id for row in trace]


def test_a_trace_that_makes_no_sense_ends_the_run() -> None:
    """A request that waits for one that isn't there: said at the end, not waited for."""
    with Served(engine=ROOMY) as served, pytest.raises(KvyardError, match="wait for others"):
        driven(served, [request("a"), request("b", after=("c",))])


def test_two_hundred_streams_at_once() -> None:
    """All are under way together: nobody waits for a connection."""
    trace = [request(str(at), ids=[at], id_block_size=64, input_length=33, output_length=30) for at in range(200)]
    with Served(engine={**ROOMY, "max_num_seqs": 256}) as served:
        thread = thawed_once(served, 200)
        done = driven(served, trace)
        thread.join()
    assert done.report.requests["finished"] == 200 and done.report.output_tokens == 200 * 30
