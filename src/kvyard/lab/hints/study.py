"""The study: a sweep over how often a hint is given and how often it is wrong, and what comes of it beside no hints at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.files import write_whole
from kvyard.lab.hints.caches import Prompt, reuse_without_time
from kvyard.lab.sweep import Sweep, sweep
from kvyard.lab.sweep.table import Figure, latency
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report import Report
from kvyard.replay.settings import SETTINGS, make_config
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.hinting import MadeHint, TraceFuture, parse_hints
from kvyard.replay.traces.identity import prefix_ids

RECALLS = (0.0, 0.25, 0.5, 0.7, 1.0)
FALSES = (0.0, 0.1, 0.3)
FIGURES = (
    Figure(
        "reuse", "reused", "Prompt tokens not computed / admitted", "high", lambda one: one.reuse["all"].value, True
    ),
    *(
        Figure(f"ttft_{field}_ms", head, f"Time to first token, {field}, ms", "low", latency("ttft", field))
        for field, head in (("mean", "TTFT"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"))
    ),
    Figure("itl_p99_ms", "ITL p99", "Inter-token latency, p99, ms", "low", latency("itl", "p99")),
    Figure("e2e_mean_ms", "E2E", "End-to-end latency, mean, ms", "low", latency("e2e", "mean")),
)


class HintPoint(msgspec.Struct, frozen=True):
    """A hint of one quality. Figures are means over seeds."""

    hint: str
    """Its kind, with what else is said of it."""
    recall: float
    false: float
    figures: dict[str, float]
    """By names of ``FIGURES``, as far as they are known."""
    gains: dict[str, float]
    """By how much each differs from no hints at all."""
    spread: dict[str, float]
    """The largest less the smallest, over seeds."""


class HintStudy(msgspec.Struct, frozen=True):
    """What hints are worth on one trace and one fleet."""

    trace: str
    setting: str
    """The fleet and how it is routed, in words."""
    points: list[HintPoint]
    censored: tuple[float, float]
    """The share of requests that are their conversation's last: in the first nine tenths of the trace, and in the last."""
    folder: Path
    sweep: Sweep | None = None
    """The replays; ``None`` for a study without time."""

    def show(self) -> None:
        """Print the tables."""
        from kvyard.lab.hints.table import print_study

        print_study(self)

    def save(self) -> list[Path]:
        """Write ``hints.csv``, ``hints.json`` and ``hints.html``; returns where. Raises ``KvyardError``."""
        from kvyard.lab.hints.page import page
        from kvyard.lab.hints.table import write_csv, write_json

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KvyardError(f"can't make the folder {self.folder}: {error.strerror}") from None
        paths = [self.folder / f"hints.{kind}" for kind in ("csv", "json", "html")]
        write_csv(self, paths[0])
        write_json(self, paths[1])
        if self.points:
            write_whole(paths[2], page(self))
        return paths if self.points else paths[:2]


def study(
    trace: str | Path,
    *,
    folder: str | Path,
    hints: Sequence[str] = ("session-end",),
    recalls: Sequence[float] = RECALLS,
    falses: Sequence[float] = FALSES,
    seeds: Sequence[int] = (0, 1),
    **how: Any,
) -> HintStudy:
    """Replay ``trace`` with each of ``hints`` (a kind, without recall and false rate), each of ``recalls`` and ``falses``, and
    each of ``seeds``. ``how`` is what ``sweep`` takes besides, which raises for both.
    """
    settings = how.get("config")
    for name, told in (("hints", "--hint"), ("seed", "--seeds")):
        if how.get(name) is not None or (isinstance(settings, Mapping) and settings.get(name) is not None):
            raise KvyardError(f"{name} is what this command varies: say {told} instead")
    wanted: dict[str, list[tuple[str, float, float]]] = {}
    for text in _kinds(hints):
        for recall in _with_0(recalls):
            for false in _with_0(falses):
                wanted.setdefault(_written(text, recall, false), []).append((text, recall, false))
    vary = {"hints": list(wanted), "seed": [str(seed) for seed in seeds]}
    done = sweep(trace, vary, folder=folder, **how)
    by_quality: dict[tuple[str, float, float], list[Report]] = {}
    for point, report in done.done:
        for quality in wanted[point.varied["hints"]]:
            by_quality.setdefault(quality, []).append(report)
    values = {
        quality: {figure.name: [float(figure.of(one) or 0.0) for one in by_quality[quality]] for figure in FIGURES}
        for quality in sorted(by_quality, key=lambda one: (hints.index(one[0]), *one[1:]))
    }
    made = make_config(SETTINGS.merge(settings, {}))
    future = TraceFuture.of(open_trace(trace, limit=made.limit, **_reading(how)))
    return HintStudy(done.trace, fleet_words(made), _points(values), _shares(future), Path(folder), done)


def quick_study(
    trace: str | Path,
    *,
    folder: str | Path,
    recalls: Sequence[float] = RECALLS,
    falses: Sequence[float] = FALSES,
    seeds: Sequence[int] = (0, 1),
    config: Mapping[str, object] | None = None,
    **reading: Any,
) -> HintStudy:
    """The same for session ends and caches alone: no clock, no queues, no answers, each prompt to the cache with most of it.

    Caches are as many and as large as the workers of ``config``. Raises ``KvyardError`` where the trace doesn't say what
    prompts share.
    """
    made = make_config(SETTINGS.merge(config, {}))
    source = open_trace(trace, limit=made.limit, **reading)
    rows = list(source)
    future = TraceFuture.of(rows)
    numbers = {name: at for at, name in enumerate(dict.fromkeys(future.names))}
    prompts: list[Prompt] = []
    for one, name in zip(rows, future.names):
        ids, size = prefix_ids(one)
        if ids is None:
            raise KvyardError(f"{source.name}: it doesn't say what prompts share, so no cache can be judged by it")
        prompts.append(Prompt(ids, size, one.input_length, numbers[name]))
    caches = sum(kind.count * kind.dp_size for kind in made.workers)
    capacity = made.workers[0].engine.capacity_tokens // prompts[0].block_size
    values: dict[tuple[str, float, float], dict[str, list[float]]] = {}
    for recall in _with_0(recalls):
        for false in _with_0(falses):
            hint = MadeHint(kind="session-end", recall=recall, false=false)
            drawn = [[said.session_end for said in future.hints([hint], seed)] for seed in seeds]
            found = [reuse_without_time(prompts, ends, caches, capacity) for ends in drawn]
            values["session-end", recall, false] = {"reuse": found}
    setting = f"{caches} caches of {capacity:,} blocks of {prompts[0].block_size} tokens, longest match, no time"
    return HintStudy(Path(trace).name, setting, _points(values), _shares(future), Path(folder))


def fleet_words(config: ReplayConfig) -> str:
    """A fleet in a few words."""
    workers = sum(kind.count for kind in config.workers)
    engine = config.workers[0].engine
    tiers = "".join(
        f", {tier.place} of {one.num_blocks:,} blocks" if one.num_blocks is not None else f", {tier.place}"
        for tier, one in (engine.tiers.levels if engine.tiers is not None else ())
    )
    sizes = f"{engine.num_gpu_blocks:,} blocks of {engine.specs[0].block_size} tokens"
    return f"{workers} workers of {sizes}{tiers}, router {config.router.policy}, eviction {engine.eviction}"


def _kinds(hints: Sequence[str]) -> list[str]:
    for text in hints:
        found = parse_hints(text)
        if len(found) > 1 or found[0].recall != 1 or found[0].false:
            raise KvyardError(
                f"--hint {text}: one kind, as in session-end or ttl:seconds=60; recall and false are varied"
            )
    if len(set(hints)) < len(hints):
        raise KvyardError(f"--hint has the same kind twice: {', '.join(hints)}")
    return list(hints)


def _written(text: str, recall: float, false: float) -> str:
    if not recall and not false:
        text = "session-end"  # no hints are the same of any kind: one replay for all
    return f"{text}{',' if ':' in text else ':'}recall={recall:g},false={false:g}"


def _with_0(shares: Sequence[float]) -> list[float]:
    for one in shares:
        if not 0 <= one <= 1:
            raise KvyardError(f"a recall and a false rate are shares from 0 to 1, not {one:g}")
    return sorted({0.0, *map(float, shares)})


def _reading(how: Mapping[str, Any]) -> dict[str, Any]:
    names = ("format", "trace_block_size", "skip_bad", "sort", "chain_ids")
    return {name: how[name] for name in names if how.get(name)}


def _points(values: Mapping[tuple[str, float, float], Mapping[str, Sequence[float]]]) -> list[HintPoint]:
    points = []
    for (hint, recall, false), figures in values.items():
        means = {name: fmean(found) for name, found in figures.items()}
        base = values.get((hint, 0.0, 0.0))
        none = {name: fmean(found) for name, found in base.items()} if base is not None else {}
        gains = {name: value - none[name] for name, value in means.items() if name in none}
        spread = {name: max(found) - min(found) for name, found in figures.items()}
        points.append(HintPoint(hint, recall, false, means, gains, spread))
    return points


def _shares(future: TraceFuture) -> tuple[float, float]:
    cut = len(future.ends) - len(future.ends) // 10
    before, after = future.ends[:cut], future.ends[cut:]
    return sum(before) / max(1, len(before)), sum(after) / max(1, len(after))
