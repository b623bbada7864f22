"""Cumulative ids for prompts without usable ids: from hashes of blocks, or from tokens."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from kvyard.replay.traces.bounds import CHECKED
from kvyard.replay.traces.errors import TraceError
from kvyard.replay.traces.prefixes import PromptPrefixes
from kvyard.replay.traces.request import TraceRequest

TOKEN_BLOCK = 16
"""Tokens an id stands for where a trace has tokens and no other size was asked for: the usual block of an engine."""

_64_BITS = (1 << 64) - 1
_SHORT = 64
"""Ids of a prompt up to which a comparison one by one is quicker than a look-up."""


def chained(hashes: Sequence[int]) -> list[int]:
    """Return cumulative ids of block hashes: equal where everything up to there is equal, and not otherwise (up to 2**-64)."""
    digest = xxhash.xxh3_64_intdigest
    ids: list[int] = []
    above = 0
    for block in hashes:
        above = digest((above << 64 | block & _64_BITS).to_bytes(16, "little"))
        ids.append(above)
    return ids


def token_ids(tokens: Sequence[int], block_size: int) -> list[int]:
    """Return cumulative ids of a prompt's blocks, the last perhaps partial."""
    packed = array("Q", tokens)
    hashes = [
        xxhash.xxh3_64_intdigest(packed[start : start + block_size].tobytes())
        for start in range(0, len(packed), block_size)
    ]
    return chained(hashes)


def cumulative(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield ``requests`` as they are. Raises ``TraceError`` at one whose ids name single blocks and not whole prefixes.

    Only the first ``CHECKED`` are checked: wrong ids show long before, and a trace may be endless.
    """
    index = PromptPrefixes()
    before: dict[int, int | None] = {}
    for number, request in enumerate(requests):
        ids = request.ids
        if number == CHECKED:
            before.clear()
            index = PromptPrefixes()
        elif ids and number < CHECKED:
            # What is in the index is behind the same ids as before; what isn't must not have been behind others.
            there = index.touch(ids, 0, True)[1] if len(ids) > _SHORT else 0
            new = ids[there:]
            if not new:
                yield request
                continue
            expected = [ids[there - 1] if there else None, *new[:-1]]
            known = list(map(before.setdefault, new, expected))
            if known != expected:
                position = next(
                    index for index, pair in enumerate(zip(known, expected, strict=False)) if pair[0] != pair[1]
                )
                raise TraceError(
                    getattr(requests, "name", "the trace"),
                    f"in request {request.id}, id {new[position]} {_follows(expected[position])}, and in an earlier one it "
                    f"{_follows(known[position])}; an id must name all that comes before it: if they name single blocks, "
                    "pass --chain-ids (chain_ids=True)",
                )
        yield request


def _follows(above: int | None) -> str:
    return "is the first" if above is None else f"follows {above}"


def prefix_ids(request: TraceRequest, token_block: int = TOKEN_BLOCK) -> tuple[Sequence[int] | None, int]:
    """Return a request's ids and how many tokens each stands for, from its tokens if it has no ids. None if neither is
    known.
    """
    if request.ids is not None:
        return request.ids, request.id_block_size
    if request.tokens is not None:
        return token_ids(request.tokens, token_block), token_block
    return None, 0
