"""What an engine makes of a trace's hints: all of it, priorities alone, or nothing. What it evicts by is its own business."""

from msgspec.structs import replace

from kvyard.blocks import NO_HINTS, BlockManager, Hints
from kvyard.replay.traces import TraceRequest


def hints_of(row: TraceRequest) -> Hints:
    """The hints of a row, with the name of its session in any case: engines note whose blocks are whose."""
    if row.session is None or row.hints.session:
        return row.hints
    return replace(row.hints, session=row.session)


def heeded(hints: Hints, manager: BlockManager) -> Hints:
    """What of ``hints`` the engine of ``manager`` goes by."""
    if hints is NO_HINTS or manager.hints:
        return hints
    if manager.keeps_by_priority and hints.retention:
        return Hints(retention=hints.retention)
    return NO_HINTS
