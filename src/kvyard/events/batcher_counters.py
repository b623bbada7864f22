"""Counters of a batcher."""

import msgspec


class BatcherCounters(msgspec.Struct):
    """Counters of a batcher since it was made."""

    iterations: int = 0
    """Ends of iteration, silent ones included."""
    batches: int = 0
    stored: int = 0
    stored_blocks: int = 0
    removed: int = 0
    removed_blocks: int = 0
    cleared: int = 0
    merged: int = 0
    """Stores that became part of an earlier Stored."""
    joined: int = 0
    """Removals that joined others already waiting."""
    repeats: int = 0
    """Further copies in, or copies out while others stay: not announced."""
    miscounted: int = 0
    """Removals whose chain no longer had all the hashes; never sent short, the whole map was announced instead."""
    lost_runs: int = 0
    """Runs given up unannounced because an iteration outgrew its bound; a snapshot made up for them."""
    resyncs: int = 0
    """Batches that cleared and announced the whole map again."""
