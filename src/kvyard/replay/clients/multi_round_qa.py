"""``multi-round-qa``: the benchmark of vLLM's production stack, with users that come back.

Source: production-stack, ``benchmarks/multi-round-qa/multi-round-qa.py``: users / rate seconds between two requests of a user,
a new user every (rounds - 1) / rate seconds beside those that are there at the start, a user with an open request waits, all
decided every 0.1 s. A session of the trace is a user.
"""

from typing import ClassVar

from kvyard.clock import SECOND
from kvyard.registry import Option, Options
from kvyard.replay.clients.client import Client, Pacing


class MultiRoundQa(Client):
    OPTIONS: ClassVar[Options] = {
        "qps": Option(1.0, "Requests a second of all users together.", positive=True),
        "users": Option(320, "Users at a time.", least=1),
        "rounds": Option(10, "Requests of a user.", least=1),
        "tick_ms": Option(100, "Milliseconds between two looks at who is due.", least=1),
    }

    def pacing(self, concurrency: int | None) -> Pacing:
        options = self.options
        return Pacing(
            join=round((options["rounds"] - 1) / options["qps"] * SECOND),
            users=int(options["users"]),
            gap=round(options["users"] / options["qps"] * SECOND),
            tick=round(options["tick_ms"] * SECOND / 1000),
        )
