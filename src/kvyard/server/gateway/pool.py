"""An engine pool: the engines of one model, the index and the router over them, and the queue before them.

A request that can't be placed waits here, in the order of a flow policy, until an engine has room or is back. Freed room goes
to the next one at once, so that no later request can slip in between.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec

from kvyard.blocks import NO_HINTS, Hints
from kvyard.clock import SECOND, Clock
from kvyard.errors import KvyardError
from kvyard.hashing import PLAIN, Namespace
from kvyard.index import Holder, Indexer
from kvyard.router import Decision, Router, RouteRequest
from kvyard.router.deciders import Decider
from kvyard.router.flow import FlowConfig, FlowQueue, FlowRequest, FlowWait, Waiting
from kvyard.router.overlaps import Known
from kvyard.router.request import Hold
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.gateway.engine import Engine
from kvyard.server.gateway.prompting import PeekedBody
from kvyard.server.gateway.reading import PromptReader, ReadPrompt
from kvyard.server.gateway.remote import RemoteIndex
from kvyard.server.gateway.sharing import SharedBookings
from kvyard.server.gateway.tracing import RequestTrace
from kvyard.server.http import Refusal

LONG = 8192
"""Tokens from which on a prompt is compared with what engines take."""


class EngineRequest(msgspec.Struct, kw_only=True, gc=False):
    """A request that wants an engine."""

    request: RouteRequest
    shut: frozenset[Holder] = frozenset()
    """Ranks that can't take it: their engine doesn't serve its adapter."""
    tried: set[str] = msgspec.field(default_factory=set)
    """Engines that failed it."""
    tail: Sequence[int] | None = None
    """The tokens behind its last full block, where it is recorded."""
    hints: Hints = NO_HINTS
    """Hints of its session, if it is recorded."""
    known: Known | None = None
    """Answer of a remote index."""
    salt: str | None = None
    """The cache_salt that its body gets, where its key has one."""
    trace: RequestTrace | None = None
    flow: FlowRequest | None = None
    """The request as flow control knows it; made when it is placed, unless more is known of it."""
    wait: FlowWait | None = None
    """Why it waited, if it did."""
    session_given: str | None = None
    """The session that its client named, if it is recorded."""


Placed: TypeAlias = tuple[Decision, Engine]


class _Queued(msgspec.Struct, eq=False):
    place: EngineRequest
    granted: asyncio.Future[Placed]


class Exhausted(Exception):
    """Every engine that is up has failed this request."""


class EnginePool(msgspec.Struct, eq=False):
    """Engines of one model, behind one router and one queue."""

    model: str
    router: Router
    reader: PromptReader
    config: GatewayConfig
    clock: Clock
    remote: RemoteIndex | None = None
    sharing: SharedBookings | None = None
    """Tells others of our load, and us of theirs."""
    indexer: Indexer | None = None
    """Index of the engines, if it is kept in this process."""
    prefill_pool: "EnginePool | None" = None
    """The engines in their role of computing prompts for others, if some have roles. Those here are the ones that answer."""
    decider: Decider | None = None
    """Says which prompts those compute."""
    is_prefill: bool = False
    """True if this is the prefill pool of another pool."""
    other_role: "EnginePool | None" = None
    """The pool with these engines in the other role, if there is one."""
    engines: dict[str, Engine] = {}
    refused: int = 0
    """Requests that the queue had no room for."""
    expired: int = 0
    """Requests that waited too long."""
    waiting: FlowQueue[_Queued] = msgspec.field(default_factory=lambda: FlowQueue(FlowConfig()))
    """Requests that can't be placed yet."""
    _open: set[Holder] = set()
    """Ranks that are in the router and not draining."""
    _full: set[Holder] = set()
    """Of those: which have as much as they may have."""
    _shut: dict[str, frozenset[Holder]] = {}
    _none_since: int | None = None
    """Time in nanoseconds at which the last open rank went down; ``None`` while one is open and before the first was."""
    _overdue: asyncio.TimerHandle | None = None
    """Until the first of those that wait for an engine of their own has waited long enough."""

    def __post_init__(self) -> None:
        self.waiting = FlowQueue(self.config.flow, self.config.queue, self.config.seed)

    def configured(self, config: GatewayConfig) -> None:
        """Use this configuration from now on."""
        self.config = config
        self.waiting.configure(config.flow, config.queue)
        for engine in self.engines.values():
            self._update_full(engine)
        if self.prefill_pool is not None:
            self.prefill_pool.configured(config)
        self.grant()

    async def read(self, ask: PeekedBody, lora: str | None, salt: str | None, small: bool = False) -> ReadPrompt:
        """Read the prompt of a request, without names if it is longer than any engine takes; ``small`` if its body is below
        ``LARGE``. Raises ``MsgspecError`` for invalid JSON.
        """
        space = PLAIN if lora is None and not salt else Namespace(lora_name=lora, salt=salt or None)
        return await self.reader.read(ask, space, self._too_long, self.remote is not None, small)

    def _too_long(self, tokens: int) -> bool:
        if tokens > self.config.limits.tokens:
            return True
        return tokens > LONG and (longest := self.longest) is not None and tokens > longest

    @property
    def longest(self) -> int | None:
        """Tokens that some engine takes, prompt and answer together; ``None`` if one reports no limit."""
        longest = [engine.longest for engine in self.engines.values()]
        return max(filter(None, longest), default=None) if all(longest) else None

    # -- members ------------------------------------------------------------------------------------------------------

    def add(self, engine: Engine) -> None:
        """Take an engine in; it gets requests once it is open."""
        self.engines[engine.name] = engine
        engine.pool = self
        self.names_changed()
        if self.prefill_pool is not None and engine.config.role != "decode":
            self.prefill_pool.engines[engine.name] = engine

    def add_prefill_pool(self, prefill_pool: "EnginePool") -> None:
        """Let prompts be computed by ``prefill_pool``, which has a router of its own."""
        self.prefill_pool, self.other_role, prefill_pool.other_role = prefill_pool, prefill_pool, self
        for engine in self.engines.values():
            if engine.config.role != "decode":
                prefill_pool.engines[engine.name] = engine
                if any(holder in self._open for holder in engine.holders):
                    prefill_pool.open(engine)

    def takes(self, engine: Engine) -> bool:
        """Return true if ``engine`` has the role that this pool's requests need."""
        return engine.config.role != ("decode" if self.is_prefill else "prefill")

    def may_take(self, place: EngineRequest) -> bool:
        """Return true if some engine that is up may get a request, now or once it has room."""
        return any(holder not in place.shut and holder.name not in place.tried for holder in self._open)

    def remove(self, engine: Engine) -> None:
        """Remove an engine. Its requests in flight go on."""
        self.forget(engine)
        del self.engines[engine.name]
        engine.pool = None
        self.names_changed()
        if self.prefill_pool is not None:
            self.prefill_pool.engines.pop(engine.name, None)

    def open(self, engine: Engine) -> None:
        """Send requests to an engine from now on."""
        if self.prefill_pool is not None:
            self.prefill_pool.open(engine)
        if not self.takes(engine):
            return
        for holder in engine.holders:
            if holder not in self._open:
                self.router.add_worker(holder, engine.config.role)
                self._open.add(holder)
                if self.sharing is not None:
                    self.sharing.worker_added(holder)
        self._none_since = None
        self._update_full(engine)
        self.grant()

    def shut(self, engine: Engine) -> None:
        """Send an engine no more requests; those in flight go on and count."""
        if self.prefill_pool is not None:
            self.prefill_pool.shut(engine)
        for holder in engine.holders:
            if holder in self._open:
                self._open.discard(holder)
                self._full.discard(holder)
                self.router.drain(holder)
        self._note_none_open()
        self.grant()

    def forget(self, engine: Engine) -> None:
        """Send an engine no more requests, and discard those it had: its process ended, and its cache with it."""
        if self.prefill_pool is not None:
            self.prefill_pool.forget(engine)
        known = set(self.router.workers)
        for holder in engine.holders:
            if holder in known:
                self._open.discard(holder)
                self._full.discard(holder)
                self.router.remove_worker(holder)
        self._note_none_open()
        self.grant()

    def spare(self, engine: Engine) -> bool:
        """Return true if others can take requests without this engine."""
        if self.prefill_pool is not None and engine.config.role == "prefill":
            return self.prefill_pool.spare(engine)
        return any(holder.name != engine.name for holder in self._open)

    def names_changed(self) -> None:
        """Compute again which engines can't take which names, after names of engines changed."""
        self._shut.clear()
        if self.prefill_pool is not None:
            self.prefill_pool.names_changed()

    def without(self, name: str) -> frozenset[Holder]:
        """Ranks that don't serve ``name``. The pool's own model is served by all: an engine put here by mistake refuses it."""
        if name == self.model:
            return frozenset()
        shut = self._shut.get(name)
        if shut is None:
            others = [engine for engine in self.engines.values() if not engine.serves(name)]
            shut = self._shut[name] = frozenset(holder for engine in others for holder in engine.holders)
        return shut

    def all_but(self, name: str) -> frozenset[Holder]:
        """Return the ranks of all engines but one, if that engine is up; none if it isn't, so that any may answer."""
        home = self.engines.get(name)
        if home is None or not home.up:
            return frozenset()
        return frozenset(holder for engine in self.engines.values() if engine is not home for holder in engine.holders)

    # -- requests -------------------------------------------------------------------------------------------------------

    async def place(self, place: EngineRequest) -> Placed:
        """Return an engine for a request, now or later; the caller must ``release`` it. Raises ``Exhausted``, or ``Refusal``
        with 429 where too many wait and 503 where it took too long.
        """
        request, now = place.request, self.clock.now()
        if place.flow is None:
            place.flow = FlowRequest(request.id, now, request.num_tokens, None, request.session)
        capped = self.waiting.capped(place.flow, len(self._open))
        if not capped and not self.waiting and self._room(place) and self._hold(place) is None:
            self.waiting.sent(place.flow, now)
            return self._book(place, now)
        self._give_up_if_exhausted(place)
        if self._all_gone():
            self.expired += 1
            raise self._gone()
        refusal = self.waiting.refusal(place.flow, len(self._open))
        if refusal is not None:
            self.refused += 1
            raise Refusal(
                429 if self._open else 503,
                f"{refusal.reason}, for model {self.model}" if self._open else self._none_up(),
                fix="try again later",
                Retry_After=str(refusal.retry_after_s),
            )
        seconds = self.config.queue_seconds
        queued = _Queued(place, asyncio.get_running_loop().create_future())
        waiting = self.waiting.push(place.flow, queued, now)
        if len(self.waiting) > 1 or self.router.policy.waits:
            # Those before it may wait for engines that it doesn't need.
            self.grant()
        try:
            async with asyncio.timeout(seconds):
                return await queued.granted
        except TimeoutError:
            self._take_back(waiting)
            self.expired += 1
            why = f"all engines of model {self.model} are busy" if self._open else self._none_up()
            raise Refusal(503, f"{why}: waited {seconds:g} s", fix="try again later", Retry_After="5") from None
        except BaseException:
            self._take_back(waiting)
            raise

    def place_at(self, place: EngineRequest, engine: Engine) -> Decision | None:
        """Book a request at the engine that turned out to have it, as ``place`` would; ``None`` if it can't be booked there.
        The caller must ``release`` it.
        """
        others = frozenset(holder for other in self.engines.values() if other is not engine for holder in other.holders)
        try:
            return self._book(msgspec.structs.replace(place, shut=others, tried=set()), self.clock.now())[0]
        except KvyardError:
            return None  # it is down, drains, or has as much as it may have

    def release(self, engine: Engine, id_: object, refused: bool = False) -> None:
        """Note that a request has left an engine, for any reason; ``refused``: as far as is known, the engine did nothing for
        it.
        """
        (self.router.refused if refused else self.router.finished)(id_, self.clock.now())
        if self.sharing is not None:
            self.sharing.finished(id_)
        engine.in_flight -= 1
        if self._taken(engine) == self.config.engine_requests - 1:
            self._full.difference_update(engine.holders)
            if self.other_role is not None:
                self.other_role.has_room(engine)
        if self.waiting:
            self.grant()

    def take_back(self, place: EngineRequest) -> None:
        """Tell flow control that a request leaves its engine without having ended there. ``release`` follows."""
        if place.flow is not None:
            self.waiting.returned(place.flow)

    def ended(self, place: EngineRequest, computed: int, output: int) -> None:
        """Tell flow control that a request ended at its engine, which computed ``computed`` tokens of its prompt and ``output``
        tokens of its answer.
        """
        if place.flow is not None and self.waiting.ended(place.flow, computed, output, self.clock.now()):
            self.grant()

    def has_room(self, engine: Engine) -> None:
        """Note that an engine that was full isn't any more, as the pool of the other role found."""
        self._full.difference_update(engine.holders)
        if self.waiting:
            self.grant()

    def grant(self) -> None:
        """Place waiting requests in order, as far as there is room."""
        if self.waiting:
            self.waiting.grant(self.clock.now(), self._may_have_room, self._grant, len(self._open))
            self._await_overdue()

    def _await_overdue(self) -> None:
        """Have those placed that wait for an engine of their own, when they have waited long enough."""
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        if self.waiting and self.router.policy.waits and self._may_have_room():
            now = self.clock.now()
            due = self.waiting.held_until(now)
            if due is not None:
                with suppress(RuntimeError):  # outside of a loop nobody waits
                    self._overdue = asyncio.get_running_loop().call_later((due - now) / SECOND, self.grant)

    def _hold(self, place: EngineRequest) -> Hold | None:
        """Return the engine without room that a request should wait for; ``None`` if it should go to another."""
        if not self.router.policy.waits:
            return None
        excluded = self._excluded(place)
        shut = [holder for holder in excluded if holder not in self._full]
        return self.router.hold(place.request, self.clock.now(), self._full, exclude=shut, known=place.known)

    def _may_have_room(self) -> bool:
        """Return false if engines are up and all are full. While none is up, requests may be given up."""
        return not self._open or len(self._full) < len(self._open)

    def _grant(self, waiting: Waiting[_Queued]) -> bool:
        """Place a waiting request, or end its wait. Returns false if it still waits."""
        place, granted = waiting.item.place, waiting.item.granted
        if granted.done():  # its client is gone
            self.waiting.remove(waiting)
            return False
        try:
            if self._room(place):
                if waiting.is_held(self._full, self.clock.now(), lambda: self._hold(place)):
                    return False
                now = self.clock.now()
                place.wait = self.waiting.explain(waiting, now)
                self.router.held_back(place.request.id, place.wait, now)
                granted.set_result(self._book(place, now))
                return True
            self._give_up_if_exhausted(place)
        except Exception as error:
            granted.set_exception(error)
            self.waiting.remove(waiting)
        return False

    def preview(self, place: EngineRequest) -> Decision:
        """Return the decision that would be taken now. Raises ``KvyardError`` if no engine may be chosen."""
        return self.router.preview(place.request, self.clock.now(), exclude=self._excluded(place), known=place.known)

    def first_token(self, id_: object, seen: bool = True) -> None:
        """Note that a request's prompt is computed; ``seen`` if its first token came just now, and not a whole answer."""
        self.router.prefill_done(id_, self.clock.now(), seen)
        if self.sharing is not None:
            self.sharing.prefill_done(id_)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _excluded(self, place: EngineRequest) -> Collection[Holder]:
        if not self._full and not place.shut and not place.tried:
            return ()
        out = {*self._full, *place.shut}
        for name in place.tried:
            engine = self.engines.get(name)
            if engine is not None:
                out.update(engine.holders)
        return out

    def _room(self, place: EngineRequest) -> bool:
        out = self._excluded(place)
        return bool(self._open) if not out else not self._open <= out  # type: ignore[operator]

    def _give_up_if_exhausted(self, place: EngineRequest) -> None:
        """Raise ``Exhausted`` where waiting won't help: all that are up were tried. Where none is, all may be tried again."""
        if not place.tried:
            return
        fit = self._open - place.shut
        if not fit:
            place.tried.clear()
        elif all(holder.name in place.tried for holder in fit):
            raise Exhausted

    def _book(self, place: EngineRequest, now: int) -> Placed:
        decision = self.router.route(place.request, now, exclude=self._excluded(place), known=place.known)
        if place.trace is not None:
            place.trace.decided(now, self.clock.now(), decision)
        engine = self.engines[decision.worker.name]
        engine.in_flight += 1
        if self._taken(engine) >= self.config.engine_requests:
            self._update_full(engine)
            if self.other_role is not None:
                self.other_role.is_full(engine)
        if self.sharing is not None:
            self.sharing.routed(place.request, decision.worker, decision.new_tokens)
        return decision, engine

    def is_full(self, engine: Engine) -> None:
        """Note that an engine is full, as the pool of the other role found."""
        self._update_full(engine)

    def load_changed(self, name: str) -> None:
        """Note that the number of others' requests at an engine changed."""
        engine = self.engines.get(name)
        if engine is not None:
            self._update_full(engine)
            if self.other_role is not None:
                self.other_role.is_full(engine)
                if self.other_role.waiting:
                    self.other_role.grant()
            if self.waiting:
                self.grant()

    def _taken(self, engine: Engine) -> int:
        """Return requests that an engine has, of all that count for how many it may have."""
        taken = engine.in_flight
        if self.sharing is not None:
            taken += self.sharing.elsewhere(engine.name)
            if self.other_role is not None and self.other_role.sharing is not None:
                taken += self.other_role.sharing.elsewhere(engine.name)
        return taken

    def _update_full(self, engine: Engine) -> None:
        if self._taken(engine) >= self.config.engine_requests:
            self._full.update(holder for holder in engine.holders if holder in self._open)
        else:
            self._full.difference_update(engine.holders)

    def _take_back(self, waiting: Waiting[_Queued]) -> None:
        """Remove a request whose client disconnected from the queue, or return the room that it was just granted."""
        granted = waiting.item.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            decision, engine = granted.result()
            self.take_back(waiting.item.place)
            self.release(engine, decision.id, refused=True)
            return
        granted.cancel()
        self.waiting.remove(waiting)

    def _note_none_open(self) -> None:
        """Refuse waiting requests ``down_seconds`` from now, if no engine is open and none recovers."""
        if self._open or self._none_since is not None:
            return
        self._none_since = self.clock.now()
        with suppress(RuntimeError):  # outside of a loop nobody waits
            asyncio.get_running_loop().call_later(self.config.down_seconds, self._refuse_if_gone)

    def _all_gone(self) -> bool:
        """True if no engine has been open for ``down_seconds``."""
        return self._none_since is not None and self._patience() <= 0

    def _patience(self) -> float:
        """Return seconds that requests still wait for an engine to come back."""
        since = self.clock.now() if self._none_since is None else self._none_since
        return self.config.down_seconds - (self.clock.now() - since) / SECOND

    def _refuse_if_gone(self) -> None:
        if self._none_since is None:
            return
        if (left := self._patience()) > 0:  # it has been up in between, or the two clocks differ a little
            asyncio.get_running_loop().call_later(left, self._refuse_if_gone)
            return
        for queued in self.waiting.drain():
            if not queued.granted.done():
                self.expired += 1
                queued.granted.set_exception(self._gone())

    def _gone(self) -> Refusal:
        return Refusal(503, self._none_up(), fix="start an engine, then try again", Retry_After="5")

    def _none_up(self) -> str:
        return f"no engine of model {self.model} is up"
