"""``constant``: as many workers as there are at the start, for comparison."""

from collections.abc import Mapping

from kvyard.engine.role import Role
from kvyard.replay.scaling import Scaler, Snapshot


class Constant(Scaler):
    def wanted(self, seen: Snapshot) -> Mapping[Role, int]:
        return {}
