"""Whether an engine's hashes can be computed by others, and whether two engines agree on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvyard.events.check import Finding
from kvyard.hashing import ALGORITHMS, HashingError, algorithm, wire_hash
from kvyard.server.doctor.case import Case, Text
from kvyard.server.doctor.finding import Expected, broken, note

SEEDS = (None, "0", "1", "42", "random", "")
"""Texts of PYTHONHASHSEED that people use; ``None`` is the engine's own default."""


def hashes(case: Case, expected: Expected) -> Iterator[Finding]:
    samples = [text for text in case.texts if text.plain and text.size and len(text.tokens) >= text.size][:16]
    if not samples:
        return
    found = _reproduced(samples)
    if expected.algorithm is not None and not all(
        _reproduces(expected.algorithm, expected.seed, text) for text in samples
    ):
        yield broken(
            "hash-seed",
            case.name,
            expected=_named(expected.algorithm, expected.seed),
            found=f", but of {found}" if found else "",
            fix=f": here {found}" if found else ", and tell the index; or let the index translate, which needs neither",
        )
    else:
        yield note("hashes.known" if found else "hashes.unknown", case.name, found=found)


def between(cases: Sequence[Case]) -> Iterator[Finding]:
    """What only shows when engines are compared."""
    seen: dict[tuple[int, tuple[int, ...]], tuple[str, int]] = {}
    for case in cases:
        for text in case.texts:
            if not text.plain or not text.size or len(text.tokens) < text.size:
                continue
            key = (text.size, text.tokens[: text.size])
            other = seen.setdefault(key, (case.name, wire_hash(text.key)))
            if other[1] != wire_hash(text.key) and other[0] != case.name:
                yield note("seeds-differ", case.name, other=other[0])
                return


def _named(algorithm: str, seed: str | None) -> str:
    return f"{algorithm} with {'its default seed' if seed is None else f'seed {seed!r}'}"


def _reproduced(samples: Sequence[Text]) -> str:
    for name in sorted(ALGORITHMS):
        for seed in SEEDS:
            if all(_reproduces(name, seed, text) for text in samples):
                return _named(name, seed)
    return ""


def _reproduces(name: str, seed: str | None, text: Text) -> bool:
    try:
        keys = algorithm(name, seed, {}).hash_blocks(None, list(text.tokens[: text.size]), text.size)
    except HashingError:
        return False
    return wire_hash(keys[0]) == wire_hash(text.key)
