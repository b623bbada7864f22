"""Digests: caches of other sites, known by short fingerprints of their blocks instead of by names.

A remote site doesn't send every event. At intervals it sends a digest of the blocks of each of its workers: a number below
``blocks / error`` for each block, sorted, as differences in Golomb-Rice code. That takes about ``log2(1 / error) + 1.5`` bits a
block. A missing block is reported as present with a probability of at most ``error``; a present block is always found.

``DigestIndex`` answers a router by these numbers alone. It receives changes when they are exchanged: ``RunFeed`` holds them
back until then.
"""

from collections.abc import Iterable
from math import log2

from kvyard.errors import KvyardError
from kvyard.hashing import Chain, Key
from kvyard.hashing.keys import Keys
from kvyard.index.backend import Rows
from kvyard.index.chains import ChainIndex
from kvyard.index.rows import joined

_WORD = (1 << 64) - 1


def fingerprint(key: Key, span: int) -> int:
    """Return the number of a block among ``span``; equally likely each, also where keys are no hashes."""
    mixed = key if isinstance(key, int) else int.from_bytes(key[-8:], "big")
    # The finaliser of splitmix64.
    mixed = (mixed + 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _WORD
    return ((mixed ^ mixed >> 31) * span) >> 64


def span_of(blocks: int, error: float) -> int:
    """Return the range of numbers for which ``blocks`` held ones occupy a share of ``error``. Raises ``KvyardError`` for an
    error that isn't between 0 and 1.
    """
    if not 0.0 < error < 1.0:
        raise KvyardError(f"a digest's error must be between 0 and 1, got {error:g}")
    return max(2, round(max(1, blocks) / error))


def encode(numbers: Iterable[int], span: int) -> bytes:
    """Return a digest as it is sent: 32 bits for the count, 6 for the division of a difference, then differences."""
    ordered = sorted(set(numbers))
    low = max(0, round(log2(max(1.0, 0.69 * span / max(1, len(ordered))))))
    bits = [format(len(ordered), "032b"), format(low, "06b")]
    before = -1
    for number in ordered:
        gap = number - before - 1
        bits.append("1" * (gap >> low) + "0")
        if low:
            bits.append(format(gap & (1 << low) - 1, f"0{low}b"))
        before = number
    text = "".join(bits)
    return int(text + "0" * (-len(text) % 8), 2).to_bytes((len(text) + 7) // 8, "big")


def decode(data: bytes) -> list[int]:
    """Return the numbers of a digest, in order. Raises ``KvyardError`` if it is cut off."""
    text = format(int.from_bytes(data, "big"), f"0{8 * len(data)}b")
    numbers: list[int] = []
    try:
        count, low, offset = int(text[:32], 2), int(text[32:38], 2), 38
        before = -1
        for _ in range(count):
            end = text.index("0", offset)
            gap = end - offset << low | (int(text[end + 1 : end + 1 + low], 2) if low else 0)
            offset = end + 1 + low
            before += gap + 1
            numbers.append(before)
        if offset > len(text):
            raise ValueError
    except ValueError:
        raise KvyardError("a digest is cut off: it has fewer blocks than it says") from None
    return numbers


class DigestIndex(ChainIndex):
    """Rows by fingerprints. The exact rows are kept beside them: they say what a store or a removal changes."""

    def __init__(self, blocks: int, error: float) -> None:
        """``blocks`` is how many the largest worker has."""
        super().__init__()
        self.span = span_of(blocks, error)
        self._masks: dict[int, int] = {}
        """Per number the places that hold a block of that number."""
        self._more: dict[tuple[int, int], int] = {}
        """Per number and place how many blocks it stands for beyond one."""

    def store_run(self, place: int, chain: Chain, start: int, stop: int) -> list[tuple[int, int]]:
        repeated = super().store_run(place, chain, start, stop)
        position = start
        for low, high in sorted(repeated):
            self._enter(place, chain.keys, position, low)
            position = high
        self._enter(place, chain.keys, position, stop)
        return repeated

    def remove_run(self, place: int, chain: Chain, start: int, stop: int) -> None:
        held = [
            block
            for node, low, high in self._along(chain.keys, stop)
            for block in range(max(low, start), high)
            if node.masks[_run_of(node.stops, block)] >> place & 1
        ]
        super().remove_run(place, chain, start, stop)
        masks, more, bit = self._masks, self._more, 1 << place
        for block in held:
            number = fingerprint(chain.keys[block], self.span)
            others = more.pop((number, place), 0)
            if others > 1:
                more[number, place] = others - 1
            elif not others:
                left = masks[number] & ~bit
                if left:
                    masks[number] = left
                else:
                    del masks[number]

    def clear(self, place: int) -> None:
        super().clear(place)
        bit = 1 << place
        self._masks = {number: mask & ~bit for number, mask in self._masks.items() if mask & ~bit}
        self._more = {key: count for key, count in self._more.items() if key[1] != place}

    def lookup(self, keys: Keys, through_holes: bool = False) -> Rows:
        """Return the rows of a prompt, with places that seem to hold blocks and don't."""
        rows: list[tuple[int, int]] = []
        masks, span = self._masks, self.span
        for index in range(len(keys)):
            mask = masks.get(fingerprint(keys[index], span), 0)
            if not mask and not through_holes:
                break
            rows.append((index + 1, mask))
        return joined(rows)

    def digest(self, place: int) -> bytes:
        """Return the digest of ``place`` as it would be sent. Scans everything."""
        return encode([number for number, mask in self._masks.items() if mask >> place & 1], self.span)

    def check_integrity(self) -> None:
        """Check as ``ChainIndex`` does, and that the numbers are those of the held blocks."""
        super().check_integrity()
        counts: dict[tuple[int, int], int] = {}
        for node in self._nodes.values():
            for block in range(node.start, node.stop):
                mask = node.masks[_run_of(node.stops, block)]
                number = fingerprint(node.chain.keys[block], self.span)
                while mask:
                    place = (mask & -mask).bit_length() - 1
                    counts[number, place] = counts.get((number, place), 0) + 1
                    mask &= mask - 1
        known = {
            (number, place): self._more.get((number, place), 0) + 1
            for number, mask in self._masks.items()
            for place in range(mask.bit_length())
            if mask >> place & 1
        }
        assert counts == known, "a digest has other blocks than are held"

    def _enter(self, place: int, keys: Keys, start: int, stop: int) -> None:
        masks, bit, span = self._masks, 1 << place, self.span
        for index in range(start, stop):
            number = fingerprint(keys[index], span)
            mask = masks.get(number, 0)
            if mask & bit:
                self._more[number, place] = self._more.get((number, place), 0) + 1
            else:
                masks[number] = mask | bit


def _run_of(stops: list[int], position: int) -> int:
    """Return the run that block ``position`` lies in."""
    run = 0
    while stops[run] <= position:
        run += 1
    return run
