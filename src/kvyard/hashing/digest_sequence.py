"""The interface of digests at rest, apart from the class that has it."""

from collections.abc import Sequence


class DigestSequence(Sequence[bytes]):
    """Base of ``DigestKeys``, and of nothing else.

    ``DigestKeys`` is compiled. A compiled class has no registry of its own for ``isinstance`` and shares that of its base:
    with ``Sequence`` itself as base a tuple would count as ``DigestKeys``, and a list no longer as a sequence.
    """

    __slots__ = ()
