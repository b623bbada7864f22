"""A virtual clock is told the time and never goes back; a wall clock lets it pass, at a speed."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

import kvyard
from kvyard import clock as module
from kvyard.clock import MS, SECOND, Clock, ClockError, VirtualClock, WallClock


class FakeTime:
    """Real time for tests: passes only when somebody sleeps, and then a little too long or too short."""

    def __init__(self, slack: int) -> None:
        self.t = 5_000
        self.slack = slack
        self.naps: list[float] = []

    def monotonic_ns(self) -> int:
        return self.t

    def time_ns(self) -> int:
        return 1_700_000_000 * SECOND

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.t += max(1, round(seconds * SECOND) + self.slack)


def test_virtual_clock_is_set_by_its_caller() -> None:
    clock = VirtualClock(7)
    assert clock.now() == 7
    clock.advance(7)
    clock.advance(9)
    assert clock.now() == 9
    with pytest.raises(ClockError, match="backwards"):
        clock.advance(8)
    assert clock.now() == 9


def test_waiting_on_a_virtual_clock_takes_no_time() -> None:
    clock: Clock = VirtualClock()
    clock.sleep_until(3_600 * SECOND)
    clock.sleep_until(5)
    assert clock.now() == 3_600 * SECOND
    asyncio.run(clock.wait_until(7_200 * SECOND))
    asyncio.run(clock.wait_until(5))
    assert clock.now() == 7_200 * SECOND


@pytest.mark.parametrize("slack", [-3_000, 0, 70_000])
@pytest.mark.parametrize("speed", [1, 10, 0.1, Fraction(1, 3)])
def test_wall_clock_waits_long_enough(slack: int, speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(slack)
    monkeypatch.setattr(module, "time", fake)
    clock = WallClock(start=100, speed=speed)
    assert clock.now() == 100
    clock.sleep_until(100 + 20 * MS)
    assert clock.now() >= 100 + 20 * MS
    assert fake.naps[0] == pytest.approx(0.02 / speed)
    naps = len(fake.naps)
    clock.sleep_until(100)
    assert len(fake.naps) == naps


def test_speed_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(0)
    monkeypatch.setattr(module, "time", fake)
    clock = WallClock(speed=3)
    fake.t += 10**18 + 1
    assert clock.now() == 3 * (10**18 + 1)


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_a_speed_must_be_positive(speed: float) -> None:
    with pytest.raises(ClockError, match="positive number"):
        WallClock(speed=speed)


def test_since_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(0)
    monkeypatch.setattr(module, "time", fake)
    clock = WallClock.since_epoch()
    fake.t += 5
    assert clock.now() == 1_700_000_000 * SECOND + 5


def test_real_time_passes_and_tasks_wait_together() -> None:
    clock: Clock = WallClock(speed=50)
    order: list[str] = []

    async def wait(name: str, t: int) -> None:
        await clock.wait_until(t)
        order.append(name)

    async def both() -> None:
        await asyncio.gather(wait("late", 2 * SECOND), wait("early", SECOND))

    asyncio.run(both())
    assert order == ["early", "late"]
    assert clock.now() >= 2 * SECOND


def clock_readings(path: Path) -> Iterator[str]:
    """Where a file names something that reads a clock or sleeps."""
    text = path.read_text()
    if not re.search(
        r"import time|from (time|asyncio|datetime) |\b(time|asyncio|datetime|date)\.(sleep|now|utcnow|today)", text
    ):
        return
    for node in ast.walk(ast.parse(text, str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name == "time"]
        elif isinstance(node, ast.ImportFrom) and node.module in {"time", "asyncio", "datetime"}:
            names = [a.name for a in node.names if node.module == "time" or a.name in {"sleep", "timeout", "wait_for"}]
        elif isinstance(node, ast.Attribute) and node.attr in {"sleep", "now", "utcnow", "today"}:
            owner = node.value
            called = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            names = [f"{called}.{node.attr}"] if called in {"asyncio", "time", "datetime", "date"} else []
        yield from (f"{path.name}:{node.lineno} {name}" for name in names)


def test_nothing_else_reads_a_clock_or_sleeps() -> None:
    root = Path(kvyard.__file__).parent
    others = [path for path in root.rglob("*.py") if path != root / "clock.py"]
    assert others
    assert [reading for path in others for reading in clock_readings(path)] == []
    assert list(clock_readings(root / "clock.py"))  # the check can see


@pytest.mark.parametrize(("speed", "passed"), [(1, 1000), (3, 3000), (0.5, 500), (0.75, 750)])
def test_a_wall_clock_passes_at_its_given_speed(speed: float, passed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WallClock(start=7, speed=speed)
    origin = clock._origin
    monkeypatch.setattr("time.monotonic_ns", lambda: origin + 1000)
    assert clock.now() == 7 + passed
