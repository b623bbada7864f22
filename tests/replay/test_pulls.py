"""Prefixes that workers of a fleet pull from each other: the same in plans and single steps, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from benchmarks import peer_pull
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.support import sessions

from kvyard.errors import KvyardError
from kvyard.replay.fleet import Fleet
from kvyard.replay.report.page import page
from kvyard.replay.report.table import print_report
from kvyard.replay.run import SimulatedRun, replay
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest
from kvyard.tiers.pulls import Pull

MS = 1_000_000
SMALL: dict[str, Any] = {
    "workers": 4,
    "router": "round-robin",
    "block_size": 16,
    "num_gpu_blocks": 400,
    "host_blocks": 800,
    "bytes_per_token": 131072,
    "peer_pull": "host:min_lead=64",
}
GROUPS = {"block_size": None, "bytes_per_token": None, "bytes_per_block": 65536, "num_gpu_blocks": 900}
FULL = {"kind": "full", "block_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "slow": {"nic_bandwidth": 1, "node_bandwidth": 1.5, "workers_per_node": 2},
    "device": {"peer_pull": "device:min_lead=64", "nic_bandwidth": 1},
    "device, tight": {"peer_pull": "device:min_lead=64", "host_blocks": 200, "num_gpu_blocks": 130},
    "tight": {"num_gpu_blocks": 130, "host_blocks": 200, "event_lag": "500ms"},
    "on eviction": {"offload_policy": "on_eviction", "num_gpu_blocks": 200, "nic_bandwidth": 1},
    "on eviction, device": {
        "peer_pull": "device:min_lead=64",
        "offload_policy": "on_eviction",
        "num_gpu_blocks": 200,
        "nic_bandwidth": 1,
    },
    "generated": {"offload_policy": "write_through_generated", "nic_bandwidth": 1},
    "chunks": {"blocks_per_chunk": 4, "nic_bandwidth": 1},
    "storage": {"storage_blocks": 3000, "host_blocks": 200, "nic_bandwidth": 2},
    "hybrid": {**GROUPS, "groups": [FULL, {"kind": "sliding_window", "block_size": 16, "window": 128}]},
    "hybrid, device": {
        **GROUPS,
        "groups": [FULL, {"kind": "sliding_window", "block_size": 16, "window": 128}],
        "peer_pull": "device:min_lead=64",
    },
    "states": {**GROUPS, "groups": [FULL, {"kind": "mamba", "block_size": 64}]},
    "ranks": {"dp_size": 2, "nic_bandwidth": 1},
    "threshold": {"load_policy": "threshold", "load_options": "tokens=300,in_flight=1", "nic_bandwidth": 1},
    "least time": {"load_policy": "least-time", "nic_bandwidth": 12},
    "drafts": {"num_speculative_tokens": 2, "nic_bandwidth": 1},
    "slru": {"host_eviction": "slru", "host_blocks": 200, "nic_bandwidth": 1},
    "kv": {"router": "kv", "nic_bandwidth": 1},
    "conductor": {"router": "conductor"},
    "roles": {"workers": None, "prefill": 2, "decode": 2, "nic_bandwidth": 1},
    "roles, device": {
        "workers": None,
        "prefill": 2,
        "decode": 2,
        "nic_bandwidth": 1,
        "protocol": "destination-first",
        "peer_pull": "device:min_lead=64",
    },
    "scaled": {"autoscale": "threshold:queue=2,min=1,max=4,startup=1s", "workers": 2, "nic_bandwidth": 1},
    "bus": {"bus_bandwidth": 1, "host_bandwidth": 2, "num_gpu_blocks": 200, "host_blocks": 300},
    "bus, device": {
        "peer_pull": "device:min_lead=64",
        "bus_bandwidth": 1,
        "offload_policy": "write_through_generated",
        "offload_batch_size": 4,
    },
    "bus, on eviction": {
        "peer_pull": "device:min_lead=64",
        "bus_bandwidth": 1,
        "offload_policy": "on_eviction",
        "num_gpu_blocks": 200,
    },
    "bus, ranks": {"bus_bandwidth": 1, "dp_size": 2},
    "bus, storage": {"bus_bandwidth": 1, "storage_blocks": 3000, "host_blocks": 200},
    "bus, roles": {"workers": None, "prefill": 2, "decode": 2, "bus_bandwidth": 1, "num_gpu_blocks": 200},
    "bus, failing": {
        "workers": [{"name": "a", "count": 2}, {"name": "b", "fail": "1500ms"}, {"name": "c", "fail": "2s"}],
        "peer_pull": "device:min_lead=64",
        "bus_bandwidth": 0.3,
    },
    "failing": {
        "workers": [{"name": "a", "count": 2}, {"name": "b", "fail": "1500ms"}, {"name": "c", "fail": "2s"}],
        "nic_bandwidth": 0.1,
    },
}
QUICK = ("slow", "device, tight", "hybrid", "roles", "failing", "bus, on eviction", "bus, roles")


def check_nothing_left(fleet: Fleet) -> None:
    """Every request ended, every block and page is free again, and the network is empty."""
    assert fleet.pulls is not None and fleet.fabric is not None
    pulls = fleet.pulls.pulls
    pulls.check_integrity()
    assert not pulls.in_flight and not pulls.expected and not fleet.fabric.network.in_flight
    for worker in fleet.workers:
        for core in worker.cores if worker.alive else ():
            core.begin(fleet.now + 1)  # what was released goes back with the next pass
            core.check_integrity()
            pool = core.scheduler.manager.pool
            assert pool.free == pool.num_blocks - 1, f"{worker.name} still holds blocks"
            assert core.offload is not None
            for tier in core.offload.tiers:
                assert tier.store.pool.free == tier.store.num_pages, f"{worker.name} still holds pages"
    assert all(record.status in ("finished", "rejected") for record in fleet.records.values())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_plans_and_single_steps_give_the_same_and_nothing_is_left(kind):
    trace = list(sessions(60, seed=3, arrivals="poisson:rate=30"))
    found = []
    for plans in (True, False):
        done = replay(trace, plans=plans, **{**SMALL, **KINDS[kind]})
        check_nothing_left(done.fleet)
        found.append((list(done.fleet.records.values()), done.report.pulls))
    assert found[0] == found[1]
    pulls = found[0][1]
    assert pulls is not None and pulls.landed, "nothing was pulled, so nothing was tested"
    if kind == "failing":
        assert pulls.failed


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "slow" else pytest.mark.slow) for kind in KINDS if "bus" not in kind],
)
def test_a_bus_that_is_wide_enough_changes_nothing(kind):
    """Offloading goes over the fleet's network then, and lands at the same instants."""
    trace = list(sessions(60, seed=3, arrivals="poisson:rate=30"))
    wide = {"bus_bandwidth": 100_000}
    runs = [replay(trace, **{**SMALL, **KINDS[kind], **more}).fleet.records for more in ({}, wide)]
    assert runs[0] == runs[1]


@settings(max_examples=8)
@given(
    st.sampled_from(["host", "device"]),
    st.lists(st.integers(1, 8000), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_workers_that_fail_at_any_instant_lose_nothing(source, failures, seed):
    """One worker lives on, so that all can be served."""
    kinds: list[dict[str, Any]] = [{"name": "a"}]
    kinds += [{"name": f"b{at}x", "fail": f"{ms}ms"} for at, ms in enumerate(failures)]
    trace = sessions(30, seed=seed, arrivals="poisson:rate=20")
    given = {**SMALL, "workers": kinds, "nic_bandwidth": 0.5, "peer_pull": f"{source}:min_lead=64"}
    fleet = Fleet(make_config(given))
    assert fleet.pulls is not None

    def landed(pull: Pull) -> None:
        assert fleet.workers[pull.source.worker].alive or not pull.copy.pieces, "the dead were read"

    fleet.pulls.pulls.watch = landed
    fleet.run(trace)
    check_nothing_left(fleet)


def prompts(*arrivals_ms: int, tokens: int = 8192, output: int = 2) -> list[TraceRequest]:
    """Requests whose first ``tokens`` are the same, and 64 of their own."""
    ids = tuple(range(tokens // 512))
    return [
        TraceRequest(str(at), ms * MS, tokens + 64, output, ids=(*ids, 1000 + at), id_block_size=512)
        for at, ms in enumerate(arrivals_ms)
    ]


def fields(done: SimulatedRun) -> Sequence[int]:
    return [record.pulled for record in done.fleet.records.values()]


def test_the_second_worker_pulls_what_the_first_has_computed_and_the_third_may_choose():
    """By hand: 8,192 tokens of 128 KiB take 21,475 us at 50 GB/s and 33,554 us at 32 GB/s."""
    given = {"workers": 3, "router": "round-robin", "host_blocks": "4k", "peer_pull": "host"}
    done = replay(prompts(0, 2000, 4000), **given)
    check_nothing_left(done.fleet)
    first, second, third = done.fleet.records.values()
    assert fields(done) == [0, 8192, 8192] and first.ttft > second.ttft == third.ttft
    moved = 8192 * 131072
    way = 10_000 + -(-moved // 50) + moved // 32
    assert second.loading == way
    rest = replay(prompts(0, tokens=0), workers=1, router="round-robin").fleet.records["0"]
    # What is left is computed after the rest, which takes a little longer than alone.
    assert rest.ttft <= second.ttft - way < 1.2 * rest.ttft
    # Now all three have it, and announced it: a fourth goes to any of them and finds it.
    done = replay(prompts(0, 2000, 4000, 6000, 8000, 10_000), **given)
    assert fields(done) == [0, 8192, 8192, 0, 0, 0]
    assert [record.cached for record in done.fleet.records.values()][3:] == [8192] * 3


def test_too_few_tokens_and_too_many_pulls_are_computed():
    given = {"workers": 2, "router": "round-robin", "host_blocks": "4k"}
    assert fields(replay(prompts(0, 2000), **given, peer_pull="host:min_lead=8193")) == [0, 0]
    assert fields(replay(prompts(0, 2000), **given, peer_pull="host:min_lead=8192")) == [0, 8192]
    different = [
        *(TraceRequest(f"a{at}", 20 * at * MS, 2048, 1, ids=(at,), id_block_size=2048) for at in range(4)),
        *(TraceRequest(f"b{at}", 5000 * MS, 2049, 1, ids=(at, 10 + at), id_block_size=2048) for at in range(4)),
    ]
    swapped = [*different[:4], *(different[4 + at] for at in (1, 0, 3, 2))]
    done = replay(swapped, **given, peer_pull="host:in_flight=1")
    assert done.report.pulls is not None and done.report.pulls.busy == 2 and done.report.pulls.landed == 2


def test_the_load_policy_goes_for_pulls_too():
    """Over a network of 1 GB/s a prompt is computed sooner than it is pulled."""
    given = {"workers": 2, "router": "round-robin", "host_blocks": "4k", "peer_pull": "host", "nic_bandwidth": 1}
    forced = replay(prompts(0, 2000), **given)
    chosen = replay(prompts(0, 2000), load_policy="least-time", **given)
    assert fields(forced) == [0, 8192] and fields(chosen) == [0, 0]
    assert chosen.report.pulls is not None and chosen.report.pulls.refused == {"slower": 1}
    records = [done.fleet.records["1"] for done in (forced, chosen)]
    assert records[0].ttft > 5 * records[1].ttft
    assert records[1].left == 8192 and records[1].miss == "left"


def test_the_report_says_what_was_pulled(tmp_path, capsys):
    done = replay(prompts(0, 2000, 4000), workers=3, router="round-robin", host_blocks="4k", peer_pull="host")
    pulls = done.report.pulls
    assert pulls is not None
    assert (pulls.begun, pulls.landed, pulls.tokens.part) == (2, 2, 16_384)
    assert pulls.ms == pytest.approx(8192 * 131072 / 50e6 + 0.01)
    assert done.report.transfers["pulls"].bytes == 16_384 * 131_072
    print_report(done.report)
    words = " ".join(capsys.readouterr().out.split())
    assert "16,384 tokens (66.15% of prompts) were pulled from other workers' host in 2 pulls" in words
    assert "pulled from other workers" in page(done.report)
    done.save(report=tmp_path / "r.json", per_request=tmp_path / "r.jsonl")
    assert '"pulled_tokens":8192' in (tmp_path / "r.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_llm_ds_table_is_predicted_from_two_of_its_rows(tmp_path):
    """See ``benchmarks/peer_pull.py``, which prints it."""
    for table in peer_pull.TABLES:
        fit = peer_pull.fitted(table, tmp_path)
        for prefix, computed, pulled in zip(peer_pull.PREFIXES, table.computed, table.pulled, strict=True):
            assert peer_pull.request(fit, prefix, False, tmp_path) == pytest.approx(computed, rel=0.15)
            assert peer_pull.request(fit, prefix, True, tmp_path) == pytest.approx(pulled, rel=0.15)


def test_choosing_beats_forced_pulls():
    """One cell of the scenario in the shape of llm-d-router #2833, where forced pulls hurt."""
    rows = peer_pull.prompts(8192, 8)
    forced, chosen = (peer_pull.ttft(rows, 4, **peer_pull.POLICIES[name]) for name in ("always", "least-time"))
    assert chosen < 0.8 * forced


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"peer_pull": "host"}, "peer_pull lands in a worker's host tier: give host_blocks"),
        ({"peer_pull": "disk", "host_blocks": 10}, "peer_pull reads from host or device, not from 'disk'"),
        ({"peer_pull": "host:lead=1", "host_blocks": 10}, "peer_pull has no 'lead': it has min_lead"),
        ({"peer_pull": "host:min_lead=0", "host_blocks": 10}, "min_lead must be at least 1, got 0"),
        ({"peer_pull": 3, "host_blocks": 10}, "peer_pull is 3: write host or device"),
        ({"peer_pull": "host", "host_blocks": 10, "host_scope": "shared"}, "peer_pull is not modelled with shared"),
        ({"peer_pull": "device", "host_blocks": 10, "blocks_per_chunk": 2}, "leave out blocks_per_chunk"),
        ({"peer_pull": "device", "host_blocks": 10, "num_speculative_tokens": 2}, "draft tokens: pull from host"),
        ({"nic": "cx7", "host_blocks": 10}, "nic is for fleets with prefill and decode workers, or with peer_pull"),
        ({"peer_pull": "host", "host_blocks": 10, "decider": "never"}, "decider is for fleets with prefill"),
        ({"peer_pull": "host", "host_blocks": 10, "nic": "carrier"}, "unknown nic 'carrier'"),
        (
            {"workers": [{"host_blocks": 10}, {"host_blocks": 10, "block_size": 32}], "peer_pull": "host"},
            "must have the same attention groups and blocks",
        ),
    ],
)
def test_senseless_settings_are_refused_in_one_sentence(given, words):
    with pytest.raises(KvyardError, match=words):
        make_config(given)


def test_peer_pull_can_be_set_in_a_file():
    pull = make_config({"peer_pull": {"source": "device", "in_flight": 3}, "host_blocks": 10}).peer_pull
    assert pull is not None and (pull.source, pull.in_flight, pull.min_lead) == ("device", 3, 1024)
    assert make_config({"peer_pull": "off"}).peer_pull is None
