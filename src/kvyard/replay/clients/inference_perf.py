"""``inference-perf``: the load generator of Kubernetes SIGs and llm-d.

Source: inference-perf, ``loadgen/load_generator.py``: ``num_workers`` processes, one a core by default, with at most
``worker_max_concurrency`` (100) requests in flight each; a request beyond that waits at the client and counts from when it is
sent. No warm-up, exact lengths.

In a closed loop of sessions (its data of kind ``conversation_replay``) the processes share out sessions and slots, and send
turn by turn (``ProcessArrivals``). A process is one event loop. It tokenizes a whole turn before it sends it, and twice more
when it is answered: 3.3 us a token of random text with o200k and Hugging Face's tokenizers (``benchmarks/tokenizing.py``).
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.replay.clients.client import TURNAROUND, Client, Pacing


class InferencePerf(Client):
    OPTIONS: ClassVar[Options] = {
        "turnaround_ms": TURNAROUND,
        "num_workers": Option(16, "Processes that send; one a core in the original.", least=1),
        "worker_max_concurrency": Option(100, "Requests in flight of each, at most.", least=1),
        "token_us": Option(3.3, "Closed loop of sessions: microseconds for each token that a process tokenizes."),
    }

    def pacing(self, concurrency: int | None) -> Pacing:
        processes = int(self.options["num_workers"])
        most = processes * int(self.options["worker_max_concurrency"])
        token_ns = self.options["token_us"] * 1e3
        return super().pacing(concurrency)._replace(most=most, processes=processes, token_ns=token_ns)
