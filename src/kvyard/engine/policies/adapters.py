"""Limit of LoRA adapters in a pass: vLLM's ``max_loras``."""

from collections.abc import Iterable

from kvyard.engine.job import Job


class AdapterLimit:
    """Adapters of the pass being formed. Jobs without an adapter always fit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: set[str] = set()

    def begin_pass(self, scheduled: Iterable[Job]) -> None:
        """Start over with the adapters of the jobs that are already in the pass."""
        names = {job.chain.namespace.lora_name for job in scheduled}
        self._used = {name for name in names if name is not None}

    def allows(self, job: Job) -> bool:
        """Return true if ``job`` may join the pass."""
        name = job.chain.namespace.lora_name
        return name is None or name in self._used or len(self._used) < self._most

    def add(self, job: Job) -> None:
        """Count the adapter of ``job``, which has joined the pass."""
        name = job.chain.namespace.lora_name
        if name is not None:
            self._used.add(name)
