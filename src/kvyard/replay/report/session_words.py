"""Sessions of a report as rows of text, for the table and the page."""

from collections.abc import Iterator

from kvyard.replay.report import words as say
from kvyard.replay.report.numbers import Spread
from kvyard.replay.report.session_report import CAUSES, SessionsReport, SessionTurn, SlowSession

TITLE = "Sessions"
SIZES = ("smallest quarter", "second quarter", "third quarter", "largest quarter")


def summary(sessions: SessionsReport) -> str:
    """Return the number of sessions, and of those that finished."""
    text = f"{sessions.finished:,} of {sessions.count:,} sessions finished, {sessions.requests:,} requests in all"
    if sessions.jain is not None:
        text += f"; Jain's index of their slowdowns {sessions.jain:.3f}"
    return text + "."


def spread_rows(sessions: SessionsReport) -> list[list[str]]:
    """Return completion time, service time, slowdown and turns: name and ``words.COLUMNS``."""
    rows = [
        _spread_row("Completion time (s)", sessions.completion, 1000),
        _spread_row("Service time, without tools and think time (s)", sessions.service, 1000),
    ]
    if sessions.slowdown is not None:
        rows.append(_spread_row("Slowdown against an idle fleet", sessions.slowdown))
    return [*rows, _spread_row("Requests per session", sessions.turns)]


def _spread_row(name: str, spread: Spread, scale: float = 1.0) -> list[str]:
    return [name, *(say.measured(getattr(spread, column) / scale) if spread.count else "-" for column in say.COLUMNS)]


def cause_rows(sessions: SessionsReport) -> list[list[str]]:
    """Return the causes of the mean session's time: cause, time, share of completion time."""
    whole = sessions.completion.mean
    return [
        [name, say.latency(ms), say.percent(ms / whole)]
        for name, ms in ((name, sessions.causes_ms.get(key, 0.0)) for key, name in CAUSES.items())
        if ms
    ]


def share_rows(sessions: SessionsReport) -> list[list[str]]:
    """Return reuse, migrations and residency: name, share, parts."""
    names = {
        "within": "Prompt tokens found that the session had sent before",
        "across": "Prompt tokens found that only other sessions had sent",
        "again": "Prompt tokens computed that the session had sent before",
    }
    shares = [(name, sessions.reuse[key]) for key, name in names.items() if key in sessions.reuse]
    shares.append(("Requests sent to another worker than the one before", sessions.migrations))
    rows = [[name, say.percent(share.value), f"{share.part:,} / {share.whole:,}"] for name, share in shares]
    resident = sessions.residency
    if resident is not None and resident.pool:
        for name, seconds in (
            ("Token-seconds held by running requests", resident.held),
            ("Token-seconds cached while nothing ran", resident.idle),
            ("Token-seconds free", resident.free),
            ("Token-seconds kept from a session's request to its next", resident.kept),
        ):
            rows.append([name, say.percent(seconds / resident.pool), f"{seconds:,.0f} / {resident.pool:,.0f}"])
    return rows


def size_rows(sessions: SessionsReport) -> list[list[str]]:
    """Return sessions by size: name, sessions, service time alone, service time, mean slowdown, p90."""
    return [
        [
            name,
            f"{group.sessions:,}",
            say.latency(group.idle_ms),
            say.latency(group.service_ms),
            f"{group.slowdown_mean:.2f}",
            f"{group.slowdown_p90:.2f}",
        ]
        for name, group in zip(SIZES, sessions.sizes, strict=False)
    ]


def slow_row(session: SlowSession) -> list[str]:
    """Return a slow session: name, completion time, slowdown, requests, migrations, main causes."""
    causes = sorted(((ms, name) for name, ms in session.causes_ms.items() if ms), reverse=True)[:3]
    return [
        session.id,
        say.latency(session.completion_ms),
        "–" if session.slowdown is None else f"{session.slowdown:.2f}",
        f"{session.requests:,}",
        f"{session.migrations:,}",
        ", ".join(f"{CAUSES[name].lower()} {ms / max(1e-9, session.completion_ms):.0%}" for ms, name in causes),
    ]


def turn_rows(session: SlowSession) -> Iterator[list[str]]:
    """Its requests: when, which, where, how long by cause, what was found and what had been evicted."""
    for turn in session.turns:
        yield [
            say.span(turn.at_s),
            f"{turn.id} ({turn.agent})" if turn.agent else turn.id,
            turn.worker,
            *(say.latency(turn.ms[key]) if key in turn.ms else "" for key in list(CAUSES)[:5]),
            say.latency(turn.held_ms) if turn.held_ms else "",
            f"{turn.input:,} + {turn.output:,}",
            f"{turn.cached + turn.loaded:,}",
            f"{turn.evicted:,}" if turn.evicted else "",
            _ending(turn),
        ]


def _ending(turn: SessionTurn) -> str:
    if turn.status != "finished":
        return turn.status
    return say.REASONS.get(turn.miss, "").lower()


TURN_COLUMNS = (
    "at",
    "request",
    "worker",
    *list(CAUSES)[:5],
    "held back",
    "tokens",
    "found",
    "evicted",
    "rest of the prompt",
)
