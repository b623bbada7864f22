"""Runs that differ in their seed alone, as one: means and spreads. And settings that a study varies by itself."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from kvyard.errors import KvyardError
from kvyard.lab.study.table import Values


def means(runs: Sequence[Values]) -> dict[str, float | None]:
    """Return the mean of each metric over ``runs`` that have it."""
    return {name: fmean(values) if (values := _known(runs, name)) else None for name in runs[0]}


def spreads(runs: Sequence[Values]) -> dict[str, float | None]:
    """Return the largest less the smallest value of each metric."""
    return {name: max(values) - min(values) if (values := _known(runs, name)) else None for name in runs[0]}


def not_set(flags: Mapping[str, str], study: str, config: object, settings: Mapping[str, object]) -> None:
    """Raise ``KvyardError`` if a setting is given that ``study`` varies; ``flags`` says by which flag, per setting."""
    given = {**config, **settings} if isinstance(config, Mapping) else settings
    for name, flag in flags.items():
        if given.get(name) is not None:
            raise KvyardError(f"{name} is what {study} varies: say {flag} instead")


def _known(runs: Sequence[Values], name: str) -> list[float]:
    return [value for run in runs if (value := run[name]) is not None]
