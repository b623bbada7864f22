"""Demand of a trace on a fleet, by hand-counted traces."""

from __future__ import annotations

import msgspec
import pytest

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.lab.plan.traffic import read_traffic
from kvyard.replay.traces.request import TraceRequest


def request(number: int, ids: list[int], tokens: int, second: float = 0.0, answer: int = 4) -> TraceRequest:
    return TraceRequest(
        id=str(number),
        arrival=int(second * SECOND),
        input_length=tokens,
        output_length=answer,
        ids=ids,
        id_block_size=10,
    )


def test_prefixes_of_earlier_prompts_need_not_be_computed() -> None:
    requests = [
        request(0, [1, 2], 20),
        request(1, [1, 3], 20, 1.0),
        request(2, [1, 2], 20, 5.0),
        request(3, [9], 7, 2.0),
    ]
    traffic = read_traffic(requests)
    assert traffic.new.tolist() == [20, 10, 1, 7]
    assert (traffic.requests, traffic.seconds, traffic.rate) == (4, 5.0, 0.8)
    assert traffic.too_long(20) == 3 and traffic.too_long(21) == 0
    assert "43% of prompt tokens were in an earlier prompt" in str(traffic)


def test_a_speedup_shortens_and_a_closed_loop_has_no_rate() -> None:
    requests = [request(0, [1], 5), request(1, [2], 5, 8.0)]
    assert read_traffic(requests, speedup=4.0).seconds == 2.0
    closed = read_traffic(requests, closed=True)
    assert (closed.seconds, closed.rate) == (0.0, 0.0)


def test_arrivals_that_share_few_stamps_are_bunched() -> None:
    ticks = [request(n, [n], 5, n // 4 * 3.0 + n % 4 * 0.002) for n in range(20)]
    traffic = read_traffic(ticks, speedup=2.0)
    assert (traffic.stamps, traffic.tick, traffic.bunched) == (5, 3.0, True)
    assert not read_traffic(ticks, closed=True).bunched
    apart = read_traffic([request(n, [n], 5, n * 0.75) for n in range(20)])
    assert (apart.stamps, apart.bunched) == (20, False)
    dense = read_traffic([request(n, [n], 5, n * 0.004 + n // 10 * 0.02) for n in range(200)])
    assert dense.stamps == 20 and not dense.bunched, "a high rate isn't a tick"
    turns = [request(n, [n], 5, n * 2.0) for n in range(5)]
    turns += [msgspec.structs.replace(request(5 + n, [n], 5, n * 2.0), after=(str(n),), delay=SECOND) for n in range(5)]
    assert not read_traffic(turns).bunched, "later turns have no arrival of their own"


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(KvyardError, match="nothing to plan for"):
        read_traffic([])


def test_the_busiest_part_has_the_most_tokens_to_compute_a_second() -> None:
    quiet = [request(n, [n], 10, n * 10.0) for n in range(6)]
    rush = [request(n, [n], 10, 60.0 + n) for n in range(6, 9)]
    known = [request(n, [6], 10, 90.0 + n * 0.7) for n in range(9, 14)]  # closer, and cached but for a token
    traffic = read_traffic([*quiet, *rush, *known])
    assert traffic.busiest(3) == 6
    assert traffic.busiest(14) == traffic.busiest(99) == 0
    assert read_traffic([*quiet, *rush], closed=True).busiest(3) == 0
