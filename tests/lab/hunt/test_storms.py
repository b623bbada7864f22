"""When preemptions are a storm: while no request gets on, however many there are otherwise."""

from __future__ import annotations

from kvyard.lab.hunt.storms import STORM_AFTER, Storms


def test_preemptions_are_a_storm_once_no_request_makes_progress() -> None:
    storms = Storms()
    for step in range(STORM_AFTER):
        assert storms.finding() is None, step
        storms.compute("r0", 4)
        storms.preempt("r0")
    # The first of them followed tokens that were new.
    found = storms.finding()
    assert found is not None
    assert found["kind"] == "storm"
    assert f"r0 {STORM_AFTER} times" in found["detail"]


def test_a_request_that_another_one_preempts_for_each_of_its_blocks_is_no_storm() -> None:
    """A pool for one request: the other one starts again and again, while the first gets on."""
    storms = Storms()
    for step in range(20 * STORM_AFTER):
        storms.compute("r0", 1 + step)
        storms.compute("r1", 4)
        storms.preempt("r1")
        assert storms.finding() is None, step
    assert storms.preemptions == 20 * STORM_AFTER


def test_tokens_that_are_computed_again_are_not_progress() -> None:
    storms = Storms()
    storms.compute("r0", 40)
    storms.compute("r1", 40)
    for step in range(STORM_AFTER):
        storms.compute(f"r{step % 2}", 39)
        storms.preempt(f"r{step % 2}")
    assert storms.finding() is not None
