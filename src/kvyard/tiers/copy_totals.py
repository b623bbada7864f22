"""Copies from one tier to the next in one direction, and their size."""


class CopyTotals:
    """Copies from one tier to the next in one direction."""

    __slots__ = ("blocks", "bytes", "landed", "queued_ns", "submitted")

    def __init__(
        self, submitted: int = 0, landed: int = 0, blocks: int = 0, nbytes: int = 0, queued_ns: int = 0
    ) -> None:
        self.submitted = submitted
        self.landed = landed
        self.blocks = blocks
        """Of those that landed."""
        self.bytes = nbytes
        self.queued_ns = queued_ns
        """Sum of the delays of landings compared with idle links."""
