"""Loads by a script follow vLLM in every rule: an engine that breaks one of them is told apart by a log of a real scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvyard.blocks import Hit
from kvyard.blocks.spec import ConfigError
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.queue import Queue
from kvyard.lab.conform import scripted_loads
from kvyard.lab.conform.scheduler import LoggedRun, SchedulerLog, conform
from kvyard.lab.conform.scripted_loads import HoldersFirst, ScriptedLoads, scripted

LOGS = Path(__file__).resolve().parents[2] / "golden" / "scheduler"
NAMES = sorted(path.name.removesuffix(".jsonl.xz") for path in LOGS.glob("connector-*.xz"))


def log_of(name: str) -> Path:
    return LOGS / f"{name}.jsonl.xz"


class LoadedJobsWaitLikeOthers(ScriptedLoads):
    def queue(self, waiting: Queue) -> Queue:
        return waiting


class ByLandingQueue(HoldersFirst):
    def push_front(self, job: Job) -> None:
        if job.tables:
            self._holders.append(job)
        else:
            super().push_front(job)


class LoadedJobsComeAsTheyLand(ScriptedLoads):
    def queue(self, waiting: Queue) -> Queue:
        return ByLandingQueue(waiting, self._started, by_priority=self._by_priority)


class RegistersWhenLanded(ScriptedLoads):
    def land(self, now: int) -> list[Job]:
        back = super().land(now)
        for job in back:
            self.receive(job)
        return back


class ReservesNothing(ScriptedLoads):
    def reserved(self) -> int:
        return 0


class LoadsOutOfLine(ScriptedLoads):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.in_line = False


class KeepsForNoTransfer(ScriptedLoads):
    def keeps(self, job: Job, now: int) -> bool:
        self._loads.pop(job.id, None)
        super().keeps(job, now)
        self._sends.pop(job.id, None)
        self.leaving.pop(job.id, None)
        return False


class KeepsWhatIsStale(ScriptedLoads):
    def keeps(self, job: Job, now: int) -> bool:
        computed, job.num_computed_tokens = job.num_computed_tokens, 0
        kept = super().keeps(job, now)
        job.num_computed_tokens = computed
        return kept


class FreesAfterDrops(ScriptedLoads):
    def free_ended(self, now: int) -> None: ...

    def land(self, now: int) -> list[Job]:
        super().free_ended(now)
        return super().land(now)


class ComputesLastBlockAgain(ScriptedLoads):
    def receive(self, job: Job) -> None:
        loaded = job.loaded
        super().receive(job)
        if job.loaded < loaded:
            again = min(15, job.loaded - 1)
            job.num_computed_tokens -= again
            job.loaded -= again


class LoadsNothingAtOnce(ScriptedLoads):
    def ask(self, job: Job, hit: Hit, now: int, others_run: bool, backlog: int) -> int:
        script = self._scripts[job.id]
        if script.load_ns is None:
            self._scripts = {**self._scripts, job.id: script._replace(load_ns=1)}
        return super().ask(job, hit, now, others_run, backlog)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        (LoadedJobsWaitLikeOthers, "connector-boundary@11"),
        (LoadedJobsComeAsTheyLand, "connector-threshold@3"),
        (RegistersWhenLanded, "connector-inside@3"),
        (ReservesNothing, "connector-async-tight@4"),
        (LoadsOutOfLine, "connector-threshold@3"),
        (KeepsForNoTransfer, "connector-mixed@1"),
        (KeepsWhatIsStale, "connector-swa@10"),
        (LoadsOutOfLine, "connector-inside@3"),
        (FreesAfterDrops, "connector-boundary@11"),
        (ComputesLastBlockAgain, "connector-async@1"),
        (LoadsNothingAtOnce, "connector-priority@2"),
    ],
)
def test_a_broken_rule_is_seen(monkeypatch: pytest.MonkeyPatch, mutant: type[ScriptedLoads], name: str) -> None:
    monkeypatch.setattr(scripted_loads, "ScriptedLoads", mutant)
    assert conform(log_of(name)).difference is not None


@pytest.mark.parametrize("name", NAMES)
def test_the_invariants_hold_to_the_end(name: str) -> None:
    run = LoggedRun(SchedulerLog(log_of(name)), plans=True)
    run.go()
    run.core.check_integrity()
    jobs = run.core.scheduler.jobs
    assert jobs.loads is not None and not (jobs.parked or jobs.leaving)
    pool = run.core.scheduler.manager.pool
    assert pool.free == pool.num_blocks - 1


def test_the_logs_have_loads_of_both_kinds_and_sends() -> None:
    scripts = [script for name in NAMES for script in (SchedulerLog(log_of(name)).scripts() or {}).values()]
    assert sum(script.tokens > 0 and script.load_ns is None for script in scripts) > 40
    assert sum(script.load_ns is not None for script in scripts) > 100
    assert sum(script.send_ns is not None for script in scripts) > 30


def test_unsupported_combinations_are_refused() -> None:
    config = EngineConfig(num_gpu_blocks=100, block_size=16, async_scheduling=True)
    with pytest.raises(ConfigError, match=r"can't have external loads beside lower tiers, drafts or asynchronous"):
        make_core(config, source=lambda manager, waiting: scripted(manager, waiting, config, {}))
