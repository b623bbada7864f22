"""A report in words: fleets made so that one resource is the limit. The fleet itself is the oracle: each resource is
relieved, and the one that is named must change the result most.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from random import Random

import pytest
from msgspec.structs import replace
from tests.replay.report.support import reported

from kvyard.engine.config import EngineConfig
from kvyard.engine.timing import PolynomialTiming
from kvyard.replay import replay
from kvyard.replay.config import ReplayConfig, WorkerConfig
from kvyard.replay.fleet import Fleet
from kvyard.replay.report import Report, make_report
from kvyard.replay.report.answers import Resource, answers, limits, time_parts
from kvyard.replay.traces import TraceRequest
from kvyard.router import RouterConfig
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.links.config import LaneConfig, LinkConfig

SECOND = 10**9
BLOCK = 64


def rows(
    count: int, gap: float, roots: int, shared: int, own: int, output: int, seed: int = 1, burst: int = 1
) -> list[TraceRequest]:
    """Prompts of ``shared`` blocks from one of ``roots`` and ``own`` blocks of their own, ``gap`` seconds apart."""
    rng = Random(seed)
    made = []
    for number in range(count):
        root = rng.randrange(roots)
        ids = [root * 10_000 + at for at in range(shared)]
        ids += [10_000_000 + number * 1000 + at for at in range(own)]
        length = BLOCK * (shared + own)
        arrival = round(number // burst * gap * SECOND)
        made.append(TraceRequest(str(number), arrival, length, output, ids=ids, id_block_size=BLOCK))
    return made


def config(
    workers: int = 1, blocks: int = 20_000, router: str = "kv", host: int = 0, gb_s: float = 0, **engine: object
) -> ReplayConfig:
    made = EngineConfig(block_size=BLOCK, num_gpu_blocks=blocks, bytes_per_block=BLOCK << 17, **engine)  # type: ignore[arg-type]
    kind = WorkerConfig(engine=made, count=workers)
    whole = ReplayConfig(workers=(kind,), router=RouterConfig(policy=router))
    return with_engine(whole, tiers=below(host, gb_s)) if host else whole


def ran(made: ReplayConfig, trace: list[TraceRequest]) -> Report:
    fleet = Fleet(made)
    fleet.run(trace)
    return make_report(fleet)


def below(blocks: int, gb_s: float) -> OffloadConfig:
    """A host tier whose link inward has so many GB/s; 0 for no limit."""
    lane = LaneConfig(bandwidth=round(gb_s * 1e9)) if gb_s else LaneConfig()
    return OffloadConfig(tiers=(TierConfig(num_blocks=blocks, link=LinkConfig(inward=lane)),))


def with_engine(made: ReplayConfig, **changes: object) -> ReplayConfig:
    kind = made.workers[0]
    return replace(made, workers=(replace(kind, engine=replace(kind.engine, **changes)),))


def relieved(made: ReplayConfig) -> dict[Resource, list[ReplayConfig]]:
    """Return the fleet with one resource relieved, in one way or another."""
    engine = made.workers[0].engine
    tiers = engine.tiers
    links = []
    if tiers is not None:
        lane = tiers.tiers[0].link.inward
        wide = replace(lane, bandwidth=2 * (lane.bandwidth or 0) or None)
        link = replace(tiers.tiers[0].link, inward=wide)
        links = [with_engine(made, tiers=replace(tiers, tiers=(replace(tiers.tiers[0], link=link),)))]
    return {
        "prefill": [with_engine(made, timing=PolynomialTiming(speedup_ratio=2, decode_speedup_ratio=0.5))],
        "decode": [with_engine(made, timing=PolynomialTiming(decode_speedup_ratio=2))],
        "cache": [with_engine(made, num_gpu_blocks=8 * engine.num_gpu_blocks)]
        + ([with_engine(made, tiers=below(10**6, 0))] if tiers is None else []),
        "link": links,
        "router": [replace(made, router=RouterConfig(policy=name)) for name in ("kv", "longest-match", "least-loaded")],
    }


def prefill_bound() -> tuple[ReplayConfig, list[TraceRequest]]:
    return config(workers=2), rows(40, 0.15, roots=40, shared=2, own=120, output=4)


def decode_bound() -> tuple[ReplayConfig, list[TraceRequest]]:
    return config(workers=2), rows(40, 0.2, roots=40, shared=1, own=3, output=250)


def seats_bound() -> tuple[ReplayConfig, list[TraceRequest]]:
    return config(max_num_seqs=2), rows(40, 0.1, roots=40, shared=1, own=3, output=120)


def cache_bound() -> tuple[ReplayConfig, list[TraceRequest]]:
    return config(blocks=700), rows(50, 1.0, roots=8, shared=150, own=1, output=4)


def room_bound() -> tuple[ReplayConfig, list[TraceRequest]]:
    return config(blocks=130), rows(40, 0.05, roots=40, shared=1, own=60, output=60)


def link_bound() -> tuple[ReplayConfig, list[TraceRequest]]:
    return config(blocks=160, host=50_000, gb_s=1.0), rows(70, 3.0, roots=30, shared=150, own=1, output=4)


def router_bound() -> tuple[ReplayConfig, list[TraceRequest]]:
    return config(workers=8, router="round-robin"), rows(70, 1.0, roots=8, shared=150, own=1, output=4)


def lopsided() -> tuple[ReplayConfig, list[TraceRequest]]:
    # All share one prefix, so the policy that looks for nothing else sends all to one of eight workers.
    return config(workers=8, router="longest-match"), rows(50, 0.05, roots=1, shared=4, own=60, output=4)


Made = Callable[[], tuple[ReplayConfig, list[TraceRequest]]]


@cache
def tried(made: Made) -> tuple[Report, dict[str, tuple[float, float]]]:
    """The report, and by resource what relieving it saves of the mean first token and of the mean request, in milliseconds."""
    base, trace = made()
    report = ran(base, trace)

    def saved(changed: ReplayConfig) -> tuple[float, float]:
        other = ran(changed, trace)
        first, whole = (report.latency[key].mean - other.latency[key].mean for key in ("ttft", "e2e"))
        return first, whole

    found = {}
    for name, ways in relieved(base).items():
        savings = [saved(way) for way in ways]
        found[str(name)] = max(savings, key=lambda one: one[1]) if savings else (0.0, 0.0)
    return report, found


@pytest.mark.parametrize(
    ("made", "limit"),
    [
        (prefill_bound, "prefill"),
        (decode_bound, "decode"),
        (seats_bound, "decode"),
        (cache_bound, "cache"),
        (room_bound, "cache"),
        (link_bound, "link"),
        (router_bound, "router"),
        (lopsided, "router"),
    ],
)
def test_the_limit_is_what_changes_the_result_most(made: Made, limit: str) -> None:
    report, saved = tried(made)
    parts = time_parts(report)
    assert parts is not None
    found = limits(report, parts)
    assert max(saved, key=lambda name: saved[name][1]) == limit == found.of_whole, (saved, found)


def test_each_limit_has_its_sentence() -> None:
    def said(made: Made) -> str:
        return " ".join(answers(tried(made)[0]))

    assert said(prefill_bound).startswith("Prefill limits this fleet: a request takes ")
    assert said(decode_bound).startswith("Decode limits this fleet: ") and "(--workers 4)" in said(decode_bound)
    assert "because they had been evicted. Try a host tier (--host-blocks 1400)" in said(cache_bound)
    assert "or more blocks (--num-gpu-blocks 1400)." in said(cache_bound)  # no card is known
    assert "requests waited for loads from lower tiers. Try a faster link" in said(link_bound)
    assert "were computed though another worker had them. Try --router least-time." in said(router_bound)


def test_parts_add_up_to_the_mean_request() -> None:
    for report in (reported(), reported(host=3000), reported(policy="round-robin", blocks=2200)):
        parts = time_parts(report)
        assert parts is not None and min(parts) >= 0
        assert parts.whole == pytest.approx(report.latency["e2e"].mean)
        assert parts.first == pytest.approx(report.latency["ttft"].mean)
        assert 1 <= len(answers(report)) <= 4


def test_hand_over_time_is_separate_from_computing() -> None:
    trace = rows(30, 0.5, roots=30, shared=1, own=30, output=20)
    report = replay(trace, prefill=1, decode=1, num_gpu_blocks=4000).report
    parts = time_parts(report)
    assert parts is not None and report.handovers is not None
    stages = report.handovers.stages
    later = [stages[name].mean for name in ("room", "transfer", "decode_queue", "first_step")]
    assert parts.handover == pytest.approx(sum(later)) and parts.prefill == pytest.approx(stages["prefill"].mean)
    assert parts.whole == pytest.approx(report.latency["e2e"].mean)
    assert "ms being handed over (" in answers(report)[0]


def test_a_report_without_requests_gives_no_advice() -> None:
    assert answers(make_report(Fleet(config()))) == []


def test_a_lever_without_cards_is_named_beside_the_limit() -> None:
    report = ran(config(workers=8, router="round-robin"), rows(40, 1.0, roots=4, shared=60, own=90, output=4))
    said = answers(report)
    assert said[0].startswith("Prefill limits this fleet")
    assert any(one.startswith("Without more cards: ") and one.endswith("try --router least-time.") for one in said)
    assert not any("more workers" in one for one in said if one.startswith("Without more cards: "))
    elsewhere = report.missed_tokens["other_worker"].value
    assert f"{elsewhere:.1%} of prompt tokens were computed though another worker had them" in " ".join(said)


def test_both_kinds_of_evicted_tokens_are_reported() -> None:
    report = ran(config(workers=2, blocks=400), rows(80, 1.0, roots=8, shared=150, own=1, output=4))
    here = report.missed_tokens["evicted"].value
    text = next(sentence for sentence in answers(report) if "had been evicted" in sentence)
    found = re.search(r"([\d.]+)% of prompt tokens .* evicted \(([\d.]+)% on their worker, ([\d.]+)% on another", text)
    assert found is not None, text
    whole, own, other = map(float, found.groups())
    assert own == pytest.approx(here * 100, abs=0.051) and whole == pytest.approx(own + other, abs=0.11)
