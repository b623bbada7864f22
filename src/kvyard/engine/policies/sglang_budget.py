"""Admission of prompts in SGLang: tokens of the pools, of a batch, and the share of output that is set aside.

A prompt is admitted if it fits whole, with its answer and a page to spare, into what is free after a share of the output
that running requests may still produce is set aside (``NewTokenRatio``), even where only a chunk of it is computed at
first.
"""

from functools import cache

from kvyard.blocks import Hit
from kvyard.blocks.window_pages import WindowPages
from kvyard.engine.policies.mocker import DECAY_PASSES, FIRST, LOOK_AHEAD, LOWEST_SHARE
from kvyard.integers import ceil_div

NO_TOKENS = -1
"""A prompt doesn't fit."""


class NewTokenRatio:
    """Share of the output that running requests may still produce for which room is set aside.

    Setting aside all of it would waste most; setting aside none would retract often. So the share falls with every decode
    pass in which nothing was retracted; a retraction sets it to what the running requests have shown to need. It is a running
    sum, as SGLang's is: a product would round differently.
    """

    def __init__(self, conservativeness: float) -> None:
        self._falls = _falls(conservativeness)
        self._position = 0
        """Index of ``current`` among the values that the share takes from the first; -1 after a retraction."""
        self.current = self._falls[0]

    def decay(self, passes: int) -> None:
        """Lower the ratio after ``passes`` decode passes without a retraction."""
        falls, position = self._falls, self._position
        if position >= 0:
            self._position = min(position + passes, len(falls) - 1)
            self.current = falls[self._position]
            return
        current, floor = self.current, falls[-1]
        step = (falls[0] - floor) / DECAY_PASSES
        while passes and current != floor:
            current = max(current - step, floor)
            passes -= 1
        self.current = current

    def reset(self) -> None:
        """Reset the ratio: no request is left."""
        self._position = 0
        self.current = self._falls[0]

    def estimate(self, produced: int, wanted: int, requests: int) -> None:
        """Start the estimate again after a retraction: from what the remaining requests have ``produced`` of the ``wanted``
        tokens they may produce.
        """
        self._position = -1
        self.current = min(1.0, (produced + LOOK_AHEAD * requests) / (wanted + 1))


@cache
def _falls(conservativeness: float) -> list[float]:
    """Return values that the share takes from the first to the floor, one a pass."""
    falls = [min(FIRST * conservativeness, 1.0)]
    floor = min(falls[0] * LOWEST_SHARE, 1.0)
    step = (falls[0] - floor) / DECAY_PASSES
    while falls[-1] != floor:
        falls.append(max(falls[-1] - step, floor))
    return falls


class Budget:
    """Tokens that one batch of prompts may still take, as in ``PrefillAdder``."""

    def __init__(self, free: int, page: int, aside: float, inputs: int, chunk: int | None, mixed: int) -> None:
        """``free`` tokens could be had at once, of which ``aside`` are for the answers of running requests; ``mixed`` of these
        decode in the batch.
        """
        self.free = free
        self.page = page
        self.total = mixed + aside
        """Tokens spoken for, answers included."""
        self.current = float(mixed)
        """Tokens spoken for in this batch."""
        self.inputs = inputs - mixed
        self.chunk = chunk - mixed if chunk is not None else None

    @property
    def roomy(self) -> bool:
        """True if something is free that isn't spoken for."""
        return self.free - self.total > 0 and self.free - self.current > 0

    @property
    def spent(self) -> bool:
        """True if the batch has as many tokens as it may have, though more would fit."""
        return (self.inputs <= 0 or (self.chunk is not None and self.chunk <= 0)) and self.roomy

    @property
    def open(self) -> bool:
        """True if another prompt may be tried."""
        return self.inputs > 0 and (self.chunk is None or self.chunk > 0) and self.roomy

    def pages(self, tokens: int) -> int:
        """Return ``tokens`` in whole pages, as tokens."""
        return ceil_div(tokens, self.page) * self.page

    def continued(self) -> int:
        """Return tokens that a prompt which is partly computed may have: what is free, unless that is nothing."""
        assert self.chunk is not None
        room = min(self.chunk, int(self.free - self.total))
        return room if room > 0 else self.chunk

    def fits(self, left: int, answer: int, locked: int) -> bool:
        """True if ``left`` prompt tokens and the answer fit, with a page to spare, once ``locked`` free pages are held."""
        return left + answer + self.page < self.free - locked * self.page - self.total

    def longest(self, left: int, answer: int, hit: Hit | None, windows: int) -> int | None:
        """Return tokens of a prompt that fits whole which the batch may compute; ``None`` for any number. ``windows``: window
        tokens that come from the host.
        """
        return self.chunk

    def price(
        self,
        left: int,
        answer: int,
        locked: int,
        *,
        first: bool,
        uncut: bool = False,
        hit: Hit | None = None,
        loaded: int = 0,
        windows: int = 0,
    ) -> int:
        """Return how many of the ``left`` tokens of a prompt are computed in this batch: ``NO_TOKENS`` if it doesn't fit whole,
        0 if the batch has as much as it may have. ``first``: the batch has no other prompt. ``uncut``: it may have no chunk
        of this one. ``hit``: what is cached of it and gets ``locked``. ``loaded`` tokens and ``windows``
        window tokens come from the host.
        """
        if not self.fits(left, answer, locked):
            return NO_TOKENS
        left -= loaded
        longest = self.longest(left, answer, hit, windows)
        if longest == NO_TOKENS:
            return NO_TOKENS
        charged = self.pages(left)
        if self.chunk is None and not first and charged >= self.inputs:
            return 0
        if longest is None or charged <= longest:
            return left
        return 0 if uncut else max(0, longest // self.page * self.page)

    def price_known(self, left: int, answer: int, remaining: int, occupied: int, known: "KnownEnds") -> int:
        """Like ``price`` without prefix caching, where all answers are known to have all their tokens: a prompt fits if there
        is room whenever a request ends.
        """
        paged = self.pages(left) + self.page
        if paged > min(self.free - self.current, self.free - self.total):
            return NO_TOKENS
        known.add(remaining, occupied)
        if not known.fit(self.free - self.current - paged):
            return NO_TOKENS
        if self.chunk is None or left <= self.chunk:
            return left
        return max(0, self.chunk)

    def charge(self, tokens: int, answer: int) -> None:
        """Charge a prompt that computes ``tokens`` in this batch and has ``answer`` tokens set aside."""
        charged = self.pages(tokens)
        self.total += charged + self.page + answer
        self.current += charged + self.page
        self.inputs -= charged
        if self.chunk is not None:
            self.chunk -= charged


class WindowBudget(Budget):
    """The budget of a model with sliding windows beside full attention: ``SWAPrefillBudget``."""

    def __init__(
        self,
        free: int,
        page: int,
        aside: float,
        inputs: int,
        chunk: int | None,
        mixed: int,
        windows: WindowPages,
    ) -> None:
        super().__init__(free, page, aside, inputs, chunk, mixed)
        self._windows = windows
        self._spoken_for = 0
        """Window tokens spoken for."""

    @property
    def window_room(self) -> int:
        """Window tokens that could be had at once and aren't spoken for."""
        windows = self._windows
        return (windows.free + windows.evictable) * self.page - self._spoken_for

    @property
    def roomy(self) -> bool:
        return super().roomy and self.window_room > 0

    def needed(self, tokens: int, answer: int) -> int:
        """Return window tokens that a prompt of ``tokens`` takes at once at most, and its answer after that."""
        window = self._windows.window
        allocated = tokens if self.chunk is None else min(tokens, self.chunk)
        return max(allocated - window, 0) + min(tokens + answer, window) + self.page

    def continued(self) -> int:
        """Return the free tokens, at least 0."""
        assert self.chunk is not None
        return max(0, min(self.chunk, int(self.free - self.total), self.window_room - self.page))

    def longest(self, left: int, answer: int, hit: Hit | None, windows: int) -> int | None:
        room = self.window_room - windows
        if hit is not None:
            room -= self._windows.lockable(hit.groups[0].parts()) * self.page
        needed = self.needed(self.pages(left), answer)
        if needed < room:
            return self.chunk
        if self.chunk is None or needed + windows < self._windows.size * self.page:
            return NO_TOKENS  # it fits later
        cap = (room - self.needed(0, answer)) // self.page * self.page
        return min(self.chunk, cap) if cap > 0 else NO_TOKENS

    def price_known(self, left: int, answer: int, remaining: int, occupied: int, known: "KnownEnds") -> int:
        """Memory is enough if the prompt fits now."""
        paged = self.pages(left) + self.page
        if (
            paged > min(self.free - self.current, self.free - self.total)
            or self.needed(left, answer) > self.window_room
        ):
            return NO_TOKENS
        if self.chunk is None or left <= self.chunk:
            return left
        return max(0, self.chunk)

    def charge(self, tokens: int, answer: int) -> None:
        self._spoken_for += self.needed(self.pages(tokens), answer)
        super().charge(tokens, answer)


class KnownEnds:
    """Ends of requests that are known to have all their tokens, the next one first."""

    def __init__(self, running: list[tuple[int, int]]) -> None:
        self._running = running
        self._ends: list[tuple[int, int]] | None = None

    def add(self, left: int, occupied: int) -> None:
        """A request with ``left`` tokens to produce is about to be admitted. SGLang puts the latest to end before the last."""
        if self._ends is None:
            self._ends = [end for end in [(left, occupied), *self._running] if end[0] > 0]
            self._ends.sort(key=lambda end: end[0])
        elif left > 0:
            at = next((at for at, end in enumerate(self._ends) if left <= end[0]), max(0, len(self._ends) - 1))
            self._ends.insert(at, (left, occupied))

    def fit(self, free: float) -> bool:
        """True if ``free`` tokens suffice until each of them ends."""
        ends = self._ends or []
        freed = 0
        for at, (left, occupied) in enumerate(ends):
            others = len(ends) - at
            if free + freed - left * others <= others:
                return False
            freed += occupied
        return True
