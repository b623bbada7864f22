"""Durations of passes: a registry of timing models, each a pure function from a batch to whole nanoseconds."""

from kvyard.engine.timing.fixed import FixedTiming
from kvyard.engine.timing.model import Durations, SharedExperts, TimingModel
from kvyard.engine.timing.polynomial import PolynomialTiming
from kvyard.engine.timing.profile import ProfileTiming
from kvyard.engine.timing.registry import TimingConfig, make_timing, parse_timing, read_timing, timing_choices

__all__ = [
    "Durations",
    "FixedTiming",
    "PolynomialTiming",
    "ProfileTiming",
    "SharedExperts",
    "TimingConfig",
    "TimingModel",
    "make_timing",
    "parse_timing",
    "read_timing",
    "timing_choices",
]
