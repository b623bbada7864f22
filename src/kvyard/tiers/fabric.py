"""The fabric: connections between the workers of a fleet, and notifications of arrivals.

A worker has a port out and a port in, and so has its node, where several share one. All that travels between workers goes
through here, so prompts that are handed over and prefixes that are pulled share the same ports. A device may have a *bus*:
one more port each way, for all that leaves it and comes to it, be it over the network or from its host (``BusLink``).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

from kvyard.tiers.network import Flow, Network

Speeds = tuple[int | None, int | None]
"""Bytes per second out and in, ``None`` for no limit."""


class Fabric:
    """The network of one fleet. Workers are numbers."""

    def __init__(
        self,
        network: Network,
        speeds: Speeds,
        node_speeds: Speeds | None = None,
        per_node: int = 8,
        bus_speeds: Speeds | None = None,
    ) -> None:
        """``speeds`` are each worker's, ``node_speeds`` those that ``per_node`` workers share, ``bus_speeds`` each device's."""
        self.network = network
        self._speeds = speeds
        self._node_speeds = node_speeds
        self._per_node = per_node
        self._bus_speeds = bus_speeds
        self._arrivals: dict[int, Callable[[Flow], None]] = {}
        """By a flow's number, what is to be done when it has landed."""

    def join(self, worker: int) -> None:
        """Add a worker's ports. Raises ``ConfigError`` for impossible speeds."""
        network = self.network
        network.add_port(("out", worker), self._speeds[0])
        network.add_port(("in", worker), self._speeds[1])
        if self._node_speeds is not None:
            node = worker // self._per_node
            network.add_port(("node out", node), self._node_speeds[0])
            network.add_port(("node in", node), self._node_speeds[1])
        if self._bus_speeds is not None:
            network.add_port(("bus out", worker), self._bus_speeds[0])
            network.add_port(("bus in", worker), self._bus_speeds[1])

    @property
    def has_bus(self) -> bool:
        """Return true if transfers to and from a device share a bus."""
        return self._bus_speeds is not None

    def ports(self, source: int, target: int, from_device: bool = True, to_device: bool = True) -> list[Hashable]:
        """Return the ports of a flow from one worker to another, from the device or the host of the one to that of the
        other: none for a worker to itself.
        """
        if source == target:
            return []
        ports: list[Hashable] = [("out", source), ("in", target)]
        if self._bus_speeds is not None:
            if from_device:
                ports.append(("bus out", source))
            if to_device:
                ports.append(("bus in", target))
        if self._node_speeds is not None:
            sends, receives = source // self._per_node, target // self._per_node
            if sends != receives:
                ports += [("node out", sends), ("node in", receives)]
        return ports

    def alone_ms(self, nbytes: int) -> float:
        """Return the time of ``nbytes`` from one worker to another with no other flow there."""
        speeds = (*self._speeds, *(self._node_speeds or ()), *(self._bus_speeds or ()))
        limits = [speed for speed in speeds if speed is not None]
        return self.network.latency / 1e6 + (nbytes / min(limits) * 1e3 if limits else 0.0)

    def send(
        self,
        now: int,
        ports: Iterable[Hashable],
        nbytes: int,
        arrived: Callable[[Flow], None],
        latency: int | None = None,
    ) -> Flow:
        """Send ``nbytes`` through ``ports``; ``arrived`` is called by ``land``, in order of time."""
        flow = self.network.submit(now, ports, nbytes, latency)
        self._arrivals[flow.number] = arrived
        return flow

    def cancel(self, now: int, flow: Flow) -> bool:
        """Cancel ``flow``; returns true if it was in flight. Then ``arrived`` is never called."""
        if self._arrivals.pop(flow.number, None) is None:
            return False
        self.network.cancel(now, flow)
        return True

    def due(self) -> int | None:
        """Return when to call ``land`` next."""
        return self.network.earliest()

    def land(self, now: int) -> None:
        """Report everything that has arrived by ``now`` to its senders."""
        landed: Sequence[Flow] = self.network.advance(now)
        for flow in landed:
            arrived = self._arrivals.pop(flow.number, None)
            if arrived is not None:  # else it was given up at the very instant
                arrived(flow)
