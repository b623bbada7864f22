"""Tasks that fail come back, are counted, and are said once."""

import asyncio

import pytest
from tests.waiting import eventually_async

from kvyard.server import supervisor as module
from kvyard.server.supervisor import Supervisor


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORTEST", 0.001)
    monkeypatch.setattr(module, "LONGEST", 0.004)


def test_a_failed_task_restarts_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        supervisor, runs, told = Supervisor(), 0, []
        done = asyncio.Event()

        async def work() -> None:
            nonlocal runs
            runs += 1
            if runs < 5:
                raise LookupError("one" if runs < 4 else "another")
            done.set()
            await asyncio.Event().wait()

        kept = supervisor.keep("the work", work, told.append)
        await asyncio.wait_for(done.wait(), 30)
        assert (kept.failures, supervisor.failures, kept.reason) == (4, 4, "")
        assert [str(error) for error in told] == ["one", "one", "one", "another"]
        await supervisor.stop()
        await kept.stop()
        assert not supervisor.tasks

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "the work failed and is begun again: LookupError: one",
        "the work failed and is begun again: LookupError: another",
    ]


def test_a_reason_is_there_while_it_waits_to_be_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(module, "SHORTEST", 60.0)
        supervisor = Supervisor()
        failed = asyncio.Event()

        async def work() -> None:
            raise OSError(24, "Too many open files")

        kept = supervisor.keep("sockets", work, lambda error: failed.set())
        await asyncio.wait_for(failed.wait(), 30)
        assert "Too many open files" in kept.reason
        await supervisor.stop()

    asyncio.run(main())


def test_a_task_that_returns_is_over_and_none_begins_twice(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        supervisor, runs = Supervisor(), 0

        async def work() -> None:
            nonlocal runs
            runs += 1

        async def fail() -> None:
            await work()
            raise ValueError("no")

        kept = supervisor.keep("short", work)
        assert kept.task is not None
        await kept.task
        supervisor.begin("once", fail())
        await eventually_async(lambda: runs >= 2)
        await supervisor.stop()
        assert runs == 2 and not supervisor.tasks and supervisor.failures == 1

    asyncio.run(main())
    assert "once failed: ValueError: no" in caplog.text
