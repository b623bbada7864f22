"""Listeners receive what happens to requests, after the recorder and in the order of their list."""

from __future__ import annotations

from tests.replay.support import record_of

from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.core import EngineCore
from kvyard.engine.job import Job
from kvyard.hashing import TraceChain
from kvyard.replay.gaps import Gaps
from kvyard.replay.jobs import PREFILL, FleetJob
from kvyard.replay.listeners import RankWatcher, RequestListener
from kvyard.replay.record import Record
from kvyard.replay.recorder import Recorder
from kvyard.replay.seen import Seen

WORKER = 3


class Log(RequestListener):
    """Keeps what it received: its own name, the event, the request, and what the record says by then."""

    def __init__(self, name: str, entries: list[tuple[object, ...]]) -> None:
        self.name, self.entries = name, entries

    def first_token(self, record: Record, now: int) -> None:
        self.entries.append((self.name, "first_token", record.id, record.first_token == now))

    def computed(self, worker: int, job: Job, record: Record, now: int) -> None:
        self.entries.append((self.name, "computed", record.id, worker))

    def ended(self, worker: int, job: Job, record: Record, now: int) -> None:
        self.entries.append((self.name, "ended", record.id, worker, record.status))


class Rank:
    """One rank's engine with its watcher."""

    def __init__(self, **settings: object) -> None:
        self.entries: list[tuple[object, ...]] = []
        self.jobs: dict[str, Job] = {}
        self.records: dict[str, Record] = {}
        recorder = Recorder(0, Seen(), Gaps(), 16)
        listeners = [Log("a", self.entries), Log("b", self.entries)]
        watcher = RankWatcher(WORKER, self.jobs, recorder, listeners)
        config = EngineConfig(block_size=16, num_gpu_blocks=40, **settings)  # type: ignore[arg-type]
        self.core: EngineCore = make_core(config, watcher=watcher)

    def submit(self, name: str, suffix: str = "", tokens: int = 100, output: int = 5) -> Job:
        chain = TraceChain((), 1, 0, 16, len(self.records))
        chain.grow(tokens)
        record = self.records[name] = record_of(name, tokens=tokens, wanted=output)
        job = FleetJob(record, chain, suffix=suffix)
        job.handed_over = bool(suffix)
        self.jobs[job.id] = job
        self.core.submit(job, 0)
        return job

    def run(self) -> None:
        now: int | None = 0
        while now is not None:
            self.core.advance(now)
            self.core.begin(now)
            now = self.core.next_decision()


def test_each_listener_receives_each_event_once_and_finds_the_record_written() -> None:
    rank = Rank()
    rank.submit("x")
    rank.run()
    assert rank.entries == [
        ("a", "first_token", "x", True),
        ("b", "first_token", "x", True),
        ("a", "ended", "x", WORKER, "finished"),
        ("b", "ended", "x", WORKER, "finished"),
    ]
    assert not rank.jobs, "a job that is through isn't the worker's any more"


def test_a_preempted_request_has_one_first_token() -> None:
    rank = Rank()
    for name in "xyz":
        rank.submit(name, tokens=180, output=60)
    rank.run()
    assert sum(record.preemptions for record in rank.records.values()) > 0
    firsts = [entry[2] for entry in rank.entries if entry[:2] == ("a", "first_token")]
    assert sorted(firsts) == ["x", "y", "z"]


def test_a_prompt_that_is_computed_for_another_worker_is_no_end_of_the_request() -> None:
    rank = Rank()
    rank.submit("x", PREFILL, output=1)
    rank.run()
    assert rank.entries == [("a", "computed", "x", WORKER), ("b", "computed", "x", WORKER)]
    assert rank.records["x"].first_token < 0 and rank.records["x"].status == ""


def test_a_refused_prompt_ends_its_request_all_the_same() -> None:
    rank = Rank()
    rank.submit("x", PREFILL, tokens=2000, output=1)
    rank.run()
    assert rank.entries[0] == ("a", "ended", "x", WORKER, "rejected")


def test_the_end_of_a_withdrawn_job_is_reported_to_no_one() -> None:
    """Even if the worker got another job of the same id in the meantime."""
    rank = Rank()
    first = rank.submit("x")
    rank.core.begin(0)
    del rank.jobs["x"]
    rank.core.cancel(first, 1)
    second = rank.submit("x", output=2)
    rank.run()
    assert first.state.ended and second.state.ended
    ends = [entry for entry in rank.entries if entry[1] == "ended"]
    assert ends == [("a", "ended", "x", WORKER, "finished"), ("b", "ended", "x", WORKER, "finished")]
    assert rank.records["x"].output == 2
