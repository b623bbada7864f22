"""Workers that start, drain and fail while requests are under way: nothing is lost, nothing ends twice."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.replay.support import SECOND, request, sessions

from kvyard.errors import KvyardError
from kvyard.replay import SimulatedRun, replay
from kvyard.replay.fleet import Fleet
from kvyard.replay.run import as_config
from kvyard.replay.traces import TraceRequest

SMALL = {"block_size": 16, "num_gpu_blocks": 600}


def run(workers: list[dict[str, object]], trace: object = None, **settings: object) -> SimulatedRun:
    made = replay(sessions(150) if trace is None else trace, workers=workers, **{**SMALL, **settings})  # type: ignore[arg-type]
    for worker in made.fleet.workers:
        assert worker.alive is False or not worker.jobs
    assert all(record.status for record in made.records), "a request was lost"
    return made


def spread(rows: int = 60, every: float = 0.05) -> list[TraceRequest]:
    lengths = {"input_length": 400, "output_length": 100, "id_block_size": 100}
    return [
        request(str(number), number * every, ids=list(range(4 * number, 4 * number + 4)), **lengths)
        for number in range(rows)
    ]


@pytest.mark.parametrize("router", ["kv", "round-robin", "least-loaded", "approx", "affinity", "random"])
def test_nothing_is_lost_when_a_worker_fails(router: str) -> None:
    made = run([{"count": 2, "fail": "1500ms"}, {"count": 2}], spread(), router=router)
    assert made.report.requests == {"all": 60, "finished": 60}
    retried = [record for record in made.records if record.retries]
    assert retried and made.report.router.retries == len(retried)
    late = [record for record in made.records if record.arrival > 1.5 * SECOND]
    assert late and all(record.worker in ("w2", "w3") for record in late + retried)
    assert all(record.first_token > 1.5 * SECOND for record in retried), "tokens of the lost worker don't count"
    assert all(record.output == record.wanted for record in made.records)


def test_requests_end_once_though_their_first_worker_had_them_half_done() -> None:
    """A dead worker is not carried on when others are looked at."""
    made = run([{"fail": "1s"}, {}], spread(40), router="kv")
    ends = Counter(record.id for record in made.records if record.status == "finished")
    assert len(ends) == 40 and max(ends.values()) == 1
    assert len(made.fleet.records) == 40 and not made.fleet.records.open
    assert sum(core.busy_ns for core in made.fleet.workers[0].cores) <= 1.05 * SECOND


@pytest.mark.parametrize("router", ["kv", "round-robin"])
def test_steps_of_a_worker_that_failed_amid_a_plan_count(router: str) -> None:
    lines = [{"fail": "2100ms"}, {}]  # all requests have come by then
    planned, stepped = [run(lines, spread(40), router=router, plans=plans).fleet for plans in (True, False)]
    steps = [
        [recorder.steps for worker in fleet.workers for recorder in worker.recorders] for fleet in (planned, stepped)
    ]
    assert steps[0] == steps[1] and steps[0][0]


def test_steps_until_an_interruption_count() -> None:
    def stop(read: int, through: int, now: int) -> None:
        raise KeyboardInterrupt

    # Prompts are looked up as they come, so plans are carried out in part.
    fleet = Fleet(as_config(None, {"workers": 2, "router": "kv", "block_size": 16, "num_gpu_blocks": 100}))
    fleet.run([*spread(1500, 0.001), request("last", 2)], stop)
    assert fleet.interrupted
    steps = [worker.recorders[0].steps for worker in fleet.workers]
    for worker in fleet.workers:
        worker.cores[0].report()
    assert steps == [worker.recorders[0].steps for worker in fleet.workers]
    told = [core._reported for worker in fleet.workers for core in worker.cores]
    assert any(told), "no plan was carried out in part"


def test_a_drained_worker_finishes_what_it_has() -> None:
    made = run([{"drain": "1s"}, {}], spread(40))
    assert made.report.requests == {"all": 40, "finished": 40}
    assert not any(record.retries for record in made.records)
    first = [record for record in made.records if record.worker == "w0"]
    assert first and all(record.arrival <= SECOND for record in first)
    assert max(record.ended for record in first) > SECOND
    assert all(record.worker == "w1" for record in made.records if record.arrival > SECOND)


def test_a_worker_that_starts_later_takes_its_share() -> None:
    made = run([{}, {"start": "1s"}], spread(60), router="round-robin")
    second = [record for record in made.records if record.worker == "w1"]
    assert second and min(record.arrival for record in second) >= SECOND
    assert len(second) == pytest.approx(20, abs=2)


def test_drained_and_then_failed() -> None:
    made = run([{"drain": "1s", "fail": "1200ms"}, {}], spread(40))
    assert made.report.requests == {"all": 40, "finished": 40}
    assert any(record.retries for record in made.records)


def test_requests_wait_for_a_worker_to_start() -> None:
    """All have failed when they come, and another is on its way."""
    made = run([{"fail": "500ms"}, {"start": "10s"}], spread(40))
    assert made.report.requests == {"all": 40, "finished": 40}
    waited = [record for record in made.records if record.arrival > 0.5 * SECOND]
    assert waited and all(record.worker == "w1" and record.admitted >= 10 * SECOND for record in waited)


def test_without_any_worker_left_requests_fail_and_say_why() -> None:
    made = run([{"count": 2, "fail": "2800ms"}], spread(60))
    counts = made.report.requests
    assert counts["failed"] > 0 and counts["finished"] > 0 and counts["finished"] + counts["failed"] == 60
    failed = [record for record in made.records if record.status == "failed"]
    assert all("no worker" in record.reason and record.output == 0 for record in failed)
    assert made.report.complete


def test_a_session_goes_on_after_its_request_failed() -> None:
    rows = [request("a", 0, session="s", output_length=2000), request("b", session="s", delay=1), request("x", 2)]
    made = run([{"fail": "1s"}], rows)
    assert {record.id: record.status for record in made.records} == {"a": "failed", "x": "failed", "b": "failed"}


@pytest.mark.parametrize("plans", [True, False])
def test_sessions_survive_a_rolling_restart(plans: bool) -> None:
    kinds = [
        {"name": "old", "drain": "5s", "fail": "8s"},
        {"name": "old", "drain": "10s"},
        {"name": "new", "start": "5s"},
        {"name": "new", "start": "10s"},
    ]
    made = run(kinds, router="kv", plans=plans)
    assert made.report.requests == {"all": 150, "finished": 150}
    assert {record.worker for record in made.records} == {"old0", "old1", "new2", "new3"}


def test_ranks_fail_together() -> None:
    made = run([{"dp_size": 2, "fail": "1s"}, {"dp_size": 2}], spread(40), router="kv")
    assert made.report.requests == {"all": 40, "finished": 40}
    assert {record.worker for record in made.records if record.arrival > SECOND} == {"w1@0", "w1@1"}


def test_with_host_tiers_too() -> None:
    made = run([{"fail": "6s"}, {"count": 2}], host_blocks=3000, num_gpu_blocks=400)
    assert made.report.requests == {"all": 150, "finished": 150}
    assert made.report.reuse["host"].part > 0


def test_a_failed_worker_leaves_no_page_of_a_shared_host_held() -> None:
    """It fails while it fetches the first prompt back from storage, with what the host still has of it kept for that."""
    shared = {"host_blocks": 60, "host_scope": "shared", "storage_blocks": 400, "storage_scope": "shared"}
    slow = {"bytes_per_block": 8 << 20, "storage_bandwidth": 1, "num_gpu_blocks": 50}
    texts = [1, 2, 3, 1, 9]
    rows = [
        request(
            str(at),
            when,
            input_length=640,
            output_length=2,
            ids=[text * 10 + part for part in range(2)],
            id_block_size=320,
        )
        for at, (when, text) in enumerate(zip([0, 2, 4, 8, 12], texts, strict=True))
    ]
    made = run([{"fail": "8100ms"}, {"start": "8050ms"}], rows, router="round-robin", **shared, **slow)
    assert made.report.requests == {"all": 5, "finished": 5}
    assert made.records[3].retries == 1
    offload = made.fleet.workers[1].cores[0].offload
    assert (
        offload is not None and not offload.tiers[0].store.pool.holds.tables and offload.tiers[0].store.pool.free == 60
    )


def test_nonsense_is_refused() -> None:
    for kinds, match in (
        ([{"start": "2s"}], "no worker is there at the start"),
        ([{"drain": "1s", "start": "2s"}, {}], "before they start"),
        ([{"count": 0}], "at least 1"),
        ([{"counts": 3}], "did you mean count"),
        ([3], "must be a table"),
        ([], "at least one worker"),
    ):
        with pytest.raises(KvyardError, match=match):
            run(kinds)  # type: ignore[arg-type]
