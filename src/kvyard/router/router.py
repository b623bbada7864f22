"""The router: it chooses a worker for each prompt, and keeps the record of requests in flight that the next decision needs.

It knows the fleet from the index, which others feed with events, and from its own record, as a real router does. It has no
clock and no sockets: the caller passes the time, in nanoseconds that never decrease. Equal calls with an equal seed give
equal decisions.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any

from msgspec.structs import replace

from kvyard.clock import MS, from_seconds
from kvyard.engine.role import Role
from kvyard.errors import KvyardError
from kvyard.index import Holder, Identity
from kvyard.index.bits import mask_of
from kvyard.router import journal as did
from kvyard.router.active import ActiveLoads, Booking
from kvyard.router.config import RouterConfig
from kvyard.router.explain import explain
from kvyard.router.flow.queue import FlowWait
from kvyard.router.inputs import RoutingInput
from kvyard.router.memory import RoutedMemory
from kvyard.router.overlaps import Known, OverlapView, PrefixIndex
from kvyard.router.pace import Pace, PaceBook, pairs_of
from kvyard.router.policies import load_of, make_policy
from kvyard.router.ranking import lowest
from kvyard.router.request import Candidate, Choice, Decision, Hold, Prompt
from kvyard.router.tree import Path, last_keys
from kvyard.router.worker import NOBODY, WorkerLoad

LARGE = 64
"""Workers from which on it pays to keep them in the order of a policy's rank."""


class Router:
    """One policy over one set of workers. Not for several threads at once."""

    def __init__(
        self,
        config: RouterConfig,
        workers: Iterable[Holder | str],
        index: PrefixIndex | Identity | None = None,
        seed: int = 0,
        *,
        journal: did.Journal | None = None,
        whole: bool = False,
        large: int = LARGE,
    ) -> None:
        """Make a router. A worker is a rank; a bare name is its rank 0. With an ``index``, decisions of every policy report
        the workers' prefixes of the prompt; for an index elsewhere pass its ``Identity``, and its answers to ``route``.
        Raises ``KvyardError`` for a policy that needs an index and has none, and for block sizes that differ.

        ``journal`` receives every call that counts, and every decision; with ``whole`` all keys of every prompt, so that
        the journal alone is enough to decide again. From ``large`` workers on, they are kept in the order of the policy's
        rank, if it has one, and not all of them are searched; the choice is the same.
        """
        self.config = config
        self.policy = make_policy(config)
        indexer: PrefixIndex | None = None
        self.identity: Identity | None = None
        """Naming of prompts' blocks; ``None`` without an index."""
        if isinstance(index, Identity):
            self.identity = index
        elif index is not None:
            indexer, self.identity = index, index.identity
        self._indexer = indexer
        if self.identity is None and self.policy.needs_index:
            name = config.fallback if config.policy == "affinity" else config.policy
            raise KvyardError(f"the policy {name} routes by an index: give one, or choose approx")
        self.block_size = _block_size(config, self.identity, self.policy.memory is not None)
        self.loads = ActiveLoads(self.block_size)
        self.forgotten = 0
        """Requests given up because their end was never reported."""
        self._rng = Random(seed)
        self._forget_after = from_seconds(config.forget_after_s)
        memory, alone = self.policy.memory, self.policy.memory is not None
        if not alone and self.policy.needs_index and config.predicted_ttl_s > 0:
            memory = RoutedMemory(from_seconds(config.predicted_ttl_s), config.remembered_blocks)
        self.overlaps = OverlapView(self.block_size, indexer, memory, alone, plain=self.policy.predicts_plainly)
        self._free: list[int] = []
        """Slots of workers that left, as a heap."""
        self._paces = PaceBook()
        self._slots: dict[Holder, int] = {}
        self._draining: set[int] = set()
        self._open: list[WorkerLoad] = []
        """Workers that may be chosen, by slot; see ``_settle``."""
        self._open_slots = 0
        """Their slots, as bits."""
        self._settled = True
        self._large = large
        self._journal = journal
        self._whole = whole
        self._note(did.Began, config=config, seed=seed, block_size=self.block_size)
        for worker in workers:
            self.add_worker(worker)

    # -- who there is -----------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Holder]:
        """All workers, draining ones included."""
        return list(self._slots)

    def add_worker(self, worker: Holder | str, role: Role = "both", pace: Pace | None = None) -> None:
        """Choose among this one too, from now on; one that was draining is back. Policies see its ``role`` and its ``pace``,
        which is learnt from its times to first token if it isn't given. Raises ``KvyardError`` for a pool.
        """
        holder = worker if isinstance(worker, Holder) else Holder(worker)
        if holder.shared:
            raise KvyardError(f"{holder} can't be routed to: name its workers")
        slot = self._slots.get(holder)
        if slot is None:
            workers = self.loads.workers
            slot = heappop(self._free) if self._free else len(workers)
            self._paces.put(slot, pace)
            joined = WorkerLoad(slot, holder, role, self._paces.all[slot], self.block_size)
            if slot == len(workers):
                workers.append(joined)
            else:
                workers[slot] = joined
            self._slots[holder] = slot
        self.loads.workers[slot].role = role
        self._draining.discard(slot)
        self._settled = False
        self._note(did.Joined, worker=holder, role=role)

    def drain(self, worker: Holder | str) -> None:
        """Choose it no more; its requests in flight go on. A bare name means all its ranks; unknown ones raise."""
        for holder in self._named(worker):
            self._draining.add(self._slots[holder])
            self._note(did.Drained, worker=holder)
        self._settled = False

    def remove_worker(self, worker: Holder | str) -> list[object]:
        """Remove a worker and all its load. Returns the ids of requests in flight there. A bare name means all its ranks."""
        lost: list[object] = []
        for holder in self._named(worker):
            slot = self._slots.pop(holder)
            left = self.loads.workers[slot]
            ids = [id_ for id_, entry in self.loads.active.items() if entry.worker is left]
            for id_ in ids:
                self.loads.end(id_)
            lost += ids
            self.overlaps.gone(slot)
            self.policy.gone(slot)
            self._draining.discard(slot)
            left.name = NOBODY
            heappush(self._free, slot)
            self._note(did.Left, worker=holder, under_way=tuple(map(str, ids)))
        self._settled = False
        return lost

    # -- decisions --------------------------------------------------------------------------------------------------

    def route(
        self,
        request: Prompt,
        now: int,
        *,
        exclude: Collection[Holder] = (),
        detail: bool = False,
        known: Known | None = None,
    ) -> Decision:
        """Choose a worker and book the request there. ``exclude`` are workers not to choose this time; with ``detail`` the
        decision has everyone's figures; ``known`` is the answer of an index elsewhere for the prompt. Raises
        ``KvyardError`` if no worker may be chosen, or the id is in flight already; nothing is changed then.
        """
        decision = self._assign(request, now, exclude, known, True, detail)[1]
        assert decision is not None
        return decision

    def assign(self, request: Prompt, now: int, exclude: Collection[Holder] = ()) -> Booking:
        """Like ``route``, without a record of the decision: returns what the router holds of the request until its end."""
        return self._assign(request, now, exclude, None, self._journal is not None, False)[0]

    def _assign(
        self,
        request: Prompt,
        now: int,
        exclude: Collection[Holder],
        known: Known | None,
        records: bool,
        detail: bool,
    ) -> tuple[Booking, Decision | None]:
        try:
            self._refuse_twice(request)
            workers, slots = self._eligible(exclude)
        except KvyardError as error:
            if self._journal is not None:
                self._journal(did.NotRouted(**self._asked(request, now, exclude), why=str(error)))
            raise
        self._forget_stale(now)
        keys = request.keys
        path = self.loads.tree.find(keys)
        routing = self._look(request, now, workers, slots, path, self._rng, known)
        choice = self._guard(routing) or self.policy.choose(routing)
        worker = self.loads.workers[choice.slot]
        tiers = routing.tiers(choice.slot)
        prefill = self._new_tokens(request, tiers)
        best, holders = routing.longest_prefix()
        # Before anything is booked: its figures are those without this request.
        decision = self._decision(routing, choice, worker, tiers, prefill, best, holders, detail) if records else None
        entry = self._begin(request, worker, path, prefill, now)
        entry.overlap, entry.best = sum(tiers), best
        if self.policy.needs_pace:
            cached = routing.num_tokens - prefill
            self.loads.attends(entry, pairs_of(prefill, cached), worker.pace.past(prefill, cached))
        entry.sent = self.overlaps.sent(choice.slot, keys, now)
        if self.policy.routed(routing, choice) and self.loads.ranking is not None:
            self.loads.rank_by(self.policy.rank)
        else:
            self.loads.rerank(worker)
        if self._journal is not None and decision is not None:
            brief = (
                replace(decision, candidates=()) if detail else decision
            )  # their figures follow from what came before
            self._journal(did.Routed(**self._asked(request, now, exclude), decision=brief))
        return entry, decision

    def preview(
        self, request: Prompt, now: int, *, exclude: Collection[Holder] = (), known: Known | None = None
    ) -> Decision:
        """Return the decision of ``route``, with figures of all workers, without booking it or advancing the generator."""
        if self._journal is not None:
            self._journal(did.Previewed(**self._asked(request, now, exclude)))
        workers, slots = self._eligible(exclude)
        rng = Random()
        rng.setstate(self._rng.getstate())
        routing = self._look(request, now, workers, slots, self.loads.tree.find(request.keys), rng, known)
        choice = self._guard(routing) or self.policy.choose(routing)
        tiers = routing.tiers(choice.slot)
        prefill = self._new_tokens(request, tiers)
        best, holders = routing.longest_prefix()
        worker = self.loads.workers[choice.slot]
        return self._decision(routing, choice, worker, tiers, prefill, best, holders, True)

    def hold(
        self,
        request: Prompt,
        now: int,
        full: Collection[Holder],
        *,
        exclude: Collection[Holder] = (),
        known: Known | None = None,
    ) -> Hold | None:
        """Return the worker of ``full``, which have no room, that ``request`` should wait for; ``None`` if it should go to one
        that has room. ``exclude`` and ``known`` are those of ``route``. Books nothing and uses up no chance.
        """
        if not self.policy.waits or not full:
            return None
        workers, slots = self._eligible(exclude)
        shut = mask_of([self._slots[holder] for holder in full if holder in self._slots]) & slots
        if not shut or shut == slots:
            return None
        path = self.loads.tree.find(request.keys)
        routing = self._look(request, now, workers, slots, path, self._rng, known)
        held = self.policy.hold(routing, shut)
        return None if held is None else Hold(self.loads.workers[held[0]].name, round(held[1] * MS))

    def book(self, request: Prompt, worker: Holder, now: int, new_tokens: int | None = None) -> None:
        """Book a request that the router of another gateway has routed: its load and its prefix count here too. ``new_tokens``
        are those of the other decision. Raises ``KvyardError`` as ``route`` does.
        """
        self._refuse_twice(request)
        slot = self._slots[self._named(worker)[0]]
        path = self.loads.tree.find(request.keys)
        prefill = request.num_tokens if new_tokens is None else new_tokens
        booked = self.loads.workers[slot]
        entry = self._begin(request, booked, path, prefill, now)
        self.loads.rerank(booked)
        entry.sent = self.overlaps.booked_elsewhere(slot, request.keys, now)
        if self._journal is not None:
            self._journal(did.Booked(**self._asked(request, now), worker=worker, new_tokens=new_tokens))

    def prefill_done(self, id_: object, now: int, seen: bool = True) -> bool:
        """Note that a request's prompt is computed: its first token is there, or came earlier, if it wasn't ``seen``. Returns
        whether the request is known.
        """
        entry = self.loads.active.get(id_)
        if entry is None:
            return False
        if self.policy.needs_pace and seen:
            # Prompts are computed one after the other: from the first token before this one on it was its turn.
            began = max(entry.since, entry.worker.computing_since)
            self._paces.observe(entry.worker.slot, entry.prefill_tokens, (now - began) / MS, entry.pairs)
        self.loads.prefill_done(entry, now)
        if self._indexer is not None and entry.tail is not None:
            self._indexer.computed(entry.worker.name, entry.num_tokens, partial(last_keys, entry.tail))
        if self._journal is not None:
            self._note(did.FirstToken, at=now, id=str(id_), seen=seen)
        return True

    def progressed(self, id_: object, output_tokens: int, now: int) -> bool:
        """Note that a request has generated ``output_tokens`` so far. Counts only with ``track_output``. Returns whether it is
        known.
        """
        entry = self.loads.active.get(id_)
        if entry is None:
            return False
        if self.config.track_output:
            self.loads.grown(entry, output_tokens)
            self._note(did.Progressed, at=now, id=str(id_), output_tokens=output_tokens)
        return True

    def finished(self, id_: object, now: int) -> bool:
        """Note that a request ended, for any reason. Returns whether it was known."""
        known = self.loads.end(id_) is not None
        if known and self._journal is not None:
            self._note(did.Ended, at=now, id=str(id_))
        return known

    def refused(self, id_: object, now: int) -> bool:
        """Note that a request ended and its worker computed nothing of it, so its predicted blocks are removed. Returns whether
        it was known.
        """
        entry = self.loads.end(id_)
        if entry is None:
            return False
        self.overlaps.withdraw(entry.sent)
        self._note(did.Ended, at=now, id=str(id_), refused=True)
        return True

    def held_back(self, id_: object, wait: FlowWait, now: int) -> None:
        """Write down why a request waited before it is routed."""
        if self._journal is not None:
            self._note(did.HeldBack, at=now, id=str(id_), **wait._asdict())

    def explain(self, record: Decision) -> str:
        """Return a decision in words, and with its details as a table."""
        return explain(record, self.config, self.block_size)

    def load(self, worker: Holder) -> WorkerLoad:
        """Return a worker's requests in flight, kept up to date. Raises ``KvyardError`` for one that isn't here."""
        self._named(worker)
        return self.loads.workers[self._slots[worker]]

    def pace(self, worker: Holder) -> Pace:
        """Return the assumed speed of a worker. Raises ``KvyardError`` for one that isn't here."""
        return self.load(worker).pace

    def check_integrity(self) -> None:
        """Raise ``AssertionError``, saying what is wrong, unless all books agree. For tests and audits."""
        self._settle()
        self.loads.check_integrity()
        if self.overlaps.memory is not None:
            self.overlaps.memory.check_integrity()
        open_slots = sorted(set(self._slots.values()) - self._draining)
        assert [worker.slot for worker in self._open] == open_slots, "who may be chosen is out of date"
        assert self._open_slots == mask_of(open_slots), "who may be chosen is out of date"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _eligible(self, exclude: Collection[Holder]) -> tuple[Sequence[WorkerLoad], int]:
        """Return the workers that may be chosen this time, and their slots as bits. Raises ``KvyardError`` if none is left."""
        self._settle()
        workers, slots = self._open, self._open_slots
        if exclude:
            workers = [worker for worker in workers if worker.name not in exclude]
            slots = mask_of([worker.slot for worker in workers])
        if not workers:
            raise KvyardError("no worker may be chosen: all are draining, excluded or gone")
        return workers, slots

    def _look(
        self,
        request: Prompt,
        now: int,
        workers: Sequence[WorkerLoad],
        slots: int,
        path: Path,
        rng: Random,
        known: Known | None,
    ) -> RoutingInput:
        policy, paces = self.policy, self._paces
        if policy.needs_pace and self.loads.ranking is not None and not paces.is_above_floor:
            self._rank()
        return RoutingInput(
            request,
            now,
            workers,
            slots,
            self.loads,
            self.overlaps.look(request, now, known),
            self.loads.tree.levels(path),
            rng,
            paces.speeds if policy.needs_pace else (),
            policy.needs_shared,
        )

    def _note(self, kind: type[did.Entry], **fields: Any) -> None:
        if self._journal is not None:
            self._journal(kind(**fields))

    def _asked(self, request: Prompt, now: int, exclude: Collection[Holder] | None = None) -> dict[str, Any]:
        """Return a request's fields for the journal."""
        keys = request.keys
        fields: dict[str, Any] = {
            "at": now,
            "id": str(request.id),
            "tokens": request.num_tokens,
            "blocks": len(keys),
            "tail": did.number(keys[-1]) if keys else 0,
            "keys": tuple(map(did.number, keys)) if self._whole else (),
            "session": request.session,
            "expected_output": request.expected_output,
        }
        return fields if exclude is None else fields | {"excluded": tuple(sorted(exclude))}

    def _guard(self, routing: RoutingInput) -> Choice | None:
        """Return the least loaded, where loads are too far apart for the policy to be followed."""
        config = self.config
        if config.guard is None or not self.policy.guarded:
            return None
        loads = [load_of(config.load, worker) for worker in routing.workers]
        high, low = max(loads), min(loads)
        if high - low <= config.guard or high <= config.guard_ratio * low:
            return None
        return routing.cheapest(lambda worker, _: load_of(config.load, worker), "guard")

    def _new_tokens(self, request: Prompt, tiers: Sequence[int]) -> int:
        """Return tokens that a worker with ``tiers`` of a prompt has to compute. What it must fetch counts by its credit, or
        not at all where the policy goes by time, since a load is no work for the device.
        """
        config, size = self.config, self.block_size
        if not tiers:
            return request.num_tokens
        cached = tiers[0] * size
        if self.policy.needs_pace:
            cached = sum(tiers) * size
        elif len(tiers) > 1 and any(tiers[1:]):
            worth = float(tiers[0])
            for blocks, credit in zip(tiers[1:], config.lower_credits):
                worth += credit * blocks
            cached = round(worth * size)
        return max(0, request.num_tokens - cached)

    def _begin(self, request: Prompt, worker: WorkerLoad, path: Path, prefill: int, now: int) -> Booking:
        reserved = int(self.config.reserve_output * (request.expected_output or 0) / self.block_size)
        return self.loads.begin(request, worker, path, prefill, reserved, now)

    def _decision(
        self,
        routing: RoutingInput,
        choice: Choice,
        worker: WorkerLoad,
        tiers: tuple[int, ...],
        new_tokens: int,
        best: int,
        holders: int,
        detail: bool,
    ) -> Decision:
        """Return the record of ``choice``; ``best`` is the longest prefix and ``holders`` have it, as bits of their slots."""
        request, prefixes = routing.request, routing.prefixes
        regret = best - sum(tiers) if best else 0
        best_worker: Holder | None = None
        if best:
            best_worker = self.loads.workers[lowest(holders)].name if regret else worker.name
        # Named one by one, though they are a candidate's: there is one decision for each request.
        return Decision(
            id=request.id,
            policy=self.policy.config.policy,
            why=choice.why,
            tied=choice.tied,
            num_tokens=request.num_tokens,
            new_tokens=new_tokens,
            blocks=routing.blocks,
            best=best,
            best_worker=best_worker,
            regret=regret,
            candidates=self._candidates(routing) if detail else (),
            worker=worker.name,
            role=worker.role,
            cost=choice.cost,
            tiers=tiers,
            predicted=prefixes.predicted(choice.slot) if prefixes is not None else 0,
            prefill_tokens=worker.prefill_tokens,
            active_blocks=worker.blocks,
            shared_blocks=routing.shared_blocks(choice.slot),
            active_requests=worker.requests,
        )

    def _candidates(self, routing: RoutingInput) -> tuple[Candidate, ...]:
        """Return all workers that could have been chosen."""
        costs = self.policy.costs(routing)
        prefixes = routing.prefixes
        return tuple(
            [
                Candidate(
                    worker=worker.name,
                    role=worker.role,
                    cost=costs.cost(worker, routing.match_of(worker.slot)),
                    tiers=routing.tiers(worker.slot),
                    predicted=prefixes.predicted(worker.slot) if prefixes is not None else 0,
                    prefill_tokens=worker.prefill_tokens,
                    active_blocks=worker.blocks,
                    shared_blocks=routing.shared_blocks(worker.slot),
                    active_requests=worker.requests,
                )
                for worker in routing.workers
            ]
        )

    def _refuse_twice(self, request: Prompt) -> None:
        if request.id in self.loads.active:
            raise KvyardError(
                f"request {request.id!r} is in flight already: report it finished before routing it again"
            )

    def _forget_stale(self, now: int) -> None:
        active = self.loads.active
        while active:
            id_, entry = next(iter(active.items()))
            if entry.since + self._forget_after > now:
                break
            self.loads.end(id_)
            self.forgotten += 1

    def _named(self, worker: Holder | str) -> Sequence[Holder]:
        if isinstance(worker, Holder):
            holders = [worker] if worker in self._slots else []
        else:
            holders = [holder for holder in self._slots if holder.name == worker]
        if not holders:
            raise KvyardError(f"there is no worker {worker!s} here")
        return holders

    def _settle(self) -> None:
        """Pass added and removed workers to all parts: thousands may come at once, which is computed once."""
        if self._settled:
            return
        self._settled = True
        workers = self.loads.workers
        self._open = [workers[slot] for slot in sorted(self._slots.values()) if slot not in self._draining]
        self._open_slots = mask_of([worker.slot for worker in self._open])
        self.overlaps.changed([worker.name for worker in workers])
        if self.policy.ranked and (self.loads.ranking is not None or len(self._open) >= self._large):
            self._rank()

    def _rank(self) -> None:
        """Put all workers in the order of the policy's rank."""
        self._paces.set_floor()
        self.loads.rank_by(self.policy.rank)


def _block_size(config: RouterConfig, identity: Identity | None, remembers: bool) -> int:
    ours = config.block_size
    if identity is not None:
        theirs = identity.block_size
        if ours is not None and ours != theirs:
            raise KvyardError(f"the router's block_size {ours} isn't the index's {theirs}: leave it out")
        return theirs
    if ours is None and remembers:
        raise KvyardError("approx routes by blocks and there is no index to take their size from: give block_size")
    return ours or 16
