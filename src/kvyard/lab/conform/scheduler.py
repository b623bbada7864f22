"""Conformance of scheduling: logs of a real vLLM scheduler, replayed through our engine and compared step by step.

A log has a configuration with vLLM's names, the requests, what the scheduler decided in each step, and how each request
ended. It is run twice. One pass at a time, everything is compared: who computes how many tokens and in which order, hits,
preemptions, ends, instants, and the order of the free blocks. With plans, what can be seen of them is: passes, admissions,
preemptions and ends.

A log of an engine at work (``kvyard.vllm`` records them) has no formula for its times: passes take what they took, which no
plan could know, so it is run one pass at a time only. It may end while requests are in flight.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from kvyard.blocks import GroupSpec
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig, SpeculativeConfig
from kvyard.engine.core import EventBatcher
from kvyard.engine.job import Job, JobState
from kvyard.engine.passes import Pass
from kvyard.engine.timing import Durations, TimingConfig
from kvyard.engine.watcher import Watcher
from kvyard.errors import KvyardError
from kvyard.hashing import PLAIN, Namespace, TokenChain, algorithm
from kvyard.lab.conform import LogDifference, LogError, LogVerdict
from kvyard.lab.conform.log import MALFORMED, in_words
from kvyard.lab.conform.scripted_loads import LoadScript, scripted

if TYPE_CHECKING:
    from kvyard.lab.conform.sglang import SglangLog

FORMAT = "scheduler-log/1"
SHOWN_BEFORE = 3
"""Steps shown that led to a difference."""
COMPARED = ("start", "scheduled", "tokens", "order", "ns", "running", "waiting", "free", "line")
MOST_TOKENS = 1 << 24
"""Most tokens of a request, with its answer: a damaged number must not fill the memory."""
LISTS = ("preempted", "gone", "aborted", "finished")
MAPS = ("new", "resumed", "loading")
REASONS = {JobState.FINISHED: "length", JobState.CANCELLED: "aborted", JobState.REJECTED: "rejected"}
SAME_NAMES = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "async_scheduling",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduler_reserve_full_isl",
    "watermark",
)

UNPACK: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.decompress, ".gz": gzip.decompress}

Record = dict[str, Any]


class LogTiming(TimingConfig, frozen=True, kw_only=True, tag="scheduler-log"):
    """The formula of a log's header, in whole nanoseconds."""

    base: int
    per_token: int
    per_request: int
    per_context: int

    def model(self, capacity_tokens: int) -> LogModel:
        return LogModel(self)


class LogModel:
    """The durations of ``LogTiming``."""

    needs_longest: ClassVar[bool] = False

    def __init__(self, config: LogTiming) -> None:
        self._config = config

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        of = self._config
        tokens = decode_batch + sum(new for new, _ in prefills)
        context = decode_context + sum(new + past for new, past in prefills)
        requests = decode_batch + len(prefills)
        return of.base + of.per_token * tokens + of.per_request * requests + of.per_context * context

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        growth = self._config.per_context * batch
        return self.pass_ns((), batch, context, longest) + growth * np.arange(passes, dtype=np.int64)


class RecordedTiming(TimingConfig, frozen=True, kw_only=True, tag="scheduler-log-recorded"):
    """Durations of a log's passes, one after the other."""

    durations: tuple[int, ...]

    def model(self, capacity_tokens: int) -> RecordedModel:
        return RecordedModel(self.durations)


class RecordedModel:
    """The durations of ``RecordedTiming``. Each is handed out once; a pass past the last takes as long as that."""

    needs_longest: ClassVar[bool] = False

    def __init__(self, durations: Sequence[int]) -> None:
        self._left = list(reversed(durations)) or [1]

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        return self._left.pop() if len(self._left) > 1 else self._left[0]

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        return np.array([self.pass_ns((), batch, context, longest) for _ in range(passes)], dtype=np.int64)


class SchedulerLog:
    """One recorded run."""

    format: ClassVar[str] = FORMAT

    def __init__(self, path: Path) -> None:
        """Raises ``LogError`` for a file that can't be read or isn't a log of a scheduler."""
        self.name = path.name.removesuffix(".xz").removesuffix(".gz").removesuffix(".jsonl")
        lines = read_lines(path)
        try:
            self.header: Record = lines[0]
            if self.header["format"] != self.format:
                raise LogError(f"{path}: is of format {self.header['format']!r}, not {self.format!r}")
            settings: Record = self.header["config"]
            self.requests = [line for line in lines if "request" in line]
            # An engine at work says what a request was when that has ended.
            self.requests.sort(key=lambda request: (request["arrival"], request.get("number", 0)))
            self.steps = [line for line in lines if "step" in line]
            self.ends = {line["end"]: line for line in lines if "end" in line}
            self.timed = self.header["timing"] is not None
            """True if times follow from a formula, so that plans can be compared too."""
            self.cut = any("cut" in line for line in lines)
            """True if it ended while requests were in flight."""
            timing = (
                LogTiming(**self.header["timing"])
                if self.timed
                else RecordedTiming(durations=tuple(step["ns"] for step in self.steps))
            )
            self.config = self.engine_config(settings, timing)
            self._check_names(path)
            self.has_line = bool(self.steps) and self.steps[0]["line"] is not None
        except (*MALFORMED, msgspec.ValidationError) as bad:
            raise LogError(f"{path}: is no scheduler log: {in_words(bad)}") from bad

    def engine_config(self, config: Record, timing: TimingConfig) -> EngineConfig:
        """Return the settings that stand for a log's. Raises ``LogError`` for what the engine has no setting for."""
        return engine_config(config, timing)

    def scripts(self) -> dict[str, LoadScript] | None:
        """Return a connector's blocks of each request, if there was one."""
        if not self.header["config"].get("connector"):
            return None
        scripts = {}
        for request in self.requests:
            tokens, load_ns = request["load"] or (0, None)
            scripts[request["request"]] = LoadScript(tokens, load_ns, request["send"])
        return scripts

    def _check_names(self, path: Path) -> None:
        """Refuse a recording that was cut off by the end of its process or a full disk: it lacks lines of its open requests."""
        known = check_requests(path, self.requests)
        for step in self.steps:
            for name in step["tokens"]:
                if name not in known:
                    raise LogError(
                        f"{path}: step {step['step']} computes for {name}, which it never admitted: the log was cut off"
                    )


def check_requests(path: Path, requests: Sequence[Record]) -> set[str]:
    """Return the names of a log's ``requests``. Raises ``LogError`` if two have the same."""
    names = Counter([request["request"] for request in requests])
    for name, count in names.items():
        if count > 1:
            raise LogError(f"{path}: {count} requests are called {name}: the log is damaged")
    return set(names)


def read_lines(path: Path) -> list[Record]:
    """Return a file of JSON lines, plain, .xz or .gz. Raises ``LogError`` if it is none."""
    try:
        data = path.read_bytes()
        if path.suffix in UNPACK:
            data = UNPACK[path.suffix](data)
        return [json.loads(line) for line in data.decode().splitlines() if line.strip()]
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, RecursionError) as bad:
        raise LogError(f"{path}: can't be read: {bad}") from bad


def log_format(path: Path) -> object:
    """Return the format that the first line of a file, plain, .xz or .gz, names; ``None`` if it names none or can't be read."""
    try:
        with _open(path) as lines:
            header = json.loads(next(iter(lines), "null"))
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, RecursionError):
        return None
    return header.get("format") if isinstance(header, dict) else None


def _open(path: Path) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def engine_config(config: Record, timing: TimingConfig) -> EngineConfig:
    """Return the settings that stand for a log's. Raises ``LogError`` for what the engine has no setting for."""
    groups = tuple(
        GroupSpec(
            kind=group["type"],
            block_size=group.get("block_size", config["block_size"]),
            **{name: value for name, value in group.items() if name not in ("type", "block_size")},
        )
        for group in config["groups"]
    )
    engine = EngineConfig(
        groups=groups,
        num_gpu_blocks=config["num_blocks"] - 1,
        scheduling_policy=config["policy"],
        retention_interval=config["prefix_cache_retention_interval"],
        timing=timing,
        max_loras=config.get("max_loras"),
        speculative=drafts(config),
        **{name: config[name] for name in SAME_NAMES},
    )
    try:
        engine.check()
    except KvyardError as refused:
        raise LogError(f"this configuration can't be replayed: {refused}") from refused
    return engine


def drafts(config: Record) -> SpeculativeConfig | None:
    """Return the settings for draft tokens. How many hold is in the log."""
    count = config["num_speculative_tokens"]
    if not count:
        return None
    return SpeculativeConfig(
        num_speculative_tokens=count, acceptance_rates=(0.0,) * count, eagle=config["drafter"] == "eagle"
    )


class LoggedRun(Watcher):
    """A log's requests through our engine."""

    wants_tokens = True

    def __init__(self, log: SchedulerLog | SglangLog, *, plans: bool, batcher: EventBatcher | None = None) -> None:
        self.steps: list[Record] = []
        """Decisions, in the form of the log's steps. Of a plan, its first pass."""
        self.passes: list[tuple[int, int, int]] = []
        """Start, duration and tokens of each pass."""
        self.first_tokens: dict[str, int] = {}
        self.ended_at: dict[str, int] = {}
        scripts = log.scripts()
        self.core = make_core(
            log.config,
            watcher=self,
            batcher=batcher,
            plans=plans,
            source=None
            if scripts is None
            else lambda manager, waiting: scripted(manager, waiting, log.config, scripts),
        )
        self._plans = plans
        self._has_line = log.has_line
        self._log = log
        self._boundary = -1
        """Start of the pass in flight."""
        self._over = 0
        """Steps that are over."""
        self._given_up: list[Job] = []
        """Jobs cancelled in the pass in flight."""
        self._arrived: set[str] = set()
        """Jobs that arrived in the pass in flight: vLLM doesn't know of them before it ends."""
        self._next: Record = {}
        """Fields to be recorded with the next step."""
        speculative = self.core.scheduler.jobs.speculative
        if speculative is not None:
            holds = {request["request"]: request["holds"] for request in log.requests}
            speculative.holding = lambda job, most: min(most, holds[job.id][job.output % len(holds[job.id])])
        sha = algorithm("sha256_cbor")
        size = self.core.scheduler.manager.geometry.hash_block_size
        self.jobs: dict[str, Job] = {}
        for request in log.requests:
            if sum(count for _, count in (*request["prompt"], *_stretches(request["output"]))) > MOST_TOKENS:
                raise LogError(
                    f"request {request['request']!r:.80} has more than {MOST_TOKENS:,} tokens: the log is damaged"
                )
            for name in ("arrival", "abort"):
                if type(request[name]) is not int and (name, request[name]) != ("abort", None):
                    raise LogError(
                        f"request {request['request']!r:.80} has {name}={request[name]!r:.40}: times are whole "
                        "nanoseconds, so the log is damaged"
                    )
            self.jobs[request["request"]] = Job(
                request["request"],
                TokenChain(
                    [token for low, count in request["prompt"] for token in range(low, low + count)],
                    size,
                    sha,
                    Namespace(lora_name=f"adapter-{request['lora']}") if request.get("lora") else PLAIN,
                ),
                sum(count for _, count in _stretches(request["output"])),
                arrival=request["arrival"],
                priority=request["priority"],
                sample=_sampler(_stretches(request["output"])),
            )

    def go(self) -> None:
        """Run from the first arrival to the last end, or to where the log was cut, but no further than one step past the log's:
        few lines may ask for millions. Raises ``LogError`` if it comes to a stand.
        """
        core = self.core
        last = len(self._log.steps) + (not self._log.cut)
        outside = [(request["arrival"], 0, index) for index, request in enumerate(self._log.requests)]
        outside += [(r["abort"], 1, index) for index, r in enumerate(self._log.requests) if r["abort"] is not None]
        outside.sort(reverse=True)
        jobs = list(self.jobs.values())
        idle = 0
        while outside or core.next_decision() is not None:
            decision = core.next_decision()
            now = min(when for when in (decision, outside[-1][0] if outside else None) if when is not None)
            self._advance(now)
            if self._over >= last:
                return
            while outside and outside[-1][0] == now:
                _, aborts, index = outside.pop()
                if not aborts:
                    self._arrived.add(jobs[index].id)
                    core.submit(jobs[index], now)
                elif not jobs[index].state.ended:
                    core.cancel(jobs[index], now)
                    if core.busy and now > self._boundary:
                        self._given_up.append(jobs[index])
                    else:
                        self._next.setdefault("gone", []).append(jobs[index].id)
            if not core.busy:
                self._boundary = now
                self._arrived.clear()
            core.begin(now)
            idle = 0 if core.next_decision() != now else idle + 1
            if idle > 3:
                raise LogError(f"our engine stops making progress at {now}")

    def _advance(self, now: int) -> None:
        core = self.core
        before = core.passes
        core.advance(now)
        if core.passes > before and not self._plans:
            for job in self._given_up:
                if job.state is JobState.CANCELLED:
                    where, record = (
                        ("gone", self._next) if job.id in self._arrived else ("aborted", self.steps[self._over])
                    )
                    record.setdefault(where, []).append(job.id)
            self._given_up.clear()
            self._arrived.clear()
            self._boundary = now
            self._over += 1

    # -- called by the engine --------------------------------------------------------------------------------------

    def decided(self, pass_: Pass, now: int) -> None:
        scheduler = self.core.scheduler
        pool = scheduler.manager.pool
        self.steps.append(
            {
                "scheduled": now,
                "tokens": {job.id: tokens for job, tokens in self.in_order(pass_)},
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting) + len(scheduler.jobs.parked),
                "free": pool.free,
                "line": zlib.crc32(",".join(map(str, pool.line())).encode()) if self._has_line else None,
                **self._next,
            }
        )
        self._next = {}

    def in_order(self, batch: Pass) -> list[tuple[Job, int]]:
        """Return the jobs of a pass and their tokens, in the order of the log: that of admission."""
        decoding = [(job, 1) for job in self.core.scheduler.lockstep()] if batch.decoding else []
        entries = [*((job, new) for job, new, _ in batch.chunks), *batch.drafted, *decoding]
        return sorted(entries, key=lambda entry: entry[0].serial)

    def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
        self._next.setdefault("resumed" if job.preemptions else "new", {})[job.id] = cached + external

    def loading(self, job: Job, now: int, tokens: int) -> None:
        self._next.setdefault("loading", {})[job.id] = tokens

    def preempted(self, job: Job, now: int) -> None:
        self._next.setdefault("preempted", []).append(job.id)

    def passed(self, start: int, end: int, chunks: Sequence[tuple[Job, int, int]], decoding: int) -> None:
        self.passes.append((start, end - start, decoding + sum(new for _, new, _ in chunks)))

    def decoded(self, start: int, durations: Durations, decoding: int, jobs: Sequence[Job]) -> None:
        for spent in durations.tolist():
            self.passes.append((start, spent, decoding))
            start += spent

    def produced(self, job: Job, count: int, end: int) -> None:
        self.first_tokens.setdefault(job.id, end)

    def ended(self, job: Job, now: int, reason: str) -> None:
        self.ended_at[job.id] = now
        if job.state is JobState.FINISHED and not self._plans:
            self.steps[self._over].setdefault("finished", []).append(job.id)


def _stretches(output: list[Any]) -> list[list[int]]:
    """Return the tokens of an answer as [first id, count] each; most logs have one run, and write it without a list."""
    return output if not output or isinstance(output[0], list) else [output]


def _sampler(stretches: list[list[int]]) -> Callable[[int, int], Sequence[int]]:
    if len(stretches) == 1:
        first = stretches[0][0]
        return lambda low, high: range(first + low, first + high)
    tokens = [token for first, count in stretches for token in range(first, first + count)]
    return lambda low, high: tokens[low:high]


# -- comparing -------------------------------------------------------------------------------------------------------


def conform(path: Path) -> LogVerdict:
    """Replay one log. Raises ``LogError`` for a file that isn't one, or can't be replayed."""
    return replay(path, SchedulerLog(path), LoggedRun)


def replay(path: Path, log: SchedulerLog, run: type[LoggedRun]) -> LogVerdict:
    """Hold runs of ``log`` to it. Raises ``LogError`` if it can't be replayed."""
    try:
        difference = _first_difference(log, run)
    except LogError as bad:
        raise LogError(f"{path}: {bad}") from bad
    except MALFORMED as bad:
        raise LogError(f"{path}: can't be replayed: {in_words(bad)}") from bad
    return LogVerdict(log.name, difference.line if difference is not None else len(log.steps), difference, "steps")


def _first_difference(log: SchedulerLog, run: type[LoggedRun]) -> LogDifference | None:
    stepped = run(log, plans=False)
    stepped.go()
    difference = _steps(log, stepped) or _ends(log, stepped)
    if difference is None and log.timed:
        planned = run(log, plans=True)
        planned.go()
        difference = _planned(log, stepped, planned) or _ends(log, planned)
    return difference


def difference_at(
    log: SchedulerLog | SglangLog, step: int, field: str, recorded: object, ours: object
) -> LogDifference:
    """The difference of ``field`` in ``step``, with the steps before it."""
    op = log.steps[step] if step < len(log.steps) else {"step": step}
    return LogDifference(step, op, field, recorded, ours, log.steps[max(0, step - SHOWN_BEFORE) : step])


def _steps(log: SchedulerLog, run: LoggedRun) -> LogDifference | None:
    for number, (recorded, ours) in enumerate(zip(log.steps, run.steps, strict=False)):
        start, ns, _ = run.passes[number] if number < len(run.passes) else (None, None, 0)
        views = []
        for step, fallback in ((recorded, recorded["start"]), (ours | {"start": start, "ns": ns}, 0)):
            view = {"scheduled": fallback, **{name: {} for name in MAPS}, **{name: [] for name in LISTS}, **step}
            views.append(view | {"order": list(step["tokens"])})
        theirs, mine = views
        for field in (*COMPARED, *MAPS, *LISTS):
            if theirs[field] != mine[field]:
                return difference_at(log, number, field, theirs[field], mine[field])
    if len(log.steps) != len(run.steps):
        return difference_at(
            log, min(len(log.steps), len(run.steps)), "number of steps", len(log.steps), len(run.steps)
        )
    return None


def _planned(log: SchedulerLog, stepped: LoggedRun, planned: LoggedRun) -> LogDifference | None:
    """Compare a run with plans with one without, which was found to be the log's."""
    for number, (single, of_plan) in enumerate(zip(stepped.passes, planned.passes, strict=False)):
        if single != of_plan:
            return difference_at(log, number, "planned pass", single, of_plan)
    if len(stepped.passes) != len(planned.passes):
        return difference_at(log, len(log.steps), "number of planned passes", len(stepped.passes), len(planned.passes))
    single_steps = enumerate(stepped.steps)
    seen = 0
    for ours in planned.steps:
        number, recorded = next(
            ((number, step) for number, step in single_steps if step["scheduled"] == ours["scheduled"]),
            (len(log.steps), {}),
        )
        for field in (*MAPS, "preempted", "tokens", "running", "waiting", "free", "line"):
            if recorded.get(field) != ours.get(field):
                return difference_at(log, number, f"{field} of a plan", recorded.get(field), ours.get(field))
        seen += sum(len(ours.get(field, ())) for field in (*MAPS, "preempted"))
    expected = sum(len(step.get(field, ())) for step in stepped.steps for field in (*MAPS, "preempted"))
    if seen != expected:
        return difference_at(log, len(log.steps), "admissions, loads and preemptions in plans", expected, seen)
    return None


def _ends(log: SchedulerLog, run: LoggedRun) -> LogDifference | None:
    for name, end in log.ends.items():
        if end["reason"] == "unfinished" and log.cut:
            continue
        job = run.jobs[name]
        ours = {
            "end": name,
            "reason": REASONS.get(job.state, "unfinished"),
            "at": run.ended_at.get(name),
            "first_token": run.first_tokens.get(name),
            "output": job.output,
            "cached": job.cached_tokens + job.external_tokens if job.cached_tokens >= 0 else None,
            "preemptions": job.preemptions,
        }
        if end["reason"] == "aborted":
            # One that waits leaves our queue at once, and vLLM's with the pass; in between it blocks no other request.
            ours["at"] = end["at"]
        for field, value in ours.items():
            if end[field] != value:
                return difference_at(log, len(log.steps), f"{field} of {name}", end, ours)
    return None
