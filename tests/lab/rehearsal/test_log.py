"""Where two runs part."""

from __future__ import annotations

from kvyard.lab.rehearsal.log import ROUTER, LogLine, first_difference


def line(at: int, what: str = "pass") -> LogLine:
    return LogLine(at, what, "", {})


def test_a_log_that_goes_on_differs_where_the_other_ends() -> None:
    for live, offline in (([line(1), line(2)], [line(1)]), ([line(1)], [line(1), line(2)])):
        found = first_difference({"a": live}, {"a": offline})
        assert found is not None and found.number == 1 and None in (found.live, found.offline)
    assert first_difference({"a": [line(1)]}, {"a": [line(1)]}) is None


def test_the_routers_choice_is_the_cause_and_what_follows_the_effect() -> None:
    live = {"a": [line(1)], ROUTER: [line(5)]}
    offline = {"a": [line(2)], ROUTER: [line(6)]}
    found = first_difference(live, offline)
    assert found is not None and found.place == ROUTER
