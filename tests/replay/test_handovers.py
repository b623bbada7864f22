"""Prompts handed over from worker to worker: stamps of Dynamo's replay, blocks that are all accounted for, contents that
survive.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.support import sessions

from kvyard.engine.job import Job
from kvyard.errors import KvyardError
from kvyard.replay.fleet import Fleet
from kvyard.replay.handovers import Handover, Handovers
from kvyard.replay.jobs import PREFILL
from kvyard.replay.record import Record
from kvyard.replay.report.answers import answers
from kvyard.replay.run import SimulatedRun, replay
from kvyard.replay.settings import make_config
from kvyard.replay.split_placement import SplitPlacement
from kvyard.replay.traces import TraceRequest
from kvyard.replay.worker import Worker

VECTORS = json.loads((Path(__file__).parent / "dynamo_handovers.json").read_text())
SMALL: dict[str, Any] = {"block_size": 16, "num_gpu_blocks": 400, "bytes_per_token": 131072}


def stage_times(record: Record) -> list[tuple[str, int]]:
    """Nanoseconds that a finished request, which was handed over, spent in each stage."""
    stages = record.stages
    assert stages is not None
    names = ["prefill_queue", "prefill", "room", "transfer", "decode_queue", "first_step"]
    marks = [record.admitted, stages.held, stages.reserved, stages.activated, stages.entered, record.first_token]
    if stages.reserved < stages.held:  # room was made first, and the prompt waited for that
        names = ["room", "prefill_queue", "prefill", *names[3:]]
        marks = [stages.reserved, record.admitted, stages.held, *marks[3:]]
    return [(name, mark - before) for name, before, mark in zip(names, (record.arrival, *marks), marks, strict=False)]


def handovers_of(fleet: Fleet) -> Handovers:
    assert isinstance(fleet.placement, SplitPlacement)
    return fleet.placement.handovers


def check_nothing_left(done: SimulatedRun) -> None:
    """Every request ended, every block is free again, and the network is empty."""
    fleet = done.fleet
    handovers = handovers_of(fleet)
    handovers.check_integrity()
    assert not handovers.in_flight and not handovers.network.in_flight
    for worker in fleet.workers:
        for core in worker.cores if worker.alive else ():
            core.begin(fleet.now + 1)  # what was released goes back with the next pass
            core.check_integrity()
            pool = core.scheduler.manager.pool
            assert pool.free == pool.num_blocks - 1, f"{worker.name} still holds blocks"
    for record in fleet.records.values():
        assert record.status in ("finished", "rejected"), record
        if record.status == "finished" and record.stages is not None:
            times = stage_times(record)
            assert sum(spent for _, spent in times) == record.ttft
            assert all(spent >= 0 for _, spent in times), (record, times)


# -- Dynamo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, backend, id=f"{case['name']}, {backend}")
        for case in VECTORS["cases"]
        for backend in ("vllm", "sglang")
        if backend == "vllm"
        or backend in case  # SGLang cuts an answer that its pool has no room for, and Dynamo doesn't
    ],
)
def test_stamps_are_those_of_dynamos_replay(case, backend):
    """To the nanosecond; where something is sent, and with its SGLang, to the one that it rounds away. Blocks that arrive, or
    may go, in the middle of a pass have its end for a stamp there, and here the instant at which they do.
    """
    rows = [
        TraceRequest(
            id=str(at),
            arrival=row["timestamp"] * 1_000_000,
            input_length=row["input_length"],
            output_length=row["output_length"],
            ids=tuple(row["hash_ids"]),
            id_block_size=64,
        )
        for at, row in enumerate(case["rows"])
    ]
    given = dict(case["settings"])
    expected = [dict(stamps) for stamps in case["stamps" if backend == "vllm" else backend]]
    if backend == "sglang":
        given |= {"backend": backend, "protocol": "destination-first", "block_size": 64}
    kinds = [{"role": role, "name": role[0], "count": 1, **given.pop(role, {})} for role in ("prefill", "decode")]
    if "sends" not in given:
        given["nic"] = "none"
    speed = given.pop("nic_bandwidth", 50)
    if given.get("nic") != "none":
        given |= {"nic_bandwidth": speed, "nic_latency": 0, "contention": False}
    done = replay(rows, workers=kinds, router="kv", **given)
    slack = len(rows) if "sends" in given else int(backend == "sglang")
    for record, stamps in zip(done.fleet.records.values(), expected, strict=True):
        stages = record.stages
        assert stages is not None
        found = {
            "admitted": record.admitted,
            "first_token": record.first_token,
            "ended": record.ended,
            "cached": record.cached,
            **{name: getattr(stages, name) for name in ("held", "reserved", "entered")},
        }
        late = {name: stamps.pop(name) for name in ("activated", "released")}
        assert found == pytest.approx(stamps, abs=slack, rel=0)
        assert stages.activated == stages.released <= min(late.values()) + slack
    check_nothing_left(done)


# -- nothing is lost --------------------------------------------------------------------------------------------------

KINDS = {
    "plain": {},
    "room first": {"protocol": "destination-first"},
    "slow network": {"nic_bandwidth": 2, "node_bandwidth": 3, "workers_per_node": 2},
    "slow network, room first": {"nic_bandwidth": 2, "protocol": "destination-first"},
    "slow network, room for one": {"nic_bandwidth": 2, "reserves": "one"},
    "tight, room for one first": {"num_gpu_blocks": 130, "protocol": "destination-first", "reserves": "one"},
    "tight": {"num_gpu_blocks": 130},
    "tight, room first": {"num_gpu_blocks": 130, "protocol": "destination-first"},
    "with a host tier": {"num_gpu_blocks": 150, "host_blocks": 400},
    "drafts": {"num_speculative_tokens": 2},
    "drafts, tight": {"num_speculative_tokens": 2, "num_gpu_blocks": 150},
    "decided ahead": {"async_scheduling": True},
    "decided ahead, tight": {"async_scheduling": True, "num_gpu_blocks": 130},
    "decided ahead, slow network, room first": {
        "async_scheduling": True,
        "nic_bandwidth": 2,
        "protocol": "destination-first",
    },
    "with a shared host tier": {"num_gpu_blocks": 150, "host_blocks": 900, "host_scope": "shared"},
    "with shared storage": {
        "num_gpu_blocks": 150,
        "host_blocks": 300,
        "storage_blocks": 900,
        "storage_scope": "shared",
    },
    "with shared storage, room first": {
        "num_gpu_blocks": 150,
        "host_blocks": 300,
        "storage_blocks": 900,
        "storage_scope": "shared",
        "protocol": "destination-first",
        "nic_bandwidth": 2,
    },
    "trtllm, tight": {"backend": "trtllm", "num_gpu_blocks": 180},
    "trtllm, tight, slow network": {"backend": "trtllm", "num_gpu_blocks": 180, "nic_bandwidth": 2},
    "trtllm, tight, no network": {"backend": "trtllm", "num_gpu_blocks": 180, "nic": "none"},
    "sglang": {"backend": "sglang", "protocol": "destination-first"},
    "sglang, tight": {"backend": "sglang", "protocol": "destination-first", "num_gpu_blocks": 180},
    "sglang, tight, slow network": {
        "backend": "sglang",
        "protocol": "destination-first",
        "num_gpu_blocks": 180,
        "nic_bandwidth": 2,
    },
    "sglang, some kept": {
        "backend": "sglang",
        "decider": "uncached",
        "decider_options": "tokens=400",
        "num_gpu_blocks": 200,
    },
    "sglang, longest prefix first": {
        "backend": "sglang",
        "sglang": {"schedule_policy": "lpm"},
        "protocol": "destination-first",
        "num_gpu_blocks": 200,
    },
    "by least time": {"decider": "least-time", "decider_options": "interference=2", "router": "least-time"},
    "some kept": {"decider": "uncached", "decider_options": "tokens=400"},
    "hybrid": {
        "block_size": None,
        "bytes_per_token": None,
        "bytes_per_block": 65536,
        "groups": [{"kind": "full", "block_size": 16}, {"kind": "sliding_window", "block_size": 16, "window": 128}],
        "num_gpu_blocks": 900,
    },
    "states": {
        "block_size": None,
        "bytes_per_token": None,
        "bytes_per_block": 65536,
        "groups": [{"kind": "full", "block_size": 16}, {"kind": "mamba", "block_size": 64}],
        "num_gpu_blocks": 900,
    },
}


SELDOM = (
    *("drafts", "decided ahead", "decided ahead, slow network, room first", "with a shared host tier"),
    *("with shared storage, room first", "trtllm, tight, slow network", "sglang", "sglang, tight", "sglang, some kept"),
)
"""Left to the slow suite: each has a sister here that is harder."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SELDOM else kind for kind in KINDS]
)
def test_plans_and_single_steps_give_the_same_and_nothing_is_left(kind):
    trace = list(sessions(60, seed=3, arrivals="poisson:rate=30"))
    records = []
    for plans in (True, False):
        done = replay(trace, prefill=2, decode=2, plans=plans, **{"router": "kv", **SMALL, **KINDS[kind]})
        check_nothing_left(done)
        records.append(list(done.fleet.records.values()))
    assert records[0] == records[1]
    handed = [record for record in records[0] if record.stages is not None]
    assert handed, "none was handed over, so nothing was tested"


FAILURES = st.lists(st.tuples(st.sampled_from("pd"), st.integers(1, 8000)), min_size=1, max_size=3)


@settings(max_examples=20)
@given(st.sampled_from(["source-first", "destination-first"]), FAILURES, st.integers(0, 5))
def test_no_request_is_lost_if_a_worker_fails_at_any_instant(protocol, failures, seed):
    check_failures(failures, seed, {"protocol": protocol})


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(KINDS)), FAILURES, st.integers(0, 5))
def test_no_request_is_lost_if_a_worker_fails_in_any_fleet(kind, failures, seed):
    """With preemption, drafts, passes decided ahead, lower and shared tiers, hybrid models, and SGLang's scheduler."""
    check_failures(failures, seed, KINDS[kind])


def check_failures(failures: list[tuple[str, int]], seed: int, given: dict[str, Any]) -> None:
    """One worker of each role lives on, so that all can be served."""
    kinds = [{"role": "prefill", "name": "p", "count": 1}, {"role": "decode", "name": "d", "count": 1}]
    for at, (role, ms) in enumerate(failures):
        kinds.append(
            {"role": "prefill" if role == "p" else "decode", "name": f"{role}{at}x", "count": 1, "fail": f"{ms}ms"}
        )
    trace = sessions(40, seed=seed, arrivals="poisson:rate=20")
    done = replay(trace, workers=kinds, **{"router": "kv", "nic_bandwidth": 1, **SMALL, **given})
    check_nothing_left(done)


@pytest.mark.parametrize(("host", "spent"), [(50, 2), (25, 2), (12.5, 4 / 3)])
def test_a_handover_shares_the_bus_with_what_its_worker_offloads(host, spent):
    """Both begin when the prompt is computed, with the same bytes. The bus has 50 GB/s, and so has the network: each gets half
    of it, unless the host takes less.
    """
    row = TraceRequest(id="a", arrival=0, input_length=4096, output_length=2, ids=tuple(range(8)), id_block_size=512)
    given = {"prefill": 1, "decode": 1, "host_blocks": 200, "nic_bandwidth": 50, "nic_latency": 0}
    took = []
    for more in ({}, {"bus_bandwidth": 50}):
        done = replay([row], host_bandwidth=host, **given, **more)
        check_nothing_left(done)
        stages = done.fleet.records["a"].stages
        assert stages is not None
        took.append(stages.activated - stages.held)
    alone = 4096 * 131072 / 50
    assert took == pytest.approx([alone, spent * alone], abs=2)
    made = done.report.handovers
    assert made is not None and made.network["out of devices"].bytes == 2 * made.bytes


CARD: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "front_end_us": 5000.0, "front_end_token_us": 2.0}


def test_a_computed_prompt_goes_through_the_decode_workers_front_end():
    rows = [TraceRequest(id="a", arrival=0, input_length=1000, output_length=5)]
    once, twice = (replay(rows, prefill=1, decode=1, second_front_end=again, **CARD) for again in (False, True))
    before, after = (done.fleet.records["a"] for done in (once, twice))
    assert before.stages is not None and after.stages is not None
    assert after.stages.held == before.stages.held
    assert after.stages.reserved - before.stages.reserved == 7_000_000
    assert after.first_token - before.first_token == 7_000_000


def test_with_room_first_both_front_ends_are_passed_together():
    rows = [TraceRequest(id=str(at), arrival=at * 10**8, input_length=1000, output_length=5) for at in range(4)]
    given = {"prefill": 1, "decode": 1, "protocol": "destination-first"}
    once, twice = (replay(rows, second_front_end=again, **given, **CARD) for again in (False, True))
    assert once.records == twice.records


@pytest.mark.parametrize("ms", range(1, 60, 3))
def test_a_prompt_in_the_second_front_end_survives_its_prefill_worker(ms):
    kinds = [
        {"role": "prefill", "name": "p", "count": 1, "fail": f"{ms}ms"},
        {"role": "prefill", "name": "q", "count": 1, "start": "100ms"},
        {"role": "decode", "name": "d", "count": 1},
    ]
    rows = [TraceRequest(id=str(at), arrival=at * 10**6, input_length=1000, output_length=5) for at in range(3)]
    done = replay(rows, workers=kinds, **CARD)
    assert {record.status for record in done.records} == {"finished"}
    handovers = handovers_of(done.fleet)
    handovers.check_integrity()
    assert not handovers.in_flight and not handovers.network.in_flight


def test_requests_wait_for_a_decode_worker_that_comes_later():
    kinds = [
        {"role": "prefill", "name": "p", "count": 1},
        {"role": "decode", "name": "d", "count": 1, "fail": "1s"},
        {"role": "decode", "name": "e", "count": 1, "start": "5s"},
    ]
    done = replay(sessions(20, seed=2), workers=kinds, router="kv", **SMALL)
    check_nothing_left(done)
    late = [record for record in done.fleet.records.values() if record.worker.startswith("e")]
    assert late and all(record.first_token >= 5_000_000_000 for record in late)


def test_a_prompt_too_large_for_the_decode_worker_is_refused_and_its_blocks_go_back():
    kinds = [
        {"role": "prefill", "name": "p", "count": 1, "num_gpu_blocks": 400},
        {"role": "decode", "name": "d", "count": 1, "num_gpu_blocks": 20},
    ]
    rows = [
        TraceRequest(id="big", arrival=0, input_length=1000, output_length=5, ids=None),
        TraceRequest(id="small", arrival=0, input_length=100, output_length=5, ids=None),
    ]
    done = replay(rows, workers=kinds, router="kv", block_size=16)
    check_nothing_left(done)
    assert {record.id: record.status for record in done.fleet.records.values()} == {
        "big": "rejected",
        "small": "finished",
    }


# -- contents ---------------------------------------------------------------------------------------------------------


class Memory:
    """Content of every block of every worker, token by token. Written when computed, copied when handed over, compared when
    read: a block that is freed too early is overwritten by others, and that shows.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._cells: dict[tuple[int, int, int], dict[int, object]] = {}
        self.checked = 0
        self.copied = 0
        for worker in fleet.workers:
            for core in worker.cores:
                self._watch(worker, core)
        handovers = handovers_of(fleet)
        activate = handovers._activate

        def copying(hand: Handover, now: int) -> None:
            self._copy(hand)
            activate(hand, now)

        handovers._activate = copying  # type: ignore[method-assign]

    def _watch(self, worker: Worker, core: Any) -> None:
        watcher = core.watcher
        before = watcher.decided

        def decided(made: Any, now: int) -> None:
            before(made, now)
            for job, new, past in made.chunks:
                self._read(worker, core, job, past)
                self._write(worker, core, job, past, past + new)
            for job in core.scheduler.lockstep():
                past = job.base + core.scheduler.batch.tick - job.joined
                self._read(worker, core, job, past)
                self._write(worker, core, job, past, past + 1)

        watcher.decided = decided

    def _label(self, job: Job, token: int) -> object:
        """Return the right content: the text up to it, or an answer's own token."""
        trace = job.chain.trace  # type: ignore[union-attr]
        if token < job.num_prompt_tokens and token // trace.id_block_size < len(trace.ids):
            return trace.ids[token // trace.id_block_size], token % trace.id_block_size
        return job.id.removesuffix(PREFILL), token

    def _slots(self, worker: Worker, core: Any, job: Job, first: int, last: int, at: int):
        """Tokens of a job and the cell that each has in every group, without what a window no longer reads ``at`` a token."""
        for group, (rule, ids) in enumerate(
            zip(core.scheduler.manager.groups, core.scheduler.manager.block_ids(job), strict=True)
        ):
            size = rule.block_size
            for token in range(max(first, rule.rule.stale(at)), last):
                assert ids[token // size], f"{job} has no block for token {token}"
                yield token, self._cells.setdefault((worker.number, group, ids[token // size]), {}), token % size

    def _write(self, worker: Worker, core: Any, job: Job, first: int, last: int) -> None:
        for token, cell, offset in self._slots(worker, core, job, first, last, first):
            cell[offset] = self._label(job, token)

    def _read(self, worker: Worker, core: Any, job: Job, past: int) -> None:
        """As in vLLM a decode worker keeps what the token behind the prompt reads of a window, and computes the last prompt
        token again: at the edge of a block, the first token of its window isn't there.
        """
        handed = past == job.num_prompt_tokens - 1 and not job.id.endswith(PREFILL)
        for token, cell, offset in self._slots(worker, core, job, 0, past, past + handed):
            assert cell.get(offset) == self._label(job, token), (
                f"{worker.name} reads something else at {token} of {job}"
            )
            self.checked += 1

    def _copy(self, hand: Handover) -> None:
        assert (
            hand.source is not None and hand.target is not None and hand.prefill is not None and hand.decode is not None
        )
        (source, rank), (target, other) = hand.source, hand.target
        tokens = hand.decode.num_prompt_tokens
        sent = self._slots(source, source.cores[rank], hand.prefill, tokens - hand.missing, tokens, tokens)
        got = self._slots(target, target.cores[other], hand.decode, tokens - hand.missing, tokens, tokens)
        for (token, cell, offset), (_, copy, at) in zip(sent, got, strict=True):
            assert cell.get(offset) == self._label(hand.prefill, token), (
                f"{source.name} sends something else of {hand.prefill}"
            )
            copy[at] = cell[offset]
            self.copied += 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("protocol", ["source-first", "destination-first"])
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_contents_survive_the_way_from_prefill_to_decode_and_into_the_next_turn(protocol, seed, kind):
    """With preemption, small pools and a slow network, so that blocks are wanted while they are read."""
    random = Random(seed)
    trace = list(sessions(30, seed=seed, arrivals="poisson:rate=40", output="fixed:16"))
    config = make_config(
        {
            "prefill": 2,
            "decode": 2,
            "router": "kv",
            "protocol": protocol,
            "nic_bandwidth": random.choice([0.5, 3]),
            **(SMALL if kind == "full" else KINDS[kind]),
            "num_gpu_blocks": 160 if kind == "full" else 260,
            "plans": False,
        }
    )
    fleet = Fleet(config)
    memory = Memory(fleet)
    fleet.run(trace)
    assert memory.copied > 5_000 and memory.checked > memory.copied
    assert all(record.status in ("finished", "rejected") for record in fleet.records.values())


def test_a_source_that_lets_go_too_early_is_noticed(monkeypatch):
    """The check above can fail: here blocks are released when the transfer begins."""
    send = Handovers._send

    def eager(self, hand, now):
        held, hand.stages.released = hand.stages.released, -1
        self._release(hand, now)
        hand.stages.released = held
        send(self, hand, now)

    monkeypatch.setattr(Handovers, "_send", eager)
    with pytest.raises((AssertionError, IndexError)):
        test_contents_survive_the_way_from_prefill_to_decode_and_into_the_next_turn("source-first", 0, "full")


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill": 2}, "prefill and decode go together: say how many decode workers there are, too"),
        ({"prefill": 0, "decode": 1}, "prefill is 0: there must be at least one"),
        ({"prefill": 1, "decode": 1, "workers": 3}, "leave one of the two out"),
        ({"workers": [{"role": "prefill"}]}, "no worker is there at the start to decode"),
        ({"workers": 2, "decider": "never"}, "decider is for fleets with prefill and decode workers"),
        ({"prefill": 1, "decode": 1, "decider": "perhaps"}, "unknown split policy 'perhaps'"),
        ({"prefill": 1, "decode": 1, "nic": "carrier"}, "unknown nic 'carrier': choose one of cx7"),
        ({"prefill": 1, "decode": 1, "streamed": 2}, "streamed is a share from 0 to 1"),
        (
            {"workers": [{"role": "prefill", "block_size": 16}, {"role": "decode", "block_size": 32}]},
            "must have the same attention groups and block sizes",
        ),
        ({"disaggregation_mode": "x"}, "say prefill and decode"),
    ],
)
def test_senseless_settings_are_refused_in_one_sentence(given, words):
    with pytest.raises(KvyardError, match=words):
        make_config(given)


@pytest.mark.parametrize("protocol", ["source-first", "destination-first"])
def test_a_prompt_of_one_token_is_answered(protocol):
    """Its only token is computed again by the decode worker: nothing of it is ever sent, and asking again would never end."""
    rows = [TraceRequest("a", 0, 1, 3), TraceRequest("b", 0, 1, 1)]
    done = replay(rows, prefill=1, decode=1, timing="fixed:10,5", protocol=protocol, limit=2)
    assert [(record.status, record.output) for record in done.records] == [("finished", 3), ("finished", 1)]


def test_streamed_layers_leave_less_to_send():
    trace = list(sessions(30, seed=1))
    sent = []
    for streamed in (0, 0.75):
        done = replay(trace, prefill=1, decode=1, router="kv", streamed=streamed, **SMALL)
        sent.append(sum(record.stages.sent for record in done.fleet.records.values() if record.stages is not None))
    assert sent[1] == pytest.approx(sent[0] / 4, rel=0.01)


def test_the_report_says_where_time_went():
    done = replay(sessions(40, seed=1, arrivals="poisson:rate=20"), prefill=2, decode=1, router="kv", **SMALL)
    made = done.report.handovers
    assert made is not None
    assert made.handed_over.part == 40 and made.decider == "always"
    whole = sum(spread.mean for spread in made.stages.values())
    assert whole == pytest.approx(done.report.latency["ttft"].mean)
    assert made.network["out of workers"].bytes == made.network["into workers"].bytes == made.bytes > 0
    assert {role: one.workers for role, one in made.roles.items()} == {"prefill": 2, "decode": 1}
    prompts = {worker.role: worker.input_tokens for worker in done.report.workers}
    assert prompts["decode"] == 0 and prompts["prefill"] > 0
    assert (
        sum(worker.output_tokens for worker in done.report.workers if worker.role == "decode")
        == done.report.output_tokens
    )


def test_bounds_go_by_where_prompts_were_computed():
    """The room of decode workers has no part in it."""
    trace = list(sessions(60, seed=3, arrivals="poisson:rate=10"))
    pooled = []
    for blocks in (400, 4000):
        kinds = [
            {"role": "prefill", "name": "p", "count": 2},
            {"role": "decode", "name": "d", "num_gpu_blocks": blocks},
        ]
        done = replay(trace, workers=kinds, bounds=True, **{"router": "round-robin", **SMALL, "num_gpu_blocks": 700})
        bounds, reused = done.report.bounds, done.report.reuse["all"].part
        assert reused <= bounds["routed_infinite"].part <= bounds["infinite"].part
        pooled.append(bounds["pooled"].part)
    assert pooled[0] == pooled[1] > 0


def test_advice_names_the_role():
    trace = sessions(60, seed=3, turns="fixed:1", arrivals="poisson:rate=200", output="fixed:200")
    done = replay(trace, prefill=4, decode=1, router="kv", **{**SMALL, "num_gpu_blocks": 4000})
    assert "(--decode 2)" in " ".join(answers(done.report))
