"""Clients: pace, lengths and warm-up of load generators."""

from __future__ import annotations

from random import Random

import pytest
from tests.replay.support import SECOND, most_at_once, play, request

from kvyard.clock import MS
from kvyard.errors import KvyardError
from kvyard.replay.clients import CLIENTS, make_client
from kvyard.replay.clients.client import Pacing, ranged
from kvyard.replay.run import replay
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest

LOOP = {"workers": 1, "timing": "fixed:10,5", "concurrency": 4}


def singles(count: int, **fields: object) -> list[TraceRequest]:
    return [TraceRequest(str(number), 0, 500, 20, **fields) for number in range(count)]  # type: ignore[arg-type]


def came(rows: list[TraceRequest], **options: object) -> list[float]:
    return [start / SECOND for _, start, _ in play(rows, **options)]  # type: ignore[arg-type]


def test_a_slot_waits_for_the_clients_turnaround() -> None:
    rows = [request(str(number)) for number in range(4)]
    assert came(rows, concurrency=2, pacing=Pacing(turnaround=SECOND // 4)) == [0, 0, 1.25, 1.25]


def test_turns_of_a_session_wait_for_it_too_unless_they_say_how_long() -> None:
    rows = [request("a", session="s"), request("b", session="s"), request("c", session="s", delay=3)]
    assert came(rows, concurrency=1, pacing=Pacing(turnaround=SECOND // 2)) == [0, 1.5, 5.5]


def test_a_ramp_spreads_the_first_of_each_slot() -> None:
    rows = [request(str(number)) for number in range(5)]
    assert came(rows, concurrency=4, pacing=Pacing(ramp=2 * SECOND)) == [0, 0.5, 1, 1, 1.5]


def test_a_capped_client_holds_requests_back_and_keeps_recorded_times() -> None:
    rows = [request("a", 0), request("b", 0), request("c", 0.5), request("d", 7)]
    assert came(rows, pacing=Pacing(most=1)) == [0, 1, 2, 7]
    spans = [(start, end) for _, start, end in play(rows, pacing=Pacing(most=2))]
    assert most_at_once(spans) == 2


def test_users_of_multi_round_qa_come_back_after_their_gap() -> None:
    pacing = make_client("multi-round-qa", {"qps": 2, "users": 4, "rounds": 3}).pacing(None)
    rows = [request(f"{user}.{turn}", session=str(user)) for user in range(5) for turn in range(2)]
    found = {name: start / SECOND for name, start, _ in play(rows, pacing=pacing)}
    # Four users within the first two seconds, the fifth joins after one; each comes back two seconds later.
    assert {found[f"{user}.0"] for user in range(4)} <= {1, 2} and found["4.0"] == 1
    assert all(found[f"{user}.1"] == found[f"{user}.0"] + 2 for user in range(5))
    slow = {name: start / SECOND for name, start, _ in play(rows, 2.51, pacing=pacing)}
    assert slow["0.1"] == pytest.approx(slow["0.0"] + 2.6)  # an open request is waited for, and the next tick


def test_a_bare_loop_has_a_turnaround() -> None:
    plain = replay(singles(40), **LOOP).report.duration_s
    at_once = replay(singles(40), turnaround=0, **LOOP).report.duration_s
    assert plain == pytest.approx(at_once + 9 * 0.007)
    assert replay(singles(40), turnaround="50ms", **LOOP).report.duration_s == pytest.approx(at_once + 9 * 0.050)


def test_inferencemax_sends_ten_rounds_of_ranged_lengths_after_two_to_warm_up() -> None:
    done = replay(singles(100), client="inferencemax", **LOOP)
    assert done.report.requests == {"all": 40, "finished": 40}
    assert {record.input for record in done.records} <= set(range(400, 501))
    assert len({record.wanted for record in done.records}) > 3
    assert min(record.arrival for record in done.records) > 0  # eight requests came before


def test_ranged_lengths_keep_what_prompts_share() -> None:
    rows = [TraceRequest("a", 0, 100, 10, tuple(range(7)), 16)]
    (row,) = ranged(rows, 0.5, 0.5, Random(0))
    assert (row.input_length, row.output_length, row.ids) == (50, 5, (0, 1, 2, 3))
    (row,) = ranged(rows, 1.5, 1.5, Random(0))
    assert (row.input_length, row.output_length) == (100, 15)


def test_every_client_can_be_asked() -> None:
    for name in CLIENTS.names():
        done = replay(singles(12), client=name, **LOOP | {"concurrency": None if name == "multi-round-qa" else 2})
        assert done.report.requests["finished"] == 12


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"client": "vllm-bensh"}, "unknown client 'vllm-bensh': did you mean"),
        ({"client": "aiperf", "client_options": "rounds=3"}, "unknown option 'rounds' of the client aiperf"),
        ({"turnaround": "5ms"}, "turnaround is for a closed loop"),
        ({"warm_up": "0"}, "warm_up is 0"),
        ({"warm_up": "10", "autoscale": "threshold"}, "warm_up is not modelled with autoscale"),
    ],
)
def test_refusals(asked: dict[str, object], says: str) -> None:
    with pytest.raises(KvyardError, match=says):
        make_config(asked)


def test_turnaround_is_read_as_a_time() -> None:
    assert make_config({"concurrency": 2, "turnaround": "5ms"}).pacing.turnaround == 5 * MS
