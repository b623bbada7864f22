"""``profile``: timing fitted to measurements of one card, model and engine.

A profile is a small JSON file: seventeen coefficients of one formula, perhaps a curve, where they come from, and how far off
they were. Some ship with kvyard and are chosen by name.

The formula is what limits a pass on a GPU. A pass multiplies all its tokens with the weights once, whichever requests they
are of. Few tokens wait for the weights to be read, many for the arithmetic, and in between the two blend. Attention comes on
top: of a prompt by pairs of tokens, of what was cached by reading it, of decoding by reading the context. A pass with prompt
tokens is launched kernel by kernel, which takes its own time; if that is longer than the work, it is what counts. Because the
parts are physical, a pass that mixes prompts and decoding needs no measurements of its own, and points far from any
measurement stay sensible. ``pass_ms`` and ``estimate`` are this one formula, for one pass and for many.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import exp, log2
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.model import NS_PER_MS, SHORT, Durations, contexts, scaled, scaled_many
from kvyard.engine.timing.registry import TimingConfig
from kvyard.errors import KvyardError, suggest

FORMAT = "kvyard-profile/1"
SHIPPED = files("kvyard.engine.timing") / "profiles"
Floats = npt.NDArray[np.float64]


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All in milliseconds, none negative; the line below each has the unit that it is per."""

    weights: float
    """Reading the weights once: the floor of a pass."""
    token: float
    """Per token, when arithmetic is what limits."""
    blend: float
    """The exponent that joins the two: 1 adds them, a large one takes the larger."""
    sequence: float
    """Per sequence that yields a token (the output layer)."""
    attention: float
    """Per pair of tokens, of a prompt without past."""
    past_attention: float
    """Per pair of tokens, of a prompt with past (engines often use another kernel)."""
    past_read: float
    """Per token of past and prompt: attention can't be faster than reading it."""
    past_copy: float
    """Per token of past and prompt, in any case (gathering the cache)."""
    launch: float
    """Launching a pass with prompt tokens; 0 if the engine captures those too."""
    past_launch: float
    """Addition of past to that."""
    context: float
    """Per token of context of a decoding sequence."""
    mixed_launch: float = 0.0
    """Addition of decode steps beside prompts to launching."""
    mixed_decode: float = 1.0
    """Factor of that in a pass with prompt tokens."""
    skew: float = 0.0
    """Share of the way from the mean context of a batch to its longest that counts."""
    host: float = 0.0
    """Host work of a pass, which comes on top of everything."""
    host_sequence: float = 0.0
    """Host time per sequence of the pass."""
    host_prompts: float = 0.0
    """Host time of a pass with prompt tokens."""


NAMES = Coefficients.__struct_fields__


class Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients, and where measurements ask for it a curve by which the work before attention is multiplied."""

    coefficients: Coefficients
    tokens: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()

    def factor(self, tokens: float) -> float:
        """Return the factor of the work before attention in a pass of ``tokens`` tokens; logarithms are linear in between."""
        if not self.tokens:
            return 1.0
        return exp(float(np.interp(log2(tokens), np.log2(self.tokens), np.log(self.factors))))


def form_of(coefficients: Coefficients, curve: Mapping[int, float]) -> Form:
    """Return the form with ``curve``: by tokens of a pass, what the work before attention is multiplied by."""
    points = sorted(curve.items())
    return Form(
        coefficients=coefficients,
        tokens=tuple(tokens for tokens, _ in points),
        factors=tuple(factor for _, factor in points),
    )


def pass_ms(
    form: Form, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int = 0
) -> float:
    """Return milliseconds of one pass; see ``TimingModel.pass_ns`` for what the arguments mean. 0 when nothing is computed."""
    of = form.coefficients
    tokens = sequences = decode_batch
    fresh_pairs = new_pairs = past_pairs = whole_pairs = 0.0
    read = cached = 0
    for new, past in prefills:
        if new:
            tokens += new
            sequences += 1
            if past:
                new_pairs += 0.5 * new * new
                past_pairs += new * past + 0.5 * new * new
                whole_pairs += 0.5 * (new + past) * (new + past)
                read += past + new
                cached += past
            else:
                fresh_pairs += 0.5 * new * new
    if not tokens:
        return 0.0
    base = base_ms(form, tokens, sequences)
    context = of.context * counted(of, decode_batch, decode_context, longest)
    host = of.host + of.host_sequence * sequences
    if tokens == decode_batch:
        return base + context + host
    context *= of.mixed_decode
    work = base + context + of.attention * fresh_pairs
    launch = of.launch
    if decode_batch:
        launch += of.mixed_launch
    host += of.host_prompts
    if not read:
        return max(work, launch) + host
    pairs, reads = of.past_attention * past_pairs, of.past_read * read
    took = max(work + max(pairs, reads) + of.past_copy * read, launch + of.past_launch)
    # Kernels for prompts with past have coefficients of their own, which may be fitted to few passes. The past adds to what
    # the new tokens take alone, and costs no more than computing it again.
    least = base + context + of.attention * (fresh_pairs + new_pairs)
    whole = base_ms(form, tokens + cached, sequences) + context + of.attention * (fresh_pairs + whole_pairs)
    return max(least, launch, min(took, max(whole, launch))) + host


def base_ms(form: Form, tokens: int, sequences: int) -> float:
    """Return the time of a pass over this many tokens before any attention."""
    of = form.coefficients
    blend = of.blend
    work = float((of.weights**blend + (of.token * tokens) ** blend) ** (1.0 / blend))
    return work * form.factor(tokens) + of.sequence * sequences


def counted(of: Coefficients, batch: int, context: int, longest: int) -> float:
    """Return the context that a decode step is charged for: what is read, and some of the waiting for the longest."""
    more = batch * longest - context
    return context + of.skew * more if more > 0 else float(context)


class Features(msgspec.Struct, frozen=True):
    """Inputs of the formula for many passes: sums over each pass's sequences, one array element a pass."""

    tokens: Floats
    sequences: Floats
    pairs: Floats
    past_pairs: Floats
    past_tokens: Floats
    launched: Floats
    with_past: Floats
    with_decode: Floats
    """True if decode steps are launched beside prompts."""
    context: Floats
    behind: Floats
    """By how much contexts fall short of the longest, summed."""
    cached: Floats
    """Past of prompts."""
    new_pairs: Floats
    """Pairs of tokens of prompts with past, without it."""
    whole_pairs: Floats
    """Pairs of tokens of those prompts, as if they were computed whole."""

    @classmethod
    def of(cls, passes: Sequence[tuple[Sequence[tuple[int, int]], int, int, int]]) -> "Features":
        """Return the features of passes given as (prefills, decode batch, decode context, longest context)."""
        rows = []
        for prefills, batch, context, longest in passes:
            fresh = [new for new, past in prefills if new and not past]
            cached = [(new, past) for new, past in prefills if new and past]
            rows.append(
                (
                    sum(fresh) + sum(new for new, _ in cached) + batch,
                    len(fresh) + len(cached) + batch,
                    sum(0.5 * new * new for new in fresh),
                    sum(new * past + 0.5 * new * new for new, past in cached),
                    sum(new + past for new, past in cached),
                    bool(fresh or cached),
                    bool(cached),
                    bool(batch and (fresh or cached)),
                    context,
                    max(0, batch * longest - context),
                    sum(past for _, past in cached),
                    sum(0.5 * new * new for new, _ in cached),
                    sum(0.5 * (new + past) * (new + past) for new, past in cached),
                )
            )
        return cls(*np.array(rows, dtype=np.float64).reshape(-1, len(cls.__struct_fields__)).T)

    def only(self, keep: npt.NDArray[np.bool_]) -> "Features":
        """Return the features of the passes that ``keep`` marks."""
        return Features(*(getattr(self, name)[keep] for name in self.__struct_fields__))


def estimate(
    values: Sequence[float] | Floats,
    features: Features,
    factors: Floats | float = 1.0,
    whole_factors: Floats | float = 1.0,
) -> Floats:
    """Return milliseconds of many passes, for coefficients in the order of ``NAMES`` and each pass's factor of the curve.

    ``whole_factors`` are those of the passes as if nothing was cached.
    """
    weights, token, blend, sequence, attention, past_attention, past_read, past_copy, launch, past_launch, *decode = (
        values
    )
    context, mixed_launch, mixed_decode, skew, host, host_sequence, host_prompts = decode

    def base(tokens: Floats, by: Floats | float) -> Floats:
        return np.asarray(by * (weights**blend + (token * tokens) ** blend) ** (1.0 / blend))

    reading = context * (features.context + skew * features.behind) * np.where(features.launched > 0, mixed_decode, 1.0)
    rest = sequence * features.sequences + reading + attention * features.pairs
    work = base(features.tokens, factors) + rest
    launching = features.launched * launch + features.with_decode * mixed_launch
    past = (
        np.maximum(past_attention * features.past_pairs, past_read * features.past_tokens)
        + past_copy * features.past_tokens
    )
    took = np.maximum(work + past, launching + features.with_past * past_launch)
    of = np.flatnonzero(features.with_past)
    if len(of):
        by = whole_factors[of] if isinstance(whole_factors, np.ndarray) else whole_factors
        whole = base((features.tokens + features.cached)[of], by) + rest[of] + attention * features.whole_pairs[of]
        least = np.maximum(work[of] + attention * features.new_pairs[of], launching[of])
        took[of] = np.maximum(least, np.minimum(took[of], np.maximum(whole, launching[of])))
    total: Floats = took + (host + host_sequence * features.sequences + host_prompts * features.launched)
    return total


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute relative errors of one kind of pass (0.05 is 5 %)."""

    points: int
    fitted: float
    unseen: float
    """On measurements left out of the fit."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a profile file."""

    format: str = FORMAT
    name: str
    device: str = ""
    source: str = ""
    errors: dict[str, FitError] = {}
    coefficients: Coefficients
    curve: dict[int, float] = {}
    """By tokens of a pass, what the work before attention is multiplied by."""
    request_ms: float = 0.0
    """Clients' waiting once per request on top of passes. The engine doesn't wait for it: a replay leaves it out."""
    held_out: dict[str, float] = {}
    """By latency (``ttft``, ``tpot``, ``e2e``), the error of the mean in time of the measured run that was held out of the fit
    and replayed, as a share without sign. Empty where the measurements have no requests."""

    @property
    def form(self) -> Form:
        """The formula and its curve."""
        return form_of(self.coefficients, self.curve)

    def check(self, where: str) -> None:
        """Raise ``KvyardError``, naming ``where``, unless the coefficients can be computed with."""
        if self.format != FORMAT:
            raise KvyardError(f"{where}: is of format {self.format!r}; this version of kvyard reads {FORMAT!r}")
        for name, value in msgspec.structs.asdict(self.coefficients).items():
            if not 0 <= value < float("inf"):
                raise KvyardError(f"{where}: {name} must be a number of at least 0, got {value}")
        if not (self.coefficients.weights > 0 and self.coefficients.blend >= 1):
            raise KvyardError(f"{where}: weights must be above 0 and blend at least 1")
        if any(tokens < 1 or not 0 < factor < float("inf") for tokens, factor in self.curve.items()):
            raise KvyardError(f"{where}: the curve has tokens of at least 1 and factors above 0")
        if any(not 0 <= error < float("inf") for error in self.held_out.values()):
            raise KvyardError(f"{where}: held_out has errors as shares of at least 0, got {self.held_out}")
        if not 0 <= self.request_ms < float("inf"):
            raise KvyardError(f"{where}: request_ms must be a number of at least 0, got {self.request_ms}")


def shipped() -> list[str]:
    """Return names of the profiles that come with kvyard."""
    return sorted(entry.name.removesuffix(".json") for entry in SHIPPED.iterdir() if entry.name.endswith(".json"))


def load_profile(*, name: str | None = None, path: str | Path | None = None) -> Profile:
    """Return a shipped profile by ``name``, or one from a file. Raises ``KvyardError`` if there is none or it's no profile."""
    if path is None:
        if name not in shipped():
            raise KvyardError(f"unknown profile {name!r}: {suggest(name, shipped(), otherwise='give a path')}")
        where = f"profile {name}"
        data = (SHIPPED / f"{name}.json").read_bytes()
    else:
        where = str(path)
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise KvyardError(f"{where}: can't be read: {error.strerror or error}") from None
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except DECODE_ERRORS as error:
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

    def model(self, capacity_tokens: int) -> "ProfileModel":
        return ProfileModel(load_profile(name=self.name, path=self.path), self)

    def describe(self) -> str:
        profile = load_profile(name=self.name, path=self.path)
        whose = f"your profile {self.path}" if self.path else f"profile {self.name}"
        return f"{whose}, fitted to passes of {profile.device}" if profile.device else whose

    def error(self) -> float | None:
        errors = load_profile(name=self.name, path=self.path).errors
        known = errors.get("all") or max(errors.values(), key=lambda one: one.unseen, default=None)
        return known.unseen if known is not None else None

    def held_out(self) -> Mapping[str, float]:
        return load_profile(name=self.name, path=self.path).held_out

    def request_ms(self) -> float:
        return load_profile(name=self.name, path=self.path).request_ms

    @classmethod
    def usage(cls) -> str:
        return "profile:NAME"

    @classmethod
    def parse(cls, text: str, speedup_ratio: float, deployment: Deployment | None = None) -> Self:
        """Return the config for a shipped profile's name or a path, which is read now, so that a missing one is refused
        here."""
        if not text:
            raise KvyardError("timing is 'profile': write profile:NAME (kvyard profile list)")
        own = text not in shipped() and Path(text).exists()
        timing = cls(name=None if own else text, path=text if own else None, speedup_ratio=speedup_ratio)
        load_profile(name=timing.name, path=timing.path)
        return timing


class ProfileModel:
    """Durations by a profile. ``decode_speedup_ratio`` divides what decoding adds to a pass."""

    needs_longest: ClassVar[bool] = True
    __slots__ = ("_decode_ratio", "_form", "_ratio")

    def __init__(self, profile: Profile, config: ProfileTiming) -> None:
        self._form = profile.form
        self._ratio = config.speedup_ratio
        self._decode_ratio = config.speedup_ratio * config.decode_speedup_ratio

    def pass_ns(self, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int, longest: int) -> int:
        whole = round(pass_ms(self._form, prefills, decode_batch, decode_context, longest) * NS_PER_MS)
        if self._ratio == self._decode_ratio:
            return scaled(whole, self._ratio)
        prompts = round(pass_ms(self._form, prefills, 0, 0) * NS_PER_MS) if prefills else 0
        return scaled(prompts, self._ratio) + scaled(whole - prompts, self._decode_ratio)

    def decode_ns(self, batch: int, context: int, passes: int, longest: int) -> Durations:
        if not batch:
            return np.zeros(passes, dtype=np.int64)
        # A batch that doesn't change costs the same each pass, but for its context. Same operations as in ``pass_ms``.
        of, ratio = self._form.coefficients, self._decode_ratio
        base, slope, host = base_ms(self._form, batch, batch), of.context, of.host + of.host_sequence * batch
        if passes <= SHORT or of.skew:
            steps = (counted(of, batch, context + step * batch, longest + step) for step in range(passes))
            return np.array(
                [scaled(round((base + slope * step + host) * NS_PER_MS), ratio) for step in steps], dtype=np.int64
            )
        return scaled_many(np.rint((base + slope * contexts(batch, context, passes) + host) * NS_PER_MS), ratio)
