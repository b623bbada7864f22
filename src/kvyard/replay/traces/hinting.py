"""Hints made from a trace's own future, as good as a client of a given quality would give them.

A client's knowledge follows from the rest of the trace: a conversation's last request could have carried the hint that it is
over, and a request that calls a tool how long to wait. ``recall`` is the share of these requests that carry the hint; ``false``
is the share of all others that do. Draws are nested: hints at a lower recall are given at a higher one as well. ``own-ttl``
knows less: for how long to wait is taken from the session's own past gaps.

The end of a trace cuts conversations off, so its last part has more ends than were true (right-censoring): that flatters
hints.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random

import msgspec
from msgspec.structs import replace

from kvyard.blocks import Hints
from kvyard.clock import SECOND, from_seconds
from kvyard.errors import KvyardError
from kvyard.replay.traces.conversations import conversations
from kvyard.replay.traces.reading import ReadingTally
from kvyard.replay.traces.request import TraceRequest
from kvyard.replay.traces.trace import Trace

KINDS = {
    "session-end": ("recall", "false"),
    "ttl": ("seconds", "recall", "false", "then"),
    "own-ttl": ("gaps", "seconds", "recall", "false", "then"),
}


class MadeHint(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of hint, and how often it is right. Raises ``KvyardError`` for what makes no sense."""

    kind: str
    """``session-end``, ``ttl`` or ``own-ttl``."""
    recall: float = 1.0
    """The share of requests that give it, of those that could."""
    false: float = 0.0
    """The share of those that give it, of all others."""
    seconds: float = 0.0
    """The time to live; of ``own-ttl`` that of a session without a gap so far, 0 for no hint."""
    gaps: float = 3.0
    """The time to live of ``own-ttl``, by the longest gap of its session so far."""
    then: str = "ordinary"
    """Priority of blocks after that."""

    def __post_init__(self) -> None:
        for name in ("recall", "false"):
            if not 0 <= getattr(self, name) <= 1:
                raise KvyardError(f"hints {self.kind}: {name} is a share from 0 to 1, not {getattr(self, name):g}")
        if self.kind == "ttl" and not 0 < self.seconds < float("inf"):
            raise KvyardError("hints ttl: say for how long, as in ttl:seconds=60")
        if self.kind == "own-ttl" and not (0 < self.gaps < float("inf") and 0 <= self.seconds < float("inf")):
            raise KvyardError("hints own-ttl: gaps is above 0 and seconds 0 or more, as in own-ttl:gaps=3,seconds=60")
        if self.then not in ("ordinary", "first"):
            raise KvyardError(f"hints {self.kind}: then is ordinary or first, not {self.then!r}")


def parse_hints(text: str) -> tuple[MadeHint, ...]:
    """Return hints as people write them: ``session-end:recall=0.5,false=0.1``, ``ttl:seconds=60,then=first``, or both with a
    ``+``. Raises ``KvyardError``.
    """
    by_kind: dict[str, MadeHint] = {}
    for part in text.split("+"):
        kind, _, rest = part.strip().partition(":")
        if kind not in KINDS:
            raise KvyardError(
                f"hints {kind!r}: choose session-end or ttl, as in session-end:recall=0.5,false=0.1 or ttl:seconds=60, "
                "or own-ttl"
            )
        if kind in by_kind:
            raise KvyardError(f"hints say {kind} twice: once is enough")
        by_kind[kind] = _made(kind, rest)
    return tuple(by_kind.values())


def _made(kind: str, text: str) -> MadeHint:
    shares: dict[str, float] = {}
    then = "ordinary"
    for item in text.split(",") if text else ():
        name, equals, value = item.strip().partition("=")
        if name not in KINDS[kind] or not equals:
            raise KvyardError(
                f"hints {kind} has {', '.join(KINDS[kind])}, as in {kind}:recall=0.5; not {item.strip()!r}"
            )
        if name == "then":
            then = value
            continue
        try:
            shares[name] = float(value)
        except ValueError:
            raise KvyardError(f"hints {kind}: {name} is a number, not {value!r}") from None
    return MadeHint(kind=kind, then=then, **shares)


class TraceFuture(msgspec.Struct, frozen=True):
    """Knowledge of a client at each request of a trace, in its order."""

    names: list[str]
    """Names of conversations."""
    ends: list[bool]
    """True if no request of its conversation comes later."""
    calls: list[bool]
    """True if its session is back soon: it called a tool, or, in traces without that, any request but the last."""
    gaps: list[float] = []
    """Seconds since the request before of its session ended, as recorded; 0 if there was none, or it isn't known."""

    @classmethod
    def of(cls, trace: Iterable[TraceRequest]) -> "TraceFuture":
        """Return the future of a trace, which is read four times."""
        names = conversations(trace)
        last = {name: number for number, name in enumerate(names)}
        ends = [last[name] == number for number, name in enumerate(names)]
        calls = [request.tool_call for request in trace]
        gaps = [(request.delay or 0) / SECOND for request in trace]
        return cls(names, ends, calls if any(calls) else [not end for end in ends], gaps)

    def hints(self, kinds: Sequence[MadeHint], seed: int) -> Iterator[Hints]:
        """Yield the hints of each request. The same seed gives the same ones."""
        draws = {hint.kind: Random(f"{seed} {hint.kind}") for hint in kinds}
        longest: dict[str, float] = {}
        for index, (name, ends, calls) in enumerate(zip(self.names, self.ends, self.calls, strict=False)):
            if self.gaps and self.gaps[index]:
                longest[name] = max(longest.get(name, 0.0), self.gaps[index])
            hints = Hints(name)
            for hint in kinds:
                knows = ends if hint.kind == "session-end" else calls
                if draws[hint.kind].random() < (hint.recall if knows else hint.false) and not hints.marks:
                    hints = _said(hint, hints, longest.get(name, 0.0))
            yield hints


def with_hints(trace: Trace, wanted: str | tuple[MadeHint, ...], seed: int = 0) -> Trace:
    """Return the trace with hints made from its own future, in place of those that it has; ranges of tokens stay.

    Looks at the whole trace before its first request. Raises ``KvyardError``.
    """
    hints_made = parse_hints(wanted) if isinstance(wanted, str) else wanted

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        hints_by_row = TraceFuture.of(trace).hints(hints_made, seed)
        for request, hints in zip(trace.rows(tally), hints_by_row, strict=False):
            kept = request.hints.retention
            yield replace(request, hints=replace(hints, retention=kept) if kept else hints)

    return Trace(f"{trace.name} with hints", trace.format, rows, grouped=trace.grouped)


def _said(hint: MadeHint, hints: Hints, longest_gap: float) -> Hints:
    if hint.kind == "session-end":
        return replace(hints, session_end=True)
    seconds = hint.gaps * longest_gap if hint.kind == "own-ttl" and longest_gap else hint.seconds
    if not seconds:
        return hints
    return replace(hints, ttl=from_seconds(seconds), ttl_then="first" if hint.then == "first" else "ordinary")


def count_hints(hints: Hints, counts: dict[str, int]) -> None:
    """Add one request's ``hints`` to ``counts``, by what they say."""
    present: Mapping[str, bool] = {
        "session end": hints.session_end,
        "time to live": hints.ttl is not None,
        "retention priority": bool(hints.retention),
    }
    for name, here in present.items():
        if here:
            counts[name] = counts.get(name, 0) + 1
