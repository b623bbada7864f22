"""``aiperf``: NVIDIA's AIPerf.

Source: aiperf, ``loadgen_config.py``: a closed loop of ``--concurrency`` credits, no warm-up requests unless
``--warmup-request-count`` names some, lengths as asked for (a standard deviation of 0). The
release that was read (October 2025) has no ramp; ``ramp_s`` is 0 unless it is set.
"""

from collections.abc import Iterator
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.replay.clients.client import RAMP, TURNAROUND, Client, repeated
from kvyard.replay.traces import TraceRequest


class Aiperf(Client):
    OPTIONS: ClassVar[Options] = {
        "turnaround_ms": TURNAROUND,
        "ramp_s": RAMP,
        "warmup_request_count": Option(0, "Requests before those that count."),
    }

    def warm_up(self, first: TraceRequest, concurrency: int | None) -> Iterator[TraceRequest]:
        return repeated(first, int(self.options["warmup_request_count"]))
