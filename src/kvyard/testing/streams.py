"""Events of an engine, gathered while a test goes on."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from kvyard.events.transport import Subscriber
from kvyard.events.transport.state import Update
from kvyard.events.types import Event
from kvyard.testing.servers import FleetServer
from kvyard.testing.threads import PATIENCE, ThreadedService


class StreamReader(ThreadedService):
    """Reads the event stream of a rank from its beginning. ``events`` grows; ``wait_for`` waits for certain events."""

    def __init__(
        self, source: FleetServer | str, *, worker: int = 0, rank: int = 0, replay: str | None = None, topic: str = ""
    ) -> None:
        """``source`` is a fleet, or an endpoint such as ``tcp://127.0.0.1:5557`` with ``replay`` where it replays."""
        super().__init__()
        if isinstance(source, FleetServer):
            stream = source.streams(worker)[rank]
            self.endpoint, replay = stream.endpoint, stream.replay_endpoint
        else:
            self.endpoint = source
        self._replay, self._topic = replay, topic
        self._changed = threading.Condition()
        self._updates: list[Update] = []

    @property
    def updates(self) -> list[Update]:
        """All that came, batch by batch and with changes of the stream's state."""
        with self._changed:
            return list(self._updates)

    @property
    def events(self) -> list[Event]:
        """All events that came, in order."""
        return [event for update in self.updates for event in update.events]

    def wait_for(self, seen: Callable[[Sequence[Event]], object], seconds: float = PATIENCE) -> list[Event]:
        """Return the events once ``seen`` is true of them. Raises ``TimeoutError`` with the events that came instead."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: seen([e for update in self._updates for e in update.events]), seconds
            ):
                raise TimeoutError(
                    f"not seen within {seconds:g} s; {len(self._updates)} updates came from {self.endpoint}"
                )
        return self.events

    async def serve(self, ready: Callable[[], None]) -> None:
        reading = asyncio.create_task(self._read(ready))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (reading, stopping):
            task.cancel()
        if reading.done() and not reading.cancelled():
            reading.result()

    async def _read(self, ready: Callable[[], None]) -> None:
        async with Subscriber(self.endpoint, replay=self._replay, topic=self._topic) as subscriber:
            ready()
            while True:
                update = await subscriber.receive()
                if update is not None:
                    with self._changed:
                        self._updates.append(update)
                        self._changed.notify_all()
