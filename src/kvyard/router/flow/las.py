"""``las``: least attained service by session, as llm-d's program-aware fairness has it.

A session's service is the tokens of its prompts and answers, an answer's counting more, and it fades with a half-life. llm-d
counts prompts by the engine's usage, so tokens that were cached count too. Of the sessions that wait the one with the least
goes first; how long a request has waited counts a little, so that none starves. Both are taken within the range of those that
wait, as llm-d does.

Service fades only while none of the session's requests waits or runs, as in llm-d 0.9: where requests wait for longer than the
half-life, service that fades meanwhile is equal for all. Later versions of llm-d let it fade always (``busy_fade=1``).
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from kvyard.clock import SECOND
from kvyard.registry import Option, Options
from kvyard.router.flow.config import FlowConfig
from kvyard.router.flow.lanes import FigureRange, Lane, LineLane, Scale, joined_range
from kvyard.router.flow.policy import FlowPolicy
from kvyard.router.flow.request import FlowRequest
from kvyard.router.flow.session_book import SessionBook, SessionNotes


class LeastAttainedService(FlowPolicy):
    """The session first that has had the least. A request without a session has had nothing."""

    by_session = True
    OPTIONS: ClassVar[Options] = {
        "service_weight": Option(0.8, "Weight of the session's service, within the range of those that wait."),
        "wait_weight": Option(0.2, "Weight of the time waited, within the range of those that wait."),
        "half_life_s": Option(60.0, "Seconds after which half of a service is forgotten; 0: never."),
        "busy_fade": Option(0.0, "1 if service fades also while a request of the session waits or runs, else 0."),
        "output_weight": Option(2.0, "Prompt tokens that a token of the answer counts for."),
        "cached_weight": Option(1.0, "Computed tokens that a cached token of a prompt counts for."),
    }

    def __init__(self, config: FlowConfig, options: Mapping[str, float]) -> None:
        super().__init__(config, options)
        self._sessions = SessionBook()
        self.dynamic = bool(self.options["busy_fade"])
        self._scale = Scale()
        """Where service fades while requests wait."""

    def service(self, session: str | None, now: int) -> float:
        """Return tokens of service that ``session`` has, by now."""
        notes = self._sessions.find(session)
        return 0.0 if notes is None else self._faded(notes, now)

    def _faded(self, notes: SessionNotes, now: int) -> float:
        half_life = self.options["half_life_s"]
        if notes.busy and not self.options["busy_fade"]:
            return notes.service
        return notes.service * 0.5 ** ((now - notes.at) / SECOND / half_life) if half_life else notes.service

    def _figures(self, request: FlowRequest, now: int) -> tuple[float, float]:
        return self.service(request.session, now), float(request.arrival)

    def _weights(self, range_: FigureRange) -> Scale:
        """Return the weights that make service and waiting count within the range of those that wait."""
        return Scale(
            self.options["service_weight"] / max(range_.most_x - range_.x, 1e-9),
            self.options["wait_weight"] / max(range_.most_y - range_.y, 1.0),
            range_.x,
            range_.y,
        )

    def lane(self) -> Lane:
        return LineLane(self._figures)

    def scale(self, lanes: Iterable[Lane]) -> Scale:
        return self._weights(joined_range(lanes))

    def look(self, waiting: Iterable[FlowRequest], now: int) -> None:
        figures = [self._figures(request, now) for request in waiting]
        if figures:
            services, arrivals = zip(*figures, strict=True)
            self._scale = self._weights(FigureRange(min(services), min(arrivals), max(services), max(arrivals)))

    def rank(self, request: FlowRequest, now: int) -> float:
        return self._scale.value(*self._figures(request, now))

    def why(self, request: FlowRequest, now: int) -> str:
        service = self.service(request.session, now)
        if not service:
            return "its session has had no service yet: only those that came before it go first"
        return f"its session has had {service:,.0f} tokens of service, and those with less go first"

    def came(self, request: FlowRequest, now: int) -> None:
        self._begin(request, now)

    def sent(self, request: FlowRequest, now: int, waited: bool) -> None:
        if not waited:
            self._begin(request, now)

    def left(self, request: FlowRequest) -> None:
        notes = self._sessions.find(request.session)
        if notes is not None:
            notes.busy = max(0, notes.busy - 1)

    def returned(self, request: FlowRequest) -> None:
        self.left(request)

    def _begin(self, request: FlowRequest, now: int) -> None:
        """Stop the service of the request's session from fading, where it doesn't while it is busy."""
        if request.session is not None and not self.options["busy_fade"]:
            notes = self._sessions.open(request.session, now)
            notes.service, notes.at = self._faded(notes, now), now
            notes.busy += 1

    def ended(self, request: FlowRequest, computed: int, output: int, now: int) -> None:
        if request.session is not None:
            notes = self._sessions.open(request.session, now)
            prompt = computed + self.options["cached_weight"] * max(0, request.tokens - computed)
            notes.service = self._faded(notes, now) + prompt + self.options["output_weight"] * output
            notes.at = now
            notes.busy = max(0, notes.busy - 1)
