"""``approx``: the cost of ``kv``, by what was routed alone. For engines that announce nothing."""

from kvyard.clock import from_seconds
from kvyard.router.config import RouterConfig
from kvyard.router.memory import RoutedMemory
from kvyard.router.policies.kv import Kv


class Approx(Kv):
    needs_index = False

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        ttl = config.approx_ttl_s
        self.memory = RoutedMemory(None if ttl is None else from_seconds(ttl), config.remembered_blocks)
