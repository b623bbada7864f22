"""Shared parts of the router's tests: prompts by name, and a fleet whose workers announce what they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvyard.events.transport import Origin, State, Update
from kvyard.events.types import Event, Removed, Stored, Tier
from kvyard.hashing import algorithm
from kvyard.index import Holder, Identity, Indexer, Source
from kvyard.router import Decision, Router, RouterConfig, RouteRequest

SIZE = 4
SECOND = 1_000_000_000


class Names:
    """Chained keys: one per prefix."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], int] = {}

    def chain(self, prompt: Sequence[object]) -> list[int]:
        return [self.known.setdefault(tuple(prompt[: end + 1]), len(self.known) + 1) for end in range(len(prompt))]


NAMES = Names()


def chain(prompt: Sequence[object]) -> list[int]:
    """The keys of a prompt whose blocks are the items of ``prompt``: the same for the same text, as keys are."""
    return NAMES.chain(prompt)


def index_for(workers: Sequence[str] = (), **options: Any) -> Indexer:
    source = {name: options.pop(name) for name in ("groups", "alignment", "by_rank") if name in options}
    indexer = Indexer(Identity(SIZE, algorithm("xxh3", "router", {}), direct=True), **options)
    for worker in workers:
        indexer.register(Source(stream=worker, worker=worker, **source))
    return indexer


class Fleet:
    """A router, its index, and streams that number their own batches."""

    def __init__(
        self, workers: Sequence[str] = ("a", "b"), seed: int = 0, index: Indexer | bool = True, **config: Any
    ) -> None:
        self.indexer = index_for(workers) if index is True else (index or None)
        if self.indexer is None:
            config.setdefault("block_size", SIZE)
        self.router = Router(RouterConfig(**{"policy": "kv", **config}), workers, self.indexer, seed)
        self.seqs: dict[str, int] = {}
        self.now = 0
        self.count = 0

    def say(self, worker: str, *events: Event, state: State = State.FRESH, rank: int | None = None) -> None:
        assert self.indexer is not None
        seq = self.seqs[worker] = self.seqs.get(worker, -1) + 1
        update = Update(
            stream=worker,
            topic="",
            seq=seq,
            events=list(events),
            rank=rank,
            dialect="map",
            epoch=0,
            origin=Origin.LIVE,
            state=state,
        )
        self.indexer.apply(update, self.now)

    def store(
        self, worker: str, prompt: Sequence[object], first: int = 0, last: int | None = None, **fields: Any
    ) -> None:
        keys = chain(prompt)
        parent = keys[first - 1] if first else None
        rank = fields.pop("rank", None)
        self.say(
            worker, Stored(hashes=keys[first:last], parent=parent, tokens=None, block_size=SIZE, **fields), rank=rank
        )

    def remove(
        self, worker: str, prompt: Sequence[object], first: int = 0, last: int | None = None, tier: Tier = Tier.G1
    ) -> None:
        self.say(worker, Removed(hashes=chain(prompt)[first:last], tier=tier))

    def route(
        self, prompt: Sequence[object], id_: object = None, tokens: int | None = None, **options: Any
    ) -> Decision:
        """Route a prompt of whole blocks and one token, so that all its blocks could be hits."""
        self.count += 1
        fields = {name: options.pop(name) for name in ("session", "expected_output") if name in options}
        request = RouteRequest(
            self.count if id_ is None else id_,
            chain(prompt),
            len(prompt) * SIZE + 1 if tokens is None else tokens,
            **fields,
        )
        decision = self.router.route(request, self.now, **options)
        self.router.check_integrity()
        return decision

    def pick(self, prompt: Sequence[object], **options: Any) -> str:
        """Where a prompt goes, without leaving a trace of load."""
        decision = self.route(prompt, **options)
        self.router.finished(decision.id, self.now)
        return decision.worker.name


def holder(name: str) -> Holder:
    return Holder(name)


def by_tier(tiers: tuple[int, ...]) -> tuple[int, int, int]:
    """A decision's blocks on the device, in host memory and in storage."""
    device, host, storage, *_ = (*tiers, 0, 0, 0)
    return device, host, storage
