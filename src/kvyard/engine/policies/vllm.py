"""vLLM's way: a known sequence that fits gets in, and when blocks run out the newest running job is preempted."""

from kvyard.engine.config import EngineConfig
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.policies.backend import SchedulerBackend
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.mixed import FitsNow, MixedPasses, least_important, newest, oldest
from kvyard.engine.queue import make_queue


def policy(jobs: Lifecycle, config: EngineConfig) -> PassMaker:
    """Return mixed passes, and the victim by ``scheduling_policy`` and ``preemption_mode``."""
    if config.scheduling_policy == "priority":
        victim = least_important
    else:
        victim = newest if config.preemption_mode == "newest" else oldest
    return MixedPasses(jobs, config, FitsNow(jobs, config.scheduler_reserve_full_isl), victim)


def check(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for a pass that has too few tokens."""
    config.check_token_budget()


VLLM = SchedulerBackend(
    block_size=64,
    check=check,
    queue=lambda config: make_queue(config.scheduling_policy, strict=config.max_loras is None),
    policy=policy,
)
