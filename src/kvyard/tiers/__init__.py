"""Lower tiers of the cache: links with finite bandwidth, stores, the offload engine, the shared time line."""

from kvyard.tiers.config import OffloadConfig, TierConfig, parse_offload_config
from kvyard.tiers.copies import Copy
from kvyard.tiers.offload import Offload
from kvyard.tiers.state import LoadAnswer, LoadStep
from kvyard.tiers.timeline import Timeline

__all__ = [
    "Copy",
    "LoadAnswer",
    "LoadStep",
    "Offload",
    "OffloadConfig",
    "TierConfig",
    "Timeline",
    "parse_offload_config",
]
