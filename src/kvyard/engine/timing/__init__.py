"""How long a pass takes: a registry of models, each a pure function from a batch to whole nanoseconds."""

from kvyard.engine.timing.config import AnyTiming, FixedTiming, PolynomialTiming, ProfileTiming, TimingConfig
from kvyard.engine.timing.model import Durations, TimingModel
from kvyard.engine.timing.registry import TIMINGS, Kind, make_timing, read_timing

__all__ = [
    "TIMINGS",
    "AnyTiming",
    "Durations",
    "FixedTiming",
    "Kind",
    "PolynomialTiming",
    "ProfileTiming",
    "TimingConfig",
    "TimingModel",
    "make_timing",
    "read_timing",
]
