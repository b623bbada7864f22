"""The bridge: from one stream's opaque hashes to request keys, with explicit positions.

A Stored event that brings tokens says which text its hashes name. From it a *piece* is made: where the text starts, the
engine's block size, and the request keys that end inside it. Nothing is inferred from the lengths of lists. So engine
blocks may be larger or smaller than ours, and an event may end in the middle of one of ours: its last tokens wait in the
piece for whatever continues it.

A bridge belongs to one stream. The same number in another stream may be another text: models, adapters and seeds differ. It
knows which text a hash names, and not who holds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from kvyard.events.types import Stored
from kvyard.hashing import Key
from kvyard.index.identity import Identity, Mark, marks_of_event

_BITS = 20
_OFFSET = (1 << _BITS) - 1


class Piece:
    """The text of one announcement, block by block. Positions are tokens from the start of the prompt."""

    __slots__ = (
        "alive",
        "begin",
        "beyond",
        "first",
        "hashes",
        "keys",
        "last",
        "number",
        "parent",
        "size",
        "tail",
        "tail_marks",
    )

    def __init__(self, begin: int, size: int, hashes: list[Key], parent: Piece | None) -> None:
        self.number = 0
        self.begin = begin
        self.size = size
        """Tokens per engine block."""
        self.hashes = hashes
        self.parent = parent
        self.first = 0
        """Which of our blocks the first of ``keys`` is."""
        self.keys = array("Q")
        """Of our blocks that end in here."""
        self.last: int | None = None
        """The key of our last full block up to the end, ``None`` where there is none yet."""
        self.tail: Sequence[int] = ()
        """Tokens after our last full block."""
        self.tail_marks: list[Mark] = []
        self.beyond: dict[int, list[tuple[int, int]]] = {}
        """Our blocks that start in here and end in a piece that branches off: by number, their keys, and up to where they
        are made of this piece."""
        self.alive = 0
        """How many hashes lead here."""

    @property
    def end(self) -> int:
        return self.begin + self.size * len(self.hashes)


class _Front(Piece):
    """The first blocks of a piece, as a parent of what branches off there."""

    __slots__ = ()

    def __init__(self, whole: Piece, count: int) -> None:
        super().__init__(whole.begin, whole.size, whole.hashes[:count], whole.parent)
        self.number = whole.number
        self.first = whole.first
        self.beyond = whole.beyond


class Bridge:
    """Which text each hash of a stream names."""

    def __init__(self, identity: Identity, *, remembered: int = 1 << 16) -> None:
        """``remembered`` hashes that nobody holds any more are kept: something may still continue them."""
        self.identity = identity
        self.remembered = remembered
        self._known: dict[Key, int] = {}
        self._pieces: dict[int, Piece] = {}
        self._texts: dict[int, tuple[Sequence[int], list[Mark]]] = {}
        """Tokens of pieces that don't end, or whose blocks don't, where ours do: to branch off in the middle of one."""
        self._next = 0
        self._idle: dict[Key, None] = {}
        """Hashes that nobody holds, first forgotten first."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    @property
    def idle(self) -> int:
        """Hashes that are known although nobody holds them."""
        return len(self._idle)

    def find(self, key: Key) -> tuple[Piece, int] | None:
        """The piece that ``key`` is in and its position there, if it is known."""
        loc = self._known.get(key)
        return None if loc is None else (self._pieces[loc >> _BITS], loc & _OFFSET)

    def announce(self, event: Stored, hashes: list[Key]) -> Piece | None:
        """Learn what a dense store (tokens for every hash) says of ``hashes`` not known so far; the new piece, if any.

        The caller has made sure that the parent is known or ``None``. Raises ``IdentityError`` where the text can't be named.
        """
        known, size = self._known, event.block_size
        skip = 0
        while skip < len(hashes) and hashes[skip] in known:
            skip += 1
        if skip == len(hashes):
            return None
        before = hashes[skip - 1] if skip else event.parent
        parent: Piece | None = None
        begin = 0
        if before is not None:
            whole, at = self.find(before)  # type: ignore[misc]
            parent = whole if at + 1 == len(whole.hashes) else self._front(whole, at + 1)
            begin = parent.end
        piece = Piece(begin, size, hashes[skip:] if skip else hashes, parent)
        assert event.tokens is not None
        marks = (
            []
            if event.extra_keys is None and event.lora_name is None and not event.salt
            else marks_of_event(event, begin - skip * size)
        )
        tokens = event.tokens[skip * size :] if skip else event.tokens
        self._name(piece, tokens, [mark for mark in marks if mark[0] >= begin])
        self._enter(piece)
        return piece

    def _front(self, whole: Piece, count: int) -> Piece:
        """The first ``count`` blocks of ``whole`` as a parent."""
        size = self.identity.block_size
        front = _Front(whole, count)
        ours = front.end // size - whole.first
        front.keys = whole.keys[:ours]
        front.last = front.keys[-1] if front.keys else (whole.parent.last if whole.parent is not None else None)
        rest = front.end % size
        if rest:
            tokens, marks = self._texts[whole.number]
            start = whole.first * size
            front.tail = tokens[front.end - rest - start : front.end - start]
            front.tail_marks = [mark for mark in marks if front.end - rest <= mark[0] < front.end]
        return front

    def _name(self, piece: Piece, tokens: Sequence[int], marks: list[Mark]) -> None:
        """Work out the request keys that end in ``piece``."""
        parent, size = piece.parent, self.identity.block_size
        last = parent.last if parent is not None else None
        if parent is not None and parent.tail:
            tokens = [*parent.tail, *tokens]
            marks = [*parent.tail_marks, *marks]
        piece.first = piece.begin // size
        start = piece.first * size
        keys = self.identity.chain(last, start, tokens, marks)
        piece.keys = array("Q", keys)
        piece.last = keys[-1] if keys else last
        rest = len(tokens) % size
        if rest:
            piece.tail = tokens[len(tokens) - rest :]
            piece.tail_marks = [mark for mark in marks if mark[0] >= piece.end - rest]
        if rest or piece.size % size or piece.begin % size:
            self._texts[self._next] = (array("I", tokens) if _small(tokens) else list(tokens), marks)

    def _enter(self, piece: Piece) -> None:
        piece.number, self._next = self._next, self._next + 1
        base = piece.number << _BITS
        known, idle = self._known, self._idle
        for at, key in enumerate(piece.hashes):
            old = known.get(key)
            if old is not None:
                self._release(old)
            elif idle:
                idle.pop(key, None)
            known[key] = base + at
        piece.alive = len(set(piece.hashes)) if len(piece.hashes) > 1 else 1
        self._pieces[piece.number] = piece

    # -- positions --------------------------------------------------------------------------------------------------

    def keys_between(self, piece: Piece, start: int, stop: int) -> list[int]:
        """The keys of our blocks ``start`` to ``stop`` on the way to ``piece``, the last of which ends in it."""
        if start >= piece.first:
            return piece.keys[start - piece.first : stop - piece.first].tolist()
        parts: list[Sequence[int]] = []
        at: Piece | None = piece
        while at is not None and stop > start:
            if stop > at.first:
                low = max(start, at.first)
                parts.append(at.keys[low - at.first : stop - at.first])
                stop = low
            at = at.parent
        return [key for part in reversed(parts) for key in part]

    def keys_at(self, piece: Piece, block: int, end: int) -> list[int]:
        """The keys, on every way known, of our block number ``block`` that the text of ``piece`` up to ``end`` is part of."""
        keys = [key for key, upto in piece.beyond.get(block, ()) if end <= upto]
        if (block + 1) * self.identity.block_size <= piece.end:
            keys += self.keys_between(piece, block, block + 1)
        return keys

    def straddled(self, piece: Piece) -> Iterator[Piece]:
        """The pieces that our first block in ``piece`` reaches back into; they learn its key."""
        block = piece.first
        at = piece.parent
        while at is not None and at.end > block * self.identity.block_size:
            ways = at.beyond.setdefault(block, [])
            if (piece.keys[0], at.end) not in ways:
                ways.append((piece.keys[0], at.end))
                yield at
            at = at.parent

    # -- forgetting -------------------------------------------------------------------------------------------------

    def rest(self, key: Key) -> None:
        """Nobody holds ``key`` any more: it is kept for a while, in case something continues it."""
        if key in self._known:
            self._idle.pop(key, None)
            self._idle[key] = None
            while len(self._idle) > self.remembered:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                self._release(self._known.pop(oldest))

    def wake(self, keys: Sequence[Key]) -> None:
        """Somebody holds ``keys`` again."""
        if self._idle:
            for key in keys:
                self._idle.pop(key, None)

    def rest_unless(self, held: Callable[[Key], bool]) -> None:
        """Let every hash rest that is not ``held``."""
        for key in [key for key in self._known if key not in self._idle and not held(key)]:
            self.rest(key)

    def clear(self) -> None:
        """Forget everything: the engine is another one, and its hashes may be too."""
        self._known.clear()
        self._pieces.clear()
        self._texts.clear()
        self._idle.clear()

    def _release(self, loc: int) -> None:
        number = loc >> _BITS
        piece = self._pieces[number]
        piece.alive -= 1
        if not piece.alive:
            del self._pieces[number]
            self._texts.pop(number, None)


def _small(tokens: Sequence[int]) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) < 1 << 32)
