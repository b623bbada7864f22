"""From a config to an engine: the one place where the parts are put together, for the replay and for the live server."""

from collections.abc import Callable
from functools import partial

import msgspec

from kvyard.blocks import BlockManager
from kvyard.blocks.spec import ConfigError
from kvyard.clock import VirtualClock
from kvyard.engine.config import BACKENDS, EngineConfig
from kvyard.engine.core import EngineCore, EventBatcher
from kvyard.engine.decode_batch import DecodeBatch
from kvyard.engine.decode_blocks import DecodeBlocks
from kvyard.engine.handovers import EngineHandovers, HandoverPeer
from kvyard.engine.lifecycle import Lifecycle, Transfers
from kvyard.engine.load_source import LoadSource
from kvyard.engine.loads import Loads, TreeLoads
from kvyard.engine.policies.backend import TreeSettings
from kvyard.engine.queue import ArrivalQueue, Queue
from kvyard.engine.scheduler import Scheduler
from kvyard.engine.speculative import ReservedDrafts, SpeculativeBatch
from kvyard.engine.stores import Stores
from kvyard.engine.timing import TimingModel, make_timing
from kvyard.engine.timing.host import HostTiming
from kvyard.engine.watcher import NO_WATCHER, Watcher
from kvyard.events.batcher import Batcher
from kvyard.events.types import Sink
from kvyard.tiers.copies import LinkMaker
from kvyard.tiers.hicache import HiCache
from kvyard.tiers.links import make_link
from kvyard.tiers.offload import Offload
from kvyard.tiers.timeline import Timeline


def make_core(
    config: EngineConfig,
    *,
    name: str = "",
    watcher: Watcher = NO_WATCHER,
    batcher: EventBatcher | None = None,
    events: bool = False,
    with_tokens: bool = False,
    plans: bool = True,
    bulk: bool = False,
    timeline: Timeline | None = None,
    ranks: int = 1,
    source: Callable[[BlockManager, Queue], tuple[LoadSource, Queue]] | None = None,
    foresight: bool = False,
    peer: HandoverPeer | None = None,
    host_link: LinkMaker = make_link,
) -> EngineCore:
    """Build an engine rank of ``config``.

    ``events`` makes a batcher and reports its batches to ``watcher.announced``; ``batcher`` brings one of another kind.
    ``bulk`` lets events of several passes come out together (see ``DecodeBlocks``). ``plans=False`` computes one pass at a
    time. ``ranks`` is the number of ranks of its engine. ``source`` makes the source of loads in place of lower tiers, and
    the queue of waiting jobs. With ``foresight`` jobs know what comes after them (``RequestFacts.next_uses``). With a
    ``peer``, prompts may be handed over to and from other engines. ``host_link`` makes the link to host memory. Raises
    ``ConfigError`` for a config that can't be honoured.
    """
    config.check()
    if not foresight and (oracle := config.needs_future) is not None:
        raise ConfigError(
            f"eviction policy {oracle} needs to know the future, which only the replay of a trace does: choose another"
        )
    ahead = config.decides_ahead
    if ahead and ranks > 1:
        plans = False  # what ranks in step have decided on differs by a pass: they are driven one by one
    if events:
        batcher = Batcher([spec.meta for spec in config.block_groups], stream=name, with_tokens=with_tokens)
    speculative = config.speculative
    clock = VirtualClock()
    announcer = batcher if config.enable_prefix_caching else None
    manager = make_manager(config, clock.now, announcer, alone=peer is None and source is None)
    timing_config = config.timing
    if config.overlaps_host and isinstance(timing_config, HostTiming):
        timing_config = msgspec.structs.replace(timing_config, overlap=True)
    timing = make_timing(timing_config, config.capacity_tokens)
    offload = _lower_tiers(config, manager, timing, name, batcher, timeline, host_link, alone=ranks == 1)
    if source is not None and (offload is not None or ahead or speculative is not None):
        raise ConfigError(
            f"{name or 'an engine'} can't have external loads beside lower tiers, drafts or asynchronous scheduling"
        )
    batch = DecodeBatch(needs_longest=timing.needs_longest)
    backend = BACKENDS.get(config.backend)
    waiting = backend.queue(config)
    loads: LoadSource | None = None
    stores: Stores | None = None
    handovers: EngineHandovers | None = None
    if source is not None:
        loads, waiting = source(manager, waiting)
    if isinstance(offload, HiCache):
        loads = TreeLoads(offload)
    elif offload is not None:
        tier_loads = Loads(offload, whole=config.scheduler_reserve_full_isl)
        loads, stores = tier_loads, Stores(tier_loads, batch)
    if peer is not None:
        handovers = EngineHandovers(manager, peer, whole=config.scheduler_reserve_full_isl)
        if config.backend == "sglang" and isinstance(waiting, ArrivalQueue):
            waiting.strict = False  # jobs that compute their prompts don't wait behind those that don't
    transfers = Transfers(loads, handovers, stores)
    scheduler = _scheduler(config, manager, waiting, batch, transfers, watcher, bulk=bulk and plans and not ahead)
    return EngineCore(
        scheduler,
        timing,
        batcher=batcher,
        offload=offload,
        clock=clock,
        timed=manager.keeps_by_priority or manager.reads_time,
        plans=plans,
        depth=2 if ahead else 1,
        name=name,
    )


def _lower_tiers(
    config: EngineConfig,
    manager: BlockManager,
    timing: TimingModel,
    name: str,
    sink: Sink | None,
    timeline: Timeline | None,
    host_link: LinkMaker,
    *,
    alone: bool,
) -> Offload | None:
    """Make what is below the device, if anything is; ``alone``: no other rank is beside it."""
    if config.tiers is None:
        if timeline is not None:
            raise ConfigError(f"{name or 'an engine'} without lower tiers has no use for a Timeline")
        return None
    assert config.bytes_per_block is not None
    tree = radix_tree(config) if manager.pool.tree is not None else None
    if tree is not None:
        return HiCache(
            manager,
            config.tiers,
            block_bytes=config.bytes_per_block,
            eviction=tree.eviction,
            pages=tree.host_pages,
            window_pages=tree.window_host_pages,
            prefetch=tree.prefetch,
            name=name,
            sink=sink,
        )
    if config.tiers.wait_for_save and not (alone and host_link is make_link):
        raise ConfigError(
            "wait_for_save is of one device's own link: leave out data-parallel ranks, and hand-overs and pulls over the "
            "device's bus"
        )
    return Offload(
        manager,
        config.tiers,
        block_bytes=config.bytes_per_block,
        name=name,
        sink=sink,
        timeline=timeline,
        prefill_ns=partial(prefill_ns, timing, config.tokens_per_pass),
        host_link=host_link,
    )


def radix_tree(config: EngineConfig) -> TreeSettings | None:
    """Return the radix tree that the backend caches blocks in, if that is its way."""
    of_backend = BACKENDS.get(config.backend).tree
    return of_backend(config) if of_backend is not None else None


def make_manager(
    config: EngineConfig, now: Callable[[], int], sink: Sink | None = None, *, alone: bool = True
) -> BlockManager:
    """Build the block manager of a rank; ``alone``: no prompt comes from elsewhere. Raises ``ConfigError``."""
    tree = radix_tree(config) if alone else None
    return BlockManager(
        (tree.pages if tree is not None else config.num_gpu_blocks) + 1,
        config.block_groups,
        caching=config.enable_prefix_caching or config.tiers is not None,
        reuses=config.enable_prefix_caching,
        max_model_len=config.max_model_len or 1 << 30,
        max_in_flight_tokens=config.max_num_batched_tokens * (2 if config.decides_ahead else 1),
        watermark=config.watermark,
        retention_interval=config.retention_interval,
        use_eagle=config.speculative is not None
        and config.speculative.eagle
        and (tree is not None or BACKENDS.get(config.backend).reserved_drafts is None),
        eviction=config.eviction,
        eviction_options=config.eviction_options,
        hints=config.heed_hints,
        quotas=config.quotas,
        sink=sink,
        now=now,
        radix=tree.empty(config.block_groups[0].block_size) if tree is not None else None,
    )


def prefill_ns(timing: TimingModel, tokens_per_pass: int, tokens: int, past: int) -> int:
    """Return the time for ``tokens`` prompt tokens after ``past`` computed ones, in passes of their own."""
    total = 0
    while tokens > 0:
        new = min(tokens, tokens_per_pass)
        total += timing.pass_ns([(new, past)], 0, 0, 0)
        tokens -= new
        past += new
    return total


def _scheduler(
    config: EngineConfig,
    manager: BlockManager,
    waiting: Queue,
    batch: DecodeBatch,
    transfers: Transfers,
    watcher: Watcher,
    *,
    bulk: bool,
) -> Scheduler:
    stores, backend = transfers.stores, BACKENDS.get(config.backend)
    # Whether lower tiers must see each pass of a decode batch by itself.
    exacting = stores is not None and (stores.cleans or stores.stores_output)
    speculative: SpeculativeBatch | None = None
    if config.speculative is not None:
        rates = config.speculative.acceptance_rates[: config.speculative.num_speculative_tokens]
        # Its own drafts are where a drafter that needs hidden states writes to: vLLM's num_lookahead_tokens.
        lookahead = len(rates) if config.speculative.eagle else 0
        slots = backend.reserved_drafts(config) if backend.reserved_drafts is not None else None
        if slots is not None:
            speculative = ReservedDrafts(manager, rates, config.seed, width=slots.width, reserve=slots.reserve)
        else:
            speculative = SpeculativeBatch(manager, rates, config.seed, lookahead=lookahead)
    blocks = DecodeBlocks(
        manager,
        batch,
        ahead=bulk and not exacting and DecodeBlocks.can_take_ahead(manager),
        defers=manager.caching
        and speculative is None
        and not any(group.acts_every_step or group.forgets for group in manager.groups)
        and not (stores is not None and stores.stores_output),
    )
    jobs = Lifecycle(manager, waiting, batch, blocks, transfers, speculative=speculative, watcher=watcher)
    policy = backend.policy(jobs, config)
    limits: list[tuple[int, int, str]] = []
    if backend.spare_blocks is not None:
        page, pages = manager.groups[0].block_size, manager.pool.num_blocks - 1
        tokens = (pages - backend.spare_blocks) * page - policy.spare_tokens
        limits.append((tokens, page if policy.spare_tokens else 1, f"the {pages} blocks there are"))
    if config.max_model_len is not None:
        limits.append((config.max_model_len, 1, f"max_model_len {config.max_model_len}"))
    return Scheduler(jobs, policy, limits, config.role)
