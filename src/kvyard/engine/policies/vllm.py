"""vLLM's way: a known sequence that fits gets in, and when blocks run out the newest running job is preempted."""

from kvyard.blocks.spec import ConfigError
from kvyard.engine.config import EngineConfig
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.policies.backend import SchedulerBackend
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.mixed import FitsNow, MixedPasses, least_important, newest, oldest
from kvyard.engine.queue import make_queue


def policy(jobs: Lifecycle, config: EngineConfig) -> PassMaker:
    """Mixed passes, and the victim that ``scheduling_policy`` and ``preemption_mode`` say."""
    if config.scheduling_policy == "priority":
        victim = least_important
    else:
        victim = newest if config.preemption_mode == "newest" else oldest
    return MixedPasses(jobs, config, FitsNow(jobs, config.scheduler_reserve_full_isl), victim)


def check(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for a pass that would have too few tokens for the drafts of all requests."""
    config.check_token_budget()
    if config.speculative is not None:
        step = 1 + config.speculative.num_speculative_tokens
        if config.max_num_batched_tokens < config.max_num_seqs * step:
            raise ConfigError(
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least {step} per request of "
                f"max_num_seqs ({config.max_num_seqs}) with draft tokens"
            )


VLLM = SchedulerBackend(
    block_size=64, check=check, queue=lambda config: make_queue(config.scheduling_policy), policy=policy
)
