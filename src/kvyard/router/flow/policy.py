"""Flow policies: the order in which waiting requests go to the router."""

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

from kvyard.registry import Options, Registry
from kvyard.router.flow.config import FlowConfig
from kvyard.router.flow.lanes import Lane, Scale
from kvyard.router.flow.request import FlowRequest


class FlowPolicy:
    """A rule that ranks waiting requests: the least rank goes next, and of equal ones the first that came.

    It receives what becomes of every request, also of those that didn't wait. What it remembers of sessions and tenants must
    be bounded: names come from clients.
    """

    dynamic = False
    """True if ranks change while requests wait; they are then worked out anew, of all that wait, for each that goes."""
    by_session = False
    """True if a request of a session that ends changes the ranks of those that wait, which are asked again."""
    OPTIONS: ClassVar[Options] = {}

    def __init__(self, config: FlowConfig, options: Mapping[str, float]) -> None:
        """``options`` are all of ``OPTIONS``, checked."""
        self.config = config
        self.options = options

    def rank(self, request: FlowRequest, now: int) -> float:
        """Return the rank of a request that waits; asked once when it comes, unless the policy is ``dynamic``."""
        return 0.0

    def lane(self) -> Lane:
        """Return an empty lane, unless the policy is ``dynamic``."""
        return Lane(self.rank)

    def scale(self, lanes: Iterable[Lane]) -> Scale:
        """Return the weights by which ``lanes`` order what they hold now."""
        return Scale()

    def look(self, waiting: Iterable[FlowRequest], now: int) -> None:
        """Look at all that wait, before a dynamic policy is asked for ranks."""

    def why(self, request: FlowRequest, now: int) -> str:
        """Return the reason for its rank, in words that continue "it waited: "."""
        return "first come, first served"

    def refuses(self, request: FlowRequest, free: int) -> str:
        """Return why a bounded queue with ``free`` places left refuses a request; empty if it doesn't."""
        return ""

    def came(self, request: FlowRequest, now: int) -> None:
        """Receive a request that begins to wait."""

    def sent(self, request: FlowRequest, now: int, waited: bool) -> None:
        """Receive a request that goes to a worker; ``waited`` if it was in the queue."""

    def left(self, request: FlowRequest) -> None:
        """Receive a request that stopped waiting without having been sent."""

    def returned(self, request: FlowRequest) -> None:
        """Receive a request that comes back from a worker without having ended there: it is sent again, or given up."""

    def ended(self, request: FlowRequest, computed: int, output: int, now: int) -> None:
        """Receive a request that ended: the fleet computed ``computed`` tokens of its prompt and ``output`` tokens of its
        answer.
        """


_HERE = "kvyard.router.flow"
FLOWS: Registry[Callable[[FlowConfig, Mapping[str, float]], FlowPolicy]] = Registry(
    "flow policy",
    "kvyard.flows",
    {
        "fifo": f"{_HERE}.policy:FlowPolicy",
        "priority": f"{_HERE}.priority:StrictPriority",
        "weighted-priority": f"{_HERE}.priority:WeightedPriority",
        "shortest": f"{_HERE}.shortest:ShortestJob",
        "las": f"{_HERE}.las:LeastAttainedService",
        "deadline": f"{_HERE}.deadline:EarliestDeadline",
        "progress": f"{_HERE}.progress:Progress",
        "fair": f"{_HERE}.fair:FairQueueing",
    },
)


def make_flow_policy(config: FlowConfig) -> FlowPolicy:
    """Return the policy that a configuration names. Raises ``KvyardError`` for an unknown one, or unknown options."""
    return FLOWS.get(config.policy)(config, FLOWS.resolve(config.policy, config.options))
