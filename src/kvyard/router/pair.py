"""Two routers for workers with roles: one among prefill workers, one among decode workers."""

from msgspec.structs import replace

from kvyard.router.config import RouterConfig
from kvyard.router.policies import make_policy


def router_pair(first: RouterConfig, second: RouterConfig | None, mixed: bool) -> tuple[RouterConfig, RouterConfig]:
    """Return the settings of both. ``second`` is of those that decode, and by default the fewest blocks held; ``mixed``: some
    workers do both.
    """
    if not mixed:
        first = replace(first, held_weight=0.0)  # what is held there is what is being computed
    if second is None:
        blind = not make_policy(first).needs_keys
        second = first if blind else RouterConfig(policy="kv", prefill_scale=0.0, overlap_credit=0.0)
    return first, second
