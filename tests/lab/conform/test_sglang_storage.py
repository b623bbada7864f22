"""Each rule of HiCache's storage and its prefetches is needed to decide what SGLang decided."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest

from kvyard.blocks import Request
from kvyard.blocks.extent import Extent, Node
from kvyard.blocks.host_pages import HostPages
from kvyard.blocks.radix import RadixGroup
from kvyard.clock import SECOND
from kvyard.engine.passes import Pass
from kvyard.hashing import Key
from kvyard.lab.conform import LogError
from kvyard.lab.conform.sglang import SglangLog, SglangRun, conform
from kvyard.tiers import page_files
from kvyard.tiers.config import TierConfig
from kvyard.tiers.hicache import HiCache
from kvyard.tiers.page_files import PageFiles, Prefetch
from kvyard.tiers.prefetches import Prefetches, Wait

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "sglang"


class CheckedRun(SglangRun):
    """A run whose engine is checked after every decision."""

    def decided(self, made: Pass, now: int) -> None:
        super().decided(made, now)
        self.core.check_integrity(alone=False)


@pytest.mark.parametrize("name", ["l3-overlap-p64@6", "l3-timeout-p64@6", "l3-wait-complete-abort@6"])
def test_device_and_host_agree_after_every_decision(name: str) -> None:
    run = CheckedRun(SglangLog(GOLDEN / f"{name}.jsonl.xz"), plans=False)
    run.go()
    run.core.check_integrity()
    assert isinstance(run.core.offload, HiCache)
    host, storage = run.core.offload.counters.tiers
    assert storage.loads.landed == storage.loads.submitted > 0
    assert 0 < storage.tokens <= run.core.offload.counters.hit_tokens
    assert host.tokens + storage.tokens == run.core.offload.counters.hit_tokens


def _reads_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefetches, "ready", lambda self, request: request not in self.in_flight)


def _requests_wait_twice_as_long(patch: pytest.MonkeyPatch) -> None:
    def wait(self: Wait, since: float, timeout: float, make: Callable[..., None] = Wait.__init__) -> None:
        make(self, since, 2 * timeout + 1 / SECOND)

    patch.setattr(Wait, "__init__", wait)


def _nobody_asks_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefetches, "begin_pass", lambda self, waiting: None)


def _who_is_next_asks_again(patch: pytest.MonkeyPatch) -> None:
    begin_pass = Prefetches.begin_pass
    patch.setattr(Prefetches, "begin_pass", lambda self, waiting: begin_pass(self, [object(), *waiting]))


def _who_lost_pages_does_not_ask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefetches, "lost", lambda self, request, hit: False)


def _any_number_of_pages_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    ask = Prefetches.ask

    def always(self: Prefetches, request: Request, known_until: int = 0) -> None:
        occupied, self.occupied = self.occupied, 0
        ask(self, request, known_until)
        self.occupied += occupied

    patch.setattr(Prefetches, "ask", always)


def _unread_pages_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    drain = Prefetches.drain

    def at_once(self: Prefetches) -> None:
        drain(self)
        released, self._released = self._released, []
        self.host.pool.release(released)

    patch.setattr(Prefetches, "drain", at_once)


def _all_pages_are_one_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(page_files, "BATCH", 1 << 30)


def _files_are_evicted_one_by_one(patch: pytest.MonkeyPatch) -> None:
    make = PageFiles.__init__

    def patient(self: PageFiles, config: TierConfig, page_bytes: int) -> None:
        make(self, config, page_bytes)
        self._least = self.limit

    patch.setattr(PageFiles, "__init__", patient)


class Unordered(OrderedDict[Key, None]):
    """Pages in the order in which they were first written."""

    def move_to_end(self, key: Key, last: bool = True) -> None:
        """Leave ``key`` where it is."""


def _files_are_evicted_by_age(patch: pytest.MonkeyPatch) -> None:
    make = PageFiles.__init__

    def unordered(self: PageFiles, config: TierConfig, page_bytes: int) -> None:
        make(self, config, page_bytes)
        self.pages = Unordered()

    patch.setattr(PageFiles, "__init__", unordered)


def _the_host_keeps_nothing_that_the_device_has(patch: pytest.MonkeyPatch) -> None:
    insert, below = RadixGroup.insert_on_host, HostPages.below

    def unkept(self: RadixGroup, request: Request, above: Node | None, own: Extent | None) -> int | None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(HostPages, "below", lambda self, node: below(self, node) or node)
            return insert(self, request, above, own)

    patch.setattr(RadixGroup, "insert_on_host", unkept)


def _pages_being_written_are_evicted(patch: pytest.MonkeyPatch) -> None:
    persist = Prefetches.persist

    def unlocked(self: Prefetches, node: Node) -> None:
        persist(self, node)
        _, _, held = self.files._writes[-1]
        self.host.pool.release(held.settle())
        held.extents, held.starts = [], [0]

    patch.setattr(Prefetches, "persist", unlocked)


def _short_finds_are_read(patch: pytest.MonkeyPatch) -> None:
    answer = Prefetches._answer

    def any_find(self: Prefetches, prefetch: Prefetch) -> None:
        rules, self._rules = self._rules, self._rules._replace(threshold=1)
        answer(self, prefetch)
        self._rules = rules

    patch.setattr(Prefetches, "_answer", any_find)


def _new_leaves_have_no_priority(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixGroup, "root_priority", property(lambda self: 0, lambda self, priority: None))


@pytest.mark.source
@pytest.mark.parametrize(
    ("mutate", "name"),
    [
        (_reads_are_waited_for, "l3-best-effort-p1@6"),
        (_requests_wait_twice_as_long, "l3-timeout-abort@6"),
        (_nobody_asks_again, "l3-best-effort-p1@6"),
        (_who_is_next_asks_again, "l3-best-effort-p1@6"),
        (_who_lost_pages_does_not_ask, "l3-timeout-p64@6"),
        (_any_number_of_pages_is_asked_for, "l3-timeout-abort@6"),
        (_unread_pages_are_free_at_once, "l3-timeout-abort@6"),
        (_all_pages_are_one_batch, "l3-selective-p1@6"),
        (_files_are_evicted_by_age, "l3-wait-complete-limit@6"),
        (_files_are_evicted_one_by_one, "l3-wait-complete-limit@6"),
        (_pages_being_written_are_evicted, "l3-best-effort-p1@6"),
        (_the_host_keeps_nothing_that_the_device_has, "l3-timeout-p64@6"),
        (_new_leaves_have_no_priority, "l3-priority@6"),
        (_short_finds_are_read, "l3-timeout-p1@6"),
    ],
)
def test_a_rule_that_is_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], name: str
) -> None:
    mutate(monkeypatch)
    assert _differs(GOLDEN / f"{name}.jsonl.xz")


def _differs(path: Path) -> bool:
    try:
        return conform(path).difference is not None
    except LogError as bad:
        assert not isinstance(bad.__cause__, TypeError), "the mutant doesn't fit the code"
        return True
    except AssertionError:
        return True
