"""The form of a profile: what limits a pass on a GPU, as a formula with eleven numbers.

A pass multiplies all its tokens with the weights once, whichever requests they are of. Few tokens wait for the weights to be
read, many for the arithmetic, and in between the two blend. Attention comes on top: of a prompt by pairs of tokens, of what was
cached by reading it, of decoding by reading the context. A pass with prompt tokens is launched kernel by kernel, which
takes its own time; if that is longer than the work, it is what counts. Because the parts are physical, a pass that mixes
prompts and decoding needs no measurements of its own, and points far from any measurement stay sensible.

It knows nothing of files and fitting. ``pass_ms`` and ``estimate`` are one formula, for one pass and for many.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All in milliseconds, none negative; per what, the line below each says."""

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
    """What past adds to that."""
    context: float
    """Per token of context of a decoding sequence."""


NAMES = Coefficients.__struct_fields__


def pass_ms(of: Coefficients, prefills: Sequence[tuple[int, int]], decode_batch: int, decode_context: int) -> float:
    """Milliseconds of one pass; see ``TimingModel.pass_ns`` for what the arguments mean. 0 when nothing is computed."""
    tokens = sequences = decode_batch
    fresh_pairs = past_pairs = 0.0
    read = 0
    for new, past in prefills:
        if new:
            tokens += new
            sequences += 1
            if past:
                past_pairs += new * past + 0.5 * new * new
                read += past + new
            else:
                fresh_pairs += 0.5 * new * new
    if not tokens:
        return 0.0
    work = base_ms(of, tokens, sequences) + of.context * decode_context
    if tokens == decode_batch:
        return work
    work += of.attention * fresh_pairs
    launch = of.launch
    if read:
        pairs, reads = of.past_attention * past_pairs, of.past_read * read
        work += (pairs if pairs > reads else reads) + of.past_copy * read
        launch += of.past_launch
    return work if work > launch else launch


def base_ms(of: Coefficients, tokens: int, sequences: int) -> float:
    """What a pass over this many tokens takes before any attention."""
    blend = of.blend
    return float((of.weights**blend + (of.token * tokens) ** blend) ** (1.0 / blend)) + of.sequence * sequences


class Features(msgspec.Struct, frozen=True):
    """What the formula needs of many passes: sums over each pass's sequences, one array element a pass."""

    tokens: Floats
    sequences: Floats
    pairs: Floats
    past_pairs: Floats
    past_tokens: Floats
    launched: Floats
    with_past: Floats
    context: Floats

    @classmethod
    def of(cls, passes: Sequence[tuple[Sequence[tuple[int, int]], int, int]]) -> Features:
        """Of passes given as (prefills, decode batch, decode context)."""
        rows = []
        for prefills, batch, context in passes:
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
                    context,
                )
            )
        return cls(*np.array(rows, dtype=np.float64).reshape(-1, 8).T)

    def only(self, keep: npt.NDArray[np.bool_]) -> Features:
        """Of the passes that ``keep`` marks."""
        return Features(*(getattr(self, name)[keep] for name in self.__struct_fields__))


def estimate(values: Sequence[float] | Floats, at: Features) -> Floats:
    """Milliseconds of many passes, for coefficients in the order of ``NAMES``."""
    weights, token, blend, sequence, attention, past_attention, past_read, past_copy, launch, past_launch, context = (
        values
    )
    work = (weights**blend + (token * at.tokens) ** blend) ** (1.0 / blend) + sequence * at.sequences
    work = work + attention * at.pairs + np.maximum(past_attention * at.past_pairs, past_read * at.past_tokens)
    work = work + past_copy * at.past_tokens + context * at.context
    total: Floats = np.maximum(work, at.launched * launch + at.with_past * past_launch)
    return total
