"""Shared parts of the index's tests: short ways to make events of an engine whose hashes are nothing like ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Cleared, Event, Removed, Stored, Tier
from kvyard.hashing import Key, algorithm
from kvyard.index import Holder, Identity, Indexer, Source

ENGINE = algorithm("sha256_cbor", "an engine's own seed")
"""Another algorithm than the index's, with digests for names: the bridge can't get by with luck."""


def hashes_of(tokens: Sequence[int], block_size: int) -> list[Key]:
    """The engine's names for every full block."""
    return ENGINE.hash_blocks(None, tokens, block_size)


def stored(tokens: Sequence[int], size: int, first: int = 0, last: int | None = None, **fields: Any) -> Stored:
    """Blocks ``first`` to ``last`` of a prompt, announced in full."""
    names = hashes_of(tokens, size)
    last = len(names) if last is None else last
    return Stored(
        hashes=names[first:last],
        parent=names[first - 1] if first else None,
        tokens=list(tokens[first * size : last * size]),
        block_size=size,
        **fields,
    )


def nameless(tokens: Sequence[int], size: int, first: int = 0, last: int | None = None, **fields: Any) -> Stored:
    """Return a store without tokens, as offload connectors announce."""
    return Stored(hashes=hashes_of(tokens, size)[first:last], parent=None, tokens=None, block_size=0, **fields)


def removed(tokens: Sequence[int], size: int, first: int = 0, last: int | None = None, **fields: Any) -> Removed:
    return Removed(hashes=hashes_of(tokens, size)[first:last], **fields)


class Bench:
    """An indexer and one or more streams that number their own batches."""

    def __init__(self, block_size: int = 4, workers: Sequence[str] = ("a",), **options: Any) -> None:
        source = {
            name: options.pop(name) for name in ("groups", "clear_scope", "alignment", "by_rank") if name in options
        }
        options.setdefault("identity", Identity(block_size))
        self.indexer = Indexer(**options)
        self.seqs: dict[str, int] = {}
        for worker in workers:
            self.indexer.register(Source(stream=worker, worker=worker, **source))

    def say(self, *events: Event, stream: str = "a", **fields: Any) -> None:
        seq = fields.pop("seq", self.seqs.get(stream, -1) + 1)
        self.seqs[stream] = seq
        fields.setdefault("epoch", 0)
        origin = fields.setdefault("origin", Origin.LIVE)
        fields.setdefault("dialect", "map")
        fields.setdefault("replaces", origin in (Origin.RESET, Origin.SNAPSHOT))
        fields.setdefault("state", State.FRESH)
        self.indexer.apply(Update(stream=stream, topic="", seq=seq, events=list(events), **fields))
        self.indexer.check_integrity()

    def clear(self, tier: Tier | None = None, stream: str = "a") -> None:
        self.say(Cleared(tier=tier), stream=stream)

    def blocks(self, tokens: Sequence[int], worker: str = "a", rank: int = 0, **namespace: Any) -> int:
        """How many blocks a worker could use, by the short way and the long way."""
        holder = Holder(worker, rank)
        keys = self.indexer.identity.keys(tokens, **namespace)
        short = self.indexer.matches(keys).get(holder, 0)
        match = self.indexer.score_keys(keys).workers.get(holder)
        assert match is None or match.blocks == short, (match, short)
        return short

    def by_tier(self, tokens: Sequence[int], worker: str = "a") -> dict[str, int]:
        match = self.indexer.score_keys(self.indexer.identity.keys(tokens)).workers[Holder(worker)]
        return {tier.name: found.blocks for tier, found in match.tiers.items()}
