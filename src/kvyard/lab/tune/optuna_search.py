"""Optuna chooses the next points of a search, and keeps them in a file so that it can go on. Only this module knows Optuna.

The next point follows from the seed and from the results reported so far, and from nothing else: a search that was
interrupted and goes on asks for the same points as one that wasn't.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvyard.errors import KvyardError
from kvyard.lab.tune.space import Space

STARTUP = 10
"""Points that are drawn before any conclusion is."""
POPULATION = 12
"""Population of a search with several goals."""
CONSTRAINT = "slo"
NOTE = "kvyard"
State = Literal["done", "pruned"]


class _Choosing:
    """Chooses as Optuna suggests for one trial."""

    def __init__(self, trial: Any) -> None:
        self._trial = trial

    def choice(self, name: str, count: int, /) -> int:
        return int(self._trial.suggest_categorical(name, list(range(count))))

    def step(self, name: str, count: int, /) -> int:
        return int(self._trial.suggest_int(name, 0, count - 1))

    def real(self, name: str, low: float, high: float, log: bool, /) -> float:
        return float(self._trial.suggest_float(name, low, high, log=log))


class _Chosen:
    """Chooses as it was chosen before."""

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        self._chosen = chosen

    def choice(self, name: str, count: int, /) -> int:
        return int(self._chosen[name])

    step = choice

    def real(self, name: str, low: float, high: float, log: bool, /) -> float:
        return float(self._chosen[name])


class Suggestion(NamedTuple):
    """A point that was asked for."""

    number: int
    point: dict[str, object]
    note: Mapping[str, Any]
    """The note of ``tell``; empty before that."""
    handle: Any
    """Optuna's trial, for ``tell``."""


class OptunaSearch:
    """A search in a file."""

    def __init__(self, path: Path, name: str, space: Space, goals: int, seed: int) -> None:
        """Go on with the search ``name`` in ``path``, or begin it. All ``goals`` are to be small. Raises ``KvyardError`` if
        Optuna isn't installed, or the file is none of its own.
        """
        self._optuna = optuna = _optuna()
        self._space = space
        self._seed = seed
        self._several = goals > 1
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            with _quiet():
                storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
                self._study = optuna.create_study(
                    storage=storage, study_name=name, directions=["minimize"] * goals, load_if_exists=True
                )
        except OSError as error:
            raise KvyardError(f"can't write {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KvyardError(
                f"{path} can't be read as a search's file ({error}): remove it; finished replays are kept elsewhere"
            ) from None
        running = optuna.trial.TrialState.RUNNING
        for left in self._study.get_trials(deepcopy=False, states=(running,)):
            # An earlier run was interrupted in the middle of it: it is the first to be asked for again.
            self._study.tell(left.number, state=optuna.trial.TrialState.FAIL)
            self._study.enqueue_trial(left.params)

    def suggestions(self) -> Iterator[Suggestion]:
        """Yield all points whose outcome is known, in the order in which they were asked for."""
        state = self._optuna.trial.TrialState
        for trial in self._study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED)):
            yield Suggestion(trial.number, self._space.pick(_Chosen(trial.params)), trial.user_attrs[NOTE], None)

    def ask(self, count: int, drawn: bool = False) -> list[Suggestion]:
        """Return the next ``count`` points; ``drawn`` at random, if what is known leads nowhere new."""
        state = self._optuna.trial.TrialState
        through = len(self._study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED)))
        suggestions = []
        for offset in range(count):
            self._study.sampler = self._sampler(through + offset, drawn)
            with _quiet():
                trial = self._study.ask()
                suggestions.append(Suggestion(trial.number, self._space.pick(_Choosing(trial)), {}, trial))
        return suggestions

    def tell(
        self, trial: Suggestion, state: State, losses: Sequence[float], violation: float, note: Mapping[str, Any]
    ) -> None:
        """Note the result of a point: its loss by each goal, by how much it misses the limits, and a note for later runs."""
        trial.handle.set_user_attr(NOTE, dict(note))
        trial.handle.set_constraint(CONSTRAINT, violation)
        with _quiet():
            if state == "done":
                self._study.tell(trial.handle, list(losses))
                return
            if losses and not self._several:
                trial.handle.report(losses[0], 0)
            self._study.tell(trial.handle, state=self._optuna.trial.TrialState.PRUNED)

    def importance(self, badness: Mapping[int, float]) -> dict[str, float]:
        """Return the settings that decide if a point is among the good ones, as shares of 1; ``badness`` is by trial
        number.

        Empty if too little is known.
        """
        known = [trial for trial in self._study.get_trials(deepcopy=False) if trial.number in badness]
        complete = [trial for trial in known if trial.state == self._optuna.trial.TrialState.COMPLETE]
        if len(complete) < STARTUP or len({badness[trial.number] for trial in complete}) < 2:
            return {}
        with _quiet():
            study = self._optuna.create_study(direction="minimize")
            for trial in complete:
                study.add_trial(
                    self._optuna.trial.create_trial(
                        params=trial.params, distributions=trial.distributions, value=badness[trial.number]
                    )
                )
            evaluator = self._optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
            importances = self._optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {str(name): float(value) for name, value in importances.items()}

    def _sampler(self, number: int, drawn: bool) -> Any:
        samplers = self._optuna.samplers
        seed = (self._seed * 1_000_003 + number) % (1 << 31)
        with _quiet():
            if drawn:
                return samplers.RandomSampler(seed=seed)
            if self._several:
                return samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
            return samplers.TPESampler(n_startup_trials=STARTUP, multivariate=True, group=True, seed=seed)


class _quiet(warnings.catch_warnings):
    """Without Optuna's remarks on what it calls experimental."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise KvyardError(f"a search needs {error.name}: pip install 'kvyard[search]'") from None
    return optuna
