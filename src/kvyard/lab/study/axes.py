"""Axes of charts: which setting runs along, in which unit, and where its values lie."""

from collections.abc import Sequence

from kvyard.errors import KvyardError
from kvyard.events.tier import LOWER_TIERS
from kvyard.replay.settings import SETTINGS

ROOMS = {f"{tier.label}_{unit}": tier for tier in LOWER_TIERS for unit in ("blocks", "bytes")}
ALONG = (*ROOMS, "num_gpu_blocks", "gpu_memory", "workers")
"""Settings that run along the axis before others: people ask about them."""
UNITS = {
    **{
        name: f"{'GB' if name.endswith('bytes') else 'blocks'} of {tier.place} per worker"
        for name, tier in ROOMS.items()
    },
    "num_gpu_blocks": "blocks on each device",
    "gpu_memory": "GB of each card",
    "event_lag": "event lag, ms",
    "workers": "workers",
    "concurrency": "sessions in flight",
    "speedup": "speed-up of arrivals",
}
SCALES = {**{name: 1e9 for name in ROOMS if name.endswith("bytes")}, "gpu_memory": 1e9, "event_lag": 1e6}

GIB = 1 << 30


def axis_title(name: str, values: Sequence[str]) -> tuple[str, float]:
    """Return the title of an axis and the factor of its values: bytes that are written in GiB are counted in GiB."""
    title = UNITS.get(name, name.replace("_", " "))
    if SCALES.get(name) == 1e9 and any("ib" in value.lower() for value in values):
        return title.replace("GB of", "GiB of"), 1e9 / GIB
    return title, 1.0


def axis(axes: dict[str, list[str]]) -> str | None:
    """Return the setting that runs along the axis: one whose values are numbers, by ``ALONG``, then by most values."""
    numeric = [
        name for name, values in axes.items() if len(values) > 1 and all(number_of(name, v) is not None for v in values)
    ]
    for name in ALONG:
        if name in numeric:
            return name
    return max(numeric, key=lambda name: len(axes[name]), default=None)


def words(name: str | None) -> str:
    """Return a setting as the title of a page."""
    text = ROOMS[name].place if name in ROOMS else (name or "").replace("_", " ")
    return text.capitalize()


PLAIN = ("none", "off", "on", "auto", "true", "false")
"""Values that need their setting's name."""


def setting_text(name: str, value: str) -> str:
    """Return a setting for a legend: its value, and its name if the value is a number or says nothing by itself."""
    return f"{name.replace('_', ' ')} {value}" if value[:1].isdecimal() or value in PLAIN else value


def number_of(name: str, value: str) -> float | None:
    """Return a value of a setting as a place on an axis, in the axis' unit; ``None`` if it isn't a number."""
    try:
        parsed = SETTINGS[name].parse(name, value)
    except KvyardError:
        return None
    if name == "workers":
        parsed = int(value) if value.isdecimal() else None
    if isinstance(parsed, bool) or not isinstance(parsed, int | float):
        return None
    return parsed / SCALES.get(name, 1)
