"""The writer: what this process knows goes to its mirror, and on to the server for the owners whose lease it has.

Whenever it gets a lease, the server knows nothing of that owner, and all that the mirror has goes out. So it never matters what
became of changes that were under way: of a server that was away, of a lease that was somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvyard.index.redis import scripts
from kvyard.index.redis.directory import Directory
from kvyard.index.redis.mirror import Mirror
from kvyard.index.redis.outbox import Outbox
from kvyard.index.redis.session import Session


class WriterCounters(msgspec.Struct):
    """What happened, over all time."""

    announced: int = 0
    """How often all that an owner has was written anew."""
    unsent_keys: int = 0
    """Changes that weren't sent because the server was away or the lease was somebody else's; the mirror has them."""


class Writer:
    """Changes on their way. ``session`` is to be set before the first."""

    session: Session

    def __init__(self, directory: Directory, budget: int | None) -> None:
        """``budget`` bytes bound the mirror, and with it what is written."""
        self.counters = WriterCounters()
        self.mirror = Mirror(budget, lambda place, keys: self._forgotten.append((place, keys)))
        self.outbox = Outbox()
        self.announce: Callable[[str], None] = lambda owner: None
        """Called when an owner's lease was got and its rows wait in the outbox: for what else there is to say."""
        self._directory = directory
        self._forgotten: list[tuple[int, Sequence[int]]] = []

    def store(self, place: int, keys: Sequence[int], parent: int | None) -> Sequence[int]:
        """``place`` holds ``keys``; returns those that it held before."""
        repeated = self.mirror.store(place, keys, parent)
        if len(repeated) < len(keys):
            fresh = keys
            if repeated:
                fresh = list(dict.fromkeys(keys))
                if len(fresh) == len(keys):
                    known = set(repeated)
                    fresh = [key for key in keys if key not in known]
            self._queue(place, b"s", fresh)
        # After it: a store that is larger than the budget forgets part of itself.
        for where, gone in self._forgotten:
            self._queue(where, b"d", gone)
        self._forgotten.clear()
        return repeated

    def remove(self, place: int, keys: Sequence[int]) -> int:
        """``place`` no longer holds ``keys``; returns how many it held."""
        removed = self.mirror.remove(place, keys)
        if removed:
            self._queue(place, b"d", list(dict.fromkeys(keys)))
        return removed

    def clear(self, place: int) -> int:
        """``place`` holds nothing; returns how many keys it held."""
        removed = self.mirror.clear(place)
        if removed:
            self._queue(place, b"c", ())
        return removed

    def say(self, owner: str, name: bytes, text: bytes | None, loud: bool) -> None:
        """Let the others know something; see ``RedisIndex.say``."""
        if owner in self.session.tokens:
            self.outbox.put(owner, b"f" if text is None else b"y" if loud else b"h", name, text or b"")

    def acquired(self, owner: str) -> None:
        """The server knows nothing of ``owner``: all that the mirror has goes out again."""
        self.outbox.drop(owner)
        for place in self.mirror.holding():
            whose, name = self._directory.name(place)
            if whose == owner:
                for run in self.mirror.held(place):
                    self.outbox.put_keys(owner, b"s", name, run)
        self.counters.announced += 1
        self.announce(owner)

    def lost(self, owner: str | None) -> None:
        """What waits for ``owner``, or for all, needn't be sent."""
        if owner is None:
            self.outbox.clear()
        else:
            self.outbox.drop(owner)

    def send(self, most: int | None) -> None:
        """Send what waits, up to about ``most`` keys. Raises ``Unavailable``."""
        tokens = self.session.tokens
        sent = 0
        while self.outbox and (most is None or sent < most):
            before = self.outbox.keys
            calls = [(owner, tokens[owner], *args) for owner, args in self.outbox.take() if owner in tokens]
            for call, reply in zip(calls, self.session.calls(scripts.WRITE, calls) if calls else (), strict=True):
                if reply[0] == b"fenced":
                    self.session.lose(str(call[0]))
            sent += before - self.outbox.keys

    def behind(self) -> set[str]:
        """The owners of which the server hasn't been told all."""
        return {owner for owner in self.session.tokens if self.outbox.waits_for(owner)} if self.outbox else set()

    def _queue(self, place: int, deed: bytes, keys: Sequence[int]) -> None:
        owner, name = self._directory.name(place)
        if owner not in self.session.tokens:
            self.counters.unsent_keys += len(keys) or 1
        elif deed == b"c":
            self.outbox.put(owner, deed, name)
        else:
            self.outbox.put_keys(owner, deed, name, keys)
