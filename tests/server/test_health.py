"""Live, ready and degraded apart, each trouble said when it comes and when it is over."""

import pytest

from kvyard.server.health import MOST, HealthLog, HealthReason, readiness

STALE = HealthReason(code="stream-stale", about="a", why="a gap")
NONE = HealthReason(code="no-engines", why="there is none", grade="unready")


def test_status_follows_from_reasons() -> None:
    fine = readiness([])
    assert fine.live and fine.ready and not fine.degraded
    degraded = readiness([STALE])
    assert degraded.ready and degraded.degraded
    unready = readiness([STALE, NONE])
    assert not unready.ready and unready.reasons == [NONE, STALE]
    many = readiness(HealthReason(code="stream-stale", about=str(at), why="") for at in range(MOST + 5))
    assert len(many.reasons) == MOST


def test_each_reason_is_logged_at_its_beginning_and_end(caplog: pytest.LogCaptureFixture) -> None:
    log = HealthLog()
    log.look([STALE])
    log.look([HealthReason(code="stream-stale", about="a", why="another gap"), NONE])
    log.look([NONE])
    assert [record.getMessage() for record in caplog.records] == [
        "degraded: stream-stale (a): a gap",
        "unready: no-engines: there is none",
        "over: stream-stale (a)",
    ]
