"""The bridge: from one stream's opaque hashes to request keys, with explicit positions.

A Stored event with tokens states which text its hashes name. From it a *span* is made: where the text starts, the
engine's block size, and the request keys that end inside it. Nothing is inferred from the lengths of lists. So engine
blocks may be larger or smaller than ours, and an event may end in the middle of one of ours: its last tokens wait in the
span for whatever continues it.

A bridge belongs to one stream. The same number in another stream may be another text: models, adapters and seeds differ. It
knows which text a hash names, and not who holds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from kvyard.events.types import Stored
from kvyard.hashing import Key
from kvyard.index.identity import Identity, IdentityError, Mark, marks_of_event

_BITS = 20
_OFFSET = (1 << _BITS) - 1


class TextSpan(msgspec.Struct, eq=False):
    """The text of one announcement, block by block. Positions are tokens from the start of the prompt."""

    begin: int
    size: int
    """Tokens per engine block."""
    hashes: list[Key]
    parent: TextSpan | None
    number: int = 0
    first: int = 0
    """Position of the first of ``keys``, in our blocks."""
    keys: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    """Request keys of our blocks that end in here."""
    last: int | None = None
    """The key of our last full block up to the end, ``None`` if there is none yet."""
    tail: Sequence[int] = ()
    """Tokens after our last full block."""
    tail_marks: list[Mark] = []
    beyond: dict[int, list[tuple[int, int]]] = {}
    """Our blocks that start in here and end in a span that branches off: by number, their keys, and up to where they are
    made of this span."""
    alive: int = 0
    """Number of hashes that lead here."""
    is_start: bool = False
    """True if this is only the start of the span with its ``number``, as the parent of what branches off there."""

    @property
    def end(self) -> int:
        return self.begin + self.size * len(self.hashes)

    def last_before(self, block: int) -> int | None:
        """Return the key of our last full block before number ``block``, which begins in here or right behind."""
        if block > self.first:
            return self.keys[block - 1 - self.first]
        return None if self.parent is None else self.parent.last

    def start(self, count: int, block_size: int) -> TextSpan:
        """Return the first ``count`` blocks, without the tail; ``block_size`` is ours."""
        start = TextSpan(self.begin, self.size, self.hashes[:count], self.parent)
        start.is_start = True
        start.number, start.first, start.beyond = self.number, self.first, self.beyond
        start.keys = self.keys[: start.end // block_size - self.first]
        return start


class SpanSnapshot(msgspec.Struct, array_like=True):
    """A ``TextSpan``. ``parent`` and ``whole`` are positions in the list of spans, -1 for none."""

    parent: int
    whole: int
    """The span that this is the start of; ``hashes``, ``keys`` and ``beyond`` are the whole's then, and left out."""
    begin: int
    size: int
    hashes: list[int | bytes]
    count: int
    """Number of hashes."""
    first: int
    keys: bytes
    last: int | None
    tail: list[int]
    marks: list[tuple[int, tuple[Any, ...]]]
    beyond: list[tuple[int, list[tuple[int, int]]]]
    known: bool
    """True if hashes lead here."""
    gone: list[int]
    """Hashes that no longer lead here, by position."""
    text: tuple[list[int], list[tuple[int, tuple[Any, ...]]]] | None


class Bridge:
    """Map from the hashes of a stream to the text that they name."""

    def __init__(self, identity: Identity, *, remembered: int = 1 << 16) -> None:
        """``remembered`` hashes that are no longer held are kept, or up to a sixty-fourth more: something may still continue
        them.
        """
        self.identity = identity
        self.remembered = remembered
        self._slack = remembered >> 6
        self._known: dict[Key, int] = {}
        self._spans: dict[int, TextSpan] = {}
        self._texts: dict[int, tuple[Sequence[int], list[Mark]]] = {}
        """Tokens of spans that don't end, or whose blocks don't, where ours do: to branch off in the middle of one."""
        self._next = 0
        self.idle: dict[Key, None] = {}
        """Hashes that are known but not held, in order of eviction."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def find(self, key: Key) -> tuple[TextSpan, int] | None:
        """Return the span that ``key`` is in and its position there, if it is known."""
        loc = self._known.get(key)
        return None if loc is None else (self._spans[loc >> _BITS], loc & _OFFSET)

    def announce(self, event: Stored, hashes: list[Key]) -> TextSpan | None:
        """Learn unknown ``hashes`` from a dense store (tokens for every hash); the new span, if any.

        The caller has made sure that the parent is known or ``None``, or else the first hash. Raises ``IdentityError``,
        changing nothing, where the text can't be named, or a hash names another text already: chained hashes have one text
        each, so one of the two is wrong, and a copy that is stored under both could only be taken back once.
        """
        known, size = self._known, event.block_size
        names = set(hashes)
        if len(names) < len(hashes):
            raise IdentityError("a store lists a hash twice, so that it names two texts")
        if event.parent in names:
            raise IdentityError("a store follows on one of its own blocks")
        skip = next((index for index, key in enumerate(hashes) if key not in known), len(hashes))
        assert event.tokens is not None
        if skip:
            self._check_known(event, hashes[:skip] if skip < len(hashes) else hashes, event.tokens[: skip * size])
            if skip == len(hashes):
                return None
        before = hashes[skip - 1] if skip else event.parent
        parent = None if before is None else self._upto(known[before])
        begin = 0 if parent is None else parent.end
        span = TextSpan(begin, size, hashes[skip:] if skip else hashes, parent)
        tokens = event.tokens[skip * size :] if skip else event.tokens
        marks = marks_of_event(event, begin - skip * size)
        text = self._name(span, tokens, [mark for mark in marks if mark[0] >= begin])
        fresh = not skip and known.keys().isdisjoint(names)
        if not fresh:
            for index, key in enumerate(span.hashes):
                if key in known:
                    self._check_same(span, text[0], index, known[key])
        if span.tail or span.size % self.identity.block_size or begin % self.identity.block_size:
            self._keep_text(self._next, text)
        self._enter(span, fresh=fresh)
        return span

    def _check_known(self, event: Stored, hashes: list[Key], tokens: Sequence[int]) -> None:
        """Raise ``IdentityError`` unless ``hashes``, all known, name the text that ``event`` gives them."""
        known, size = self._known, event.block_size
        before: TextSpan | None = None
        if event.parent is None or event.parent in known:
            before = None if event.parent is None else self._upto(known[event.parent])
        else:
            # The parent was evicted: the position follows from the first hash itself.
            loc = known[hashes[0]]
            whole, index = self._spans[loc >> _BITS], loc & _OFFSET
            if whole.size != size:
                return
            before = self._start_of(whole, index) if index else whole.parent
        begin = 0 if before is None else before.end
        span = TextSpan(begin, size, hashes, before)
        text = self._name(span, tokens, [mark for mark in marks_of_event(event, begin) if mark[0] >= begin])[0]
        locs = [known[key] for key in hashes]
        in_a_row = locs == list(range(locs[0], locs[0] + len(locs)))
        if in_a_row and self._spans[locs[0] >> _BITS].size == size:
            # Where hashes follow each other in a span, the last one's text has the others' in it.
            self._check_same(span, text, len(locs) - 1, locs[-1])
            return
        for index, loc in enumerate(locs):
            self._check_same(span, text, index, loc)

    def _check_same(self, span: TextSpan, text: Sequence[int], index: int, loc: int) -> None:
        """Raise ``IdentityError`` unless the text up to hash ``index`` of ``span`` is the one at ``loc``. ``text`` is that
        of ``span``, from where our first block of it begins.
        """
        other, place, size = self._spans[loc >> _BITS], loc & _OFFSET, self.identity.block_size
        end = span.begin + (index + 1) * span.size
        if other.begin + (place + 1) * other.size == end and span.last_before(end // size) == other.last_before(
            end // size
        ):
            rest = end % size
            if not rest:
                return
            theirs = self._texts[other.number][0]
            mine = text[end - rest - span.first * size : end - span.first * size]
            if list(mine) == list(theirs[end - rest - other.first * size : end - other.first * size]):
                return
        raise IdentityError("a hash names another text already")

    def _upto(self, loc: int) -> TextSpan:
        """Return the text up to a hash, as a parent of what follows it."""
        whole, offset = self._spans[loc >> _BITS], loc & _OFFSET
        return whole if offset + 1 == len(whole.hashes) else self._start_of(whole, offset + 1)

    def _start_of(self, whole: TextSpan, count: int) -> TextSpan:
        """Return the first ``count`` blocks of ``whole`` as a parent."""
        size = self.identity.block_size
        front = whole.start(count, size)
        front.last = front.keys[-1] if front.keys else (whole.parent.last if whole.parent is not None else None)
        rest = front.end % size
        if rest:
            tokens, marks = self._texts[whole.number]
            start = whole.first * size
            front.tail = tokens[front.end - rest - start : front.end - start]
            front.tail_marks = [mark for mark in marks if front.end - rest <= mark[0] < front.end]
        return front

    def _name(self, span: TextSpan, tokens: Sequence[int], marks: list[Mark]) -> tuple[Sequence[int], list[Mark]]:
        """Work out the request keys that end in ``span``; its text from where our first block of it begins, with marks."""
        parent, size = span.parent, self.identity.block_size
        last = parent.last if parent is not None else None
        if parent is not None and parent.tail:
            tokens = [*parent.tail, *tokens]
            marks = [*parent.tail_marks, *marks]
        span.first = span.begin // size
        start = span.first * size
        keys = self.identity.chain(last, start, tokens, marks)
        span.keys = array("Q", keys)
        span.last = keys[-1] if keys else last
        rest = len(tokens) % size
        if rest:
            span.tail = tokens[len(tokens) - rest :]
            span.tail_marks = [mark for mark in marks if mark[0] >= span.end - rest]
        return tokens, marks

    def _keep_text(self, number: int, text: tuple[Sequence[int], list[Mark]]) -> None:
        tokens, marks = text
        small = not tokens or (min(tokens) >= 0 and max(tokens) < 1 << 32)
        self._texts[number] = (array("I", tokens) if small else list(tokens), marks)

    def _enter(self, span: TextSpan, gone: Collection[int] = (), fresh: bool = False) -> None:
        """Let the hashes of ``span``, but for the positions ``gone``, lead there. ``fresh``: none of them is known."""
        span.number, self._next = self._next, self._next + 1
        base = span.number << _BITS
        known, idle = self._known, self.idle
        if fresh:
            known.update(zip(span.hashes, range(base, base + len(span.hashes)), strict=True))
            span.alive = len(span.hashes)
            self._spans[span.number] = span
            return
        for index, key in enumerate(span.hashes):
            if index in gone:
                continue
            old = known.get(key)
            if old is not None:
                self._release(old)
            elif idle:
                idle.pop(key, None)
            known[key] = base + index
        span.alive = len(span.hashes) - len(gone)
        self._spans[span.number] = span

    # -- positions --------------------------------------------------------------------------------------------------

    def keys_between(self, span: TextSpan, start: int, stop: int) -> list[int]:
        """Return the keys of our blocks ``start`` to ``stop`` on the way to ``span``, the last of which ends in it."""
        if start >= span.first:
            return span.keys[start - span.first : stop - span.first].tolist()
        keys: list[int] = []
        node: TextSpan | None = span
        while node is not None and stop > start:
            if stop > node.first:
                low = max(start, node.first)
                keys[:0] = node.keys[low - node.first : stop - node.first]
                stop = low
            node = node.parent
        return keys

    def keys_at(self, span: TextSpan, block: int, end: int) -> list[int]:
        """Return the keys, on every way known, of our block number ``block`` that the text of ``span`` up to ``end`` is part
        of.
        """
        keys = [key for key, upto in span.beyond.get(block, ()) if end <= upto]
        if (block + 1) * self.identity.block_size <= span.end:
            keys += self.keys_between(span, block, block + 1)
        return keys

    def straddled(self, span: TextSpan) -> Iterator[TextSpan]:
        """Yield the spans that our first block in ``span`` reaches back into; they learn its key."""
        block = span.first
        ancestor = span.parent
        while ancestor is not None and ancestor.end > block * self.identity.block_size:
            ways = ancestor.beyond.setdefault(block, [])
            if (span.keys[0], ancestor.end) not in ways:
                ways.append((span.keys[0], ancestor.end))
                yield ancestor
            ancestor = ancestor.parent

    # -- forgetting -------------------------------------------------------------------------------------------------

    def rest(self, key: Key) -> None:
        """``key`` is no longer held: it is kept for a while, in case something continues it."""
        if key in self._known:
            self.idle.pop(key, None)
            self.idle[key] = None
            if len(self.idle) > self.remembered + self._slack:
                # Many at once: the first of a dictionary is found by passing over all that were removed before it.
                for oldest in list(islice(self.idle, len(self.idle) - self.remembered)):
                    del self.idle[oldest]
                    self._release(self._known.pop(oldest))

    def wake(self, keys: Sequence[Key]) -> None:
        """Take back ``rest`` of ``keys``: they are held again."""
        if self.idle:
            for key in keys:
                self.idle.pop(key, None)

    def rest_unless(self, held: Callable[[Key], bool]) -> None:
        """Let every hash rest that is not ``held``, in the order of their spans, which a restored bridge has too."""
        known = self._known
        left = [key for key in known if key not in self.idle and not held(key)]
        for key in sorted(left, key=known.__getitem__):
            self.rest(key)

    def clear(self) -> None:
        """Remove everything: another engine may hash differently."""
        self._known.clear()
        self._spans.clear()
        self._texts.clear()
        self.idle.clear()

    # -- snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[list[SpanSnapshot], list[Key]]:
        """Return all needed spans, each after the spans that it refers to, and the idle hashes."""
        order: dict[int, int] = {}
        out: list[SpanSnapshot] = []
        for known in self._spans.values():
            # Spans are known in the order in which they were made, so only those on its way that no hash leads to are new.
            way: list[TextSpan] = []
            node: TextSpan | None = known
            while node is not None and id(node) not in order:
                way.append(node)
                node = node.parent
            for span in reversed(way):
                whole = self._spans.get(span.number) if span.is_start else None
                parent = -1 if span.parent is None else order[id(span.parent)]
                order[id(span)] = len(out)
                out.append(self._snapshot_of(span, parent, -1 if whole is None else order[id(whole)]))
        return out, list(self.idle)

    def _snapshot_of(self, span: TextSpan, parent: int, whole: int) -> SpanSnapshot:
        known = self._spans.get(span.number) is span
        base = span.number << _BITS
        text = self._texts.get(span.number) if known else None
        return SpanSnapshot(
            parent=parent,
            whole=whole,
            begin=span.begin,
            size=span.size,
            hashes=[] if whole >= 0 else list(span.hashes),
            count=len(span.hashes),
            first=span.first,
            keys=b"" if whole >= 0 else span.keys.tobytes(),
            last=span.last,
            tail=list(span.tail),
            marks=list(span.tail_marks),
            beyond=[] if whole >= 0 else list(span.beyond.items()),
            known=known,
            gone=[index for index, key in enumerate(span.hashes) if self._known.get(key) != base + index]
            if known
            else [],
            text=None if text is None else (list(text[0]), list(text[1])),
        )

    def restore(self, spans: Iterable[SpanSnapshot], idle: Iterable[Key]) -> None:
        """Know what another bridge knew when it made a snapshot. To be called before anything else."""
        restored: list[TextSpan] = []
        for snapshot in spans:
            parent = restored[snapshot.parent] if snapshot.parent >= 0 else None
            if snapshot.whole >= 0:
                span = restored[snapshot.whole].start(snapshot.count, self.identity.block_size)
            else:
                span = TextSpan(snapshot.begin, snapshot.size, list(snapshot.hashes), parent)
                span.first = snapshot.first
                span.keys = array("Q", snapshot.keys)
                span.beyond = {block: list(ways) for block, ways in snapshot.beyond}
            span.last, span.tail, span.tail_marks = snapshot.last, snapshot.tail, list(snapshot.marks)
            restored.append(span)
            if snapshot.known:
                if snapshot.text is not None:
                    self._texts[self._next] = (snapshot.text[0], list(snapshot.text[1]))
                self._enter(span, set(snapshot.gone))
        self.idle = dict.fromkeys(idle)

    def _release(self, loc: int) -> None:
        number = loc >> _BITS
        span = self._spans[number]
        span.alive -= 1
        if not span.alive:
            del self._spans[number]
            self._texts.pop(number, None)
