"""HiCache's storage on a virtual clock, in place of the threads that query, read and write it.

What they do is SGLang's own: the query, the transfer of a batch of pages, the backup, and the files of its ``file`` backend.
When they do it is a rule. Queries, reads and writes are carried out one after the other, each kind by itself. A query takes
``first_byte`` nanoseconds, a read or a write ``per_page`` more for each page of a batch. What was terminated by the instant at
which it would begin takes no time and finds nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from types import SimpleNamespace
from typing import Any

from kvyard.sglang.copies import VirtualCopies

SECOND = 1_000_000_000
FILES = "/dev/shm"
"""Folder in memory for files, if there is one."""


class TimedQueue:
    """Stands for a queue that a thread reads: notes when each item was put."""

    def __init__(self) -> None:
        self.clock: VirtualCopies | None = None
        self.items: deque[tuple[int, Any]] = deque()

    def put(self, item: Any) -> None:
        if item is not None and self.clock is not None:
            self.items.append((self.clock.now, item))

    put_nowait = put

    def empty(self) -> bool:
        return not self.items


def without_threads() -> None:
    """Have SGLang's cache controllers start no threads for storage, and note when prefetches are terminated."""
    from queue import Queue

    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

    if hasattr(PrefetchOperation, "terminated_at"):
        return  # it has been done
    PrefetchOperation.terminated_at = None

    def start(controller: Any) -> None:
        for name in ("prefetch_queue", "backup_queue", "prefetch_buffer"):
            setattr(controller, name, TimedQueue())
        for name in ("prefetch_hit", "ack_prefetch", "ack_backup", "host_mem_release"):
            setattr(controller, f"{name}_queue", Queue())
        controller.prefetch_sync_queue = controller.ack_prefetch_queue

    HiCacheController._start_storage_threads = start
    HiCacheController._stop_storage_threads = lambda controller: None
    mark = PrefetchOperation.mark_terminate

    def mark_at(operation: Any) -> None:
        if not operation.is_terminated():
            operation.terminated_at = VirtualStorage.latest.clock.now
        mark(operation)

    PrefetchOperation.mark_terminate = mark_at


class VirtualStorage:
    """The storage of one tree."""

    latest: VirtualStorage
    """The one that was made last: there is one at a time."""

    def __init__(self, tree: Any, clock: VirtualCopies, storage: dict[str, Any]) -> None:
        from sglang.srt.utils import poll_timer

        VirtualStorage.latest = self
        self.tree = tree
        self.clock = clock
        self._controller = tree.cache_controller
        self._first_byte, self._per_page = storage["first_byte"], storage["per_page"]
        self._free_at = {"query": 0, "read": 0, "write": 0}
        self._reading: tuple[Any, int, int, bool] | None = None
        """A prefetch that is being read: the operation, its next batch, pages that have come, and true if none failed."""
        for name in ("prefetch_queue", "backup_queue", "prefetch_buffer"):
            getattr(self._controller, name).clock = clock
        self._controller.storage_host_pool.pin_memory = False  # there is no device to copy to
        poll_timer.time = SimpleNamespace(perf_counter=lambda: clock.now / SECOND)

    def advance(self) -> None:
        """Carry out all that has ended by now."""
        while (step := self._next()) is not None and step[0] <= self.clock.now:
            step[1]()

    def files(self) -> int:
        """Return the number of pages that have files."""
        return sum(name.endswith(".bin") for name in os.listdir(self._controller.storage_backend.file_path))

    def next_end(self) -> int | None:
        """Return when the next of them ends, or a request stops waiting for one: in a nanosecond at the earliest."""
        waits = [self._deadline(wait) for wait in self.tree._storage_prefetch_wait.values() if not wait.expired]
        step = self._next()
        ends = [end for end in waits if end is not None and end > self.clock.now]
        if step is not None:
            ends.append(max(step[0], self.clock.now + 1))
        return min(ends, default=None)

    def _deadline(self, wait: Any) -> int | None:
        """Return the first nanosecond at which a request has waited too long."""
        if not wait.timer.running or not any(
            request in self.tree.ongoing_prefetch
            for request, other in self.tree._storage_prefetch_wait.items()
            if other is wait
        ):
            return None
        start, timeout = wait.timer.started_at, wait.timeout_s
        end = int((start + timeout) * SECOND) - 2
        while not end / SECOND - start > timeout:
            end += 1
        return end

    # -- the threads ------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, Any] | None:
        """Next end, with its instant."""
        steps = [step for step in (self._next_query(), self._next_read(), self._next_write()) if step is not None]
        return min(steps, key=lambda step: step[0], default=None)

    def _next_query(self) -> tuple[int, Any] | None:
        queue = self._controller.prefetch_queue.items
        if not queue:
            return None
        put, operation = queue[0]
        start = max(put, self._free_at["query"])
        skipped = _terminated_by(operation, start)
        end = start + (0 if skipped else self._first_byte)

        def answer() -> None:
            queue.popleft()
            self._free_at["query"] = end
            controller = self._controller
            hashes, hit = ([], 0) if skipped else controller._storage_hit_query(operation)
            hit = controller._sync_prefetch_hit_query(operation, hit)
            operation.hash_value, operation.storage_hit_count = hashes[: hit // controller.page_size], hit
            controller.prefetch_hit_queue.put(operation)

        return end, answer

    def _next_read(self) -> tuple[int, Any] | None:
        from sglang.srt.managers.cache_controller import PrefetchAck
        from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorageExtraInfo

        controller = self._controller
        if self._reading is None:
            if not controller.prefetch_buffer.items:
                return None
            put, operation = controller.prefetch_buffer.items.popleft()
            self._free_at["read"] = max(put, self._free_at["read"])
            self._reading = (operation, 0, 0, True)
        operation, batch, pages, going_on = self._reading
        start = self._free_at["read"]
        hashes = operation.hash_value[batch : batch + STORAGE_BATCH_SIZE]
        going_on = going_on and not _terminated_by(operation, start)
        end = start + (self._first_byte + len(hashes) * self._per_page if going_on else 0)

        def read() -> None:
            self._free_at["read"] = end
            came, success = pages, going_on
            if going_on:
                size = controller.page_size
                slots = operation.host_indices[batch * size : (batch + len(hashes)) * size]
                hits = controller._page_transfer_kv_batch(operation, hashes, slots, HiCacheStorageExtraInfo(), [])
                came, success = pages + hits, hits == len(hashes)
            rid, tokens = operation.request_id, came * controller.page_size
            controller.ack_prefetch_queue.put(PrefetchAck(rid=rid, completed_tokens=tokens, operation=operation))
            self._reading = (operation, batch + STORAGE_BATCH_SIZE, came, success)
            if batch + STORAGE_BATCH_SIZE >= len(operation.hash_value):
                controller._page_transfer_sidecar(operation, came)
                controller.ack_prefetch_queue.put(PrefetchAck(rid=rid, completed_req=True, operation=operation))
                self._reading = None

        return end, read

    def _next_write(self) -> tuple[int, Any] | None:
        queue = self._controller.backup_queue.items
        if not queue:
            return None
        put, operation = queue[0]
        end = max(put, self._free_at["write"]) + self._first_byte + len(operation.hash_value) * self._per_page

        def write() -> None:
            queue.popleft()
            self._free_at["write"] = end
            self._controller._page_backup_or_log(operation)
            self._controller.ack_backup_queue.put(operation)

        return end, write


def _terminated_by(operation: Any, instant: int) -> bool:
    return bool(operation.is_terminated() and operation.terminated_at <= instant)


class StorageFolder:
    """A folder for the files of one log, which goes with the log."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="kvyard-l3-", dir=FILES if os.path.isdir(FILES) else None)
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = self.path

    def remove(self) -> None:
        """Remove the folder and all files in it."""
        shutil.rmtree(self.path, ignore_errors=True)
