"""I10: a trace through a live fleet behind a gateway, and the same stamps and sequences in virtual time, decide the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.replay.support import sessions
from tests.replay.traces.support import CONVERSATION

from kvyard.errors import KvyardError
from kvyard.lab.rehearsal.live_fleet import LiveFleet
from kvyard.lab.rehearsal.log import NETWORK, ROUTER, LiveRecording, LogLine, first_difference, tally
from kvyard.lab.rehearsal.offline import Offline
from kvyard.lab.rehearsal.run import Proof, Rehearsed, Scripts, Tolerance, observed, prove, rehearse
from kvyard.replay.live.config import LiveConfig
from kvyard.replay.live.endpoint import Endpoint
from kvyard.replay.live.run import LiveRun, drive
from kvyard.replay.run import replay
from kvyard.replay.settings import make_config
from kvyard.replay.traces import Trace, TraceRequest, open_trace
from kvyard.router.journal import Applied, Began, Routed
from kvyard.server.mock.faults import MockFaults

pytestmark = pytest.mark.zmq

PATIENT = Tolerance(p50_ms=10_000, p99_ms=30_000)
"""A test machine may be slow; a clock on another scale, or an answer from another request, is further off than this."""
SHARED_MACHINE = Tolerance(p50_ms=1000, p99_ms=15_000)
"""All of a fleet in one process, for minutes, on cores that others use too: it falls behind at times, and catches up."""
SMALL: dict[str, Any] = {
    "workers": 3,
    "block_size": 16,
    "num_gpu_blocks": 300,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 4500,
    "timing": "fixed:20,10",
    "bytes_per_token": "64KiB",
}
TIERS: dict[str, Any] = {"host_blocks": 800, "host_bandwidth": "1"}
CASES: dict[str, dict[str, Any]] = {
    "ranks": {"workers": 2, "dp_size": 2, "router": "kv", "temperature": 0.5},
    "after hits": {**TIERS, "offload_policy": "after_hits", "router": "affinity", "fallback": "kv"},
    "five tiers": {
        **{"host_blocks": 300, "storage_blocks": 400, "remote_blocks": 500, "object_blocks": 4000},
        **{"host_bandwidth": "1", "storage_latency": 0, "remote_latency": "1ms", "object_latency": "5ms"},
        "object_scope": "private",
    },
}


def short(requests: int = 40) -> Trace:
    """Talks over shared prefixes, too many for a device's memory."""
    return sessions(requests, arrivals="poisson:rate=12", input="lognormal:median=200,sigma=0.7", think="exponential:1")


def settings(**more: Any) -> Any:
    return make_config({**SMALL, **more})


def lines(recording: LiveRecording, what: str) -> list[LogLine]:
    return [line for place in recording.log.values() for line in place if line.what == what]


def told(recording: LiveRecording, fact: str) -> int:
    """How many blocks all announcements say that of."""
    return sum(line.facts.get(fact, 0) for line in lines(recording, "announced"))  # type: ignore[misc]


def proven(done: Rehearsed) -> tuple[Proof, LiveRecording]:
    assert done.proof is not None and done.recording is not None
    assert done.proof.equal, str(done.proof)
    return done.proof, done.recording


@pytest.fixture(scope="module")
def performed() -> Rehearsed:
    """A run with tiers, to be looked at and then tampered with."""
    return rehearse(short(), settings(**TIERS), speed=8.0, proven=True, tolerance=PATIENT)


def test_the_same_decisions(performed: Rehearsed) -> None:
    look_at(performed)
    assert performed.recording is not None and told(performed.recording, "stored G2")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in ("ranks", "after hits") else ()) for case in CASES]
)
def test_the_same_decisions_otherwise(case: str) -> None:
    look_at(rehearse(short(), settings(**CASES[case]), speed=8.0, proven=True, tolerance=PATIENT))


def look_at(done: Rehearsed) -> None:
    """It is equal, and equal about something."""
    proof, recording = proven(done)
    assert done.run.complete and done.run.report.requests == {"all": 40, "finished": 40}
    assert proof.close, str(proof)
    assert proof.requests == 40 and proof.first_token.count == proof.last_token.count == 40
    assert "all" in str(proof) and "within the tolerance" in str(proof)
    # The comparison is about something: workers were chosen, for prefixes as well, and caches were full.
    routed = [entry for entry in recording.entries if isinstance(entry, Routed)]
    assert len(routed) == 40 and len({entry.decision.worker for entry in routed}) > 1
    assert any(entry.decision.overlap for entry in routed)
    assert any(line.facts["cached"] for line in lines(recording, "admitted"))
    assert told(recording, "stored G1") and told(recording, "removed G1")
    assert sum(isinstance(entry, Applied) and entry.events > 0 for entry in recording.entries) > 50
    # And what clients were told is what was decided.
    decisions = {entry.id: entry.decision for entry in routed}
    found: dict[str, Any] = {}
    for line in lines(recording, "admitted"):
        found.setdefault(line.of, line.facts)
    for record in done.run.records:
        decision = decisions[record.id]
        assert record.worker == str(decision.worker) and record.overlap == decision.overlap
        assert record.best_overlap == decision.best and record.retries == 0
        assert record.cached == found[record.id]["cached"] + found[record.id]["loaded"]


def again(recording: LiveRecording, rows: Sequence[TraceRequest] | Trace | None = None, seed: int = 0) -> Proof:
    return prove(recording, Scripts(rows or short(), LiveConfig(seed=seed)).of)


def tampered(done: Rehearsed, **changes: Any) -> LiveRecording:
    assert done.recording is not None
    return msgspec.structs.replace(done.recording, **changes)


class TestAnInputThatDiffersShows:
    """The negative controls: the comparison fails where it should, and says where."""

    def test_nothing_changed(self, performed: Rehearsed) -> None:
        assert performed.recording is not None
        assert again(performed.recording).equal

    def test_another_stamp(self, performed: Rehearsed) -> None:
        assert performed.recording is not None
        actions = [list(some) for some in performed.recording.actions]
        first = actions[1][0]
        actions[1][0] = msgspec.structs.replace(first, stamp=first.stamp - 1_000_000)
        changed = tampered(performed, actions=actions)
        assert not again(changed).equal
        # Its own admission is the first thing that moves.
        offline = Offline(changed, Scripts(short(), LiveConfig()).of)
        offline.run()
        place = "worker1@0"
        moved = first_difference({place: changed.log[place]}, {place: offline.log[place]})
        assert moved is not None and moved.live is not None and moved.live.of == first.request
        assert moved.live.what == "admitted" and "its time" in str(moved)

    def test_a_batch_seen_later(self, performed: Rehearsed) -> None:
        """Decisions that don't know what the live ones knew are others."""
        assert performed.recording is not None
        entries = list(performed.recording.entries)
        early = [entry for entry in entries if not isinstance(entry, Applied)]
        late = [entry for entry in entries if isinstance(entry, Applied)]
        offline = Offline(tampered(performed, entries=early + late), Scripts(short(), LiveConfig()).of)
        offline.run()
        routed = [
            {ROUTER: [line for line in log[ROUTER] if line.what == "routed"]}
            for log in (performed.recording.log, offline.log)
        ]
        assert first_difference(*routed) is not None

    def test_another_order(self, performed: Rehearsed) -> None:
        """One batch and one decision swapped: already in the order they differ."""
        assert performed.recording is not None
        entries = list(performed.recording.entries)
        at = next(
            at
            for at in range(len(entries) - 1)
            if isinstance(entries[at], Applied) and isinstance(entries[at + 1], Routed)
        )
        entries[at], entries[at + 1] = entries[at + 1], entries[at]
        proof = again(tampered(performed, entries=entries))
        assert proof.difference is not None and proof.difference.place == ROUTER
        assert {proof.difference.live.what, proof.difference.offline.what} == {"applied", "routed"}  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        "change",
        [{"num_gpu_blocks": 299}, {"timing": "fixed:20,11"}, {"host_blocks": 60}, {"max_num_batched_tokens": 100}],
    )
    def test_another_engine(self, performed: Rehearsed, change: dict[str, Any]) -> None:
        assert performed.recording is not None
        fleet = msgspec.structs.replace(
            performed.recording.fleet, engine=settings(**{**TIERS, **change}).workers[0].engine
        )
        proof = again(tampered(performed, fleet=fleet))
        assert not proof.equal and proof.difference is not None

    @pytest.mark.parametrize(
        "change", [{"policy": "kv"}, {"policy": "round-robin"}, {"options": {"interference": 3.0, "renewal": 5.0}}]
    )
    def test_another_router(self, performed: Rehearsed, change: dict[str, Any]) -> None:
        assert performed.recording is not None
        entries = [
            msgspec.structs.replace(entry, config=msgspec.structs.replace(entry.config, **change))
            if isinstance(entry, Began)
            else entry
            for entry in performed.recording.entries
        ]
        proof = again(tampered(performed, entries=entries))
        assert proof.difference is not None and proof.difference.place == ROUTER
        assert proof.difference.live is not None and proof.difference.live.what == "routed"
        assert str(proof).startswith("Live is not offline: router, decision ")

    def test_other_prompts(self, performed: Rehearsed) -> None:
        assert performed.recording is not None
        proof = again(performed.recording, seed=1)
        assert proof.difference is not None and "tail" in str(proof)

    def test_a_decision_that_was_not_taken(self, performed: Rehearsed) -> None:
        """A live log that claims something else: the log is compared, not only the journal."""
        assert performed.recording is not None
        log = {place: list(some) for place, some in performed.recording.log.items()}
        where, at = next(
            (place, at) for place, some in log.items() for at, line in enumerate(some) if line.what == "admitted"
        )
        line = log[where][at]
        log[where][at] = msgspec.structs.replace(line, facts=line.facts | {"cached": 7777})
        proof = again(tampered(performed, log=log))
        assert proof.difference is not None and proof.difference.number == at
        assert "what differs is cached" in str(proof) and "7777" in str(proof)


ROLES: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name != "workers"},
    **{"prefill": 2, "decode": 2, "router": "kv", "decode_router": "kv", "nic_bandwidth": "1"},
}


@pytest.fixture(scope="module")
def handed_over() -> Rehearsed:
    """A run on workers with roles, over a network so slow that transfers meet."""
    return rehearse(short(), make_config(ROLES), speed=8.0, proven=True, tolerance=PATIENT)


class TestWithRoles:
    """Prompts are computed by some workers and answered by others: routers, engines and the network decide the same."""

    def test_the_same_decisions(self, handed_over: Rehearsed) -> None:
        proof, recording = proven(handed_over)
        assert proof.close, str(proof)
        assert handed_over.run.report.requests == {"all": 40, "finished": 40}
        routed = [entry for entry in recording.entries if isinstance(entry, Routed)]
        sides = {side: [entry for entry in routed if entry.router == side] for side in ("", "prefill")}
        assert all(len({entry.id for entry in some}) == len(some) == 40 for some in sides.values())
        assert {entry.decision.worker.name for entry in sides["prefill"]} == {"p0", "p1"}
        assert {entry.decision.worker.name for entry in sides[""]} == {"d2", "d3"}
        # Later turns found blocks on either side, which were not sent again; transfers met, and took longer for it.
        assert all(any(entry.decision.overlap for entry in some) for some in sides.values())
        # What is reused is what no worker computed, and not what came from another one.
        found = {
            line.of: line.facts["cached"]
            for place in ("p0@0", "p1@0")
            for line in recording.log[place]
            if line.what == "admitted"
        }
        assert {record.id: record.cached for record in handed_over.run.records} == found
        network = recording.log[NETWORK]
        sent = [line for line in network if line.what == "sent"]
        landed = [line for line in network if line.what == "landed"]
        assert len(sent) == len(landed) > 30
        assert any(line.facts["queued"] for line in landed)  # type: ignore[misc]
        whole = sum(-(-row.input_length // 16) for row in short()) * 16 * 64 * 1024
        assert 0 < sum(line.facts["bytes"] for line in sent) < whole  # type: ignore[misc]
        assert sum(line.facts["loaded"] > 0 for line in lines(recording, "admitted")) > 30  # type: ignore[operator]

    def test_nothing_changed(self, handed_over: Rehearsed) -> None:
        assert handed_over.recording is not None
        assert again(handed_over.recording).equal

    def test_a_prompt_that_came_later(self, handed_over: Rehearsed) -> None:
        assert handed_over.recording is not None
        actions = [list(some) for some in handed_over.recording.actions]
        at, first = next((at, one) for at, one in enumerate(actions[2]) if one.what == "landed")
        actions[2][at] = msgspec.structs.replace(first, stamp=first.stamp + 1_000_000)
        proof = again(tampered(handed_over, actions=actions))
        # At the worker, or where its events come in a millisecond later: whichever of the two is first in time.
        assert proof.difference is not None and proof.difference.place in ("d2@0", "router")

    def test_a_prompt_that_was_sent_earlier(self, handed_over: Rehearsed) -> None:
        assert handed_over.recording is not None
        first, *others = handed_over.recording.transfers
        transfers = [msgspec.structs.replace(first, stamp=first.stamp - 1), *others]
        proof = again(tampered(handed_over, transfers=transfers))
        assert proof.difference is not None and proof.difference.place == NETWORK

    def test_another_network(self, handed_over: Rehearsed) -> None:
        assert handed_over.recording is not None
        network = make_config({**ROLES, "nic_bandwidth": "2"}).handover
        fleet = msgspec.structs.replace(handed_over.recording.fleet, handover=network)
        proof = again(tampered(handed_over, fleet=fleet))
        assert proof.difference is not None and proof.difference.place == NETWORK

    def test_settings_of_simulations_are_refused(self) -> None:
        for more, words in (
            ({"protocol": "destination-first"}, "leave protocol out"),
            (
                {"prefill": None, "decode": None, "workers": [{"role": "both"}, {"role": "decode"}]},
                "but for their roles",
            ),
        ):
            with pytest.raises(KvyardError, match=words):
                LiveFleet(make_config({**ROLES, **more}))


def test_prompts_and_answers_longer_than_the_context() -> None:
    """As in a replay: a prompt without room for a token is rejected, and an answer ends where the context does."""
    lengths = [(4000, 100), (4450, 100), (4499, 100), (4500, 100), (6000, 1), (200, 10)]
    rows = [
        TraceRequest(id=f"r{at}", arrival=at * 1_000_000, input_length=size, output_length=out)
        for at, (size, out) in enumerate(lengths)
    ]
    done = rehearse(rows, settings(workers=1), speed=20.0, proven=True, tolerance=PATIENT)
    proven(done)
    live = {record.id: (record.status, record.output) for record in done.run.records}
    offline = {record.id: (record.status, record.output) for record in replay(rows, config=settings(workers=1)).records}
    assert live == offline
    assert [live[f"r{at}"][1] for at in range(6)] == [100, 50, 1, 0, 0, 10]
    assert done.run.driver.inexact == 0


def test_the_first_difference_of_logs_is_named() -> None:
    one = [LogLine(5, "admitted", "a", {"cached": 1}), LogLine(9, "ended", "a", {})]
    other = [LogLine(5, "admitted", "a", {"cached": 1})]
    assert first_difference({"w": one}, {"w": list(one)}) is None
    missing = first_difference({"w": one}, {"w": other})
    assert missing is not None and missing.number == 1 and "offline: nothing more" in str(missing)
    moved = first_difference({"w": one, "x": one}, {"w": one, "x": [LogLine(6, "admitted", "a", {"cached": 1})]})
    assert moved is not None and moved.place == "x" and "its time" in str(moved)
    # The router's difference is the cause, however late its clock says it came.
    both = first_difference({"w": one, ROUTER: [LogLine(99, "routed", "a", {})]}, {"w": other, ROUTER: []})
    assert both is not None and both.place == ROUTER
    assert tally({"w": one}) == {"admitted": 1, "ended": 1}


def test_recordings_without_a_beginning_are_refused(performed: Rehearsed) -> None:
    assert performed.recording is not None
    with pytest.raises(KvyardError, match="begin at the beginning"):
        Offline(tampered(performed, entries=[]), Scripts(short(), LiveConfig()).of)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_conversations_with_tiers() -> None:
    trace = open_trace(CONVERSATION, None, limit=1000)
    config = make_config({"workers": 4, "block_size": 64, "num_gpu_blocks": 2048, "host_blocks": "8k", "limit": 1000})
    done = rehearse(trace, config, speed=3.0, proven=True, tolerance=SHARED_MACHINE)
    proof, recording = proven(done)
    print(f"\n{proof}")
    assert proof.requests == 1000 and proof.first_token.min >= 0 and proof.last_token.min >= 0
    assert told(recording, "stored G2") and told(recording, "removed G1") and told(recording, "removed G2")
    assert sum(line.facts["loaded"] > 0 for line in lines(recording, "admitted")) > 10  # type: ignore[operator]
    assert proof.close, str(proof)


def test_events_that_were_lost_on_the_way() -> None:
    """Batches that never arrived, gaps that were noticed and filled from replay: the journal has them as they were applied."""
    live = LiveConfig(speed=8.0)

    async def perform() -> tuple[LiveRun, LiveRecording]:
        stage = LiveFleet(settings(**TIERS), speed=live.speed, recorded=True)
        for worker in stage.fleet.workers:
            worker.faults = MockFaults(event_loss=0.2)
        async with stage, Endpoint(stage.url) as endpoint:
            run = await drive(short(), endpoint, live, clock=stage.clock)
            await stage.rest()
        return run, stage.recording()

    run, recording = asyncio.run(perform())
    assert run.report.requests == {"all": 40, "finished": 40}
    applied = [entry for entry in recording.entries if isinstance(entry, Applied)]
    assert any(entry.origin == "replay" for entry in applied), "nothing was lost"
    assert any(entry.state != "fresh" for entry in applied), "nobody noticed"
    proof = prove(recording, Scripts(short(), live).of, observed(run), PATIENT)
    assert proof.equal, str(proof)
    assert proof.close, str(proof)
