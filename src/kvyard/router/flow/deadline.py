"""``deadline``: the request first whose first token is due first."""

from typing import ClassVar

from kvyard.clock import MS
from kvyard.registry import Option, Options
from kvyard.router.flow.policy import FlowPolicy
from kvyard.router.flow.request import FlowRequest


class EarliestDeadline(FlowPolicy):
    """By the deadline that a request comes with; without one, by a time that grows with its prompt."""

    OPTIONS: ClassVar[Options] = {
        "ttft_ms": Option(500.0, "Milliseconds to the first token of a short prompt."),
        "token_us": Option(100.0, "Microseconds more for each token of the prompt."),
    }

    def rank(self, request: FlowRequest, now: int) -> float:
        if request.deadline is not None:
            return float(request.deadline)
        return request.arrival + self.options["ttft_ms"] * MS + self.options["token_us"] * 1000 * request.tokens

    def why(self, request: FlowRequest, now: int) -> str:
        left = (self.rank(request, now) - now) / MS
        due = f"is due in {left:,.0f} ms" if left >= 0 else f"was due {-left:,.0f} ms ago"
        return f"its first token {due}, and earlier ones go first"
