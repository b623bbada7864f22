"""Pools as a fleet's file names them, and which requests of a trace are a pool's: those that ask for the model of its name."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvyard.errors import KvyardError
from kvyard.replay.config import ReplayConfig
from kvyard.replay.settings import SETTINGS, make_config
from kvyard.replay.traces import Trace, TraceRequest
from kvyard.replay.traces.errors import TraceError
from kvyard.replay.traces.reading import ReadingTally

OF_ALL = ("limit", "max_tokens", "pools")
"""Settings that a single pool can't have."""


def read_pools(settings: Mapping[str, object]) -> dict[str, ReplayConfig]:
    """Return the pools of flat ``settings``, which have some, by name. What stands outside of their tables holds for all of
    them.

    Raises ``KvyardError`` for tables that make no sense, naming the pool.
    """
    common = {name: value for name, value in settings.items() if name not in OF_ALL}
    tables = settings["pools"]
    if not isinstance(tables, list | tuple) or not tables:
        raise KvyardError("pools are tables: write [[pools]] with a name and settings, once for each of them")
    pools: dict[str, ReplayConfig] = {}
    for number, table in enumerate(tables, 1):
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str) or not table["name"]:
            raise KvyardError(f"pool {number} has no name: give it that of the model whose requests are its own")
        name = table["name"]
        if name in pools:
            raise KvyardError(f"two pools are called {name!r}: put them together, or rename one")
        own = {key: value for key, value in table.items() if key != "name"}
        try:
            for key in OF_ALL:
                if key in own:
                    raise KvyardError(f"{key} is for the whole trace: put it outside of pools")
            SETTINGS.check_names(own)
            pools[name] = make_config({**common, **SETTINGS.named(own)})
        except KvyardError as error:
            raise KvyardError(f"pool {name!r}: {error}") from None
    return pools


def pool_requests(trace: Trace, name: str, names: Collection[str]) -> Trace:
    """Return the requests of ``trace`` that ask for the model ``name``, at their times. ``names`` are all pools there are.

    Reading it raises ``KvyardError`` at a request, of whatever pool, that asks for a model without a pool, and at a session or
    a request that waits for one of another pool: then pools wouldn't be independent. So it does where no request asks for it.
    """

    def rows(tally: ReadingTally) -> Iterator[TraceRequest]:
        asked = False
        sessions: dict[str, str | None] = {}
        waited_for: dict[str, str | None] | None = None
        for request in trace.rows(tally):
            if request.model is None or request.model not in names:
                problem = "names no model" if request.model is None else f"asks for the model {request.model!r}"
                raise TraceError(
                    trace.name,
                    f"request {request.id} {problem}, and the fleet's pools are {', '.join(map(repr, names))}",
                )
            if request.session is not None and sessions.setdefault(request.session, request.model) != request.model:
                raise TraceError(
                    trace.name,
                    f"session {request.session} asks for the models {sessions[request.session]!r} and {request.model!r}, "
                    "so their pools aren't independent: replay them as one fleet",
                )
            if request.after:
                if waited_for is None:
                    waited_for = {other.id: other.model for other in trace.rows(ReadingTally())}
                for before in request.after:
                    if waited_for.get(before, request.model) != request.model:
                        raise TraceError(
                            trace.name,
                            f"request {request.id} of pool {request.model!r} waits for {before} of pool "
                            f"{waited_for[before]!r}, so they aren't independent: replay them as one fleet",
                        )
            if request.model == name:
                asked = True
                yield request
        if not asked:
            raise TraceError(trace.name, f"no request that is replayed asks for the model {name!r}: leave its pool out")

    return Trace(trace.name, trace.format, rows, grouped=trace.grouped)


def of_all(settings: Mapping[str, Any], name: str) -> int | None:
    """Return a setting of the whole trace, ``limit`` or ``max_tokens``; ``None`` if it isn't given. Raises ``KvyardError``."""
    given: int | None = SETTINGS.parse({name: settings.get(name)}).get(name)
    return given
