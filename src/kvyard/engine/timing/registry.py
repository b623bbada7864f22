"""Timing kinds by name, and what they share: a config that people write, which makes the model.

A kind is one file: a ``TimingConfig`` with the kind's name as its tag, and the model that it makes; and one entry of
``TIMINGS``. One's own is under an entry point of group ``kvyard.timing``.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

import msgspec

from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.error_range import RunClass
from kvyard.engine.timing.model import TimingModel
from kvyard.errors import KvyardError
from kvyard.registry import Registry


class TimingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Fields of every timing model: the factor by which the engine runs faster than the model."""

    speedup_ratio: float = 1.0
    """Divides every duration."""
    decode_speedup_ratio: float = 1.0
    """Divides what decoding takes once more."""

    def check(self) -> None:
        """Raise ``KvyardError`` if a value makes no sense."""
        for name in ("speedup_ratio", "decode_speedup_ratio"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise KvyardError(f"timing: {name} must be a number above 0, got {value}")

    def model(self, capacity_tokens: int) -> TimingModel:
        """Return the model, for an engine whose cache holds ``capacity_tokens``. Raises ``KvyardError`` if there
        can't be one.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the source and the error of a run's times in a few words for its report."""
        return str(self.__struct_config__.tag)

    def error(self) -> float | None:
        """Return the mean error of passes where it could be checked, as a share (0.1 is 10 %); ``None`` if it isn't known."""
        return None

    def held_out(self) -> Mapping[str, float]:
        """Return errors of ``ttft``, ``tpot`` and ``e2e`` in measured time that was held out of its fit, as shares."""
        return {}

    def run_class(self, backend: str) -> RunClass | None:
        """Return the class of published runs from which its error is known on the engine ``backend``; ``None`` if none do."""
        return None

    def request_ms(self) -> float:
        """Return the clients' waiting once per request, on top of passes: HTTP, tokenizing. 0 if it wasn't measured."""
        return 0.0

    def front_end_ns(self, tokens: int) -> int:
        """Return the time of a request with a prompt of ``tokens`` before and after the engine, if a replay is to add it."""
        return 0

    @classmethod
    def usage(cls) -> str:
        """Return its form as one word, such as ``fixed:PREFILL_MS,DECODE_MS``: its name, then the values of its fields."""
        return ":".join(filter(None, (str(cls.__struct_config__.tag), ",".join(cls._own()).upper())))

    @classmethod
    def parse(cls, text: str, speedup_ratio: float, deployment: Deployment | None = None) -> Self:
        """Return the config that ``text``, what follows the name in one word, stands for. Raises ``KvyardError`` if it is none.

        ``deployment`` is the model and the card, if both are known; most kinds don't ask.
        """
        values = text.split(",") if text else []
        if len(values) == len(cls._own()):
            fields = dict(zip(cls._own(), values, strict=False), speedup_ratio=speedup_ratio)
            with suppress(msgspec.ValidationError):
                return msgspec.convert(fields, cls, strict=False)
        given = f"{cls.__struct_config__.tag}:{text}" if text else str(cls.__struct_config__.tag)
        raise KvyardError(f"timing is {given!r}: write {cls.usage()}")

    @classmethod
    def _own(cls) -> list[str]:
        return [name for name in cls.__struct_fields__ if name not in TimingConfig.__struct_fields__]


TIMINGS: Registry[type[TimingConfig]] = Registry(
    "timing kind",
    "kvyard.timing",
    {
        "polynomial": "kvyard.engine.timing.polynomial:PolynomialTiming",
        "fixed": "kvyard.engine.timing.fixed:FixedTiming",
        "profile": "kvyard.engine.timing.profile:ProfileTiming",
        "roofline": "kvyard.engine.timing.roofline_timing:RooflineTiming",
        "tables": "kvyard.engine.timing.tables:TablesTiming",
    },
)


def timing_choices() -> str:
    """Return the form of each timing model as one word, for help and refusals; just the name of one that can't be loaded."""
    usages = []
    for name in TIMINGS.names():
        try:
            usages.append(TIMINGS.get(name).usage())
        except KvyardError:
            usages.append(name)
    return f"{', '.join(usages[:-1])}, or {usages[-1]}"


def parse_timing(text: str, speedup_ratio: float = 1.0, deployment: Deployment | None = None) -> TimingConfig:
    """Return the config of one word such as ``fixed:50,8``. Raises ``KvyardError`` with the right form if it is none.

    ``deployment`` is the model and the card, for the kinds that are made from them.
    """
    name, _, rest = text.partition(":")
    if name not in TIMINGS:
        raise KvyardError(f"timing is {text!r}: choose {timing_choices()}")
    return TIMINGS.get(name).parse(rest, speedup_ratio, deployment)


def read_timing(value: Mapping[str, Any]) -> TimingConfig:
    """Return the config that a mapping such as ``{"kind": "polynomial"}`` stands for. Raises ``KvyardError`` if it's wrong."""
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise KvyardError(f"timing: kind must be one of {', '.join(sorted(TIMINGS.names()))}, got {kind!r}")
    try:
        return msgspec.convert(dict(value), TIMINGS.get(kind))
    except msgspec.ValidationError as error:
        raise KvyardError(f"timing: {kind}: {error}") from None


def make_timing(config: TimingConfig | Mapping[str, Any], capacity_tokens: int) -> TimingModel:
    """Return the model for an engine whose cache holds ``capacity_tokens``. Raises ``KvyardError`` for a config that can't
    work.
    """
    if not isinstance(config, TimingConfig):
        config = read_timing(config)
    config.check()
    return config.model(capacity_tokens)
