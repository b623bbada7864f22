"""The ledger: what a stream has announced and not taken back, ready to be announced again to somebody who comes late.

It is kept by whoever sends the stream, from the very events that were sent. So it needs nothing from the engine, can be
asked at any time, and is by construction what a reader of all batches so far holds. Announcing it again needs more than a
mirror's sets of hashes: parents, tokens and namespaces, in an order in which parents come first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvyard.events.mirror import Place
from kvyard.events.types import Cleared, Event, Removed, Stored
from kvyard.hashing import Key


class _Piece:
    """One Stored event, as long as any of its blocks is held."""

    __slots__ = ("event", "hashes", "tokens")

    def __init__(self, event: Stored) -> None:
        self.tokens = _compact(event.tokens)
        self.hashes = [*event.hashes]  # packed ones can't be sliced
        self.event = msgspec.structs.replace(event, tokens=None, hashes=self.hashes)


class Ledger:
    """Per (group, tier) the held hashes and the announcement that each came with."""

    def __init__(self) -> None:
        self._held: dict[Place, dict[Key, _Piece]] = {}

    @property
    def blocks(self) -> int:
        """How many (hash, group, tier) are held."""
        return sum(map(len, self._held.values()))

    def held(self) -> dict[Place, set[Key]]:
        """What a mirror of the stream holds."""
        return {place: set(pieces) for place, pieces in self._held.items()}

    def clear(self) -> None:
        """Forget everything, as a restarted engine has."""
        self._held.clear()

    def apply(self, events: Iterable[Event]) -> None:
        """Take in ``events`` in order."""
        for event in events:
            if isinstance(event, Stored):
                if event.hashes:
                    self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            elif event.tier is None:
                self._held.clear()
            else:
                for place in [place for place in self._held if place[1] == event.tier]:
                    del self._held[place]

    def events(self) -> list[Event]:
        """A clear, then everything held: place by place, parents first, each stretch of one announcement as one Stored."""
        out: list[Event] = [Cleared()]
        for place in sorted(self._held, key=lambda place: (-1 if place[0] is None else place[0], place[1])):
            out += _parents_first(_stretches(self._held[place]))
        return out

    def _store(self, event: Stored) -> None:
        pieces = self._held.setdefault((event.group, event.tier), {})
        piece = _Piece(event)
        if event.tokens is None:
            # Hashes alone must not replace an announcement that says more.
            for key in piece.hashes:
                pieces.setdefault(key, piece)
        else:
            pieces.update(dict.fromkeys(piece.hashes, piece))

    def _remove(self, event: Removed) -> None:
        place = (event.group, event.tier)
        pieces = self._held.get(place)
        if pieces is not None:
            for key in event.hashes:
                pieces.pop(key, None)
            if not pieces:
                del self._held[place]


def _stretches(pieces: dict[Key, _Piece]) -> Iterator[Stored]:
    """Every held block once, in consecutive stretches of the event it came with, events in order of their first block."""
    for piece in dict.fromkeys(pieces.values()):
        hashes = piece.hashes
        start = 0
        for at in range(len(hashes) + 1):
            if at < len(hashes) and pieces.get(hashes[at]) is piece:
                continue
            if start < at:
                yield _slice(piece, start, at)
            start = at + 1


def _slice(piece: _Piece, start: int, stop: int) -> Stored:
    event, hashes, tokens = piece.event, piece.hashes, piece.tokens
    if start == 0 and stop == len(hashes):
        return event if tokens is None else msgspec.structs.replace(event, tokens=list(tokens))
    size, extras = event.block_size, event.extra_keys
    part: list[int] | None = None
    if tokens is not None and len(tokens) == size * len(hashes):
        part = list(tokens[start * size : stop * size])
    return msgspec.structs.replace(
        event,
        hashes=hashes[start:stop],
        parent=hashes[start - 1] if start else event.parent,
        tokens=part,
        extra_keys=extras[start:stop] if extras is not None else None,
    )


def _parents_first(stretches: Iterable[Stored]) -> list[Stored]:
    """``stretches`` reordered so that one whose parent is in another comes after it.

    They are stretches of paths in a tree, so there is no circle among them.
    """
    waiting = list(stretches)
    home = {key: at for at, event in enumerate(waiting) for key in event.hashes}
    out: list[Stored] = []
    done = [False] * len(waiting)
    for first in range(len(waiting)):
        line = []
        at: int | None = first
        while at is not None and not done[at]:
            done[at] = True
            line.append(waiting[at])
            parent = waiting[at].parent
            at = home.get(parent) if parent is not None else None
        out += reversed(line)
    return out


def _compact(tokens: Sequence[int] | None) -> Sequence[int] | None:
    """Tokens at four bytes each where they fit: a ledger keeps them for as long as blocks are held."""
    if tokens is None or isinstance(tokens, array):
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError):
        return list(tokens)


def restates(events: Iterable[Event]) -> bool:
    """Whether a batch makes all before it irrelevant: it says somewhere that everything, everywhere, is gone."""
    return any(isinstance(event, Cleared) and event.tier is None for event in events)
