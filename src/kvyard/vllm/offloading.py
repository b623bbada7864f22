"""vLLM's CPU tier for an engine that computes on CPU: the same manager, and a worker that copies tensors.

vLLM's own worker needs a GPU to copy from. With this one, ``OffloadingConnector`` works on the CPU engine, so that what is
offloaded when, and what is loaded, can be tested anywhere; and each block that comes back can be compared with what was stored.

Loaded by vLLM with ``"spec_name":"CopyOffloadingSpec","spec_module_path":"kvyard.vllm.offloading"`` in the connector's
``kv_connector_extra_config``, beside the settings of vLLM's own; ``"verify_bytes":true`` compares.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from kvyard.integers import ceil_div
from kvyard.vllm.version import check_version

check_version()  # before the first import from vLLM: another version may not have what is imported

# ruff: noqa: E402
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvyard.clock import WallClock, to_seconds
from kvyard.errors import KvyardError


class CorruptBlockError(KvyardError, RuntimeError):
    """A block came back other than it was stored."""


class CopyOffloadingSpec(CPUOffloadingSpec):
    """vLLM's ``CPUOffloadingSpec`` but for the worker."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._copies: CopyWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._copies is None:
            verify = bool(self.extra_config.get("verify_bytes", False))
            self._copies = CopyWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, verify=verify)
        return self._copies


class CopyWorker(OffloadingWorker):
    """Copies between the tensors of the engine and those of the tier. A copy is over when it is submitted."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int, *, verify: bool) -> None:
        """``verify``: remember a digest of each block that is stored, and compare it with each that is loaded."""
        self._device = [cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes)) for cache in kv_caches.tensors]
        self._host = [
            torch.zeros((num_chunks, blocks_per_chunk, cache.page_size_bytes), dtype=torch.int8)
            for cache in kv_caches.tensors
        ]
        self._tensors_of = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        """Per group, where its blocks are."""
        self._blocks_per_chunk = blocks_per_chunk
        self._digests: dict[tuple[int, int, int], bytes] | None = {} if verify else None
        """By tensor, chunk and place in the chunk."""
        self._finished: list[TransferResult] = []
        self._clock = WallClock()
        self.stored = 0
        """Blocks so far, once for each tensor."""
        self.loaded = 0
        self.verified = 0
        """Loaded chunks that were compared."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        began = self._clock.now()
        size = 0
        for tensor, block, chunk, place in self._pairs(src_spec, dst_spec):
            page = self._device[tensor][block]
            self._host[tensor][chunk, place].copy_(page)
            size += page.numel()
            self.stored += 1
            if self._digests is not None:
                self._digests[tensor, chunk, place] = _digest(page)
        self._note(job_id, size, began)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Raises ``CorruptBlockError`` for a block that isn't what was stored, if that is compared."""
        began = self._clock.now()
        size = 0
        for tensor, block, chunk, place in self._pairs(dst_spec, src_spec):
            page = self._device[tensor][block]
            page.copy_(self._host[tensor][chunk, place])
            size += page.numel()
            self.loaded += 1
            if self._digests is not None:
                if self._digests.get((tensor, chunk, place)) != _digest(page):
                    raise CorruptBlockError(
                        f"block {block} of tensor {tensor} was loaded from chunk {chunk}, which was stored otherwise"
                    )
                self.verified += 1
        self._note(job_id, size, began)
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: no job is ever in flight."""

    def _pairs(self, device: Any, host: Any) -> Iterator[tuple[int, int, int, int]]:
        """Yield the copies: tensor, block of the device, chunk of the host, and position in the chunk.

        Blocks are listed group after group, and those of a group follow each other in its chunks, of which the first may be
        entered in the middle.
        """
        blocks, chunks = device.block_ids.tolist(), host.block_ids.tolist()
        per_chunk = self._blocks_per_chunk
        first_block = first_chunk = 0
        for group, (count, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=False)):
            skip = index % per_chunk
            for number in range(count):
                chunk, place = divmod(skip + number, per_chunk)
                for tensor in self._tensors_of[group]:
                    yield tensor, blocks[first_block + number], chunks[first_chunk + chunk], place
            first_block += count
            first_chunk += ceil_div(skip + count, per_chunk) if count else 0

    def _note(self, job_id: int, size: int, began: int) -> None:
        took = to_seconds(self._clock.now() - began)
        self._finished.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=took))


def _digest(page: torch.Tensor) -> bytes:
    return hashlib.blake2b(page.numpy().tobytes(), digest_size=16).digest()
