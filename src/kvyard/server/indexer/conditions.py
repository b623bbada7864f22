"""Health reasons of an index service: streams, the server it keeps rows on, its own tasks."""

from collections.abc import Iterator

from kvyard.events.transport import State
from kvyard.server.health import HealthReason
from kvyard.server.indexer.listener import Listener
from kvyard.server.indexer.service import Service


def conditions(service: Service) -> Iterator[HealthReason]:
    """Yield all that isn't as it should be."""
    if not service.ready:
        yield HealthReason(code="starting", why="it isn't ready yet, or it is ending", grade="unready")
    yield from index_conditions(service)
    yield from task_conditions(service)


def index_conditions(service: Service) -> Iterator[HealthReason]:
    """Like ``conditions``, of streams and of the server with the rows alone."""
    for model in service.models.values():
        trouble = model.indexer.trouble
        if trouble:
            yield HealthReason(code="index-server", about=model.label, why=trouble)
        for listener in model.listeners.values():
            yield from stream_conditions(listener)


def stream_conditions(listener: Listener) -> Iterator[HealthReason]:
    """Return the problems of one stream."""
    info, about = listener.info(), listener.source.stream
    if listener.error:
        yield HealthReason(code="stream-failed", about=about, why=listener.error)
    elif info.state == State.STALE.value:
        yield HealthReason(code="stream-stale", about=about, why=info.reason or "nothing received yet")
    if info.block_sizes:
        sizes = ", ".join(map(str, info.block_sizes))
        configured = listener.registration.block_size
        yield HealthReason(
            code="block-size", about=about, why=f"its blocks have {sizes} tokens, and {configured} were given"
        )


def task_conditions(service: Service) -> Iterator[HealthReason]:
    """Yield tasks that failed and haven't begun again; listeners report for themselves."""
    listening = {f"listener {name}" for model in service.models.values() for name in model.listeners}
    for task in service.supervisor.tasks:
        if task.reason and task.name not in listening:
            yield HealthReason(code="task-failed", about=task.name, why=task.reason)
