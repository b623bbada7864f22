"""``inference-perf``: the load generator of Kubernetes SIGs and llm-d.

Source: inference-perf, ``loadgen/load_generator.py``: ``num_workers`` processes, one a core by default, with at most
``worker_max_concurrency`` (100) requests in flight each; a request beyond that waits at the client and counts from when it is
sent. No warm-up, exact lengths.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.replay.clients.client import TURNAROUND, Client, Pacing


class InferencePerf(Client):
    OPTIONS: ClassVar[Options] = {
        "turnaround_ms": TURNAROUND,
        "num_workers": Option(16, "Processes that send; one a core in the original.", least=1),
        "worker_max_concurrency": Option(100, "Requests in flight of each, at most.", least=1),
    }

    def pacing(self, concurrency: int | None) -> Pacing:
        most = int(self.options["num_workers"]) * int(self.options["worker_max_concurrency"])
        return super().pacing(concurrency)._replace(most=most)
