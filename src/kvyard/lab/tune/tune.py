"""A search over settings of a fleet: points that Optuna asks for are replayed on one part of a trace, and the best is tested on
another.

A point is first looked at on a prefix of its part, and given up where that is hopeless; one that can be told without a replay
(its cost is known beforehand) isn't replayed. Finished replays are kept as files, the search as one more, so the same call
goes on where it was interrupted.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvyard.errors import KvyardError
from kvyard.lab.jobs import Executor, LocalExecutor, Task, Told, TracePart
from kvyard.lab.sweep.grid import fingerprint, point_key
from kvyard.lab.sweep.run import POINTS, kept_report
from kvyard.lab.tune.cost import Prices, cost
from kvyard.lab.tune.goals import COST, LOST, Goal, Limit
from kvyard.lab.tune.look import Look, judged, look_at
from kvyard.lab.tune.parts import cut
from kvyard.lab.tune.space import parse_space
from kvyard.lab.tune.study import STARTUP, Trial, TuneStudy
from kvyard.lab.tune.tuned import Tuned
from kvyard.replay.report import Report
from kvyard.replay.report.files import read_report
from kvyard.replay.settings import SETTINGS
from kvyard.replay.traces import open_trace

JOURNAL = "study.journal"
FREE = 5
"""After so many points in a row that needed no replay, every second one is drawn at random."""
IDLE = 60
"""After so many of them a search ends: there is nothing new to look at."""
HOPELESS = 0.5
"""A point is given up where a prefix misses the limits by more than this share, and by more than the best so far does."""
MOST_TESTED = 8
"""Points of a Pareto front that are replayed on the part for the test."""

Counted = Callable[[int, int], None]
"""Told how many points are to be replayed, and how many were."""


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
    executor: Executor | None = None,
    format: str | None = None,
    skip_bad: bool = False,
    sort: bool = False,
    trace_block_size: int | None = None,
    chain_ids: bool = False,
    progress: Told | None = None,
    counted: Counted | None = None,
    **settings: Any,
) -> Tuned:
    """Search for settings of a fleet that keep ``limits`` and are best by ``goals``, with at most ``trials`` of them replayed.

    What is searched says ``search``, as ``parse_space`` takes it; the rest by ``config`` and ``settings`` as for ``replay``.
    The last ``test`` share of the trace's time is not searched on: the best is replayed there afterwards. ``executor`` runs
    the replays, as many points at a time as it has jobs; the same number and ``seed`` (the replays', unless given) give the
    same search. Raises
    ``KvyardError`` before anything runs for what makes no sense. A KeyboardInterrupt ends it; what is finished stays in
    ``folder``, and the same call goes on from there.
    """
    if trials < 1:
        raise KvyardError(f"trials must be at least 1, got {trials}")
    base = SETTINGS.merge(config, settings)
    limit = SETTINGS.parse({"limit": base.pop("limit", None)}).get("limit")
    if seed is None:
        seed = SETTINGS.parse({"seed": base.get("seed")}).get("seed", 0)
    space = parse_space([search] if isinstance(search, str) else search, base)
    reading: dict[str, Any] = {
        "format": format,
        "skip_bad": skip_bad,
        "sort": sort,
        "trace_block_size": trace_block_size,
        "limit": limit,
    }
    if chain_ids:
        reading["chain_ids"] = True
    source = open_trace(trace, **reading)
    source.first  # noqa: B018 - refuses an empty one
    parts = cut(source, test)
    made = Tuned(Path(trace).name, Path(folder), base, space, list(goals), list(limits), prices, parts, seed)
    about = {"trace": fingerprint(trace), "reading": {**reading, "format": source.format}}
    crew = executor or LocalExecutor()
    _Search(made, str(trace), reading, about, crew, trials, progress, counted).run()
    return made


class _Search:
    """A search under way."""

    def __init__(
        self,
        made: Tuned,
        trace: str,
        reading: Mapping[str, Any],
        about: Mapping[str, object],
        crew: Executor,
        trials: int,
        progress: Told | None,
        counted: Counted | None,
    ) -> None:
        self._made = made
        self._trace = trace
        self._reading = reading
        self._about = about
        self._crew = crew
        self._trials = trials
        self._progress = progress
        self._counted = counted
        self._kept = made.folder / POINTS
        self._prefixes: list[float] = []
        """Losses on the prefix of points that were then replayed as a whole, with one goal."""
        try:
            self._kept.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KvyardError(f"can't make the folder {self._kept}: {error.strerror}") from None
        what = {
            "goals": made.goals,
            "limits": made.limits,
            "prices": made.prices,
            "space": made.space,
            "base": made.base,
        }
        name = point_key(None, {**about, **what, "seed": made.seed, "parts": made.parts})
        self._study = TuneStudy(made.folder / JOURNAL, name, made.space, len(made.goals), made.seed)

    def run(self) -> None:
        made = self._made
        seen: set[str] = set()
        for trial in self._study.told():
            look = self._look(trial)
            self._recall(look, trial.note, look.name not in seen)
            seen.add(look.name)
            made.looks.append(look)
        made.found = made.replayed
        self._count()
        try:
            while made.replayed < self._trials and (idle := made.idle) < IDLE and not made.exhausted:
                drawn = idle >= FREE and idle % 2 == 0
                self._round(self._study.ask(min(self._crew.jobs, self._trials - made.replayed), drawn))
            self._test()
        except KeyboardInterrupt:
            made.interrupted = True
        made.importance = self._study.importance(self._badness())

    def _round(self, asked: Sequence[Trial]) -> None:
        """Look at some points at a time, and tell of them in the order in which they were asked for."""
        looks = [self._look(trial) for trial in asked]
        seen = {one.name: one for one in self._made.looks}
        fresh: dict[str, Look] = {}
        for look in looks:
            if look.state == "done" and look.name not in seen:
                self._skip(look)
                if look.state == "done":
                    fresh.setdefault(look.name, look)
        prefixes = self._replay(fresh.values(), self._made.parts.prefix)
        losses: dict[str, float] = {}
        for name, look in list(fresh.items()):
            if name in prefixes or look.state == "failed":
                self._prune(look, prefixes.get(name), losses)
        whole = [look for look in fresh.values() if look.state == "done"]
        for name, (figures, violation) in self._replay(whole, self._made.parts.train).items():
            fresh[name].figures, fresh[name].violation = figures, violation
            if name in losses:
                self._prefixes.append(losses[name])
        for trial, look in zip(asked, looks, strict=True):
            twin = seen.get(look.name) or fresh.get(look.name)
            if twin is not None and twin is not look and look.config is not None:
                look.state, look.why, look.figures, look.violation = twin.state, twin.why, twin.figures, twin.violation
            self._tell(trial, look, losses.get(look.name))
            self._made.looks.append(look)
            self._count()

    def _look(self, trial: Trial) -> Look:
        made = self._made
        return look_at(trial.number, trial.point, made.base, made.prices, made.limits)

    def _skip(self, look: Look) -> None:
        """Leave out what a replay could tell nothing new of."""
        made = self._made
        if look.violation > 0:
            look.state, look.why = "skipped", "it costs more than the limit"
        elif [goal.name for goal in made.goals] == [COST] and made.met and look.cost > made.best[0].cost:
            look.state, look.why = "skipped", "a cheaper point keeps the limits"

    def _prune(self, look: Look, prefix: tuple[dict[str, float], float] | None, losses: dict[str, float]) -> None:
        """Give up what does badly on a prefix of the trace."""
        made = self._made
        if prefix is None:
            return
        figures, violation = prefix
        done = [one for one in made.looks if one.state == "done"]
        closest = min((one.violation for one in done), default=float("inf"))
        if violation > max(HOPELESS, closest):
            look.state, look.why, look.violation = "pruned", "a prefix of the trace misses the limits by far", violation
        if len(made.goals) > 1 or made.goals[0].name == COST:
            return
        loss = losses[look.name] = made.goals[0].loss(figures[made.goals[0].name])
        if look.state == "done" and violation <= 0 and len(self._prefixes) >= STARTUP and loss > median(self._prefixes):
            look.state, look.why = "pruned", "half of the points do better on a prefix of the trace"

    def _tell(self, trial: Trial, look: Look, prefix: float | None) -> None:
        note = {"state": look.state, "why": look.why, "violation": look.violation, "prefix": prefix}
        if look.state == "done":
            self._study.tell(trial, "done", look.losses(self._made.goals), look.violation, note)
        else:
            self._study.tell(trial, "pruned", [] if prefix is None else [prefix], look.violation, note)

    def _recall(self, look: Look, note: Mapping[str, Any], first: bool) -> None:
        """What was told of a point in an earlier run; its figures are in its report, which is made again if it is gone.

        Points that were asked for twice in one round have the same note: their prefix counts for the ``first``.
        """
        look.state, look.why, look.violation = note["state"], note["why"], note["violation"]
        if look.state == "done" and look.config is not None:
            found = self._replay([look], self._made.parts.train)
            if not found:
                raise KvyardError(f"point {look.number} can't be replayed any more: {look.why}")
            ((look.figures, look.violation),) = found.values()
            if note["prefix"] is not None and first:
                self._prefixes.append(note["prefix"])

    def _replay(self, looks: Any, part: TracePart | None) -> dict[str, tuple[dict[str, float], float]]:
        """Figures of ``looks`` on a part of the trace, and by how much they miss the limits; those that fail get a reason."""
        found: dict[str, tuple[dict[str, float], float]] = {}
        if part is None:
            return found
        tasks: dict[str, Task] = {}
        by_key: dict[str, Look] = {}
        for look in looks:
            assert look.config is not None
            key = point_key(look.config, {**self._about, "part": part})
            by_key[key] = look
            path = self._kept / f"{key}.json"
            if kept_report(path) is None:
                label = ", ".join(f"{name}={value}" for name, value in self._made.space.flat(look.point).items())
                tasks[key] = Task(self._trace, self._reading, look.config, None, label, str(path), key, part)

        def ended(key: str, why: str | None) -> None:
            if why is not None:
                look = by_key[key]
                look.state, look.why, look.violation = "failed", why, LOST

        if tasks:
            self._crew.run(list(tasks.values()), ended, self._progress)
        for key, look in by_key.items():
            if look.state != "failed":
                report = read_report(self._kept / f"{key}.json")
                price = self._price(look, report)
                if part == self._made.parts.train:
                    look.cost = price
                figures, violation = judged(report, price, self._made.limits)
                absent = [goal.name for goal in self._made.goals if goal.name not in figures]
                if absent and part != self._made.parts.test:
                    why = f"no request has a figure {absent[0]}: that can't be a goal here"
                    look.state, look.why, look.violation = "failed", why, LOST
                    continue
                found[look.name] = figures, violation
        return found

    def _price(self, look: Look, report: Report) -> float:
        if look.config is None or report.scaling is None:
            return look.cost
        made = self._made
        return cost(made.settings(look), look.config, made.prices, report.scaling.mean_workers)

    def _test(self) -> None:
        """Replay the best on the part that was kept for it; of a front, some of it."""
        made = self._made
        answer = made.answer
        chosen = {one.name: one for one in ([answer] if answer is not None else [])}
        front = made.best
        step = max(1, -(-len(front) // MOST_TESTED))
        chosen |= {one.name: one for one in front[::step]}
        for name, (figures, violation) in self._replay(chosen.values(), made.parts.test).items():
            chosen[name].test, chosen[name].test_violation = figures, violation

    def _badness(self) -> dict[int, float]:
        """One number per point for the first goal: those that miss limits are worse than all that don't."""
        done = [one for one in self._made.looks if one.state == "done"]
        losses = {one.number: one.losses(self._made.goals)[0] for one in done}
        worst = max(losses.values(), default=0.0)
        scale = max(1.0, abs(worst))
        return {one.number: losses[one.number] if one.met else worst + scale * (1 + one.violation) for one in done}

    def _count(self) -> None:
        if self._counted is not None:
            self._counted(self._trials, min(self._trials, self._made.replayed))
