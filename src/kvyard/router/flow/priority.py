"""``priority`` and ``weighted-priority``: by the priority that requests come with, smaller ones first, as vLLM's."""

from typing import ClassVar

from kvyard.clock import SECOND
from kvyard.registry import Option, Options
from kvyard.router.flow.policy import FlowPolicy
from kvyard.router.flow.request import FlowRequest


class StrictPriority(FlowPolicy):
    """A request of a smaller priority goes before all others, however long they have waited."""

    def rank(self, request: FlowRequest, now: int) -> float:
        return float(request.priority)

    def why(self, request: FlowRequest, now: int) -> str:
        return f"its priority is {request.priority}, smaller ones go first"


class WeightedPriority(FlowPolicy):
    """A step of priority is worth some seconds of waiting, so that no request waits for ever."""

    OPTIONS: ClassVar[Options] = {"seconds": Option(10.0, "Seconds of waiting that a step of priority is worth.")}

    def rank(self, request: FlowRequest, now: int) -> float:
        return request.arrival + request.priority * self.options["seconds"] * SECOND

    def why(self, request: FlowRequest, now: int) -> str:
        seconds = self.options["seconds"]
        return f"its priority is {request.priority}, and a step of priority is worth {seconds:g} s of waiting"
