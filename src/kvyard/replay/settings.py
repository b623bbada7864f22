"""Settings: a replay described in flat names, the same on the command line, in a file, in Python and in a sweep.

``make_config`` is the one way from there to a ``ReplayConfig``. What makes no sense together is refused in one sentence that
says what to do; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvyard.errors import KvyardError
from kvyard.replay.config import LEFT_OUT, ReplayConfig, WorkerConfig
from kvyard.replay.settings_engine import OF_AN_ENGINE, engine_config
from kvyard.router import RouterConfig
from kvyard.settings import Settings, chosen, count, settings_of

OF_A_WORKER = Settings(settings_of(WorkerConfig), OF_AN_ENGINE, left_out=LEFT_OUT)
"""What a table of workers can have."""
SETTINGS = Settings(
    {"workers": settings_of(ReplayConfig)["workers"]},  # first in help
    settings_of(RouterConfig),
    settings_of(ReplayConfig),
    {"dp_size": OF_A_WORKER["dp_size"]},
    OF_AN_ENGINE,
    left_out=LEFT_OUT,
)
"""Everything that can be set, by name."""

DEFAULTS: dict[str, Any] = {"workers": 8}


def make_config(settings: Mapping[str, object]) -> ReplayConfig:
    """The replay that flat ``settings`` describe. Names that are left out have their defaults, and so has ``None``.

    Raises ``KvyardError`` for an unknown name, with the nearest one; for what this replay leaves out, by name; and for values
    that make no sense alone or together.
    """
    given = DEFAULTS | SETTINGS.parse(settings)
    shared = {name: value for name, value in given.items() if name in OF_A_WORKER}
    fields = chosen(ReplayConfig, given)
    fields["workers"] = tuple(_kinds(given["workers"], shared, given.get("seed", 0)))
    config = ReplayConfig(router=RouterConfig(**chosen(RouterConfig, given)), **fields)
    config.check()
    return config


def _kinds(workers: object, shared: Mapping[str, Any], seed: int) -> Iterable[WorkerConfig]:
    if not isinstance(workers, list | tuple):
        number = count("workers", workers)
        if number < 1:
            raise KvyardError(f"workers is {number}: a fleet needs at least one worker")
        yield _kind({**shared, "count": number}, "", seed)
        return
    if not workers:
        raise KvyardError("workers is an empty list: a fleet needs at least one worker")
    for at, own in enumerate(workers):
        if not isinstance(own, Mapping):
            raise KvyardError(f"workers[{at}] is {own!r}: it must be a table of settings, such as {{count = 4}}")
        where = f" of workers[{at}]"
        yield _kind({**shared, **OF_A_WORKER.parse(own, where)}, where, seed)


def _kind(given: Mapping[str, Any], where: str, seed: int) -> WorkerConfig:
    engine = engine_config({name: value for name, value in given.items() if name in OF_AN_ENGINE}, seed)
    kind = WorkerConfig(engine=engine, **chosen(WorkerConfig, given))
    if kind.count < 1:
        raise KvyardError(f"count{where} is {kind.count}: it must be at least 1")
    return kind
