"""Conformance of ``backend=sglang``: logs of a real SGLang scheduler, replayed through our engine and compared batch by batch.

A log is like one of vLLM's scheduler (``kvyard.lab.conform.scheduler``) with SGLang's settings: what each batch computes and
in which order, how much of each prompt was cached, who was retracted, pages that are free, evictable and protected, the share
of output set aside, and every KV event with its parent and its place.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.clock import SECOND
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.passes import Pass
from kvyard.engine.policies.settings import SglangSettings
from kvyard.engine.policies.sglang_passes import SglangPasses
from kvyard.errors import KvyardError
from kvyard.events.types import EventBatch, Tier
from kvyard.hashing import Key, PairChain, Run
from kvyard.lab.conform import LogDifference, LogError, LogVerdict
from kvyard.lab.conform.log import MALFORMED, in_words
from kvyard.lab.conform.scheduler import (
    LoggedRun,
    LogTiming,
    Record,
    check_requests,
    difference_at,
    read_lines,
)
from kvyard.tiers.config import OffloadConfig, TierConfig
from kvyard.tiers.hicache import HiCache
from kvyard.tiers.links import LaneConfig, LinkConfig

FORMAT = "sglang-log/1"
_STATE = (
    "past",
    "requeued",
    "running",
    "waiting",
    "free",
    "evictable",
    "protected",
    "swa",
    "host",
    "swa_host",
    "storage",
    "states",
    "ratio",
)
OF_PLANS = ("tokens", *_STATE)
"""Fields that the first pass of a plan has in common with the same pass by itself."""
COMPARED = (
    "start",
    "scheduled",
    "ns",
    "mode",
    "tokens",
    "order",
    *_STATE,
    "events",
    "finished",
)
SAME_NAMES = (
    "max_prefill_tokens",
    "schedule_conservativeness",
    "enable_mixed_chunk",
    "ignore_eos",
    "radix_eviction_policy",
    "enable_priority_scheduling",
)
WRITE_POLICIES = {
    "write_through": "write_through",
    "write_through_selective": "after_hits",
    "write_back": "on_eviction",
}
"""Our names of HiCache's write policies."""
UNLIMITED = 1 << 40
"""Pages of storage without a limit."""
EAGLES = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms whose drafters need hidden states."""
OPTIONAL = (
    "max_mamba_cache_size",
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "prefill_max_requests",
    "swa_full_tokens_ratio",
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "priority_scheduling_preemption_threshold",
)

KNOWN = {
    *SAME_NAMES,
    *OPTIONAL,
    "chunked_prefill_size",
    "disable_radix_cache",
    "hicache",
    "max_running_requests",
    "num_tokens",
    "overlap",
    "page_size",
    "schedule_policy",
    "seed",
    "sliding_window_size",
    "speculative",
}
"""Settings that a log may have."""


class EventNumbers:
    """A sink that writes events as a log does: blocks are numbers, in order of first appearance."""

    pending = False

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._events: list[tuple[str, str, Key | None, list[Key], list[int]]] = []

    def entered(self, run: Run, group: int, tier: Tier, first: bool) -> None:
        parent = run.chain.keys[run.start - 1] if run.start else None
        hashes = [run.chain.keys[position] for position in range(run.start, run.stop)]
        tokens = list(run.chain.tokens_of(run.start, run.stop) or ())
        last = self._events[-1] if self._events else None
        # SGLang continues the event before, if that is where the new one continues.
        if last is not None and last[:2] == ("stored", tier.label) and last[3][-1] == parent:
            last[3].extend(hashes)
            last[4].extend(tokens[1:] if isinstance(run.chain, PairChain) else tokens)
        else:
            self._events.append(("stored", tier.label, parent, hashes, tokens))

    def left(self, run: Run, group: int, tier: Tier, last: bool, reason: str | None = None) -> None:
        hashes = [run.chain.keys[index] for index in range(run.start, run.stop)]
        before = self._events[-1] if self._events else None
        if before is not None and before[:2] == ("removed", tier.label):
            before[3].extend(hashes)
        else:
            self._events.append(("removed", tier.label, None, hashes, []))

    def cleared(self, tier: Tier | None = None) -> None:
        """Ignore clears: a log has no event for them."""

    def end_iteration(self, now: int) -> EventBatch | None:
        return None

    def take(self) -> list[list[Any]]:
        """Return the events since the last call."""
        written: list[list[Any]] = []
        for kind, tier, parent, hashes, tokens in self._events:
            if kind == "stored":
                before = None if parent is None else self._number(parent)
                crc = zlib.crc32(",".join(map(str, tokens)).encode())
                written.append([kind, tier, before, self._runs(hashes), crc])
            else:
                written.append([kind, tier, self._runs(hashes)])
        self._events.clear()
        return written

    def _number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _runs(self, hashes: Sequence[Key]) -> list[list[int]]:
        runs: list[list[int]] = []
        for number in map(self._number, hashes):
            if runs and sum(runs[-1]) == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        return runs


class SglangLog:
    """One recorded run."""

    timed = True
    cut = False
    has_line = False

    def __init__(self, path: Path) -> None:
        """Raises ``LogError`` for a file that can't be read or isn't a log of SGLang."""
        self.name = path.name.removesuffix(".xz").removesuffix(".jsonl")
        lines = read_lines(path)
        try:
            self.header: Record = lines[0]
            if self.header["format"] != FORMAT:
                raise LogError(f"{path}: is of format {self.header['format']!r}, not {FORMAT!r}")
            self.requests = [
                {"abort": None, **line, "priority": line["priority"] or 0} for line in lines if "request" in line
            ]
            self.steps = [line for line in lines if "step" in line]
            self.ends = {line["end"]: line for line in lines if "end" in line}
            self.rest = lines[-1].get("rest")
            if self.rest is None:
                raise LogError(f"{path}: its last line isn't the last of a log (rest): the log was cut off")
            check_requests(path, self.requests)
            self.config = engine_config(self.header["config"], LogTiming(**self.header["timing"]))
        except (*MALFORMED, msgspec.ValidationError) as bad:
            raise LogError(f"{path}: is no log of SGLang's scheduler: {in_words(bad)}") from bad

    def scripts(self) -> None:
        """Return ``None``: nothing is loaded from elsewhere."""


def engine_config(config: Record, timing: LogTiming) -> EngineConfig:
    """Return the settings that stand for a log's. Raises ``LogError`` for what the engine has no setting for."""
    unknown = sorted(config.keys() - KNOWN)
    if unknown:
        raise LogError(f"this configuration can't be replayed: nothing here stands for {unknown[0]}")
    page = config["page_size"]
    if not isinstance(page, int) or page < 1:
        raise LogError(f"this configuration can't be replayed: page_size must be at least 1, got {page!r}")
    window = config.get("sliding_window_size")
    groups: tuple[GroupSpec, ...] = ()
    blocks = config["num_tokens"] // page
    if window is not None:
        # SGLang counts the tokens before the current one.
        window_group = GroupSpec(kind="sliding_window", block_size=page, window=window + 1)
        groups = (GroupSpec(kind="full", block_size=page), window_group)
        blocks = ceil(blocks * (1 + config["swa_full_tokens_ratio"]))
    if "max_mamba_cache_size" in config:
        groups = (*(groups or (GroupSpec(kind="full", block_size=page),)), GroupSpec(kind="mamba", block_size=page))
    hicache = config.get("hicache")
    policy = config["schedule_policy"]
    engine = EngineConfig(
        backend="sglang",
        block_size=None if groups else page,
        groups=groups,
        num_gpu_blocks=blocks,
        max_num_seqs=config["max_running_requests"],
        enable_prefix_caching=not config["disable_radix_cache"],
        async_scheduling=config["overlap"],
        seed=config["seed"],
        timing=timing,
        speculative=_drafts(config.get("speculative")),
        tiers=_tiers(hicache, 1 + config.get("swa_full_tokens_ratio", 0)) if hicache is not None else None,
        # A byte a nanosecond, so that a page takes as long as it has bytes.
        bytes_per_block=hicache["per_page"] if hicache is not None else None,
        sglang=msgspec.convert(
            {
                "schedule_policy": "fifo" if policy == "fcfs" else policy,
                "chunked_prefill_size": config["chunked_prefill_size"] or -1,
                **{name: config[name] for name in SAME_NAMES},
                **({"radix_eviction_policy": "lru"} if config["disable_radix_cache"] else {}),  # nothing is evicted
                **{name: config[name] for name in OPTIONAL if name in config},
                **_draft_settings(config.get("speculative")),
                **_prefetch_settings(hicache.get("storage") if hicache is not None else None),
            },
            SglangSettings,
        ),
    )
    try:
        engine.check()
    except KvyardError as refused:
        raise LogError(f"this configuration can't be replayed: {refused}") from refused
    return engine


def _drafts(drafts: Record | None) -> SpeculativeConfig | None:
    """Return the settings for draft tokens. How many hold is in the log."""
    if drafts is None:
        return None
    chains = drafts["algorithm"] == "NGRAM"
    count = drafts["num_draft_tokens"] - 1 if chains else drafts["num_steps"]
    eagle = drafts["algorithm"] in EAGLES
    return SpeculativeConfig(num_speculative_tokens=count, acceptance_rates=(0.0,) * count, eagle=eagle)


def _draft_settings(drafts: Record | None) -> Record:
    """Return SGLang's settings for trees of drafts, if they are trees."""
    if drafts is None or drafts["eagle_topk"] == 1:
        return {}
    return {
        "speculative_eagle_topk": drafts["eagle_topk"],
        "speculative_num_draft_tokens": drafts["num_draft_tokens"],
    }


def _prefetch_settings(storage: Record | None) -> Record:
    """Return SGLang's settings for prefetches, if there is storage."""
    if storage is None:
        return {}
    prefix = "hicache_storage_prefetch_"
    names = ("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token")
    renamed = {f"{prefix}{name}": storage[name] for name in ("retry_poll_interval", "retry_max_attempts")}
    return {**{name: storage[name] for name in names}, **renamed, f"{prefix}policy": storage["prefetch_policy"]}


def _tiers(hicache: Record, share: float) -> OffloadConfig:
    """``share``: blocks that a page of full attention and what window layers have for it take."""
    lane = LaneConfig(bandwidth=SECOND, first_byte_ns=hicache["first_byte"])
    link = LinkConfig(discipline="fifo", outward=lane, inward=lane)
    tiers = [TierConfig(num_blocks=ceil(hicache["host_pages"] * share), link=link)]
    storage = hicache.get("storage")
    if storage is not None:
        times = storage["per_page"] // hicache["per_page"]
        lane = LaneConfig(bandwidth=SECOND // times, first_byte_ns=storage["first_byte"])
        link = LinkConfig(discipline="fifo", outward=lane, inward=lane)
        tiers.append(TierConfig(num_blocks=storage["pages"] or UNLIMITED, link=link))
    return OffloadConfig(
        tiers=tuple(tiers),
        policy=WRITE_POLICIES[hicache["write_policy"]],
    )


class SglangRun(LoggedRun):
    """A log's requests through our engine."""

    def __init__(self, log: SglangLog, *, plans: bool) -> None:
        self.numbers = EventNumbers()
        super().__init__(log, plans=plans, batcher=self.numbers)
        self.rest: list[list[Any]] = []
        """Events after the last pass was decided on."""

    def go(self) -> None:
        super().go()
        self.rest = self.numbers.take()

    def ended(self, job: Job, now: int, reason: str) -> None:
        super().ended(job, now, reason)
        if job.aborted and not self._plans:
            self.steps[self._over].setdefault("finished", []).append(job.id)

    def decided(self, pass_: Pass, now: int) -> None:
        scheduler = self.core.scheduler
        pool = scheduler.manager.pool
        policy = scheduler.policy
        assert isinstance(policy, SglangPasses)
        tokens = {job.id: new for job, new, _ in pass_.chunks}
        if pass_.drafted:
            tokens |= {job.id: verified for job, verified in pass_.drafted}
        elif pass_.decoding:
            tokens |= {job.id: 1 for job in policy.decoding()}
        held = sum(len(extent.ids) for extent in pool.maps[0].extents() if extent.refs)
        unnamed = pool.unnamed if scheduler.manager.caching else pool.free
        windows, states = pool.windows, pool.states
        hicache = self.core.offload if isinstance(self.core.offload, HiCache) else None
        self.steps.append(
            {
                "scheduled": now,
                "mode": "decode" if not pass_.chunks else "mixed" if pass_.decoding else "extend",
                "tokens": tokens,
                "past": {job.id: past for job, _, past in pass_.chunks},
                "requeued": self._next.pop("preempted", []),
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "free": unnamed,
                "evictable": pool.free - unnamed,
                "protected": held,
                "swa": [windows.free, windows.evictable, windows.protected] if windows is not None else None,
                "host": hicache.pages.pool.unnamed if hicache is not None else None,
                "swa_host": windows.host.free if windows is not None and windows.host is not None else None,
                "storage": _storage(hicache),
                "states": [states.free, states.evictable, states.protected] if states is not None else None,
                "ratio": policy.ratio,
                "events": self.numbers.take(),
                "finished": [],
            }
        )
        self._next.clear()


def _storage(hicache: HiCache | None) -> list[int] | None:
    """Return pages in storage, and pages that requests have asked for, if there is storage."""
    prefetches = hicache.prefetches if hicache is not None else None
    return [len(prefetches.files.pages), prefetches.occupied] if prefetches is not None else None


def conform(path: Path) -> LogVerdict:
    """Replay one log. Raises ``LogError`` for a file that isn't one, or can't be replayed."""
    log = SglangLog(path)
    try:
        difference = _first_difference(log)
    except LogError as bad:
        raise LogError(f"{path}: {bad}") from bad
    except MALFORMED as bad:
        raise LogError(f"{path}: can't be replayed: {in_words(bad)}") from bad
    return LogVerdict(log.name, difference.line if difference is not None else len(log.steps), difference, "steps")


def _first_difference(log: SglangLog) -> LogDifference | None:
    stepped = SglangRun(log, plans=False)
    stepped.go()
    difference = _steps(log, stepped) or _ends(log, stepped)
    if difference is None:
        planned = SglangRun(log, plans=True)
        planned.go()
        difference = _planned(log, stepped, planned) or _ends(log, planned)
    return difference


def _steps(log: SglangLog, run: SglangRun) -> LogDifference | None:
    for step, (recorded, ours) in enumerate(zip(log.steps, run.steps, strict=False)):
        start, ns, _ = run.passes[step] if step < len(run.passes) else (None, None, 0)
        theirs = {
            "scheduled": recorded["start"],
            "past": {},
            "swa": None,
            "host": None,
            "swa_host": None,
            "storage": None,
            "states": None,
            "events": [],
            "finished": [],
            **recorded,
        }
        theirs["requeued"] = [*recorded.get("retracted", ()), *recorded.get("preempted", ())]
        theirs["order"] = list(recorded["tokens"])
        mine = ours | {"start": start, "ns": ns, "order": list(ours["tokens"])}
        if "preempted" in recorded:
            # Those preempted at once are released in the order of the batch and come back in another.
            theirs["requeued"], mine["requeued"] = sorted(theirs["requeued"]), sorted(mine["requeued"])
        for field in COMPARED:
            if theirs[field] != mine[field]:
                return difference_at(log, step, field, theirs[field], mine[field])
    if len(log.steps) != len(run.steps):
        return difference_at(
            log, min(len(log.steps), len(run.steps)), "number of steps", len(log.steps), len(run.steps)
        )
    return None if run.rest == log.rest else difference_at(log, len(log.steps), "events at the end", log.rest, run.rest)


def _planned(log: SglangLog, stepped: SglangRun, planned: SglangRun) -> LogDifference | None:
    """Compare a run with plans with one without, which was found to be the log's."""
    for number, (alone, of_plan) in enumerate(zip(stepped.passes, planned.passes, strict=False)):
        if alone != of_plan:
            return difference_at(log, number, "planned pass", alone, of_plan)
    if len(stepped.passes) != len(planned.passes):
        return difference_at(log, len(log.steps), "number of planned passes", len(stepped.passes), len(planned.passes))
    singles = enumerate(stepped.steps)
    for ours in planned.steps:
        number, single = next(
            ((number, step) for number, step in singles if step["scheduled"] == ours["scheduled"]), (len(log.steps), {})
        )
        for field in OF_PLANS:
            if single.get(field) != ours[field]:
                return difference_at(log, number, f"{field} of a plan", single.get(field), ours[field])
    events = [_flat([event for step in run.steps for event in step["events"]] + run.rest) for run in (stepped, planned)]
    return None if events[0] == events[1] else difference_at(log, len(log.steps), "events of plans", *events)


def _flat(events: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Return events block by block, however they were put together."""
    return [
        (kind, tier, low + number)
        for kind, tier, *rest in events
        for low, count in _numbers(rest)
        for number in range(count)
    ]


def _numbers(rest: list[Any]) -> list[list[int]]:
    numbers: list[list[int]] = rest[1] if len(rest) > 1 else rest[0]
    return numbers


def _ends(log: SglangLog, run: SglangRun) -> LogDifference | None:
    for name, end in log.ends.items():
        job = run.jobs[name]
        ours = {
            "end": name,
            "at": run.ended_at.get(name),
            "first_token": run.first_tokens.get(name),
            "output": job.output,
            "cached": job.cached_tokens + job.external_tokens if job.cached_tokens >= 0 else None,
            "retractions": job.preemptions,
        }
        if job.state is JobState.CANCELLED and not job.aborted:
            # One that waits leaves our queue at once, and SGLang's with the pass.
            ours["at"] = end["at"]
        for field, value in ours.items():
            if end[field] != value:
                return difference_at(log, len(log.steps), f"{field} of {name}", end, ours)
    return None
