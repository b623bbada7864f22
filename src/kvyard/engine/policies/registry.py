"""Backends by name: which scheduler an engine gets."""

from __future__ import annotations

from kvyard.engine.policies.sglang import SglangScheduler
from kvyard.engine.policies.trtllm import NoEvictScheduler
from kvyard.engine.scheduler import Scheduler

SCHEDULERS: dict[str, type[Scheduler]] = {
    "vllm": Scheduler,
    "sglang": SglangScheduler,
    "trtllm": NoEvictScheduler,
}
"""The scheduler of each ``backend`` of ``EngineConfig``."""
