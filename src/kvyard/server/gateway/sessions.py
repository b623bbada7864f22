"""Sessions of a gateway: which one a request belongs to, and what each has had. All of it is bounded, and expires.

A request belongs to the session that its client names (a header), else to that of the response it goes on from, else to its
``user``, else to the session whose latest prompt it begins with. With keys, names are those of the key: nobody can name
another's session.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from kvyard.clock import MS, SECOND
from kvyard.server.dashboard.view import SessionView, TenantView

LONG_NAME = 128
"""Characters from which on a name is kept as a digest."""
MOST_SESSIONS = 10_000
MOST_TENANTS = 200
"""Tenants that are counted by name; clients may invent them."""
OTHERS = "(others)"
IDLE = 3600 * SECOND
"""Sessions that were idle for longer are dropped."""
LOOK_BACK = 512
"""Blocks at the end of a prompt that are compared with the ends of earlier prompts."""
STRIDE = 8
"""Of those, every eighth is compared first."""
SHOWN = 50
"""Sessions in a view, the latest first."""


def session_name(given: str | None) -> str | None:
    """Return the name of a session or tenant as it is kept; long ones are digests."""
    if given is None or len(given) < LONG_NAME:
        return given
    return blake2b(given.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class _Recognised(msgspec.Struct, gc=False):
    name: str
    scope: str
    tokens: int
    at: int
    anchor: int = 0
    """Key of the last block of its latest prompt whose position is a multiple of ``STRIDE``."""


class PrefixSessions:
    """Sessions of clients that name none: a prompt that begins with all of an earlier one goes on from it."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._known: OrderedDict[int, _Recognised] = OrderedDict()
        """By the key of the last whole block of a session's latest prompt; those that were quiet the longest first."""
        self._anchors: Counter[int] = Counter()
        """Sessions by their anchors. Where none of a prompt's blocks is one, no session ends within it."""
        self._made = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, keys: Sequence[int], tokens: int, scope: str, now: int) -> str | None:
        """Return the session of a prompt of ``tokens`` tokens; a new one, unless it goes on from an earlier prompt of
        ``scope``. ``None`` for one without a whole block.
        """
        if not keys:
            return None
        known = self._known
        match = self._take(keys, tokens, scope, now)
        if match is None:
            self._made += 1
            match = _Recognised(f"recognised {self._made}", scope, tokens, now)
        if keys[-1] in known:
            self._drop(keys[-1])
        match.tokens, match.at, match.anchor = tokens, now, keys[(len(keys) - 1) // STRIDE * STRIDE]
        known[keys[-1]] = match
        self._anchors[match.anchor] += 1
        while len(known) > self._most or next(iter(known.values())).at < now - IDLE:
            self._drop(next(iter(known)))
        return match.name

    def _take(self, keys: Sequence[int], tokens: int, scope: str, now: int) -> _Recognised | None:
        """Take the session that a prompt continues; its prompt no longer ends there."""
        anchors, known = self._anchors, self._known
        start = max(0, len(keys) - LOOK_BACK) // STRIDE * STRIDE
        if anchors.keys().isdisjoint(keys[start::STRIDE]):
            return None
        for position in range((len(keys) - 1) // STRIDE * STRIDE, start - 1, -STRIDE):
            if keys[position] not in anchors:
                continue
            for end in reversed(keys[position : position + STRIDE]):
                if end in known:
                    match = known[end]
                    if match.scope != scope or tokens <= match.tokens or match.at < now - IDLE:
                        return None
                    return self._drop(end)
        return None

    def _drop(self, end: int) -> _Recognised:
        match = self._known.pop(end)
        self._anchors[match.anchor] -= 1
        if not self._anchors[match.anchor]:
            del self._anchors[match.anchor]
        return match


class SessionStats(msgspec.Struct, gc=False):
    """Statistics of one session, in constant size however many turns it has."""

    tenant: str
    first: int
    last: int
    turns: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    waited: int = 0
    engine: str = ""
    moves: int = 0


class TenantStats(msgspec.Struct, gc=False):
    """Statistics of one tenant."""

    requests: int = 0
    failed: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    waited: int = 0
    engine_ns: int = 0


class EndedTurn(msgspec.Struct, gc=False, kw_only=True):
    """A request that is over, as far as sessions and tenants are concerned; times in nanoseconds."""

    session: str | None
    tenant: str
    has_key: bool
    finished: bool
    prompt: int
    cached: int
    output: int
    waited: int
    engine: str
    engine_ns: int


class SessionTally:
    """Counts by session and by tenant."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._sessions: OrderedDict[str, SessionStats] = OrderedDict()
        """Sessions, those that were quiet the longest first."""
        self._tenants: dict[str, TenantStats] = {}
        self.started = 0
        """Sessions so far."""
        self.forgotten = 0
        """Of those, sessions whose counts were dropped, for want of room or because they were quiet."""

    def __len__(self) -> int:
        return len(self._sessions)

    def ended(self, turn: EndedTurn, now: int) -> None:
        """Count a request that is over."""
        if turn.tenant:
            self._count_tenant(turn)
        if turn.session is None:
            return
        stats = self._sessions.get(turn.session)
        if stats is None:
            stats = self._sessions[turn.session] = SessionStats(turn.tenant, now, now)
            self.started += 1
        else:
            self._sessions.move_to_end(turn.session)
            stats.last = now
        self._forget(now)
        stats.turns += 1
        stats.prompt += turn.prompt
        stats.cached += turn.cached
        stats.output += turn.output
        stats.waited += turn.waited
        if turn.engine:
            stats.moves += stats.engine not in ("", turn.engine)
            stats.engine = turn.engine

    def _count_tenant(self, turn: EndedTurn) -> None:
        stats = self._tenants.get(turn.tenant)
        if stats is None:
            name = turn.tenant if turn.has_key or len(self._tenants) < MOST_TENANTS else OTHERS
            stats = self._tenants.setdefault(name, TenantStats())
        stats.requests += 1
        stats.failed += not turn.finished
        stats.prompt += turn.prompt
        stats.cached += turn.cached
        stats.output += turn.output
        stats.waited += turn.waited
        stats.engine_ns += turn.engine_ns

    def _forget(self, now: int) -> None:
        sessions = self._sessions
        while len(sessions) > self._most or next(iter(sessions.values())).last < now - IDLE:
            sessions.popitem(last=False)
            self.forgotten += 1

    def session_views(self, now: int) -> list[SessionView]:
        """Return the latest sessions, the latest first."""
        views: list[SessionView] = []
        for name, stats in reversed(self._sessions.items()):
            if len(views) == SHOWN:
                break
            views.append(
                SessionView(
                    name=name.rpartition("\0")[2],
                    tenant=stats.tenant,
                    turns=stats.turns,
                    prompt_tokens=stats.prompt,
                    cached_tokens=stats.cached,
                    output_tokens=stats.output,
                    waited_ms=stats.waited / stats.turns / MS,
                    worker=stats.engine,
                    moves=stats.moves,
                    lasted_s=(stats.last - stats.first) / SECOND,
                    age_s=(now - stats.last) / SECOND,
                )
            )
        return views

    def tenant_views(self) -> list[TenantView]:
        """Return all tenants, the one with the most tokens first."""
        ordered = sorted(self._tenants.items(), key=lambda item: (-item[1].prompt - item[1].output, item[0]))
        return [
            TenantView(
                name=name,
                requests=stats.requests,
                failed=stats.failed,
                prompt_tokens=stats.prompt,
                cached_tokens=stats.cached,
                output_tokens=stats.output,
                waited_ms=stats.waited / stats.requests / MS,
                engine_s=stats.engine_ns / SECOND,
            )
            for name, stats in ordered
        ]
