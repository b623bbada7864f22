"""Computed parts of texts by worker, against a plain dict of ids."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.engine.job import Job
from kvyard.hashing import TraceChain
from kvyard.replay.seen import Seen

SIZE, BLOCK = 8, 4


class Plain:
    """Model with a set of workers for every id."""

    def __init__(self) -> None:
        self.known: dict[int, set[int]] = {}
        self.off: dict[int, set[int]] = {}
        self.sessions: dict[str, set[int]] = {}

    def switched_off(self, worker: int) -> None:
        for name, workers in self.known.items():
            if worker in workers:
                self.off.setdefault(name, set()).add(worker)

    def gone(self, ids: Sequence[int], length: int, found: int, worker: int) -> int:
        tokens = 0
        for at in range(found // SIZE, len(ids)):
            workers = self.known.get(ids[at], set())
            if workers and workers <= self.off.get(ids[at], set()):
                tokens += min((at + 1) * SIZE, length) - max(found, at * SIZE)
        if self.off:
            for name in ids:
                self.off.get(name, set()).discard(worker)
        return max(0, tokens)

    def reason(
        self, ids: Sequence[int], length: int, found: int, worker: int, session: str
    ) -> tuple[str, int, int, int]:
        def upto(start: int, test: object) -> int:
            at = start
            while at < len(ids) and (worker in self.known.get(ids[at], ()) if test else self.known.get(ids[at])):
                at += 1
            return at

        mine = upto(0, True)
        anyone = upto(mine, False)
        why, lost, elsewhere = "partial_block", 0, 0
        if found + BLOCK == length:
            why = "none"
        elif found + BLOCK < length:
            had = self.known.get(ids[(found + BLOCK - 1) // SIZE], set())
            why = "evicted" if worker in had else "other_worker" if had else "never_seen"
            if had:
                start = found // SIZE
                stop = max(start, mine) if worker in had else start
                lost = max(0, min(stop * SIZE, length) - found)
                elsewhere = max(0, min(max(stop, anyone) * SIZE, length) - found - lost)
        for name in ids:
            self.known.setdefault(name, set()).add(worker)
        had = self.sessions.setdefault(session, set())
        own = min(next((at for at, name in enumerate(ids) if name not in had), len(ids)) * SIZE, length)
        had.update(ids)
        return why, lost, elsewhere, own


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_as_with_a_set_for_every_id(data: st.DataObject) -> None:
    seen, plain = Seen(), Plain()
    names: dict[tuple[int, ...], int] = {}
    large = data.draw(st.booleans())
    for number in range(data.draw(st.integers(1, 25))):
        worker = data.draw(st.integers(0, 70))
        if data.draw(st.integers(0, 9)) == 0:
            seen.switched_off(worker)
            plain.switched_off(worker)
        text = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
        ids = [names.setdefault(tuple(text[: end + 1]), len(names)) for end in range(len(text))]
        if large:
            ids = [name << 60 for name in ids]  # more than fits into 64 bits, some of them
        length = len(ids) * SIZE - data.draw(st.integers(0, SIZE - 1))
        found = data.draw(st.integers(0, length - 1)) // BLOCK * BLOCK
        job = Job(str(number), TraceChain(ids, SIZE, length, BLOCK, number + 1), 1, arrival=0)
        assert seen.gone(job, found, worker) == plain.gone(ids, length, found, worker)
        session = data.draw(st.sampled_from("abc"))
        expected = plain.reason(ids, length, found, worker, session)
        assert seen.reason(job, found, worker, BLOCK, session) == expected
