"""``profile``: timing fitted to measurements of one card, model and engine.

A profile is a small JSON file: the eleven coefficients of ``profile_form``, where they come from, and how far off they were.
Some ship with kvyard and are chosen by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from kvyard.engine.timing.config import TimingConfig
from kvyard.engine.timing.model import NS_PER_MS, SHORT, Durations, contexts, scaled, scaled_many
from kvyard.engine.timing.profile_form import Coefficients, base_ms, pass_ms
from kvyard.errors import KvyardError

FORMAT = "kvyard-profile/1"


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute relative errors of one kind of pass (0.05 is 5 %)."""

    points: int
    fitted: float
    unseen: float
    """On measurements left out of the fit."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a profile file says."""

    format: str = FORMAT
    name: str
    device: str = ""
    source: str = ""
    errors: dict[str, FitError] = {}
    coefficients: Coefficients

    def check(self, where: str) -> None:
        """Raise ``KvyardError``, naming ``where``, unless the coefficients can be computed with."""
        if self.format != FORMAT:
            raise KvyardError(f"{where}: is of format {self.format!r}; this version of kvyard reads {FORMAT!r}")
        for name, value in msgspec.structs.asdict(self.coefficients).items():
            if not 0 <= value < float("inf"):
                raise KvyardError(f"{where}: {name} must be a number of at least 0, got {value}")
        if not (self.coefficients.weights > 0 and self.coefficients.blend >= 1):
            raise KvyardError(f"{where}: weights must be above 0 and blend at least 1")


def shipped() -> list[str]:
    """Names of the profiles that come with kvyard."""
    folder = files("kvyard.engine.timing") / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_profile(*, name: str | None = None, path: str | Path | None = None) -> Profile:
    """A shipped profile by ``name``, or one from a file. Raises ``KvyardError`` if there is none or it's no profile."""
    if path is None:
        if name not in shipped():
            raise KvyardError(
                f"no profile {name!r} ships with kvyard; choose one of {', '.join(shipped())}, or give a path"
            )
        where = f"profile {name}"
        data = (files("kvyard.engine.timing") / "profiles" / f"{name}.json").read_bytes()
    else:
        where = str(path)
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise KvyardError(f"{where}: can't be read: {error.strerror or error}") from None
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.DecodeError as error:
        raise KvyardError(f"{where}: not a profile: {error}; make one with kvyard profile fit") from None
    profile.check(where)
    return profile


class ProfileTiming(TimingConfig, frozen=True, kw_only=True, tag="profile"):
    """Fitted to measurements: a profile that ships with kvyard, by ``name``, or one of your own, by ``path``."""

    name: str | None = None
    path: str | None = None

    def check(self) -> None:
        super().check()
        if (self.name is None) == (self.path is None):
            raise KvyardError("timing: a profile needs either a name (one that ships with kvyard) or a path, not both")

    def model(self, capacity_tokens: int) -> ProfileModel:
        return ProfileModel(load_profile(name=self.name, path=self.path), self)

    @classmethod
    def usage(cls) -> str:
        return "profile:NAME"

    @classmethod
    def parse(cls, text: str, speedup_ratio: float) -> Self:
        """A shipped profile's name or a path, which is read now, so that one that isn't there is refused here."""
        if not text:
            raise KvyardError("timing is 'profile': write profile:NAME (kvyard profile list)")
        own = text not in shipped() and Path(text).exists()
        made = cls(name=None if own else text, path=text if own else None, speedup_ratio=speedup_ratio)
        load_profile(name=made.name, path=made.path)
        return made


class ProfileModel:
    """Durations by a profile. ``decode_speedup_ratio`` divides what decoding adds to a pass."""

    __slots__ = ("_decode_ratio", "_of", "_ratio")

    def __init__(self, profile: Profile, config: ProfileTiming) -> None:
        self._of = profile.coefficients
        self._ratio = config.speedup_ratio
        self._decode_ratio = config.speedup_ratio * config.decode_speedup_ratio

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int) -> int:
        whole = round(pass_ms(self._of, prefills, decode_batch, decode_context) * NS_PER_MS)
        if self._ratio == self._decode_ratio:
            return scaled(whole, self._ratio)
        prompts = round(pass_ms(self._of, prefills, 0, 0) * NS_PER_MS) if prefills else 0
        return scaled(prompts, self._ratio) + scaled(whole - prompts, self._decode_ratio)

    def decode_ns(self, batch: int, context: int, passes: int) -> Durations:
        if not batch:
            return np.zeros(passes, dtype=np.int64)
        # A batch that doesn't change costs the same each pass, but for its context. Same operations as in ``pass_ms``.
        base, slope, ratio = base_ms(self._of, batch, batch), self._of.context, self._decode_ratio
        if passes <= SHORT:
            steps = range(context, context + batch * passes, batch)
            return np.array([scaled(round((base + slope * at) * NS_PER_MS), ratio) for at in steps], dtype=np.int64)
        return scaled_many(np.rint((base + slope * contexts(batch, context, passes)) * NS_PER_MS), ratio)
