"""Base of policies that know caches by events, or, with the option ``approximate``, by what was routed there."""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.config import RouterConfig
from kvyard.router.memory import RoutedMemory
from kvyard.router.policies import Policy


class EventsOrMemory(Policy):
    needs_index = True
    OPTIONS: ClassVar[Options] = {
        "approximate": Option(0, "1: caches are known by what was routed there, not by events.", most=1)
    }

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        if self.options["approximate"]:
            self.needs_index = False
            self.memory = RoutedMemory(None, config.remembered_blocks)
