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
    if expected.algorithm is not None:
        wrong = [text for text in samples if not _reproduces(expected.algorithm, expected.seed, text)]
        if wrong:
            found = _reproduced(samples)
            yield broken(
                "hash-seed",
                case.name,
                f"The engine's hashes are not those of {expected.algorithm} with "
                f"{'its default seed' if expected.seed is None else f'seed {expected.seed!r}'}"
                + (f", but of {found}." if found else "."),
                "Hashes that are computed elsewhere, as in direct mode, never equal this engine's.",
                "Set the engine's --prefix-caching-hash-algo and PYTHONHASHSEED, the same for all"
                + (
                    f": here {found}."
                    if found
                    else ", and tell the index; or let the index translate, which needs neither."
                ),
            )
            return
    if samples:
        found = _reproduced(samples)
        yield note(
            "hashes",
            case.name,
            f"The engine's hashes are those of {found}." if found else "Its hashes can't be computed from tokens.",
            "An index in direct mode could take them as they are."
            if found
            else "Their seed is random or unknown. kvyard's index doesn't need it; stores shared between engines do.",
            "Nothing to do." if found else "For a shared store set PYTHONHASHSEED to the same value for all engines.",
        )


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
                yield note(
                    "seeds-differ",
                    case.name,
                    f"It and {other[0]} give one block two hashes.",
                    "Their hash seeds or algorithms differ: they can't share a store, and no index in direct mode can "
                    "serve both. An index that translates can.",
                    "Set PYTHONHASHSEED and the hash algorithm to the same for both, if they are to share.",
                )
                return


def _reproduced(samples: Sequence[Text]) -> str:
    for name in sorted(ALGORITHMS):
        for seed in SEEDS:
            if all(_reproduces(name, seed, text) for text in samples):
                return f"{name} with {'its default seed' if seed is None else f'seed {seed!r}'}"
    return ""


def _reproduces(name: str, seed: str | None, text: Text) -> bool:
    try:
        keys = algorithm(name, seed, {}).hash_blocks(None, list(text.tokens[: text.size]), text.size)
    except HashingError:
        return False
    return wire_hash(keys[0]) == wire_hash(text.key)
