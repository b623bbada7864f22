"""``vllm-bench``: ``vllm bench serve``.

Source: vLLM 0.2x, ``vllm/benchmarks/serve.py``: one request to see that the server answers, then ``--num-warmups`` copies of it
behind the same semaphore (none by default); a semaphore of ``--max-concurrency``, whatever the rate; random lengths from
1 - ``--random-range-ratio`` to 1 + that of those asked for (exact by default).
"""

from collections.abc import Iterable, Iterator
from random import Random
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.replay.clients.client import TURNAROUND, Client, Pacing, ranged, repeated
from kvyard.replay.traces import TraceRequest


class VllmBench(Client):
    OPTIONS: ClassVar[Options] = {
        "turnaround_ms": TURNAROUND,
        "num_warmups": Option(
            0, "Requests before those that count, beside the one that sees whether the server answers."
        ),
        "random_range_ratio": Option(0.0, "Share by which lengths may differ from the trace's, either way.", most=1.0),
        "max_concurrency": Option(
            0, "Requests in flight at most where the trace says when they come; 0 for any number."
        ),
    }

    def pacing(self, concurrency: int | None) -> Pacing:
        most = int(self.options["max_concurrency"])
        return super().pacing(concurrency)._replace(most=most or None)

    def requests(self, rows: Iterable[TraceRequest], concurrency: int | None, random: Random) -> Iterable[TraceRequest]:
        ratio = self.options["random_range_ratio"]
        return ranged(rows, 1 - ratio, 1 + ratio, random) if ratio else rows

    def warm_up(self, first: TraceRequest, concurrency: int | None) -> Iterator[TraceRequest]:
        return repeated(first, 1 + int(self.options["num_warmups"]))
