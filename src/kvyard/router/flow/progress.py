"""``progress``: sessions in progress go before others, for as long as their caches are likely to exist.

After Progress-TTL (vllm-project/router #285): a session whose latest request ended within a time is active and goes first.
After that it is paused, and of paused and new sessions the one that has come furthest goes first.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.clock import SECOND
from kvyard.registry import Option, Options
from kvyard.router.flow.config import FlowConfig
from kvyard.router.flow.policy import FlowPolicy
from kvyard.router.flow.request import FlowRequest
from kvyard.router.flow.session_book import SessionBook

_STEP = 1 << 40
"""Between active and paused sessions: more than any session has requests."""


class Progress(FlowPolicy):
    """Active sessions first, in the order in which they came; then paused and new ones, the most requests first."""

    by_session = True
    OPTIONS: ClassVar[Options] = {
        "ttl_s": Option(10.0, "Seconds for which a session stays active after its latest request.")
    }

    def __init__(self, config: FlowConfig, options: Mapping[str, float]) -> None:
        super().__init__(config, options)
        self._sessions = SessionBook()

    def rank(self, request: FlowRequest, now: int) -> float:
        notes = self._sessions.find(request.session)
        if notes is None:
            return float(_STEP)
        if request.arrival - notes.at <= self.options["ttl_s"] * SECOND:
            return 0.0
        return float(_STEP - notes.turns)

    def why(self, request: FlowRequest, now: int) -> str:
        notes = self._sessions.find(request.session)
        if notes is None:
            return "its session is new, and sessions in progress go first"
        if not self.rank(request, now):
            return "its session is active, as others that came before"
        return f"its session is paused after {notes.turns:,} requests, and active ones go first"

    def ended(self, request: FlowRequest, computed: int, output: int, now: int) -> None:
        if request.session is not None:
            notes = self._sessions.open(request.session, now)
            notes.turns += 1
            notes.at = now
