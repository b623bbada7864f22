"""``inferencemax``: InferenceMAX's runs of vLLM's benchmark client.

Source: its README and scripts: ten prompts for each of ``--max-concurrency``, all at once, end of text ignored, lengths drawn
from 0.8 times those named up to those (``--random-range-ratio 0.8``), two warm-up requests for each of the concurrency.
"""

from collections.abc import Iterable, Iterator
from random import Random
from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.replay.clients.client import TURNAROUND, Client, ranged, repeated, rounds_of
from kvyard.replay.traces import TraceRequest


class InferenceMax(Client):
    OPTIONS: ClassVar[Options] = {
        "turnaround_ms": TURNAROUND,
        "rounds": Option(10, "Requests for each slot of the closed loop."),
        "random_range_ratio": Option(0.8, "Least length, as a share of the trace's.", most=1.0),
        "warm_up_rounds": Option(2, "Warm-up requests for each slot of the closed loop."),
    }

    def requests(self, rows: Iterable[TraceRequest], concurrency: int | None, random: Random) -> Iterable[TraceRequest]:
        rows = rounds_of(rows, self.options["rounds"], concurrency)
        return ranged(rows, self.options["random_range_ratio"], 1.0, random)

    def warm_up(self, first: TraceRequest, concurrency: int | None) -> Iterator[TraceRequest]:
        return repeated(first, round(self.options["warm_up_rounds"] * (concurrency or 0)))
