"""``kvyard hints``: a sweep over how often a hint is given and how often it is wrong, beside no hints at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.errors import KvyardError
from kvyard.lab.hints.caches import Prompt, reuse_without_time
from kvyard.lab.study import Result, Row, Section, Study, Table, own_options
from kvyard.lab.study.advice import changes
from kvyard.lab.study.charts import Lines, curves
from kvyard.lab.study.runs import notes, times
from kvyard.lab.study.seeds import means, not_set, spreads
from kvyard.lab.study.table import Values
from kvyard.replay.config import ReplayConfig
from kvyard.replay.report.html import tile
from kvyard.replay.report.metrics import METRICS, Metric, read_metrics
from kvyard.replay.settings import SETTINGS, make_config
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.hinting import MadeHint, TraceFuture, parse_hints
from kvyard.replay.traces.identity import prefix_ids

RECALLS = (0.0, 0.25, 0.5, 0.7, 1.0)
FALSES = (0.0, 0.1, 0.3)
SHOWN = ("reuse", "ttft_mean", "ttft_p90", "ttft_p99", "itl_p99")
DRAWN = ("reuse", "ttft_mean", "ttft_p90", "ttft_p99")
WORTH = ("reuse", "ttft_mean")
"""Metrics that a hint's worth is told in."""


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


class HintStudy(msgspec.Struct):
    """What hints are worth on one trace and one fleet."""

    trace: str
    setting: str
    """The fleet and how it is routed, in words."""
    points: list[HintPoint]
    censored: tuple[float, float]
    """Share of requests that are their conversation's last: in the first nine tenths of the trace, and in the last."""
    folder: Path
    study: Study | None = None
    """The replays; ``None`` for a study without time."""

    @property
    def by_hint(self) -> dict[str, list[HintPoint]]:
        """Points by kind of hint, in order of false rate and recall."""
        found: dict[str, list[HintPoint]] = {}
        for point in sorted(self.points, key=lambda one: (one.false, one.recall)):
            found.setdefault(point.hint, []).append(point)
        return found

    def base(self, hint: str) -> Values:
        """Return the metrics without hints."""
        plain = (one.values for one in self.points if (one.hint, one.recall, one.false) == (hint, 0.0, 0.0))
        return next(plain, {})

    def result(self) -> Result:
        """Return what came of it."""
        return view(self)

    def show(self) -> None:
        """Print the tables and what hints are worth."""
        self.result().show()

    def save(self) -> list[Path]:
        """Write ``hints.csv``, ``hints.json`` and ``hints.html``; returns where. Raises ``KvyardError``."""
        return self.result().save(self.folder)


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
) -> HintStudy:
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
    study = Study(trace, folder, **options)
    study.vary({"hints": list(wanted), "seed": [str(seed) for seed in seeds]}, config, settings)
    runs: dict[tuple[str, float, float], list[Values]] = {}
    for point, report in study.done:
        for quality in wanted[point.varied["hints"]]:
            runs.setdefault(quality, []).append(read_metrics(report))
    ordered = sorted(runs, key=lambda quality: (hints.index(quality[0]), *quality[1:]))
    made = make_config(SETTINGS.merge(config, settings))
    reading = {name: value for name, value in study.reading.items() if name != "limit"}
    future = TraceFuture.of(open_trace(trace, limit=made.limit, **reading))
    points = _points({quality: runs[quality] for quality in ordered})
    return HintStudy(study.trace, fleet_words(made), points, _last_shares(future), Path(folder), study)


def quick_hints(
    trace: str | Path,
    *,
    folder: str | Path,
    recalls: Sequence[float] = RECALLS,
    falses: Sequence[float] = FALSES,
    seeds: Sequence[int] = (0, 1),
    config: Mapping[str, object] | None = None,
    **reading: Any,
) -> HintStudy:
    """Judge session ends by caches alone: no clock, no queues, no answers, each prompt to the cache with most of it.

    Caches are as many and as large as the workers of ``config``. Raises ``KvyardError`` if the trace doesn't say what prompts
    share.
    """
    made = make_config(SETTINGS.merge(config, {}))
    source = open_trace(trace, limit=made.limit, **reading)
    requests = list(source)
    future = TraceFuture.of(requests)
    numbers = {name: at for at, name in enumerate(dict.fromkeys(future.names))}
    prompts: list[Prompt] = []
    for request, name in zip(requests, future.names):
        ids, size = prefix_ids(request)
        if ids is None:
            raise KvyardError(f"{source.name}: it doesn't say what prompts share, so no cache can be judged by it")
        prompts.append(Prompt(ids, size, request.input_length, numbers[name]))
    caches = sum(kind.count * kind.dp_size for kind in made.workers)
    capacity = made.workers[0].engine.capacity_tokens // prompts[0].block_size
    runs: dict[tuple[str, float, float], list[Values]] = {}
    for recall in _with_0(recalls):
        for false in _with_0(falses):
            hint = MadeHint(kind="session-end", recall=recall, false=false)
            drawn = [[said.session_end for said in future.hints([hint], seed)] for seed in seeds]
            found = [reuse_without_time(prompts, ends, caches, capacity) for ends in drawn]
            runs["session-end", recall, false] = [{"reuse": reuse} for reuse in found]
    setting = f"{caches} caches of {capacity:,} blocks of {prompts[0].block_size} tokens, longest match, no time"
    return HintStudy(Path(trace).name, setting, _points(runs), _last_shares(future), Path(folder))


def view(found: HintStudy) -> Result:
    """Return the result: a table and curves by recall for each kind of hint, a line for each false rate."""
    study, before, after = found.study, *found.censored
    metrics = [
        metric
        for metric in METRICS.values()
        if metric.shown == "table" and any(one.values.get(metric.name) is not None for one in found.points)
    ]
    known = [name for name in SHOWN if any(metric.name == name for metric in metrics)]
    tables = {
        hint: Table(
            rows=[
                Row(cells={"recall": f"{one.recall:.2f}", "false": f"{one.false:.2f}"}, values=one.values)
                for one in points
            ],
            title=hint,
            shown=known,
            changes=[name for name in WORTH if name in known],
            base=found.base(hint),
        )
        for hint, points in found.by_hint.items()
    }
    said = [sentence for hint in tables if (sentence := worth(found, hint))]
    flatters = "cuts conversations off, which flatters hints about ends"
    cut = f"the trace's end {flatters if after > before else 'cuts no more conversations off than end before it'}"
    censoring = f"Of the last tenth of requests {after:.0%} end a conversation, before that {before:.0%}: {cut}."
    return Result(
        kind="hints",
        title="What a hint is worth",
        about=f"{found.trace} on {found.setting}; means over seeds",
        tables=list(tables.values()),
        rows=[row for points in found.by_hint.values() for row in _rows(found, points, metrics)],
        facts={
            "trace": found.trace,
            "setting": found.setting,
            "last_of_conversation": {"before": before, "last_tenth": after},
            "advice": said,
        },
        advice=said,
        notes=[censoring, *(notes(study) if study is not None else ())],
        times=times(study, "hints.csv") if study is not None else "",
        legend=f"{found.trace}: {found.setting}. Times are in ms, means over seeds.",
        sections=[
            Section(
                title=hint,
                text="Beside no hints at all.",
                tiles=list(_tiles(found, hint)),
                charts=[curves(METRICS[name], _lines(found, hint, name), "recall") for name in DRAWN if name in known],
                table=table,
            )
            for hint, table in tables.items()
        ],
        config=("Configuration of the first point", study.done[0][1].config)
        if study is not None and study.done
        else None,
    )


def worth(found: HintStudy, hint: str) -> str:
    """Return what a hint of middling recall is worth that is never wrong; empty if that wasn't run."""
    right = [one for one in found.by_hint[hint] if not one.false and 0 < one.recall < 1]
    if not right:
        return ""
    one = min(right, key=lambda point: abs(point.recall - 0.5))
    metrics = [METRICS[name] for name in WORTH if one.values.get(name) is not None]
    changed = changes(metrics, one.values, found.base(hint))
    return f"{hint}, given at {one.recall:.0%} of the places where it could be and never wrongly, beside no hints: {changed}."


def fleet_words(config: ReplayConfig) -> str:
    """Return a fleet in a few words."""
    workers = sum(kind.count for kind in config.workers)
    engine = config.workers[0].engine
    tiers = "".join(
        f", {tier.place} of {one.num_blocks:,} blocks" if one.num_blocks is not None else f", {tier.place}"
        for tier, one in (engine.tiers.levels if engine.tiers is not None else ())
    )
    sizes = f"{engine.num_gpu_blocks:,} blocks of {engine.specs[0].block_size} tokens"
    return f"{workers} workers of {sizes}{tiers}, router {config.router.policy}, eviction {engine.eviction}"


def _rows(found: HintStudy, points: Sequence[HintPoint], metrics: Sequence[Metric]) -> Iterator[dict[str, Any]]:
    for one in points:
        row: dict[str, Any] = {"hint": one.hint, "recall": one.recall, "false": one.false}
        base = found.base(one.hint)
        for metric in metrics:
            row[metric.column] = one.values[metric.name]
        for metric in metrics:
            value, none = one.values[metric.name], base.get(metric.name)
            row[f"{metric.column}_gain"] = None if value is None or none is None else value - none
        yield row | {f"{metric.column}_spread": one.spread[metric.name] for metric in metrics}


def _tiles(found: HintStudy, hint: str) -> Iterator[str]:
    """No hints, and the best hints there are."""
    best = max((one for one in found.by_hint[hint] if not one.false), key=lambda one: one.recall, default=None)
    base = found.base(hint)
    for metric in (METRICS[name] for name in WORTH):
        if best is not None and base.get(metric.name) is not None:
            old, new = base[metric.name], best.values[metric.name]
            unit = "ms" if metric.unit == "ms" else ""
            more = f"{metric.change_text(new, old)} from no hints to recall {best.recall:.0%}"
            yield tile(metric.title, f"{metric.text(old)} → {metric.text(new)}", unit, more)


def _lines(found: HintStudy, hint: str, name: str) -> Lines:
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for one in found.by_hint[hint]:
        lines.setdefault(f"{one.false:.0%} false", []).append((one.recall, one.values[name]))
    return lines


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
    for share in shares:
        if not 0 <= share <= 1:
            raise KvyardError(f"a recall and a false rate are shares from 0 to 1, not {share:g}")
    return sorted({0.0, *map(float, shares)})


def _points(runs: Mapping[tuple[str, float, float], Sequence[Values]]) -> list[HintPoint]:
    return [HintPoint(*quality, means(found), spreads(found)) for quality, found in runs.items()]


def _last_shares(future: TraceFuture) -> tuple[float, float]:
    cut = len(future.ends) - len(future.ends) // 10
    before, after = future.ends[:cut], future.ends[cut:]
    return sum(before) / max(1, len(before)), sum(after) / max(1, len(after))
