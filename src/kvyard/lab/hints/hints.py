"""``kvyard hints``: a sweep over recall and false rate of a hint, beside a run without hints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.lab.hints.caches import Prompt, reuse_without_time
from kvyard.lab.study import Result, Row, Section, Study, Table, own_options
from kvyard.lab.study.advice import changes
from kvyard.lab.study.charts import Lines, curves
from kvyard.lab.study.seeds import means, not_set, spreads
from kvyard.lab.study.table import Values
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report.html import tile
from kvyard.replay.report.metrics import METRICS, Metric, read_metrics
from kvyard.replay.settings import SETTINGS, make_config
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.changes import without_long
from kvyard.replay.traces.hinting import MadeHint, TraceFuture, parse_hints
from kvyard.replay.traces.identity import prefix_ids

RECALLS = (0.0, 0.25, 0.5, 0.7, 1.0)
FALSES = (0.0, 0.1, 0.3)
SHOWN = ("reuse", "ttft_mean", "ttft_p90", "ttft_p99", "itl_p99")
DRAWN = ("reuse", "ttft_mean", "ttft_p90", "ttft_p99")
WORTH = ("reuse", "ttft_mean")
"""Metrics of a hint's value."""


class HintPoint(msgspec.Struct, frozen=True):
    """A hint of one quality."""

    hint: str
    """Its kind, with its options."""
    recall: float
    false: float
    values: Values
    """Means over seeds."""
    spread: Values
    """The largest less the smallest value over seeds."""


def hints(
    trace: str | Path,
    *,
    folder: str | Path,
    hints: Sequence[str] = ("session-end",),
    recalls: Sequence[float] = RECALLS,
    falses: Sequence[float] = FALSES,
    seeds: Sequence[int] = (0, 1),
    config: str | Path | Mapping[str, object] | None = None,
    **more: Any,
) -> Study:
    """Replay ``trace`` with each of ``hints`` (a kind, without recall and false rate), each of ``recalls`` and ``falses``, and
    each of ``seeds``. ``more`` and errors are as for ``sweep``.
    """
    options, settings = own_options(more)
    not_set({"hints": "--hint", "seed": "--seeds"}, "this command", config, settings)
    wanted: dict[str, list[tuple[str, float, float]]] = {}
    for text in _kinds(hints):
        for recall in _with_0(recalls):
            for false in _with_0(falses):
                wanted.setdefault(_written(text, recall, false), []).append((text, recall, false))
    replay_config = make_config(SETTINGS.merge(config, settings))

    def result(study: Study) -> Result:
        runs: dict[tuple[str, float, float], list[Values]] = {}
        for point, report in study.done:
            for quality in wanted[point.varied["hints"]]:
                runs.setdefault(quality, []).append(read_metrics(report))
        future = TraceFuture.of(
            without_long(open_trace(trace, limit=replay_config.limit, **study.reading), replay_config.max_tokens)
        )
        ordered = sorted(runs, key=lambda quality: (hints.index(quality[0]), quality[2], quality[1]))
        return view(study.trace, fleet_words(replay_config), {quality: runs[quality] for quality in ordered}, future)

    study = Study(trace, folder, result, **options)
    study.vary({"hints": list(wanted), "seed": [str(seed) for seed in seeds]}, config, settings)
    return study


def quick_hints(
    trace: str | Path,
    *,
    recalls: Sequence[float] = RECALLS,
    falses: Sequence[float] = FALSES,
    seeds: Sequence[int] = (0, 1),
    config: Mapping[str, object] | None = None,
    progress: Callable[[int, int], None] = lambda judged, all_: None,
    **reading: Any,
) -> Result:
    """Judge session ends by caches alone: no clock, no queues, no answers, each prompt to the cache with most of it.

    ``progress`` receives how many qualities of the hint are judged, and of how many. Caches are as many and as large as the
    workers of ``config``. Raises ``KvyardError`` if the trace doesn't say what prompts share.
    """
    replay_config = make_config(SETTINGS.merge(config, {}))
    source = without_long(open_trace(trace, limit=replay_config.limit, **reading), replay_config.max_tokens)
    requests = list(source)
    future = TraceFuture.of(requests)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(future.names))}
    prompts: list[Prompt] = []
    for request, name in zip(requests, future.names, strict=False):
        ids, size = prefix_ids(request)
        if ids is None:
            raise KvyardError(f"{source.name}: it doesn't say what prompts share, so no cache can be judged by it")
        prompts.append(Prompt(ids, size, request.input_length, numbers[name]))
    caches = sum(kind.count * kind.dp_size for kind in replay_config.workers)
    capacity = replay_config.workers[0].engine.capacity_tokens // prompts[0].block_size
    runs: dict[tuple[str, float, float], list[Values]] = {}
    for false in _with_0(falses):
        for recall in _with_0(recalls):
            hint = MadeHint(kind="session-end", recall=recall, false=false)
            drawn = [[hint_given.session_end for hint_given in future.hints([hint], seed)] for seed in seeds]
            shares = [reuse_without_time(prompts, ends, caches, capacity) for ends in drawn]
            runs["session-end", recall, false] = [{"reuse": reuse} for reuse in shares]
            progress(len(runs), len(_with_0(falses)) * len(_with_0(recalls)))
    setting = f"{caches} caches of {capacity:,} blocks of {prompts[0].block_size} tokens, longest match, no time"
    return view(Path(trace).name, setting, runs, future)


def view(
    trace: str,
    setting: str,
    runs: Mapping[tuple[str, float, float], Sequence[Values]],
    future: TraceFuture,
) -> Result:
    """Return the result: a table and curves by recall for each kind of hint, a line for each false rate. ``runs`` are by kind,
    recall and false rate, ``setting`` is the fleet in words.
    """
    by_hint: dict[str, list[HintPoint]] = {}
    for quality, quality_runs in runs.items():
        by_hint.setdefault(quality[0], []).append(HintPoint(*quality, means(quality_runs), spreads(quality_runs)))
    every = [point for points in by_hint.values() for point in points]
    metrics = [
        metric
        for metric in METRICS.values()
        if metric.shown == "table" and any(point.values.get(metric.name) is not None for point in every)
    ]
    known = {metric.name for metric in metrics}
    tables = {
        hint: Table(
            rows=[
                Row(cells={"recall": f"{point.recall:.2f}", "false": f"{point.false:.2f}"}, values=point.values)
                for point in points
            ],
            title=hint,
            shown=[name for name in SHOWN if name in known],
            changes=WORTH,
            base=_base(points),
        )
        for hint, points in by_hint.items()
    }
    sentences = [sentence for points in by_hint.values() if (sentence := worth(points))]
    before, after = _last_shares(future)
    flatters = "cuts conversations off, which flatters hints about ends"
    cut = f"the trace's end {flatters if after > before else 'cuts no more conversations off than end before it'}"
    censoring = f"Of the last tenth of requests {after:.0%} end a conversation, before that {before:.0%}: {cut}."
    shares = {"before": before, "last_tenth": after}
    return Result(
        kind="hints",
        title="What a hint is worth",
        about=f"{trace} on {setting}; means over seeds",
        tables=list(tables.values()),
        rows=[_row(point, _base(points), metrics) for points in by_hint.values() for point in points],
        facts={"trace": trace, "setting": setting, "last_of_conversation": shares, "advice": sentences},
        advice=sentences,
        notes=[censoring],
        legend=f"{trace}: {setting}. Times are in ms unless a column says s, means over seeds.",
        sections=[
            Section(
                title=hint,
                text="Beside no hints at all.",
                tiles=list(_tiles(points)),
                charts=[curves(METRICS[name], _lines(points, name), "recall") for name in DRAWN if name in known],
                table=tables[hint],
            )
            for hint, points in by_hint.items()
        ],
    )


def worth(points: Sequence[HintPoint]) -> str:
    """Return what a hint of middling recall is worth that is never wrong; empty if that wasn't run."""
    right = [point for point in points if not point.false and 0 < point.recall < 1]
    if not right:
        return ""
    point = min(right, key=lambda point: abs(point.recall - 0.5))
    metrics = [METRICS[name] for name in WORTH if point.values.get(name) is not None]
    changed = changes(metrics, point.values, _base(points))
    given = f"{point.hint}, given at {point.recall:.0%} of the places where it could be and never wrongly"
    return f"{given}, beside no hints: {changed}."


def fleet_words(config: ReplayConfig) -> str:
    """Return a fleet in a few words."""
    workers = sum(kind.count for kind in config.workers)
    engine = config.workers[0].engine
    tiers = "".join(
        f", {tier.place} of {store.num_blocks:,} blocks" if store.num_blocks is not None else f", {tier.place}"
        for tier, store in (engine.tiers.levels if engine.tiers is not None else ())
    )
    sizes = f"{engine.num_gpu_blocks:,} blocks of {engine.specs[0].block_size} tokens"
    return f"{workers} workers of {sizes}{tiers}, router {config.router.policy}, eviction {engine.eviction}"


def _base(points: Sequence[HintPoint]) -> Values:
    """Return metrics without hints."""
    return next((point.values for point in points if not point.recall and not point.false), {})


def _row(point: HintPoint, base: Values, metrics: Sequence[Metric]) -> dict[str, Any]:
    row: dict[str, Any] = {"hint": point.hint, "recall": point.recall, "false": point.false}
    row |= {metric.column: point.values[metric.name] for metric in metrics}
    for metric in metrics:
        value, none = point.values[metric.name], base.get(metric.name)
        row[f"{metric.column}_gain"] = None if value is None or none is None else value - none
    return row | {f"{metric.column}_spread": point.spread[metric.name] for metric in metrics}


def _tiles(points: Sequence[HintPoint]) -> Iterator[str]:
    """Yield tiles for no hints and for the best hints."""
    best = max((point for point in points if not point.false), key=lambda point: point.recall)
    for metric in (METRICS[name] for name in WORTH):
        old, new = _base(points).get(metric.name), best.values.get(metric.name)
        if old is not None:
            more = f"{metric.change_text(new, old)} from no hints to recall {best.recall:.0%}"
            yield tile(metric.title, f"{metric.text(old)} → {metric.text(new, unit=True)}", "", more)


def _lines(points: Sequence[HintPoint], name: str) -> Lines:
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for point in points:
        lines.setdefault(f"{point.false:.0%} false", []).append((point.recall, point.values[name]))
    return lines


def _kinds(hints: Sequence[str]) -> list[str]:
    for text in hints:
        parsed = parse_hints(text)
        if len(parsed) > 1 or parsed[0].recall != 1 or parsed[0].false:
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
    for share in shares:
        if not 0 <= share <= 1:
            raise KvyardError(f"a recall and a false rate are shares from 0 to 1, not {share:g}")
    return sorted({0.0, *map(float, shares)})


def _last_shares(future: TraceFuture) -> tuple[float, float]:
    cut = len(future.ends) - len(future.ends) // 10
    before, after = future.ends[:cut], future.ends[cut:]
    return sum(before) / max(1, len(before)), sum(after) / max(1, len(after))
