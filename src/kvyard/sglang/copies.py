"""Copies between device and host on a virtual clock, in place of HiCache's, which need CUDA."""

from __future__ import annotations

from typing import Any


class CopyEvent:
    """The end of a copy, which has happened when the virtual clock says so."""

    def __init__(self, engine: VirtualCopies, end: int) -> None:
        self._engine = engine
        self.end = end

    def query(self) -> bool:
        return self._engine.now >= self.end

    def synchronize(self) -> None:
        self._engine.now = max(self._engine.now, self.end)


class VirtualCopies:
    """Stands for ``L2TransferEngine``: copies between device and host take time on a virtual clock and move nothing.

    Each direction carries one copy after the other, which begins ``first_byte`` nanoseconds after it was submitted at the
    earliest and takes ``per_page`` nanoseconds a page.
    """

    def __init__(self, page: int, first_byte: int, per_page: int) -> None:
        self._page, self._first_byte, self._per_page = page, first_byte, per_page
        self.now = 0
        self._free_at = [0, 0]
        self.ends: list[int] = []
        """End of the copies submitted so far."""

    def submit_device_to_host(self, transfers: list[Any]) -> Any:
        return self._submit(0, transfers)

    def submit_host_to_device(self, transfers: list[Any], **_: Any) -> Any:
        return self._submit(1, transfers)

    def next_end(self) -> int | None:
        """Return when the next copy ends after now."""
        return min((end for end in self.ends if end > self.now), default=None)

    def _submit(self, direction: int, transfers: list[Any]) -> Any:
        from sglang.srt.mem_cache.l2_transfer import TransferCompletion

        pages = sum(len(transfer.host_indices) for transfer in transfers) // self._page
        start = max(self.now + self._first_byte, self._free_at[direction])
        end = self._free_at[direction] = start + pages * self._per_page
        self.ends.append(end)
        return TransferCompletion(CopyEvent(self, self.now), CopyEvent(self, end), False)
