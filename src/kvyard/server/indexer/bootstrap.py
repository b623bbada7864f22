"""Bootstrap from a peer: load another indexer's state, and continue its streams where it was.

Sockets are opened first and read last: whatever is published while the dump travels waits in them. A batch that the dump
covers is discarded, the next is applied, and where one is missing the stream requests it or is stale. So a peer can be out
of date without harm; it can't be wrong about what it received.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from kvyard.clock import Clock, pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.index.dump import IndexDump, StreamDump, dump, load
from kvyard.server.http import Refusal
from kvyard.server.http_client import NoAnswer, ask
from kvyard.server.indexer.answers import model_facts
from kvyard.server.indexer.listener import IndexedModel, Listener
from kvyard.server.indexer.schemas import Register

log = logging.getLogger(__name__)

MSGPACK = "application/msgpack"
CONNECT_SECONDS = 2.0
"""Seconds to wait for publishers before the dump is fetched: what they send before that is a gap, not an error."""
FETCH_SECONDS = 60.0


Models: TypeAlias = Mapping[tuple[str, str], IndexedModel]
"""By name and tenant."""


class ModelDump(msgspec.Struct, kw_only=True):
    """One model, whole."""

    model_name: str
    tenant_id: str
    block_size: int
    registrations: list[Register]
    """One per rank."""
    positions: dict[str, dict[bytes, tuple[int, int, int | None]]]
    """Per stream and topic."""
    index: IndexDump


class PeerDump(msgspec.Struct, kw_only=True):
    """Everything a peer knows, for a peer."""

    models: list[ModelDump]


async def dump_all(models: Models) -> PeerDump:
    """Dump ``models``, each at one moment, yielding to other tasks in between."""
    dumps: list[ModelDump] = []
    for model in list(models.values()):
        dumps.append(dump_model(model))
        await pause()
    return PeerDump(models=dumps)


def dump_model(model: IndexedModel) -> ModelDump:
    """Return the dump of one model now: what was read of its streams is applied first, so that positions and rows agree."""
    for listener in model.listeners.values():
        listener.drain()
    return ModelDump(
        **model_facts(model),
        registrations=[listener.registration for listener in model.listeners.values()],
        positions={name: listener.subscriber.subscription.positions() for name, listener in model.listeners.items()},
        index=dump(model.indexer),
    )


async def bootstrap(
    peers: Sequence[str],
    token: str | None,
    models: Models,
    listen: Callable[[Register, int], Awaitable[list[Listener]]],
    opened: list[Listener],
    clock: Clock,
) -> list[Listener]:
    """Learn from the first peer that answers; ``opened`` are the listeners so far, ``listen`` opens those of its workers that
    weren't configured here, which are returned.

    No peer that answers is no error: the service starts with what its streams say. Raises ``KvyardError`` for a peer that
    names blocks otherwise.
    """
    for url in peers:
        try:
            dump = await fetch(url, token)
        except KvyardError as error:
            log.warning("%s", error)
            continue
        more = await _listen_too(dump, models, listen)
        connected = await asyncio.gather(
            *(listener.subscriber.connected(CONNECT_SECONDS) for listener in (*opened, *more))
        )
        missing = connected.count(False)
        if missing:
            log.warning(
                "%d of %d streams aren't connected yet: what they send now may be missed", missing, len(connected)
            )
        # Once more, now that nothing falls between it and the sockets.
        dump = await fetch(url, token)
        names = [name for model in dump.models for name in _take_over(models, model, clock.now())]
        log.info("took over %d streams from %s", len(names), url)
        return more
    return []


async def fetch(url: str, token: str | None) -> PeerDump:
    """Return the dump of the indexer at ``url``. Raises ``KvyardError`` if there is none."""
    try:
        reply = await ask(f"{url.rstrip('/')}/dump", token=token, seconds=FETCH_SECONDS, headers={"Accept": MSGPACK})
    except NoAnswer as error:
        raise KvyardError(f"peer {url} doesn't answer: {error}") from None
    if reply.status != 200:
        raise KvyardError(f"peer {url} answers {reply.status} to /dump")
    try:
        return msgspec.msgpack.decode(reply.content, type=PeerDump)
    except DECODE_ERRORS as error:
        raise KvyardError(f"what peer {url} sends is no dump of this version of kvyard: {error}") from None


async def _listen_too(
    dump: PeerDump, models: Models, listen: Callable[[Register, int], Awaitable[list[Listener]]]
) -> list[Listener]:
    """Open the peer's streams that weren't configured here."""
    more: list[Listener] = []
    for model in dump.models:
        for registration in model.registrations:
            mine = models.get((registration.model_name, registration.tenant))
            if mine is not None and registration.stream_name(registration.dp_rank or 0) in mine.listeners:
                continue
            try:
                more += await listen(registration, model.block_size)
            except (KvyardError, Refusal) as error:
                log.warning("can't listen to %s as the peer does: %s", registration.endpoint, error)
    return more


def _take_over(models: Models, dump: ModelDump, now: int) -> list[str]:
    mine = models.get((dump.model_name, dump.tenant_id))
    if mine is None:
        return []
    unclear = {stream.stream for stream in dump.index.streams if (_position(dump, stream) or (None,))[0] != stream.seq}
    # Only what the peer's sockets are sure of; the same stream elsewhere may be another one.
    same = {
        name
        for name, listener in mine.listeners.items()
        if name not in unclear
        and any(_same(listener.registration, registration) for registration in dump.registrations)
    }
    taken = load(mine.indexer, dump.index, same, now)
    for stream in taken:
        position = _position(dump, stream)
        assert position is not None
        mine.listeners[stream.stream].subscriber.subscription.resume(stream.topic.encode(), position, now)
    return [stream.stream for stream in taken]


def _position(dump: ModelDump, stream: StreamDump) -> tuple[int, int, int | None] | None:
    """Return the position of the peer's socket in a stream."""
    return dump.positions.get(stream.stream, {}).get(stream.topic.encode())


def _same(mine: Register, theirs: Register) -> bool:
    return msgspec.structs.replace(mine, members=[]) == msgspec.structs.replace(theirs, members=[])
