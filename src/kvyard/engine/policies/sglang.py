"""SGLang as a backend: the queue and the passes that its settings make."""

from kvyard.engine.config import EngineConfig
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.loads import TreeLoads
from kvyard.engine.policies.backend import SchedulerBackend
from kvyard.engine.policies.maker import PassMaker
from kvyard.engine.policies.mocker import MockerPasses, PrefixQueue
from kvyard.engine.policies.sglang_checks import check
from kvyard.engine.policies.sglang_passes import SglangPasses
from kvyard.engine.policies.sglang_queue import WaitingQueue
from kvyard.engine.policies.sglang_tree import as_mocker, draft_slots, tree
from kvyard.engine.queue import ArrivalQueue, Queue


def queue(config: EngineConfig) -> Queue:
    """Kept in the order in which it was last sorted; by arrival for the mocker's rules."""
    if as_mocker(config):
        sorts = config.sglang is not None and config.sglang.schedule_policy == "lpm" and config.enable_prefix_caching
        return PrefixQueue() if sorts else ArrivalQueue()
    return WaitingQueue()


def policy(jobs: Lifecycle, config: EngineConfig) -> PassMaker:
    """Return SGLang's own rules, or those of Dynamo's mocker."""
    loads = jobs.may_load and not isinstance(jobs.loads, TreeLoads)
    return MockerPasses(jobs, config) if loads or as_mocker(config) else SglangPasses(jobs, config)


SGLANG = SchedulerBackend(
    block_size=1,
    check=check,
    queue=queue,
    policy=policy,
    spare_blocks=1,
    tree=tree,
    reserved_drafts=draft_slots,
)
