"""The interface of digests at rest, apart from the class that has it."""

from collections.abc import Sequence


class DigestSequence(Sequence[bytes]):
    """What ``DigestKeys`` derives from, and nothing else.

    That one is compiled. A compiled class has no book of its own of what counts as derived from it, and shares that of its
    base: with ``Sequence`` itself as base a tuple would be a ``DigestKeys``, and lists no sequences any more.
    """

    __slots__ = ()
