"""Requests of replicas to the server about one owner and its answers, and a model of what it may answer.

The property: **every operation on a lease, and every row that a reader credits, is linearizable**, whatever becomes of the
server, of connections and of clocks. A reader may always find nothing: that is what the index promises, and no more. The
time that a lease lasts isn't part of it: safety comes from tokens, and clocks decide only who may ask for the next one,
which ``early_takeovers`` looks at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from tests.index.redis.linearizability import UNKNOWN, Operation, explained

from kvyard.index.redis import RedisIndex, scripts

WATCHED = (scripts.BEGIN, scripts.ACQUIRE, scripts.RENEW, scripts.RELEASE, scripts.WRITE)


class LeaseState(msgspec.Struct, frozen=True):
    """The server, as far as one owner is concerned."""

    epoch: str = ""
    counter: int = 0
    """The last token that was given out."""
    token: int = 0
    """That of the last who got the lease; 0 for none."""
    holder: str = ""
    """Who has the lease; it may run out at any time."""
    rows: frozenset[bytes] = frozenset()


class LeaseRecorder:
    """All replicas' operations, as they came and went."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.history: list[Operation] = []
        self._lock = threading.Lock()

    def add(self, **fields: Any) -> None:
        with self._lock:
            self.history.append(Operation(**fields))

    def watch(self, name: str, index: RedisIndex) -> None:
        """Note down all that ``index`` asks for its owner from now on."""
        inner = index.server.commands

        def commands(asked: Sequence[tuple[Any, ...]]) -> list[Any]:
            found = [self._operation(one) for one in asked]
            called = time.monotonic()
            try:
                replies = inner(asked)
            except Exception:
                # Some may have been done, all of them, or none; and what is on its way may still arrive.
                for one in found:
                    if one is not None:
                        self.add(kind=one[0], caller=name, arguments=one[1], called=called)
                raise
            returned = time.monotonic()
            for one, reply in zip(found, replies, strict=True):
                if one is not None:
                    result = _result(one[0], reply, self.owner)
                    self.add(
                        kind=one[0], caller=name, arguments=one[1], result=result, called=called, returned=returned
                    )
            return replies

        index.server.commands = commands  # type: ignore[method-assign]

    def _operation(self, command: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]] | None:
        """Return the kind and content of a command, if it is about our owner."""
        names = {script.digest: script.name for script in WATCHED}
        kind = names.get(str(command[1])) if command[0] == "EVALSHA" else None
        if kind is None:
            return None
        arguments = command[4:]
        if kind in ("renew", "release"):
            pairs = arguments[3:] if kind == "renew" else arguments[1:]
            tokens = [token for owner, token in zip(pairs[::2], pairs[1::2], strict=True) if owner == self.owner]
            if not tokens:
                return None
            return kind, (arguments[0], arguments[1] if kind == "renew" else "", int(tokens[0]))
        if kind != "begin" and arguments[1] != self.owner:
            return None
        if kind == "write":
            changes = [tuple(arguments[at : at + 3]) for at in range(3, len(arguments), 3)]
            keys = tuple((what, text) for what, _, text in changes if what in (b"s", b"d"))
            clears = any(what == b"c" for what, _, _ in changes)
            return kind, (arguments[0], int(arguments[2]), keys, clears)
        return kind, tuple(arguments)


def _result(kind: str, reply: list[Any], owner: str) -> Any:
    words = tuple(word.decode() if isinstance(word, bytes) else word for word in reply)
    if kind == "renew" and words[0] == "ok":
        return "lost" if owner in words[1:] else "ok"
    if kind == "acquire" and words[0] == "held":
        return words[:2]
    return words if kind in ("begin", "acquire") else words[0]


class LeaseModel:
    """Model of the server's possible answers, given all that is known of its answers."""

    def __init__(self, history: Sequence[Operation]) -> None:
        known = [one for one in history if one.result != UNKNOWN]
        self._given = {
            (one.arguments[0], one.result[1]) for one in known if one.kind == "acquire" and one.result[0] == "ok"
        }
        """Epochs and tokens that callers got: those that no caller heard of got others. This only makes the search short."""
        self._epochs = {one.arguments[0] for one in known if one.kind not in ("begin", "read", "restart")}

    def step(self, state: LeaseState, one: Operation) -> LeaseState | None:
        """The server after ``one``, or ``None`` where it wouldn't have answered so."""
        unknown = one.result == UNKNOWN
        if one.kind == "restart":
            return LeaseState()
        if one.kind == "read":
            # The longest beginning of the prompt that is there; nothing is always right.
            prompt, blocks = one.arguments[0], one.result
            held = next((at for at, key in enumerate(prompt) if key not in state.rows), len(prompt))
            return state if blocks in (0, held) else None
        if one.kind == "begin":
            fresh = one.arguments[1]
            if unknown:
                return state if state.epoch or fresh not in self._epochs else LeaseState(epoch=fresh)
            if one.result[0] == state.epoch:
                return state
            return LeaseState(epoch=fresh) if one.result[0] == fresh and not state.epoch else None
        left = one.result in ("epoch", ("epoch",))
        if one.arguments[0] != state.epoch:
            return state if unknown or left else None
        return None if left else self._in_epoch(state, one, unknown)

    def _in_epoch(self, state: LeaseState, one: Operation, unknown: bool) -> LeaseState | None:
        if one.kind == "acquire":
            replica, token = one.arguments[2], state.counter + 1
            if unknown:
                if (state.epoch, token) in self._given:
                    return state
            elif one.result[0] == "held":
                return state if state.holder == one.result[1] != replica else None
            elif one.result[1] != token:
                return None
            return LeaseState(epoch=state.epoch, counter=token, token=token, holder=replica)
        fits = one.arguments[1 if one.kind == "write" else 2] == state.token
        if one.kind == "release":
            return msgspec.structs.replace(state, holder="") if fits else state
        if not unknown and (one.result == "ok") != fits:
            return None
        if not fits:
            return state
        if one.kind == "renew":
            return msgspec.structs.replace(state, holder=one.arguments[1])
        _, _, changes, clears = one.arguments
        rows = set() if clears else set(state.rows)
        for what, text in changes:
            keys = {text[at : at + 8] for at in range(0, len(text), 8)}
            rows = rows | keys if what == b"s" else rows - keys
        return msgspec.structs.replace(state, rows=frozenset(rows))


def order_of(history: Sequence[Operation], begun: LeaseState) -> list[Operation] | None:
    """An order that explains ``history``; ``None`` where there is none."""
    return explained(history, begun, LeaseModel(history).step)


def early_takeovers(history: Sequence[Operation], lease: float, cut_short: Sequence[float]) -> list[tuple[float, str]]:
    """Leases that went to another replica before their time was up, when and to whom: without a server's restart, a release, or
    one of ``cut_short``, when a test let leases run out, in between.
    """
    found = []
    got = [one for one in history if one.kind == "acquire" and one.result != UNKNOWN and one.result[0] == "ok"]
    for after in got:
        for before in history:
            kept = (before.kind == "renew" and before.result == "ok") or before in got
            if not kept or before.caller == after.caller or before.arguments[0] != after.arguments[0]:
                continue
            if not before.returned < after.called or after.returned >= before.called + lease:
                continue
            if any(before.called <= moment <= after.returned for moment in cut_short):
                continue
            if not any(
                one.kind == "release" and one.caller == before.caller and one.called <= after.returned <= after.returned
                for one in history
                if one.called >= before.called
            ):
                found.append((after.called, after.caller))
    return found
