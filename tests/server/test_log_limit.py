"""What is logged too often is counted instead."""

import io
import logging

from kvyard.clock import SECOND, VirtualClock
from kvyard.server.log_limit import KINDS, LogLimit


def logged(limit: LogLimit) -> tuple[logging.Logger, io.StringIO]:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.addFilter(limit)
    logger = logging.Logger("x")
    logger.addHandler(handler)
    return logger, out


def test_a_kind_of_line_is_written_a_few_times_and_then_counted() -> None:
    clock = VirtualClock()
    logger, out = logged(LogLimit(most=3, window=10 * SECOND, clock=clock))
    for number in range(1000):
        logger.error("no descriptor for %d", number)
        logger.warning("of another kind, once") if number == 500 else None
    assert out.getvalue().splitlines() == [
        *(f"no descriptor for {number}" for number in range(3)),
        "of another kind, once",
    ]
    clock.advance(10 * SECOND)
    logger.error("no descriptor for %d", 1)
    logger.error("no descriptor for %d", 2)
    lines = out.getvalue().splitlines()[4:]
    assert lines == ["no descriptor for 1 (997 more like this were left out)", "no descriptor for 2"]


def test_lines_that_differ_after_the_first_are_one_kind_and_kinds_are_bounded() -> None:
    limit = LogLimit(most=2, clock=VirtualClock())
    logger, out = logged(limit)
    for number in range(50):
        logger.error(f"socket.accept() out of system resource\nsocket: {number}")
    assert out.getvalue().count("accept") == 2
    for number in range(2 * KINDS):
        logger.error(f"kind {number}")
    assert len(limit._seen) <= KINDS
