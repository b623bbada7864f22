"""``shortest``: the request with the least work, as far as that is known beforehand.

Work is the prompt's tokens beyond what the session's latest request had, which is mostly cached, and the answer's: as expected,
else the session's mean so far, else the mean of all answers.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.flow.config import FlowConfig
from kvyard.router.flow.policy import FlowPolicy
from kvyard.router.flow.request import FlowRequest
from kvyard.router.flow.session_book import SessionBook

_KEPT = 0.99


class ShortestJob(FlowPolicy):
    """The least work first."""

    OPTIONS: ClassVar[Options] = {
        "output_weight": Option(20.0, "Prompt tokens that a token of the answer costs as much as.")
    }

    def __init__(self, config: FlowConfig, options: Mapping[str, float]) -> None:
        super().__init__(config, options)
        self._sessions = SessionBook()
        self._output = 0.0
        """Mean tokens of answers, newer ones counting more."""

    def rank(self, request: FlowRequest, now: int) -> float:
        notes = self._sessions.find(request.session)
        output = request.output
        new = request.tokens
        if notes is not None:
            new = max(1, new - notes.length)
        if output is None:
            return new + self.options["output_weight"] * (self._output if notes is None else notes.output)
        return new + self.options["output_weight"] * output

    def why(self, request: FlowRequest, now: int) -> str:
        return f"its work is taken for {self.rank(request, now):,.0f} prompt tokens, and less goes first"

    def ended(self, request: FlowRequest, computed: int, output: int, now: int) -> None:
        self._output = _KEPT * self._output + (1 - _KEPT) * output if self._output else float(output)
        if request.session is not None:
            notes = self._sessions.open(request.session, now)
            notes.at = now
            notes.turns += 1
            notes.output += (output - notes.output) / notes.turns
            notes.length = request.tokens + output
