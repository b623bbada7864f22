"""Is there an order of operations, one after the other, that explains what their callers saw? Wing and Gong's search, with
Lowe's memory of what was tried.

An operation takes effect at one moment between its call and its return. One whose outcome its caller never learned may take
effect at any moment after its call, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import msgspec

StateT = TypeVar("StateT", bound=Hashable)
UNKNOWN = "unknown"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One call of one caller."""

    kind: str
    caller: str
    arguments: tuple[Any, ...] = ()
    result: Any = UNKNOWN
    called: float
    returned: float = float("inf")
    """Never, where the outcome is unknown."""


class _Entry:
    """A call or a return in the list of what happened."""

    __slots__ = ("before", "behind", "number", "partner")

    def __init__(self, number: int, partner: _Entry | None) -> None:
        self.number = number
        self.partner = partner
        """A call's return; ``None`` of a return."""
        self.before: _Entry | None = None
        self.behind: _Entry | None = None


def explained(
    history: Sequence[Operation], state: StateT, step: Callable[[StateT, Operation], StateT | None]
) -> list[Operation] | None:
    """An order that explains ``history`` from ``state`` on, or ``None`` where there is none.

    ``step`` is the state after an operation, or ``None`` where it can't have had its result then. With an unknown result it
    can always happen.
    """
    head = _listed(history)
    needed = sum(1 << number for number, one in enumerate(history) if one.result != UNKNOWN)
    tried: set[tuple[int, StateT]] = set()
    path: list[tuple[_Entry, StateT]] = []
    done, at = 0, head.behind
    while done & needed != needed:
        if at is None or at.partner is None:
            # Something has returned that can't be explained by what was chosen so far.
            if not path:
                return None
            at, state = path.pop()
            done ^= 1 << at.number
            _put_back(at)
            at = at.behind
            continue
        after = step(state, history[at.number])
        chosen = done | 1 << at.number
        idle = after == state and history[at.number].result == UNKNOWN
        if after is None or idle or (chosen, after) in tried:
            at = at.behind
            continue
        tried.add((chosen, after))
        path.append((at, state))
        done, state = chosen, after
        _take_out(at)
        at = head.behind
    return [history[entry.number] for entry, _ in path]


def _listed(history: Sequence[Operation]) -> _Entry:
    moments: list[tuple[float, int, _Entry]] = []
    for number, one in enumerate(history):
        end = _Entry(number, None)
        moments += [(one.called, 0, _Entry(number, end)), (one.returned, 1, end)]
    head = last = _Entry(-1, None)
    for _, _, entry in sorted(moments, key=lambda moment: moment[:2]):
        last.behind, entry.before = entry, last
        last = entry
    return head


def _take_out(call: _Entry) -> None:
    for entry in (call, call.partner):
        assert entry is not None and entry.before is not None
        entry.before.behind = entry.behind
        if entry.behind is not None:
            entry.behind.before = entry.before


def _put_back(call: _Entry) -> None:
    for entry in (call.partner, call):
        assert entry is not None and entry.before is not None
        entry.before.behind = entry
        if entry.behind is not None:
            entry.behind.before = entry
