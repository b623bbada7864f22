"""The part of a trace's hints that an engine heeds: all of it, priorities alone, or nothing."""

from msgspec.structs import replace

from kvyard.blocks import NO_HINTS, BlockManager, Hints
from kvyard.replay.traces import TraceRequest


def hints_of(row: TraceRequest) -> Hints:
    """The hints of a row, with the name of its session in any case: engines note whose blocks are whose."""
    if row.session is None or row.hints.session:
        return row.hints
    return replace(row.hints, session=row.session)


def heeded(hints: Hints, manager: BlockManager) -> Hints:
    """The part of ``hints`` that the engine of ``manager`` heeds."""
    if hints is NO_HINTS or manager.hints:
        return hints
    if manager.keeps_by_priority and hints.retention:
        return Hints(retention=hints.retention)
    return NO_HINTS
