"""The replay of one pool of a fleet, as sent back by another process or machine."""

from collections import Counter
from collections.abc import Callable, Collection

import msgspec
import numpy as np
import numpy.typing as npt

from kvyard.lab.pools.pool import pool_requests
from kvyard.replay.config import ReplayConfig
from kvyard.replay.records import PackedRecords
from kvyard.replay.report import Report, Slo
from kvyard.replay.run import replay
from kvyard.replay.traces import Trace
from kvyard.replay.traces.reading import ReadingTally


class PoolRun(msgspec.Struct, frozen=True):
    """Result of a pool's replay."""

    report: Report
    records: PackedRecords
    durations: bytes
    """Gaps between tokens, ..."""
    counts: bytes
    """... and how often each occurred."""
    skipped: int
    """Bad rows of the whole trace that were left out, ..."""
    examples: list[str]
    """... the first of them in words, ..."""
    left_out: dict[str, int]
    """... and others that were, by reason."""

    @property
    def tally(self) -> ReadingTally:
        return ReadingTally(self.skipped, self.examples, Counter(self.left_out))

    @property
    def gaps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return np.frombuffer(self.durations, dtype=np.int64), np.frombuffer(self.counts, dtype=np.int64)


def perform_pool(
    trace: Trace,
    name: str,
    names: Collection[str],
    config: ReplayConfig,
    slo: Slo | None,
    progress: Callable[[int, int, int], None] | None,
) -> bytes:
    """Replay the requests of pool ``name``; returns a ``PoolRun``, packed.

    Raises ``KvyardError``; a KeyboardInterrupt goes on.
    """
    done = replay(pool_requests(trace, name, names), config=config, slo=slo, label=name, progress=progress)
    if not done.complete:
        raise KeyboardInterrupt
    durations, counts = done.fleet.gaps.columns()
    assert done.trace is not None
    tally = done.trace.tally
    left = (tally.skipped, tally.examples, dict(tally.left_out))
    run = PoolRun(done.report, done.fleet.records.packed(), durations.tobytes(), counts.tobytes(), *left)
    return msgspec.msgpack.encode(run)


def read_pool(data: bytes) -> PoolRun:
    """Decode the result of ``perform_pool``."""
    return msgspec.msgpack.decode(data, type=PoolRun)
