"""A router and an index that write down what they are told. In all else they are what they were before.

``journal`` is where entries go: a list's ``append``, or a ``JournalFile``'s ``write``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

from msgspec.structs import replace

from kvyard.engine.role import Role
from kvyard.errors import KvyardError
from kvyard.events.transport import Update
from kvyard.index import Holder, Identity, Indexer, Source
from kvyard.router.config import RouterConfig
from kvyard.router.entries import (
    AnyEntry,
    Applied,
    Began,
    Booked,
    Drained,
    Ended,
    FirstToken,
    Joined,
    Left,
    Listening,
    Lost,
    NotRouted,
    Previewed,
    Progressed,
    Routed,
    Shared,
    Unheard,
)
from kvyard.router.overlaps import Known, PrefixIndex
from kvyard.router.request import Decision, RouteRequest
from kvyard.router.router import Router

Journal: TypeAlias = Callable[[AnyEntry], None]


class JournaledRouter(Router):
    """A ``Router`` whose calls go into a journal, with the decisions they led to."""

    def __init__(
        self,
        config: RouterConfig,
        workers: Iterable[Holder | str],
        index: PrefixIndex | Identity | None = None,
        seed: int = 0,
        *,
        journal: Journal,
        whole: bool = False,
    ) -> None:
        """As ``Router``. ``whole``: all keys of every prompt are written, so that the journal alone is enough; that is much."""
        self._write = journal
        self._whole = whole
        super().__init__(config, (), index, seed)
        journal(Began(config=config, seed=seed, block_size=self.block_size))
        for worker in workers:
            self.add_worker(worker)

    def add_worker(self, worker: Holder | str, role: Role = "both") -> None:
        super().add_worker(worker, role)
        self._write(Joined(worker=worker if isinstance(worker, Holder) else Holder(worker), role=role))

    def drain(self, worker: Holder | str) -> None:
        named = self._named(worker)
        super().drain(worker)
        for holder in named:
            self._write(Drained(worker=holder))

    def remove_worker(self, worker: Holder | str) -> list[object]:
        lost: list[object] = []
        for holder in list(self._named(worker)):
            mine = super().remove_worker(holder)
            self._write(Left(worker=holder, under_way=tuple(map(str, mine))))
            lost += mine
        return lost

    def route(
        self,
        request: RouteRequest,
        now: int,
        *,
        exclude: Collection[Holder] = (),
        detail: bool = False,
        known: Known | None = None,
    ) -> Decision:
        excluded = tuple(sorted(exclude))
        try:
            decision = super().route(request, now, exclude=exclude, detail=detail, known=known)
        except KvyardError as error:
            self._write(NotRouted(**self._asked(request, now), excluded=excluded, why=str(error)))
            raise
        # The candidates' figures follow from what came before.
        brief = replace(decision, candidates=()) if decision.candidates else decision
        self._write(Routed(**self._asked(request, now), excluded=excluded, decision=brief))
        return decision

    def preview(
        self, request: RouteRequest, now: int, *, exclude: Collection[Holder] = (), known: Known | None = None
    ) -> Decision:
        self._write(Previewed(**self._asked(request, now), excluded=tuple(sorted(exclude))))
        return super().preview(request, now, exclude=exclude, known=known)

    def book(self, request: RouteRequest, worker: Holder, now: int, new_tokens: int | None = None) -> None:
        super().book(request, worker, now, new_tokens)
        self._write(Booked(**self._asked(request, now), worker=worker, new_tokens=new_tokens))

    def prefill_done(self, id_: object, now: int) -> bool:
        known = super().prefill_done(id_, now)
        if known:
            self._write(FirstToken(at=now, id=str(id_)))
        return known

    def progressed(self, id_: object, output_tokens: int, now: int) -> bool:
        known = super().progressed(id_, output_tokens, now)
        if known and self.config.track_output:
            self._write(Progressed(at=now, id=str(id_), output_tokens=output_tokens))
        return known

    def finished(self, id_: object, now: int) -> bool:
        known = super().finished(id_, now)
        if known:
            self._write(Ended(at=now, id=str(id_)))
        return known

    def _asked(self, request: RouteRequest, now: int) -> dict[str, Any]:
        keys = request.keys
        return {
            "at": now,
            "id": str(request.id),
            "tokens": request.num_tokens,
            "blocks": len(keys),
            "tail": _number(keys[-1]) if keys else 0,
            "keys": tuple(map(_number, keys)) if self._whole else (),
            "session": request.session,
            "expected_output": request.expected_output,
        }


def _number(key: int | bytes) -> int:
    """A key as a whole number; trace keys are numbers already, hashes of bytes are read as one."""
    return key if isinstance(key, int) else int.from_bytes(key, "big")


class JournaledIndexer(Indexer):
    """An ``Indexer`` whose inputs go into a journal. What it refuses is not written."""

    def __init__(self, *given: Any, journal: Journal, **named: Any) -> None:
        """As ``Indexer``."""
        super().__init__(*given, **named)
        self._write = journal

    def register(self, source: Source) -> None:
        known = source.stream in self._sources
        super().register(source)
        if not known:
            self._write(Listening(source=source))

    def unregister(self, stream: str) -> None:
        known = stream in self._sources
        super().unregister(stream)
        if known:
            self._write(Unheard(stream=stream))

    def share(self, pool: str, members: Iterable[Holder]) -> None:
        members = list(members)
        super().share(pool, members)
        self._write(Shared(pool=pool, members=tuple(sorted(members))))

    def apply(self, update: Update, now: int = 0) -> None:
        known = update.stream in self._sources
        super().apply(update, now)
        if known:
            self._write(Applied.of(update, now))

    def lose(self, stream: str, reason: str) -> None:
        super().lose(stream, reason)
        self._write(Lost(stream=stream, reason=reason))
