"""Who has had more than its share lately, against sums worked out anew; and what a tenant above it may have at workers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvyard.clock import SECOND
from kvyard.errors import KvyardError
from kvyard.router.flow import FlowConfig, FlowQueue, FlowRequest
from kvyard.router.flow.shares import FORGOTTEN, HALF_LIFE, MOST_TENANTS, TenantShares


def test_shares_are_those_of_sums_that_fade() -> None:
    rng = Random(2)
    weights = {"a": 3.0}
    shares = TenantShares(weights)
    charges: list[tuple[str, float, int]] = []
    now = 0
    for _ in range(4000):
        now += rng.choice([SECOND, 40 * SECOND, HALF_LIFE])
        charges.append((rng.choice("abbbcd"), float(rng.randrange(1, 5000)), now))
        shares.charge(*charges[-1])
        latest = {tenant: at for tenant, _, at in charges}
        lately = {tenant for tenant, at in latest.items() if now - at < FORGOTTEN}
        sums = dict.fromkeys(lately, 0.0)
        for tenant, tokens, at in charges[-400:]:
            if tenant in sums:
                sums[tenant] += tokens / weights.get(tenant, 1.0) * 0.5 ** ((now - at) / HALF_LIFE)
        assert len(shares) == len(lately)
        mean = sum(sums.values()) / len(sums)
        for tenant, amount in sums.items():
            if abs(amount - mean) > 0.02 * mean:  # one that was forgotten and came back begins anew
                assert shares.above(tenant) == (amount > mean)


def test_a_tenant_alone_has_its_share_and_no_more() -> None:
    shares = TenantShares({})
    for number in range(1000):
        shares.charge("alone", 1 + number, number * SECOND)
        assert not shares.above("alone") and not shares.above("never seen")


def test_tenants_of_shares_are_bounded() -> None:
    shares = TenantShares({})
    for number in range(MOST_TENANTS + 500):
        shares.charge(f"t{number}", 1, number)
    assert len(shares) == MOST_TENANTS


def order(queue: FlowQueue[str], now: float, workers: int) -> list[str]:
    sent: list[str] = []

    def place(waiting: Any) -> bool:
        sent.append(waiting.item)
        return True

    queue.grant(round(now * SECOND), lambda: True, place, workers)
    return sent


def asked(name: str, tenant: str, tokens: int = 100) -> FlowRequest:
    return FlowRequest(name, 0, tokens, None, None, tenant)


@pytest.mark.parametrize("policy", ["fifo", "fair", "las"])
def test_a_tenant_above_its_share_has_so_many_for_each_worker(policy: str) -> None:
    queue: FlowQueue[str] = FlowQueue(FlowConfig(policy=policy, greedy_requests=1))
    flood = [asked(f"f{number}", "flood") for number in range(9)]
    for request in flood:
        queue.push(request, str(request.id), 0)
    assert order(queue, 0, 2) == [f"f{number}" for number in range(9)], "nobody else has had anything: no limit"
    for number in range(9):
        queue.push(asked(f"g{number}", "flood"), f"g{number}", 0)
    quiet = [asked(f"q{number}", "quiet", 10) for number in range(5)]
    for request in quiet:
        queue.push(request, str(request.id), 0)
    assert order(queue, 1, 2) == ["q0", "q1", "q2", "q3", "q4"], "below its share it may have more than 2"
    for request in flood[:7]:
        assert queue.ended(request, 10, 1, SECOND)
        assert not order(queue, 1, 2), "2 for 2 workers"
    assert queue.ended(flood[7], 10, 1, SECOND) and order(queue, 1, 2) == ["g0"]
    assert order(queue, 2, 4) == ["g1", "g2"], "4 for 4 workers"
    assert queue.capped(asked("x", "flood"), 4) and not queue.capped(asked("x", "flood"), 5)
    assert not queue.capped(asked("x", "quiet"), 1)


def test_why_a_tenant_above_its_share_waited() -> None:
    queue: FlowQueue[str] = FlowQueue(FlowConfig(greedy_requests=1))
    queue.sent(asked("q", "quiet", 1), 0)
    queue.sent(asked("f", "flood", 900), 0)
    waiting = queue.push(asked("g", "flood"), "g", 0)
    assert not order(queue, 0, 1)
    assert "a tenant above its share has 1 requests for each worker at most" in queue.explain(waiting, 0).why


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(KvyardError, match="greedy_requests is -1"):
        FlowConfig(greedy_requests=-1)
