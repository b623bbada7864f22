"""Searches for garbage: set aside what stays, search all only when idle."""

import asyncio
import gc
import itertools
from collections.abc import Iterator

import pytest
from tests.waiting import eventually_async

from kvyard.server import garbage


@pytest.fixture
def settings() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    gc.callbacks.remove(garbage.TIMES)


@pytest.mark.usefixtures("settings")
def test_objects_are_frozen_and_all_is_collected_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(garbage, "INTERVAL", 0.001)
        monkeypatch.setattr(garbage, "WHOLE", 0)
        garbage.settle()
        assert gc.get_threshold() == (garbage.YOUNG, garbage.ROUNDS, garbage.NEVER)
        aside = gc.get_freeze_count()
        assert aside > 1000
        kept = [[at] for at in range(5000)]
        busy, searches = True, []
        collect = gc.collect
        monkeypatch.setattr(gc, "collect", lambda generation=2: searches.append(generation) or collect(generation))
        task = asyncio.create_task(garbage.stay_settled(lambda: not busy))
        await eventually_async(lambda: gc.get_freeze_count() >= aside + len(kept))
        assert searches and set(searches) == {1}, "all is left alone while something is under way"
        busy = False
        await eventually_async(lambda: 2 in searches)
        # Busy, and the process has grown.
        busy = True
        monkeypatch.setattr(garbage, "SOONEST", 0)
        # It goes on growing: a search may be in flight just now, and what it sees is where growth is counted from.
        sizes = map(lambda doublings: 1 << (40 + doublings), itertools.count())
        monkeypatch.setattr(garbage, "resident_bytes", lambda: next(sizes))
        searches.clear()
        await eventually_async(lambda: 2 in searches)
        task.cancel()
        assert garbage.TIMES.count > len(searches) and 0 < garbage.TIMES.longest <= garbage.TIMES.total

    asyncio.run(main())


@pytest.mark.usefixtures("settings")
def test_free_memory_is_given_back_though_the_process_hardly_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        trims = list[bool]()
        looks = itertools.count()
        seen = [0]

        def resident_bytes() -> int:
            seen[0] = next(looks)
            return 1 << 30

        monkeypatch.setattr(garbage, "INTERVAL", 0.001)
        monkeypatch.setattr(garbage, "TRIMMED", 0)
        monkeypatch.setattr(garbage, "TRIM_SHARE", 0)
        monkeypatch.setattr(garbage, "resident_bytes", resident_bytes)
        monkeypatch.setattr(garbage, "trim", lambda: trims.append(True))
        garbage.settle()
        task = asyncio.create_task(garbage.stay_settled(lambda: False))
        await eventually_async(lambda: len(trims) > 1)
        # Where it takes long, it isn't done again soon.
        monkeypatch.setattr(garbage, "TRIM_SHARE", 1 << 40)
        done = len(trims)
        await eventually_async(lambda: len(trims) > done)
        done = len(trims)
        intervals = seen[0]
        await eventually_async(lambda: seen[0] > intervals + 50)
        assert len(trims) <= done + 1  # one may have been in flight when it became slow
        task.cancel()

    asyncio.run(main())
