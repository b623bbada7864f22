"""Block tables: which physical blocks a request has in one group, position by position.

A table lists extents at ascending positions; positions between them hold the null block. An extent that others split in
the meantime is recognised by its later start, and its earlier parts are found to its left.
"""

from collections.abc import Iterator

from kvyard.blocks.extent import Extent


class BlockTable:
    """The blocks of one request in one group."""

    __slots__ = ("account", "extents", "length", "registered", "starts", "state")

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.account = 0
        """Owner of fresh blocks in the pool's ledger."""
        self.starts: list[int] = []
        """Start of each extent when the table got it."""
        self.length = 0
        """Positions in the table, null ones included."""
        self.registered: int | None = None
        """Number of leading positions that have been offered to the map of cached copies; ``None`` before the first time.

        It also distinguishes a running request from one that has yet to adopt its hits.
        """
        self.state: object = None
        """State of a state group between steps; other kinds leave it alone."""

    def append(self, extent: Extent) -> None:
        """Add ``extent`` behind the last position it leaves; a gap before it is null."""
        self.extents.append(extent)
        self.starts.append(extent.start)
        self.length = extent.start + len(extent.ids)

    def add_blocks(self, ids: list[int]) -> None:
        """Add fresh, private blocks at the end."""
        extents = self.extents
        last = extents[-1] if extents else None
        # Only a table's own unnamed blocks may grow: named ones are a copy of something.
        if last is not None and not last.cached and last.refs == 1 and last.start + len(last.ids) == self.length:
            last.ids += ids
        else:
            extent = Extent(ids, self.length)
            extent.account = self.account
            extents.append(extent)
            self.starts.append(self.length)
        self.length += len(ids)

    def settle(self) -> list[Extent]:
        """List the parts of extents that were split since; returns the extents in order of position."""
        extents, starts = self.extents, self.starts
        for index, extent in enumerate(extents):
            if extent.start != starts[index]:
                break
        else:
            return extents
        settled: list[Extent] = []
        for index, extent in enumerate(extents):
            start = starts[index]
            if extent.start == start:
                settled.append(extent)
                continue
            parts = [extent]
            while parts[-1].start > start:
                part = parts[-1].left
                assert part is not None, f"a table lost the blocks before {parts[-1]}"
                parts.append(part)
            parts.reverse()
            settled += parts
        self.extents = settled
        self.starts = [extent.start for extent in settled]
        return settled

    def drop_before(self, position: int) -> list[Extent]:
        """Take the blocks before ``position`` out of the table and return them; their positions become null.

        An extent that crosses ``position`` must have been split there (see ``Pool.cut``).
        """
        extents = self.settle()
        count = 0
        while count < len(extents) and extents[count].stop <= position:
            count += 1
        dropped = extents[:count]
        del extents[:count]
        del self.starts[:count]
        return dropped

    def replace(self, index: int, parts: list[Extent]) -> None:
        """Put ``parts`` in place of the extent at ``index``."""
        self.extents[index : index + 1] = parts
        self.starts[index : index + 1] = [part.start for part in parts]

    def ids(self) -> list[int]:
        """Return the physical id at every position, 0 where the table holds the null block."""
        listed: list[int] = []
        for extent in self.settle():
            listed += [0] * (extent.start - len(listed))
            listed += extent.ids
        listed += [0] * (self.length - len(listed))
        return listed

    def __iter__(self) -> Iterator[Extent]:
        return iter(self.settle())
