"""Points of a study: combinations of settings, and the key that each one's report is kept under."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec
import xxhash

from kvyard import __version__
from kvyard.errors import KvyardError
from kvyard.files import encode_json
from kvyard.lab.jobs import TracePart
from kvyard.replay.config import ReplayConfig
from kvyard.replay.settings import SETTINGS, make_config

MOST = 10_000
"""Points of a grid, at most."""


RANGE = re.compile(r"[\w.]+\.\.[\w.]+")
"""Form of the ranges that ``tune`` searches."""


class Point(msgspec.Struct, frozen=True):
    """One replay of a study."""

    varied: dict[str, str]
    """Settings in which it differs from the other points, as they were written."""
    config: ReplayConfig
    key: str
    """Hash of everything that its report depends on."""
    part: TracePart | None = None
    """Requests that are replayed, if not all."""

    @property
    def label(self) -> str:
        """Name for people."""
        return ", ".join(f"{name}={value}" for name, value in self.varied.items()) or "base"


class Grid(msgspec.Struct, frozen=True):
    """All combinations of some settings, the last of them varying fastest."""

    axes: dict[str, list[str]]
    points: list[Point]
    base: Mapping[str, object] = {}
    """Settings that all points share."""

    def settings(self, point: Point) -> dict[str, object]:
        """Return all settings of ``point``."""
        return {**self.base, **point.varied}


def parse_vary(texts: Iterable[str]) -> dict[str, list[str]]:
    """Return axes from texts such as ``host_blocks=0,20k,80k``. Values that contain commas are separated by ``;``.

    Raises ``KvyardError``.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        parts = [part.strip() for part in values.split(";" if ";" in values else ",")]
        if not equals or not all(parts):
            raise KvyardError(f"{text!r} is nothing to vary: write NAME=VALUE,VALUE, as in host_blocks=0,20k,80k")
        if len(parts) == 1 and RANGE.fullmatch(parts[0]):
            raise KvyardError(f"{text!r} is a range, which kvyard tune takes: write the values, as in {name}=1,2,4,8")
        if name in axes:
            raise KvyardError(f"{name} is varied twice: put all its values into one")
        axes[name] = parts
    return axes


def make_grid(
    base: Mapping[str, object], vary: Mapping[str, Sequence[object]], about: Mapping[str, object] | None = None
) -> Grid:
    """Return all combinations of ``vary`` on top of ``base``, each checked before anything runs.

    ``about`` is what reports depend on besides settings: the trace, the SLO. Raises ``KvyardError``, naming the point.
    """
    if not vary:
        raise KvyardError("a sweep varies something: say what, as in --vary host_blocks=0,20k,80k")
    SETTINGS.check_names(vary, " to vary")
    vary = SETTINGS.named(vary)
    axes: dict[str, list[str]] = {}
    for name, values in vary.items():
        if isinstance(values, str) or not values:
            raise KvyardError(f"{name} is varied over {values!r}: give a list of values")
        if base.get(name) is not None:
            raise KvyardError(f"{name} is both set and varied: leave one of the two out")
        axes[name] = [str(value) for value in values]
        if len(set(axes[name])) < len(axes[name]):
            raise KvyardError(f"{name} is varied over the same value twice: {', '.join(axes[name])}")
    total = 1
    for choices in axes.values():
        total *= len(choices)
    if total > MOST:
        raise KvyardError(f"that is a grid of {total:,} points, and {MOST:,} are the most: vary less at once")
    points = []
    for combination in product(*vary.values()):
        varied = dict(zip(axes, combination, strict=True))
        label = ", ".join(f"{name}={value}" for name, value in varied.items())
        try:
            config = make_config({**base, **varied})
        except KvyardError as error:
            raise KvyardError(f"at the point {label}: {error}") from None
        written = {name: str(value) for name, value in varied.items()}
        points.append(Point(written, config, point_key(config, about or {})))
    return Grid(axes, points, dict(base))


def point_key(config: ReplayConfig | None, about: Mapping[str, object]) -> str:
    """Return the key of a replay: equal replays have equal keys, however they were written."""
    value = {"version": __version__, "config": config, "about": dict(about)}
    return xxhash.xxh3_128_hexdigest(encode_json(value, order="deterministic"))


def fingerprint(path: str | Path) -> str:
    """Return a hash of a trace's content. Raises ``KvyardError`` if it can't be read."""
    path = Path(path)
    hashed = xxhash.xxh3_128()
    try:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            hashed.update(b"" if file == path else str(file.relative_to(path)).encode())
            with file.open("rb") as opened:
                while chunk := opened.read(1 << 20):
                    hashed.update(chunk)
    except FileNotFoundError:
        raise KvyardError(f"{path}: no such file") from None
    except OSError as error:
        raise KvyardError(f"can't read {path}: {error.strerror}") from None
    return hashed.hexdigest()
