"""The table of transitions says all that happens: no phase follows another that it doesn't name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.events.transport.test_subscription_follower import OPS, RATE, run_troubled, troubles

from kvyard.events.transport.phases import ASKING, NOT_WHOLE, BatchKind, Phase, Signal
from kvyard.events.transport.recovery import Recovery


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, accept = Recovery.handle, Recovery.accept

    def check(recovery: Recovery, cause: Signal | BatchKind, before: Phase, row) -> None:
        allowed = {before} if row is None else row.leads_to
        assert recovery.phase in allowed, f"{cause.name} led from {before.name} to {recovery.phase.name}"
        assert (recovery._inquiry.request is not None) == (recovery.phase in ASKING)

    def handling(self: Recovery, signal: Signal, now: int) -> None:
        before = self.phase
        handle(self, signal, now)
        check(self, signal, before, Recovery.SIGNALS.get((signal, before)))

    def accepting(self: Recovery, batch, now: int) -> None:
        before, kind = self.phase, self._kind_of(batch)
        accept(self, batch, now)
        check(self, kind, before, Recovery.BATCHES.get((kind, before)))

    monkeypatch.setattr(Recovery, "handle", handling)
    monkeypatch.setattr(Recovery, "accept", accepting)


@given(options=troubles(), ops=OPS, reply_loss=RATE)
@settings(max_examples=500)
def test_only_the_phases_that_the_table_names_follow(options, ops, reply_loss):
    run_troubled(options, ops, reply_loss).settle()


def test_every_phase_can_be_left_and_reached():
    rows = {**Recovery.BATCHES, **Recovery.SIGNALS}
    for phase in Phase:
        assert any(before == phase and row.leads_to - {phase} for (_, before), row in rows.items()), phase
        assert any(phase in row.leads_to for (_, before), row in rows.items() if before != phase), phase


def test_a_batch_that_clears_everything_helps_in_every_phase():
    assert all((BatchKind.RESTATES, phase) in Recovery.BATCHES for phase in Phase)
    assert all((BatchKind.FIRST, phase) in Recovery.BATCHES for phase in NOT_WHOLE)
