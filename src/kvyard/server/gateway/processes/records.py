"""The recording and the access log of several processes: each sends to the parent, which writes one file.

Requests are recorded by the clocks of the processes, which are one clock. What comes to the parent a little out of order is
taken to have come when the one before it did: a trace's rows are in order of arrival.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvyard.clock import Clock, VirtualClock
from kvyard.errors import KvyardError
from kvyard.server.gateway.access_log import AccessLog
from kvyard.server.gateway.recording import ArrivedRequest, RecorderCounters, TrafficRecorder
from kvyard.server.gateway.sharing.peers import packed, unpacked

log = logging.getLogger(__name__)

Tell = Callable[[bytes], bool]
"""Returns false if the parent doesn't keep up, and receives nothing."""
encode = msgspec.msgpack.Encoder().encode


class RecordedCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A process's report of a request: that it came, or that it is over."""

    at: int
    """Time in nanoseconds."""
    id: str
    keys: bytes | None = None
    """Of one that came, packed; ``None``: it is over."""
    arrived: ArrivedRequest | None = None
    """The rest of it."""
    output: int = 0
    first_token: int | None = None
    cached: int | None = None


class ToldRecorder:
    """A recorder that has another process write."""

    def __init__(self, path: str, clock: Clock, tell: Tell) -> None:
        self.path = Path(path)
        self.stopped = ""
        self.counters = RecorderCounters()
        """Requests that the parent didn't receive; it counts the rest."""
        self._clock = clock
        self._tell = tell

    def arrived(self, request: ArrivedRequest) -> None:
        """See ``TrafficRecorder.arrived``."""
        rest = msgspec.structs.replace(
            request, id=None, keys=(), tail=None if request.tail is None else [*request.tail]
        )
        call = RecordedCall(at=self._clock.now(), id=str(request.id), keys=packed(request.keys), arrived=rest)
        if not self._tell(encode(call)):
            self.counters.left_out += 1

    def ended(
        self, id_: object, output_tokens: int, *, first_token: int | None = None, cached: int | None = None
    ) -> None:
        """See ``TrafficRecorder.ended``."""
        call = RecordedCall(
            at=self._clock.now(), id=str(id_), output=output_tokens, first_token=first_token, cached=cached
        )
        self._tell(encode(call))

    def flush(self) -> None:
        """The parent does."""

    def close(self) -> None:
        """The parent does."""


def write_down(recorder: TrafficRecorder, clock: VirtualClock, process: int, call: RecordedCall) -> None:
    """Record the reports of a process, by ``clock``, which is the recorder's."""
    clock.advance(max(clock.now(), call.at))
    id_ = (process, call.id)
    if call.keys is None or call.arrived is None:
        recorder.ended(id_, call.output, first_token=call.first_token, cached=call.cached)
        return
    try:
        recorder.arrived(msgspec.structs.replace(call.arrived, id=id_, keys=unpacked(call.keys)))
    except KvyardError as error:
        log.warning("the recording ends: %s", error)
        recorder.close()


class ToldLog(AccessLog):
    """An access log that another process writes."""

    lost = 0
    error = ""

    def __init__(self, path: str, tell: Tell) -> None:
        self._tell = tell
        super().__init__(path)

    def write(self, text: bytes) -> None:
        self.error = "" if not text or self._tell(text) else "the parent process doesn't keep up"
        if self.error:
            self.lost += text.count(b"\n")

    def reopen(self) -> None:
        """The parent does."""

    def close(self) -> None:
        """The parent does."""
        self.flush()

    def _open(self) -> None:
        """The parent does."""
