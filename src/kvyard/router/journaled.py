"""A router and an index that write down what they are told. In all else they are what they were before."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from kvyard.engine.role import Role
from kvyard.errors import KvyardError
from kvyard.events.transport import Update
from kvyard.index import Holder, Identity, Indexer, Source
from kvyard.router.config import RouterConfig
from kvyard.router.journal import Journal
from kvyard.router.overlaps import Known, PrefixIndex
from kvyard.router.request import Decision, RouteRequest
from kvyard.router.router import Router


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
    ) -> None:
        """As ``Router``."""
        self.journal = journal
        super().__init__(config, (), index, seed)
        journal.began(config, seed, self.block_size)
        for worker in workers:
            self.add_worker(worker)

    def add_worker(self, worker: Holder | str, role: Role = "both") -> None:
        super().add_worker(worker, role)
        self.journal.joined(worker if isinstance(worker, Holder) else Holder(worker))

    def drain(self, worker: Holder | str) -> None:
        named = self._named(worker)
        super().drain(worker)
        for holder in named:
            self.journal.drained(holder)

    def remove_worker(self, worker: Holder | str) -> list[object]:
        lost: list[object] = []
        for holder in list(self._named(worker)):
            mine = super().remove_worker(holder)
            self.journal.left(holder, mine)
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
        try:
            decision = super().route(request, now, exclude=exclude, detail=detail, known=known)
        except KvyardError as error:
            self.journal.refused(request, str(error), now, exclude)
            raise
        self.journal.routed(request, decision, now, exclude)
        return decision

    def preview(
        self, request: RouteRequest, now: int, *, exclude: Collection[Holder] = (), known: Known | None = None
    ) -> Decision:
        self.journal.previewed(request, now, exclude)
        return super().preview(request, now, exclude=exclude, known=known)

    def book(self, request: RouteRequest, worker: Holder, now: int, new_tokens: int | None = None) -> None:
        super().book(request, worker, now, new_tokens)
        self.journal.booked(request, worker, now, new_tokens)

    def prefill_done(self, id_: object, now: int) -> bool:
        known = super().prefill_done(id_, now)
        if known:
            self.journal.first_token(id_, now)
        return known

    def progressed(self, id_: object, output_tokens: int, now: int) -> bool:
        known = super().progressed(id_, output_tokens, now)
        if known and self.config.track_output:
            self.journal.progressed(id_, output_tokens, now)
        return known

    def finished(self, id_: object, now: int) -> bool:
        known = super().finished(id_, now)
        if known:
            self.journal.ended(id_, now)
        return known


class JournaledIndexer(Indexer):
    """An ``Indexer`` whose inputs go into a journal. What it refuses is not written."""

    def __init__(self, *given: Any, journal: Journal, **named: Any) -> None:
        """As ``Indexer``."""
        super().__init__(*given, **named)
        self.journal = journal

    def register(self, source: Source) -> None:
        known = source.stream in self._sources
        super().register(source)
        if not known:
            self.journal.listening(source)

    def unregister(self, stream: str) -> None:
        known = stream in self._sources
        super().unregister(stream)
        if known:
            self.journal.unheard(stream)

    def share(self, pool: str, members: Iterable[Holder]) -> None:
        members = list(members)
        super().share(pool, members)
        self.journal.shared(pool, members)

    def apply(self, update: Update, now: int = 0) -> None:
        known = update.stream in self._sources
        super().apply(update, now)
        if known:
            self.journal.applied(update, now)

    def lose(self, stream: str, reason: str) -> None:
        super().lose(stream, reason)
        self.journal.lost(stream, reason)
