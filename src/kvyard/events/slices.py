"""Events in slices: a batch may have a million blocks, and a server has others to serve in between."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvyard.events.types import Cleared, Event, Removed, Stored


def slices(events: Iterable[Event], most: int) -> Iterator[list[Event]]:
    """Yield ``events`` in lists of about ``most`` blocks, equivalent to them in sequence; an event with more is taken
    apart.
    """
    portion: list[Event] = []
    blocks = 0
    for event in events:
        for part in _parts(event, most):
            portion.append(part)
            blocks += 1 if isinstance(part, Cleared) else max(1, len(part.hashes))
            if blocks >= most:
                yield portion
                portion, blocks = [], 0
    if portion:
        yield portion


def blocks_of(events: Sequence[Event]) -> int:
    """Return the number of blocks that events are about; a clear counts as one."""
    return sum(1 if isinstance(event, Cleared) else len(event.hashes) for event in events)


def _parts(event: Event, most: int) -> Iterator[Event]:
    if isinstance(event, Cleared) or len(event.hashes) <= most:
        yield event
        return
    replace, hashes = msgspec.structs.replace, event.hashes
    for low in range(0, len(hashes), most):
        high = low + most
        if isinstance(event, Removed):
            yield replace(event, hashes=hashes[low:high])
        else:
            yield _stored(event, low, high)


def _stored(event: Stored, low: int, high: int) -> Stored:
    """Return blocks ``low`` to ``high`` of a store, which follow on the one before them."""
    hashes, tokens, extras, size = event.hashes, event.tokens, event.extra_keys, event.block_size
    if tokens is not None and len(tokens) != size * len(hashes):
        tokens = None  # they can't be distinguished, and so are evidence of no block
    return msgspec.structs.replace(
        event,
        hashes=hashes[low:high],
        parent=hashes[low - 1] if low else event.parent,
        tokens=None if tokens is None else tokens[low * size : high * size],
        extra_keys=None if extras is None else extras[low:high],
    )
