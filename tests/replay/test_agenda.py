"""The order of what happens in a replay, and that what was put off doesn't happen."""

from __future__ import annotations

from kvyard.replay.agenda import ARRIVAL, LANDING, PASS_END, PASS_START, REROUTING, SAMPLE, WORKER_CHANGE, Agenda


def all_of(agenda: Agenda) -> list[tuple[int, int, int]]:
    out = []
    while (entry := agenda.pop()) is not None:
        out.append(entry)
    return out


def test_at_one_instant_the_order_is_fixed() -> None:
    order = [PASS_END, LANDING, WORKER_CHANGE, REROUTING, ARRIVAL, PASS_START, SAMPLE]
    agenda = Agenda()
    for what in reversed(order):
        agenda.put(7, what)
    agenda.put(6, SAMPLE, 1)
    agenda.put(8, PASS_END, 1)
    assert all_of(agenda) == [(6, SAMPLE, 1), *((7, what, 0) for what in order), (8, PASS_END, 1)]


def test_workers_come_by_their_numbers() -> None:
    agenda = Agenda()
    for number in (10, 2, 300):
        agenda.put(5, PASS_END, number)
    assert [which for _, _, which in all_of(agenda)] == [2, 10, 300]


def test_an_entry_put_again_happens_once_at_the_new_time() -> None:
    agenda = Agenda()
    agenda.put(5, PASS_END, 1)
    agenda.put(3, PASS_END, 1)
    agenda.put(9, PASS_END, 2)
    agenda.put(11, PASS_END, 2)
    agenda.put(9, PASS_END, 2)
    assert all_of(agenda) == [(3, PASS_END, 1), (9, PASS_END, 2)]


def test_a_cancelled_entry_does_not_happen() -> None:
    agenda = Agenda()
    agenda.put(5, PASS_END, 1)
    agenda.put(None, PASS_END, 1)
    agenda.put(None, ARRIVAL)
    assert agenda.pop() is None


def test_entries_may_be_added_at_the_present_instant() -> None:
    agenda = Agenda()
    agenda.put(5, PASS_START)
    assert agenda.pop() == (5, PASS_START, 0)
    agenda.put(5, PASS_END, 1)
    agenda.put(5, PASS_START)
    assert all_of(agenda) == [(5, PASS_END, 1), (5, PASS_START, 0)]


def test_the_agenda_knows_if_other_entries_remain() -> None:
    agenda = Agenda()
    agenda.put(5, SAMPLE)
    agenda.put(6, WORKER_CHANGE, 3)
    assert agenda.holds_beyond(SAMPLE) and not agenda.holds_beyond(SAMPLE, WORKER_CHANGE)
