"""The network between mock workers: prompts that are handed over take the time that they would take, and share ports.

It is that of ``kvyard replay``, driven by a clock. Workers of other processes have ports here too, of which this process knows
its own transfers alone.
"""

import asyncio
from collections.abc import Callable, Hashable
from typing import Protocol

from kvyard.clock import SECOND, Clock
from kvyard.replay.config import HandoverConfig
from kvyard.server.mock.incoming import IncomingPrompt
from kvyard.tiers.network import Network

NetworkJournal = Callable[[int, str, IncomingPrompt, int], None]
"""Told (stamp, ``sent``, ``landed`` or ``stopped``, prompt, bytes or nanoseconds that others cost it)."""


class PromptNetwork(Protocol):
    """Network between workers, as a worker sees it."""

    def takes_time(self, prompt: IncomingPrompt) -> bool:
        """Return true if ``prompt`` has to wait for its blocks once there is room for them."""

    def send(self, prompt: IncomingPrompt, now: int) -> None:
        """Start the transfer of ``prompt``, for which there is room since ``now``."""


class PromptSizes:
    """Bytes of a prompt that are sent, and through which ports."""

    def __init__(self, config: HandoverConfig, block_bytes: int, block_size: int) -> None:
        self.config = config
        self._block_bytes = block_bytes
        self._block_size = block_size

    def nbytes(self, prompt: IncomingPrompt) -> int:
        """Return the bytes that are sent when the prompt is computed."""
        return self.config.sent_bytes(prompt.tokens, prompt.blocks, self._block_bytes, self._block_size)

    def take_time(self, prompt: IncomingPrompt) -> bool:
        """Return true if the transfer takes any time."""
        limits = self.ports(prompt).values()
        return self.nbytes(prompt) > 0 and (self.config.latency > 0 or any(limit is not None for limit in limits))

    def ports(self, prompt: IncomingPrompt) -> dict[Hashable, int | None]:
        """Return the ports that it goes through, with their limits."""
        config, source, target = self.config, prompt.source.number, prompt.target
        out, into = config.bandwidth
        if source == target:
            return {}
        limits: dict[Hashable, int | None] = {("out", prompt.source.label): out, ("in", target): into}
        if config.node_bandwidth is not None:
            receives = target // config.workers_per_node
            sends = None if source is None else source // config.workers_per_node
            if sends != receives:
                if sends is not None:
                    limits["node out", sends] = config.node_bandwidth[0]
                limits["node in", receives] = config.node_bandwidth[1]
        return limits


class LiveNetwork:
    """One network for the workers of a process, in nominal time."""

    def __init__(
        self, sizes: PromptSizes, clock: Clock, speed: float, landed: Callable[[IncomingPrompt, int], None]
    ) -> None:
        """``landed`` receives prompts that have arrived, and the time."""
        self.sizes = sizes
        self.journal: NetworkJournal = lambda stamp, what, prompt, amount: None
        self._network = Network(sizes.config.latency, shared=sizes.config.contention)
        self._clock = clock
        self._speed = speed
        self._landed = landed
        self._now = 0
        self._in_flight: dict[int, IncomingPrompt] = {}
        self._timer: asyncio.TimerHandle | None = None

    def takes_time(self, prompt: IncomingPrompt) -> bool:
        return self.sizes.take_time(prompt)

    def send(self, prompt: IncomingPrompt, now: int) -> None:
        self._now = max(now, self._now)
        prompt.flow = self._network.submit(self._now, self._open(prompt), self.sizes.nbytes(prompt))
        self._in_flight[prompt.flow.number] = prompt
        self.journal(self._now, "sent", prompt, prompt.flow.nbytes)
        self._plan()

    def stop(self, prompt: IncomingPrompt) -> None:
        """Cancel transfers of ``prompt`` in flight."""
        flow = prompt.flow
        if flow is not None and self._in_flight.pop(flow.number, None) is not None:
            self._now = max(self._clock.now(), self._now)
            self._network.cancel(self._now, flow)
            self.journal(self._now, "stopped", prompt, 0)
            self._plan()

    def of(self, number: int) -> list[IncomingPrompt]:
        """Return prompts in flight to or from the worker of that number."""
        return [
            transfer for transfer in self._in_flight.values() if number in (transfer.source.number, transfer.target)
        ]

    @property
    def idle(self) -> bool:
        """Return true if no transfer is in flight."""
        return not self._in_flight

    def close(self) -> None:
        """Land nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless shares are fair."""
        self._network.check_integrity()

    def _open(self, prompt: IncomingPrompt) -> list[Hashable]:
        ports = self.sizes.ports(prompt)
        for port, limit in ports.items():
            self._network.add_port(port, limit)
        return list(ports)

    def _plan(self) -> None:
        self.close()
        due = self._network.earliest()
        if due is not None:
            seconds = max(0.0, (due - self._clock.now()) / (self._speed * SECOND))
            self._timer = asyncio.get_running_loop().call_later(seconds, self._turn)

    def _turn(self) -> None:
        self._timer = None
        self._now = max(self._clock.now(), self._now)
        for flow in self._network.advance(self._now):
            prompt = self._in_flight.pop(flow.number, None)
            if prompt is not None and flow.ended is not None:
                self.journal(flow.ended, "landed", prompt, flow.queued)
                self._landed(prompt, flow.ended)
        self._plan()
