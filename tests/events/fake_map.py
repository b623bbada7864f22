"""A map of copies as small as can be: counts per hash, and the sink told when the first comes and the last goes."""

from collections.abc import Iterator

from kvyard.events import Sink, Tier
from kvyard.hashing import Key, Run, TokenChain, TraceChain, algorithm, wire_hash

XXH3 = algorithm("xxh3", seed="test")
SHA = algorithm("sha256", seed="test")


def token_chain(*tokens: int, size: int = 1, digests: bool = False) -> TokenChain:
    """A chain whose blocks are ``tokens``, repeated to fill a block each."""
    return TokenChain([t for token in tokens for t in [token] * size], size, SHA if digests else XXH3)


def trace_chain(own: int, blocks: int, size: int = 1) -> TraceChain:
    """A chain without tokens that shares nothing with chains of another ``own``."""
    return TraceChain(range(own * 1000, own * 1000 + blocks), size, blocks * size, size, own)


class FakeMap:
    """Every tier's map in one. Blocks are looked at one by one, which is slow and plainly right."""

    def __init__(self, sink: Sink | None = None) -> None:
        self.sink = sink
        self.counts: dict[tuple[int, Tier], dict[Key, int]] = {}
        self.where: dict[Key, Run] = {}

    def enter(self, run: Run, group: int, tier: Tier) -> None:
        counts = self.counts.setdefault((group, tier), {})
        for first, part in self._stretches(run, lambda key: not counts.get(key)):
            for at in range(part.start, part.stop):
                key = part.chain.keys[at]
                counts[key] = counts.get(key, 0) + 1
                self.where[key] = Run(part.chain, at, at + 1)
            if self.sink is not None:
                self.sink.entered(part, group, tier, first)

    def leave(self, run: Run, group: int, tier: Tier) -> None:
        """Drop one copy of each block of ``run`` that has any."""
        counts = self.counts.get((group, tier), {})
        for some, part in self._stretches(run, lambda key: bool(counts.get(key))):
            if not some:
                continue
            for last, piece in self._stretches(part, lambda key: counts[key] == 1):
                for key in piece.hashes:
                    counts[key] -= 1
                    if not counts[key]:
                        del counts[key]
                if self.sink is not None:
                    self.sink.left(piece, group, tier, last)

    def clear(self, tier: Tier | None = None) -> None:
        for place in list(self.counts):
            if tier is None or place[1] == tier:
                del self.counts[place]
        if self.sink is not None:
            self.sink.cleared(tier)

    def snapshot(self) -> Iterator[tuple[int, Tier, list[Run]]]:
        for (group, tier), counts in self.counts.items():
            yield group, tier, [self.where[key] for key in counts]

    def held(self, narrow: bool = True) -> dict[tuple[int, Tier], set[Key]]:
        """Return what a mirror should hold; ``narrow`` as integers, the way hashes travel."""
        return {
            place: {wire_hash(key) if narrow else key for key in counts}
            for place, counts in self.counts.items()
            if counts
        }

    @staticmethod
    def _stretches(run: Run, question) -> Iterator[tuple[bool, Run]]:
        """``run`` in parts of equal answer; the answers are asked for before anything changes."""
        answers = [question(key) for key in run.hashes]
        start = 0
        for at in range(1, len(answers) + 1):
            if at == len(answers) or answers[at] != answers[start]:
                yield answers[start], run[start:at]
                start = at
