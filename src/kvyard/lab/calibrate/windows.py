"""Measurements from what clients saw of an engine: when tokens came says how long its passes took.

Every pass gives one token to each request that decodes. So between two tokens of one answer, the *observer*, there was one
pass, and the times of all other requests say what was in it: those between their first and their last token decoded, those
whose first token came then had their prompt computed. A few passes in a row are timed as one window, because clients see
tokens with a jitter; one with a prompt is timed with the next. Where a run has only first and last tokens, the whole answer is
one window, and its tokens are taken to have come evenly.

A prompt that had the engine for itself is a pass too, but its client waited for more than that: for HTTP and tokenizing.
``lone_prompts`` has those, with all that their clients waited for.

Not seen: preempted requests, whose prompts are computed again; prompts found cached, where the run doesn't say so.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvyard.clock import MS
from kvyard.engine.timing.measurements import Measurement, PassShape
from kvyard.integers import ceil_div
from kvyard.lab.validate.reading import MeasuredRequest

LENGTH = 8
"""Passes of one window."""
COARSE = 160
"""Answers that are looked at, where only first and last tokens are known."""
KNOWN = 0.5
"""Share of an answer's tokens whose times must be known: engines that are behind send several at once."""
LONG = 64
"""Tokens of two answers in the same time from which it is seen whether both are of one engine."""
PAIRS = 8
"""Pairs that are needed for an answer."""
APART = 0.06
"""Share by which the tokens of a quarter of them differ if they aren't. Of one engine they differ by a token or two."""
PARTS = 24
PROMPT_PARTS = 64
"""Passes of one window that are fitted separately, without prompts and with."""

Times = npt.NDArray[np.int64]


class _TimedAnswer(NamedTuple):
    """One request, with the times of its tokens."""

    arrival: int
    input: int
    cached: int
    times: Times

    @property
    def first(self) -> int:
        return int(self.times[0])

    @property
    def ended(self) -> int:
        return int(self.times[-1])


def windows(
    requests: Iterable[MeasuredRequest],
    budget: int | None = None,
    group: int | None = None,
    late: int = 0,
    until: int | None = None,
) -> list[Measurement]:
    """Return passes of a run, a few in a row as one measurement. ``budget`` is ``max_num_batched_tokens``, if it is known.
    Measurements that end after ``until`` are left out.

    A new answer begins later than others go on, on a busy machine by several passes: its prompt is put to the longest of the
    ``late`` passes before its first token, where only few prompts come.
    """
    fine, answers = _answers(requests)
    measurements: list[Measurement] = []
    for observer in _observers(answers) if fine else _some(answers):
        measurements += [
            row
            for ended, row in _seen_by(observer, answers, budget, fine, group, late)
            if until is None or ended <= until
        ]
    return measurements


def lone_prompts(
    requests: Iterable[MeasuredRequest], budget: int | None = None, group: int | None = None
) -> list[Measurement]:
    """Return the time to the first token of prompts that had the engine for themselves, with all their clients' waiting."""
    _, answers = _answers(requests)
    measurements = []
    latest = -1
    for index, answer in enumerate(answers):
        alone = latest < answer.arrival and (index + 1 == len(answers) or answers[index + 1].arrival >= answer.first)
        latest = max(latest, answer.ended)
        new = answer.input - answer.cached
        if alone and new > 0 and answer.first > answer.arrival:
            first, *others = _chunks(new, answer.cached, budget or new)
            rest = tuple((1.0, (((more, past),), 0, 0, 0)) for more, past in others)
            ms = (answer.first - answer.arrival) / MS
            measurements.append(Measurement("prefill", (first,), 0, 0, 0, ms, others=rest, group=group))
    return measurements


def out_of_step(requests: Iterable[MeasuredRequest]) -> float | None:
    """Return by which share answers that decoded together differ in their tokens, if that is more than jitter; else
    ``None``.

    In one engine every pass gives a token to each of them. Only answers whose tokens were all timed tell.
    """
    fine, answers = _answers(requests)
    if not fine:
        return None
    shares = []
    for earlier, other in pairwise(answers):
        low, high = max(earlier.first, other.first), min(earlier.ended, other.ended)
        counts = sorted(
            int(np.searchsorted(answer.times, high, "right") - np.searchsorted(answer.times, low, "right"))
            for answer in (earlier, other)
        )
        if counts[1] >= LONG:
            shares.append((counts[1] - counts[0]) / max(1, counts[0]))
    if len(shares) < PAIRS:
        return None
    # Neighbours are often of one rank, also if there are several.
    apart = float(np.quantile(shares, 0.75))
    return apart if apart > APART else None


def _chunks(new: int, past: int, budget: int) -> list[tuple[int, int]]:
    return [(min(budget, new - start), past + start) for start in range(0, new, budget)]


def _answers(requests: Iterable[MeasuredRequest]) -> tuple[bool, list[_TimedAnswer]]:
    """Return answers by arrival, and whether the time of every token is known."""
    fine, answers = True, []
    for measured in requests:
        if measured.first_token is None:
            continue
        request = measured.request
        tokens = request.output_length
        if measured.gaps is not None and KNOWN * (tokens - 1) <= len(measured.gaps) <= tokens - 1:
            times = measured.first_token + np.concatenate([[0], np.cumsum(measured.gaps)]).astype(np.int64)
            times = _each(times, tokens)
        else:
            fine = fine and tokens == 1
            times = np.linspace(measured.first_token, measured.ended, tokens).round().astype(np.int64)
        answers.append(
            _TimedAnswer(request.arrival, request.input_length, min(measured.cached or 0, request.input_length), times)
        )
    return fine, sorted(answers, key=attrgetter("arrival"))


def _each(times: Times, tokens: int) -> Times:
    """Return the time of each token, where some came together: after the longest waits, since passes went on meanwhile."""
    count = np.ones(len(times), dtype=np.int64)
    waits = np.diff(times, prepend=times[:1])
    for _ in range(tokens - len(times)):
        count[int(np.argmax(waits / count))] += 1
    return np.repeat(times, count)


def _observers(answers: Sequence[_TimedAnswer]) -> Iterator[_TimedAnswer]:
    """Yield answers that together cover the time, each cut to begin where the one before ends."""
    waiting = sorted((answer for answer in answers if len(answer.times) > 1), key=attrgetter("first"))
    now = -1
    index = 0
    while index < len(waiting):
        best = None
        while index < len(waiting) and waiting[index].first <= max(now, waiting[index].first if best is None else now):
            if best is None or waiting[index].ended > best.ended:
                best = waiting[index]
            index += 1
            if best.first > now:
                break
        assert best is not None
        if best.ended <= now:
            continue
        begin = max(0, bisect.bisect_left(best.times, now) if now > best.first else 0)
        if len(best.times) - begin > 1:
            # Tokens before the cut still count for its context.
            yield best._replace(input=best.input + begin, times=best.times[begin:])
        now = best.ended


def _some(answers: Sequence[_TimedAnswer]) -> Sequence[_TimedAnswer]:
    long = [answer for answer in answers if len(answer.times) > 1]
    step = ceil_div(len(long), COARSE) or 1
    return long[::step]


def _seen_by(
    observer: _TimedAnswer,
    answers: Sequence[_TimedAnswer],
    budget: int | None,
    fine: bool,
    group: int | None,
    late: int,
) -> Iterator[tuple[int, Measurement]]:
    """Yield the windows of one observer, each with its end. Pass k gave it token k; what others got is put to the
    nearest pass.
    """
    grid = observer.times
    last = len(grid) - 1
    batch = np.zeros(last + 2, dtype=np.int64)
    context = np.zeros(last + 2, dtype=np.int64)
    longest = np.zeros(last + 1, dtype=np.int64)
    prompts: dict[int, list[tuple[int, int]]] = {}
    steps = np.arange(last + 1)
    open_end = False
    for other in answers:
        if other.ended < grid[0] or other.arrival > grid[-1]:
            continue
        if other.first > grid[-1]:
            # One that takes several passes may have been computed while the observer ended, or waited: that is unknown.
            open_end = open_end or (budget is not None and other.input - other.cached > budget - len(answers))
            continue
        begun = _nearest(grid, other.first) if other.first >= grid[0] else 1 - _count_until(other.times, int(grid[0]))
        if late and begun > 1:
            from_ = max(1, begun - late, int(np.searchsorted(grid, other.arrival)))
            begun = max(range(from_, begun + 1), key=lambda point: grid[point] - grid[point - 1], default=begun)
        if begun >= 1 and other.input > other.cached:
            prompts.setdefault(begun, []).append((other.input - other.cached, other.cached))
        start, stop = max(1, begun + 1), min(last, _nearest(grid, other.ended))
        if start <= stop:
            batch[start] += 1
            batch[stop + 1] -= 1
            context[start] += other.input - begun
            context[stop + 1] -= other.input - begun
            longest[start : stop + 1] = np.maximum(
                longest[start : stop + 1], other.input - begun + steps[start : stop + 1]
            )
    batch, context = np.cumsum(batch)[: last + 1], np.cumsum(context)[: last + 1]
    context = context + batch * steps
    broken = _split(prompts, batch, budget)
    shapes: list[PassShape] = [
        (tuple(prompts.get(index, ())), int(batch[index]), int(context[index]), int(longest[index]))
        for index in range(last + 1)
    ]
    for low, high in _cuts(shapes) if fine else ((1, last),):
        if (open_end and fine and high == last) or low <= broken:
            continue
        took = (int(grid[high]) - int(grid[low - 1])) / MS
        if took > 0:
            yield int(grid[high]), _measurement(shapes[low : high + 1], took, group)


def _nearest(grid: Times, time: int) -> int:
    index = int(np.searchsorted(grid, time))
    if index == len(grid):
        return index - 1
    return index - 1 if index and time - int(grid[index - 1]) < int(grid[index]) - time else index


def _count_until(times: Times, time: int) -> int:
    """Return tokens that had come by ``time``, including one that came just after."""
    count = int(np.searchsorted(times, time, side="right"))
    near = count < len(times) and count and int(times[count]) - time < time - int(times[count - 1])
    return max(1, count + bool(near))


def _split(prompts: dict[int, list[tuple[int, int]]], batch: Times, budget: int | None) -> int:
    """Move what a pass can't compute to the one before it, whose budget it had. Returns the last pass that isn't known then."""
    if budget is None:
        return 0
    for index in range(len(batch) - 1, 0, -1):
        left = max(1, budget - int(batch[index]))
        mine = prompts.get(index)
        while mine and sum(new for new, _ in mine) > left:
            new, past = mine[0]
            over = min(new, sum(tokens for tokens, _ in mine) - left)
            if index == 1:
                return 1
            prompts.setdefault(index - 1, []).append((over, past))
            mine[0] = (new - over, past + over)
            if over == new:
                del mine[0]
    return 0


def _cuts(shapes: Sequence[PassShape]) -> Iterator[tuple[int, int]]:
    """First and last pass of each window: ``LENGTH`` passes, or those with prompts and the one after them."""
    low = 1
    for index in range(1, len(shapes)):
        ends = index + 1 == len(shapes) or index - low + 1 >= LENGTH
        if not ends:
            prompts, before = bool(shapes[index][0]), bool(shapes[index - 1][0])
            ends = not prompts and (before or bool(shapes[index + 1][0]))
        if ends:
            yield low, index
            low = index + 1


def _measurement(shapes: Sequence[PassShape], took: float, group: int | None) -> Measurement:
    """Return one window. Where it has many passes, one stands for a few that are alike: of those without prompts their mean."""
    prompts = sorted((shape for shape in shapes if shape[0]), key=lambda shape: sum(new for new, _ in shape[0]))
    size = ceil_div(len(prompts), PROMPT_PARTS) or 1
    groups = (prompts[first : first + size] for first in range(0, len(prompts), size))
    parts: list[tuple[float, PassShape]] = [(float(len(some)), some[len(some) // 2]) for some in groups]
    steps = [shape for shape in shapes if not shape[0]]
    size = ceil_div(len(steps), PARTS) if len({shape[1] for shape in steps}) > 1 else len(steps)
    for first in range(0, len(steps), max(1, size)):
        some = steps[first : first + size]
        mean = np.array([shape[1:] for shape in some]).mean(axis=0).round().astype(int).tolist()
        parts.append((float(len(some)), ((), mean[0], mean[1], mean[2])))
    (count, main), *others = parts
    kind = "decode" if not main[0] else "mixed" if main[1] or len(main[0]) > 1 else "prefill"
    if count > 1:
        others.insert(0, (count - 1.0, main))
    return Measurement(kind, *main, took, others=tuple(others), group=group)
