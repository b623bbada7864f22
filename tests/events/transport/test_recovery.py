"""The table of transitions says all that happens: no phase follows another that it doesn't name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.events.transport.test_follower import OPS, RATE, run_troubled, troubles

from kvyard.events.transport.recovery import ASKING, NOT_WHOLE, TABLE, Phase, Recovery, Signal

seen: set[tuple[Signal, Phase, Phase]] = set()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Recovery.handle

    def watching(self: Recovery, signal: Signal, now: int, batch=None, why: str = "") -> None:
        before = self.phase
        handle(self, signal, now, batch, why)
        seen.add((signal, before, self.phase))
        row = TABLE.get((signal, before))
        allowed = {before} if row is None else row.leads_to
        assert self.phase in allowed, f"{signal.name} led from {before.name} to {self.phase.name}"
        assert (self._inquiry.request is not None) == (self.phase in ASKING)

    monkeypatch.setattr(Recovery, "handle", watching)


@given(options=troubles(), ops=OPS, reply_loss=RATE)
@settings(max_examples=300)
def test_only_the_phases_that_the_table_names_follow(options, ops, reply_loss):
    run_troubled(options, ops, reply_loss).settle()


def test_every_phase_can_be_left_and_reached():
    for phase in Phase:
        assert any(before == phase and row.leads_to - {phase} for (_, before), row in TABLE.items()), phase
        assert phase == Phase.REBUILD or any(phase in row.leads_to for row in TABLE.values()), phase


def test_a_batch_that_clears_everything_helps_in_every_phase():
    assert all((Signal.RESTATES, phase) in TABLE for phase in Phase)
    assert all((Signal.FIRST, phase) in TABLE for phase in NOT_WHOLE)
