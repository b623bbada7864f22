"""A round of visits, one engine after the other, in a thread of its own: the caller listens to their events meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvyard.clock import MS, SECOND, WallClock
from kvyard.server.doctor.visit import Questions, Visit, visit

SETTLE = 300 * MS
"""Until a subscription has reached a publisher that was just connected to; and until the last events are here."""
CONNECT = 3 * SECOND
"""How long to wait for listeners before asking nevertheless."""


class Round:
    """Visits to all of ``urls``. ``start`` it; it is ``busy`` until the last answer, and a little longer."""

    def __init__(
        self, urls: Sequence[str], ask: Questions, token: str | None, listening: Callable[[], bool] | None = None
    ) -> None:
        """``listening`` says whether listeners are connected; left out, there are none."""
        self.visits: list[Visit] = []
        """Of those that were visited by now, in order."""
        self._urls = urls
        self._ask = ask
        self._token = token
        self._listening = listening
        self._clock = WallClock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def busy(self) -> bool:
        """Whether it is still under way."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Until it is done. Raises what a visit raised."""
        while self._thread.is_alive():
            self._thread.join(0.2)  # so that Ctrl-C gets through
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            for url in self._urls:
                self.visits.append(visit(url, self._ask, self._token, self._wait_for_listeners))
            if self._listening is not None:
                self._sleep(SETTLE)
        except BaseException as error:  # raised by ``wait``
            self._failure = error

    def _wait_for_listeners(self) -> None:
        if self._listening is None or self.visits:
            return
        end = self._clock.now() + CONNECT
        while not self._listening() and self._clock.now() < end:
            self._sleep(20 * MS)
        self._sleep(SETTLE)

    def _sleep(self, ns: int) -> None:
        self._clock.sleep_until(self._clock.now() + ns)
