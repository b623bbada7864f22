"""The render service: tokenizes prompts before they are routed, a number of them at a time, as llm-d's does for its router."""

from heapq import heappop, heappush, heapreplace

from kvyard.replay.record import Record


class Rendering:
    """Requests whose prompts are tokenized, in the order in which they come."""

    def __init__(self, token_ns: float, renderers: int) -> None:
        """A prompt takes ``token_ns`` for each token, and has one of the ``renderers`` for itself; 0: there is always one."""
        self._token_ns = token_ns
        self._free = [0] * renderers
        """Time at which each renderer is free, earliest first."""
        self._rendered: list[tuple[int, int, Record]] = []
        self._serial = 0

    def submit(self, record: Record, now: int) -> None:
        """Render the prompt of ``record``, which arrived at ``now``."""
        takes = round(self._token_ns * record.input)
        done = now + takes
        if self._free:
            done = max(now, self._free[0]) + takes
            heapreplace(self._free, done)
        heappush(self._rendered, (done, self._serial, record))
        self._serial += 1

    def due(self) -> int | None:
        """Return the time at which the next prompt is ready."""
        return self._rendered[0][0] if self._rendered else None

    def take(self, now: int) -> list[Record]:
        """Return the requests that can be routed by ``now``, in order."""
        out: list[Record] = []
        while self._rendered and self._rendered[0][0] <= now:
            out.append(heappop(self._rendered)[2])
        return out
