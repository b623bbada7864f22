"""Durations of requests on an idle fleet: the workers' own timing models, with no other request in any pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from kvyard.engine.timing import make_timing

if TYPE_CHECKING:
    from kvyard.engine.config import EngineConfig, SpeculativeConfig
    from kvyard.replay.fleet import Fleet

_RANK = re.compile(r"@\d+$")


class IdleEngine:
    """One engine with nothing else to do."""

    def __init__(self, config: EngineConfig) -> None:
        self._timing = make_timing(config.timing, config.capacity_tokens)
        self._front_end = config.timing.front_end_ns
        self._per_pass = config.tokens_per_pass
        self._block_size = min(spec.block_size for spec in config.specs)
        self._per_step = _tokens_per_step(config.speculative)

    def prefill_ns(self, tokens: int, cached: int) -> int:
        """Return time to the first token of a prompt of ``tokens``, of which ``cached`` ones were computed before."""
        size = self._block_size
        past = max(0, min(cached, tokens - 1)) // size * size
        ns = self._front_end(tokens)
        while past < tokens:
            new = min(self._per_pass, tokens - past)
            ns += self._timing.pass_ns([(new, past)], 0, 0, 0)
            past += new
        return ns

    def decode_ns(self, tokens: int, output: int) -> int:
        """Return time from the first to the last of ``output`` tokens behind a prompt of ``tokens``."""
        steps = ceil((output - 1) / self._per_step)
        return int(self._timing.decode_ns(1, tokens + 1, steps, tokens + 1).sum()) if steps > 0 else 0


def _tokens_per_step(speculative: SpeculativeConfig | None) -> float:
    """Return tokens of a decode step, on average."""
    tokens, holds = 1.0, 1.0
    if speculative is not None:
        for rate in speculative.acceptance_rates[: speculative.num_speculative_tokens]:
            holds *= rate
            tokens += holds
    return tokens


class IdleFleet:
    """The engines of a fleet by the numbers that its records have for workers."""

    def __init__(self, fleet: Fleet, workers: Sequence[str]) -> None:
        engines = [IdleEngine(kind.engine) for kind in fleet.config.workers]
        kinds = [
            engines[number]
            for number, kind in enumerate(fleet.config.workers)
            for _ in range(fleet.config.made_of(kind))
        ]
        by_name = {worker.name: engine for worker, engine in zip(fleet.workers, kinds, strict=True)}
        self._engines = [by_name.get(_RANK.sub("", name), engines[0]) for name in workers]

    def request_ns(self, prefill: int, decode: int, tokens: int, cached: int, output: int) -> int:
        """Return end-to-end latency of a request whose prompt worker ``prefill`` computes and whose answer worker ``decode``
        gives.
        """
        ns = self._engines[prefill].prefill_ns(tokens, cached)
        return ns + self._engines[decode].decode_ns(tokens, output) if output > 1 else ns
