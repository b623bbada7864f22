"""``affinity``: a session stays at its worker as long as that exists; ``RouterConfig.fallback`` chooses the first one."""

from msgspec.structs import replace

from kvyard.clock import from_seconds
from kvyard.router.config import RouterConfig
from kvyard.router.inputs import RoutingInput
from kvyard.router.policies import POLICIES, CostModel, Policy
from kvyard.router.request import Choice
from kvyard.router.worker import WorkerLoad


class Affinity(Policy):
    guarded = True

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(replace(config, options={}))  # they are its fallback's
        self.fallback = POLICIES.get(config.fallback)(config)
        self.needs_index = self.fallback.needs_index
        self.needs_keys = self.fallback.needs_keys
        self.needs_pace = self.fallback.needs_pace
        self.needs_shared = self.fallback.needs_shared
        self.memory = self.fallback.memory
        self.ranked = self.fallback.ranked
        self.draws = self.fallback.draws
        self._ttl = from_seconds(config.session_ttl_s)
        self._bound: dict[str, tuple[int, int]] = {}
        """Per session its slot and the time of its latest request; in that order."""

    def __len__(self) -> int:
        """Return the number of sessions kept."""
        return len(self._bound)

    def choose(self, routing: RoutingInput) -> Choice:
        session = routing.request.session
        known = self._bound.get(session) if session is not None else None
        if known is not None and known[1] + self._ttl > routing.now and routing.eligible >> known[0] & 1:
            return Choice(known[0], 0.0, 1, "session")
        return self.fallback.choose(routing)

    def costs(self, routing: RoutingInput) -> CostModel:
        return self.fallback.costs(routing)

    def rank(self, worker: WorkerLoad) -> tuple[int, float]:
        return self.fallback.rank(worker)

    def routed(self, routing: RoutingInput, choice: Choice) -> bool | None:
        session = routing.request.session
        bound = self._bound
        if session is not None:
            known = bound.pop(session, None)
            # The guard sends one request elsewhere, not the session.
            stays = known is not None and choice.why == "guard" and routing.eligible >> known[0] & 1
            bound[session] = (known[0] if stays and known is not None else choice.slot, routing.now)
        while bound:
            oldest = next(iter(bound))
            if len(bound) <= self.config.sessions and bound[oldest][1] + self._ttl > routing.now:
                break
            del bound[oldest]
        return self.fallback.routed(routing, choice)

    def gone(self, slot: int) -> None:
        self.fallback.gone(slot)
        self._bound = {session: known for session, known in self._bound.items() if known[0] != slot}
