"""``kvyard tune``: points that Optuna asks for are replayed on one part of a trace, and the best is tested on another.

A point is first replayed on a prefix of its part, and given up if that is hopeless; one whose cost alone decides isn't
replayed. Finished replays are kept as files, the search as one more, so the same call goes on where it was interrupted.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvyard.errors import KvyardError
from kvyard.integers import ceil_div
from kvyard.lab.jobs import TracePart
from kvyard.lab.study import Study, own_options
from kvyard.lab.study.certainty import evidence_of
from kvyard.lab.study.cost import Prices, cost
from kvyard.lab.study.goals import Goal, judged
from kvyard.lab.study.grid import point_key
from kvyard.lab.tune.optuna_search import STARTUP, OptunaSearch, Suggestion
from kvyard.lab.tune.parts import cut
from kvyard.lab.tune.space import parse_space
from kvyard.lab.tune.trial import Trial, make_trial
from kvyard.lab.tune.view import Tuned
from kvyard.replay.report import Report
from kvyard.replay.report.metrics import COST
from kvyard.replay.report.slo import Limit, missed, without_value
from kvyard.replay.settings import SETTINGS

JOURNAL = "study.journal"
FREE = 5
"""After this many points in a row that needed no replay, every second one is drawn at random."""
IDLE = 60
"""After this many of them a search ends: there is nothing new to look at."""
HOPELESS = 0.5
"""A point is given up if a prefix misses the limits by more than this share, and by more than the best so far does."""
MOST_TESTED = 8
"""Points of a Pareto front that are replayed on the part for the test."""
Judged = tuple[dict[str, float | None], float]
"""Metrics, and by how much they miss the limits."""


def tune(
    trace: str | Path,
    search: str | Sequence[str],
    goals: Sequence[Goal],
    limits: Sequence[Limit] = (),
    *,
    folder: str | Path,
    trials: int = 60,
    test: float = 0.3,
    seed: int | None = None,
    prices: Prices = Prices(),  # noqa: B008 - a frozen value
    config: str | Path | Mapping[str, object] | None = None,
    **more: Any,
) -> Tuned:
    """Search for settings of a fleet that keep ``limits`` and are best by ``goals``, with at most ``trials`` of them replayed.

    ``search`` is as ``parse_space`` takes it; ``config`` and ``more`` as for ``sweep``, without an SLO. The last ``test`` share
    of the trace's time isn't searched on; the best is replayed there afterwards. As many points are replayed at a time as
    the executor has jobs; the same number and ``seed`` (the replays', unless given) give the same search. Raises
    ``KvyardError`` before anything runs for what makes no sense. A KeyboardInterrupt ends it; what is finished stays in
    ``folder``, and the same call goes on from there.
    """
    if trials < 1:
        raise KvyardError(f"trials must be at least 1, got {trials}")
    options, settings = own_options(more)
    base = SETTINGS.merge(config, settings)
    limit = SETTINGS.parse({"limit": base.pop("limit", None)}).get("limit")
    if seed is None:
        seed = SETTINGS.parse({"seed": base.get("seed")}).get("seed", 0)
    space = parse_space([search] if isinstance(search, str) else search, base)
    study = Study(trace, folder, **options, limit=limit)
    parts = cut(study.source, test, SETTINGS.parse({"max_tokens": base.get("max_tokens")}).get("max_tokens"))
    tuned = Tuned(
        trace=study.trace,
        folder=study.folder,
        base=base,
        space=space,
        goals=list(goals),
        limits=list(limits),
        prices=prices,
        parts=parts,
        seed=seed,
    )
    _Search(tuned, study, trials).run()
    return tuned


class _Search:
    """A search that is running."""

    def __init__(self, tuned: Tuned, study: Study, trials: int) -> None:
        self._tuned = tuned
        self._study = study
        self._trials = trials
        self._prefixes: list[float] = []
        """Losses on the prefix of points that were then replayed as a whole, with one goal."""
        study.make_folder()
        asked = {"goals": tuned.goals, "limits": tuned.limits, "prices": tuned.prices, "space": tuned.space}
        asked |= {"base": tuned.base, "seed": tuned.seed, "parts": tuned.parts}
        name = point_key(None, {**study.about, **asked})
        self._optuna = OptunaSearch(tuned.folder / JOURNAL, name, tuned.space, len(tuned.goals), tuned.seed)

    def run(self) -> None:
        tuned = self._tuned
        seen: set[str] = set()
        for suggestion in self._optuna.suggestions():
            trial = self._trial(suggestion)
            self._recall(trial, suggestion.note, trial.identity not in seen)
            seen.add(trial.identity)
            tuned.trials.append(trial)
        tuned.found = tuned.replayed
        self._count()
        try:
            while tuned.replayed < self._trials and (idle := tuned.idle) < IDLE and not tuned.exhausted:
                drawn = idle >= FREE and idle % 2 == 0
                self._round(self._optuna.ask(min(self._study.executor.jobs, self._trials - tuned.replayed), drawn))
            self._test()
        except KeyboardInterrupt:
            tuned.interrupted = True
        tuned.importance = self._optuna.importance(self._badness())

    def _round(self, asked: Sequence[Suggestion]) -> None:
        """Replay some points at a time, and report them in the order in which they were asked for."""
        trials = [self._trial(suggestion) for suggestion in asked]
        seen = {trial.identity: trial for trial in self._tuned.trials}
        fresh: dict[str, Trial] = {}
        for trial in trials:
            if trial.state == "done" and trial.identity not in seen:
                self._skip(trial)
                if trial.state == "done":
                    fresh.setdefault(trial.identity, trial)
        prefixes = self._replay(fresh.values(), self._tuned.parts.prefix)
        losses: dict[str, float] = {}
        for identity, outcome in prefixes.items():
            self._prune(fresh[identity], *outcome, losses)
        whole = [trial for trial in fresh.values() if trial.state == "done"]
        for identity, (values, violation) in self._replay(whole, self._tuned.parts.train).items():
            fresh[identity].values, fresh[identity].violation = values, violation
            if identity in losses:
                self._prefixes.append(losses[identity])
        for suggestion, trial in zip(asked, trials, strict=True):
            same = seen.get(trial.identity) or fresh.get(trial.identity)
            if same is not None and same is not trial and trial.config is not None:
                trial.state, trial.why, trial.values, trial.violation = (
                    same.state,
                    same.why,
                    same.values,
                    same.violation,
                )
            self._tell(suggestion, trial, losses.get(trial.identity))
            self._tuned.trials.append(trial)
            self._count()

    def _trial(self, suggestion: Suggestion) -> Trial:
        tuned = self._tuned
        return make_trial(suggestion.number, suggestion.point, tuned.base, tuned.space, tuned.prices, tuned.limits)

    def _skip(self, trial: Trial) -> None:
        """Leave out a point whose replay is known."""
        tuned = self._tuned
        if trial.violation > 0:
            trial.state, trial.why = "skipped", "it costs more than the limit"
        elif tuned.metrics == [COST] and tuned.met and trial.cost > tuned.best[0].cost:
            trial.state, trial.why = "skipped", "a cheaper point keeps the limits"

    def _prune(
        self, trial: Trial, values: Mapping[str, float | None], violation: float, losses: dict[str, float]
    ) -> None:
        """Give up a point that does badly on a prefix of the trace."""
        tuned = self._tuned
        closest = min((trial.violation for trial in tuned.trials if trial.state == "done"), default=float("inf"))
        if violation > max(HOPELESS, closest):
            why = missed(values, tuned.limits)
            trial.state, trial.why, trial.violation = "pruned", f"on a prefix of the trace {why}", violation
        if len(tuned.goals) > 1 or tuned.metrics == [COST]:
            return
        value = values[tuned.goals[0].name]
        assert value is not None
        loss = losses[trial.identity] = tuned.metrics[0].loss(value)
        known = len(self._prefixes) >= STARTUP
        if trial.state == "done" and violation <= 0 and known and loss > median(self._prefixes):
            trial.state, trial.why = "pruned", "half of the points do better on a prefix of the trace"

    def _tell(self, suggestion: Suggestion, trial: Trial, prefix: float | None) -> None:
        note = {"state": trial.state, "why": trial.why, "violation": trial.violation, "prefix": prefix}
        if trial.state == "done":
            self._optuna.tell(suggestion, "done", trial.losses(self._tuned.metrics), trial.violation, note)
        else:
            self._optuna.tell(suggestion, "pruned", [] if prefix is None else [prefix], trial.violation, note)

    def _recall(self, trial: Trial, note: Mapping[str, Any], first: bool) -> None:
        """Restore a point from its note of an earlier run and from its report, which is made again if it is gone.

        Points that were asked for twice in one round have the same note: their prefix counts for the ``first``.
        """
        trial.state, trial.why, trial.violation = note["state"], note["why"], note["violation"]
        if trial.state == "done" and trial.config is not None:
            judged = self._replay([trial], self._tuned.parts.train)
            if not judged:
                raise KvyardError(f"point {trial.number} can't be replayed any more: {trial.why}")
            ((trial.values, trial.violation),) = judged.values()
            if note["prefix"] is not None and first:
                self._prefixes.append(note["prefix"])

    def _replay(self, trials: Iterable[Trial], part: TracePart | None) -> dict[str, Judged]:
        """Return metrics of ``trials`` on a part of the trace, by identity; those that fail get a reason."""
        if part is None:
            return {}
        tuned, study = self._tuned, self._study
        points = []
        for trial in trials:
            assert trial.config is not None
            points.append((trial, study.point(tuned.space.flat(trial.point), trial.config, part)))
        reports = study.replay([point for _, point in points])
        results: dict[str, Judged] = {}
        for trial, point in points:
            report = reports.get(point.key)
            if report is None:
                trial.fail(study.failures[point.key])
                continue
            price = self._price(trial, report)
            if part == tuned.parts.train:
                trial.cost, trial.evidence = price, evidence_of(report)
            values, violation = judged(report, price, tuned.limits)
            absent = [goal.name for goal in tuned.goals if values[goal.name] is None]
            if absent and part != tuned.parts.test:
                trial.fail(f"no request has a metric {absent[0]}: that can't be a goal here")
            elif (name := without_value(values, tuned.limits)) and part != tuned.parts.test:
                trial.fail(f"no request has a metric {name}: that can't be limited here")
            else:
                results[trial.identity] = values, violation
        return results

    def _price(self, trial: Trial, report: Report) -> float:
        if trial.config is None or report.scaling is None:
            return float(trial.cost)
        return cost(self._tuned.settings(trial), trial.config, self._tuned.prices, report.scaling.mean_workers)

    def _test(self) -> None:
        """Replay the best on the part that was kept for it; of a front, some of it."""
        tuned = self._tuned
        answer, front = tuned.answer, tuned.best
        chosen = {trial.identity: trial for trial in ([answer] if answer is not None else [])}
        chosen |= {trial.identity: trial for trial in front[:: max(1, ceil_div(len(front), MOST_TESTED))]}
        for identity, (values, violation) in self._replay(chosen.values(), tuned.parts.test).items():
            chosen[identity].test, chosen[identity].test_violation = values, violation

    def _badness(self) -> dict[int, float]:
        """Return one number per point for the first goal: those that miss limits are worse than all that don't."""
        done = [trial for trial in self._tuned.trials if trial.state == "done"]
        losses = {trial.number: trial.losses(self._tuned.metrics)[0] for trial in done}
        worst = max(losses.values(), default=0.0)
        scale = max(1.0, abs(worst))
        return {
            trial.number: losses[trial.number] if trial.met else worst + scale * (1 + trial.violation) for trial in done
        }

    def _count(self) -> None:
        self._study.counted(self._trials, min(self._trials, self._tuned.replayed))
