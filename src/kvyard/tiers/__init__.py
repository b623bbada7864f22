"""Lower tiers of the cache: links with finite bandwidth, stores, the offload engine, the shared time line."""

from kvyard.tiers.config import OffloadConfig, TierConfig, parse_offload_config
from kvyard.tiers.counters import OffloadCounters
from kvyard.tiers.depot import Copy, Kind
from kvyard.tiers.offload import Offload
from kvyard.tiers.outcome import Outcome, Step
from kvyard.tiers.policy import POLICIES
from kvyard.tiers.store import TierStore
from kvyard.tiers.timeline import Timeline

__all__ = [
    "POLICIES",
    "Copy",
    "Kind",
    "Offload",
    "OffloadConfig",
    "OffloadCounters",
    "Outcome",
    "Step",
    "TierConfig",
    "TierStore",
    "Timeline",
    "parse_offload_config",
]
