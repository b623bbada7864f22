"""The weight of a JSON text: a bound of the objects that a reader would build of it, found without building any.

A text of 16 MiB makes 5 million lists in 1.3 s, and 200 bytes of memory of each three of its own. Counting commas, brackets and
quotes takes some milliseconds, so large bodies are weighed before they are read.
"""

from kvyard.clock import pause

LARGE = 256 << 10
"""Bytes from which on a text is weighed: a shorter one is read within 20 ms, whatever it is."""
MOST_WEIGHT = 1_000_000
"""Weight of a text that is read within 50 ms of CPU."""
CONTAINER = 10
STRING = 5
"""Weights of a list or an object, and of a string among many; a number has 1."""
MOST_ESCAPES = 2_000_000
"""Backslashes of a text that is read in the same time."""
HEAVY = "the body has more values than are read at once"
FIX = "send fewer numbers, lists, objects or escapes at once"


async def too_heavy(text: bytes, numbers: int = MOST_WEIGHT) -> bool:
    """True if a text has more than ``numbers`` numbers, or more of other values than may be read at once. Other tasks have
    their turn in between.
    """
    if len(text) < LARGE:
        return False
    escapes = text.count(b"\\")
    if escapes > MOST_ESCAPES:
        return True
    await pause()
    light = text.count(b",") <= numbers and CONTAINER * _containers(text) <= MOST_WEIGHT
    await pause()
    if light or text[:1] == b'"':  # one string
        return False
    # What stands in strings weighs nothing.
    if escapes:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        await pause()
    strings = STRING * text.count(b'"') // 2
    if strings > MOST_WEIGHT:
        return True
    text = b"".join(text.split(b'"')[::2])
    await pause()
    return text.count(b",") > numbers or strings + CONTAINER * _containers(text) > MOST_WEIGHT


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")
