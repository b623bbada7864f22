"""A link to host memory over a bus that other traffic of the device uses too: hand-overs to other workers, and pulls from it.

Its transfers are flows of the fleet's network. They go through the link's own limits and through the device's bus, so all of it
is shared max-min fair. The fleet lands them; the link says so when it is next asked.
"""

from collections.abc import Callable, Hashable

from kvyard.blocks.spec import ConfigError
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.links.config import LinkConfig
from kvyard.tiers.links.link import Direction, LinkBase, Transfer
from kvyard.tiers.network import Flow


class BusTransfer(Transfer):
    """One submission, and its flow."""

    flow: Flow


class BusLink(LinkBase[BusTransfer]):
    """See ``Link`` for the verbs; ``advance`` reports what the fabric has landed by then."""

    def __init__(
        self, config: LinkConfig, fabric: Fabric, worker: int, rank: int, landed: Callable[[int], None]
    ) -> None:
        """Bus link of a rank of a worker, by number in the ``fabric``. ``landed`` receives the time of each landing. Raises
        ``ConfigError`` for a link that doesn't share.
        """
        if config.discipline != "fair":
            raise ConfigError(f"a bus is shared by all that use it: leave out discipline {config.discipline!r}")
        if any(lane.client_bandwidth is not None for lane in config.lanes):
            raise ConfigError("a bus is one device's: leave out client_bandwidth")
        super().__init__(config, BusTransfer)
        self._fabric = fabric
        self._on_landed = landed
        self._by_flow: dict[int, BusTransfer] = {}
        self._ports: list[list[Hashable]] = []
        for way, lane, of_bus in zip(("host out", "host in"), config.lanes, ("bus out", "bus in"), strict=True):
            fabric.network.add_port((way, worker, rank), lane.bandwidth)
            ports: list[Hashable] = [(way, worker, rank), (of_bus, worker)]
            if config.duplex_bandwidth is not None:
                fabric.network.add_port(("host", worker, rank), config.duplex_bandwidth)
                ports.append(("host", worker, rank))
            self._ports.append(ports)

    def earliest(self) -> int | None:
        if self._landed:
            return self._now
        network = self._fabric.network
        return min([network.landing(transfer.flow) for transfer in self._live.values()], default=None)

    def foresee(self, now: int, direction: Direction, nbytes: int, client: str = "", pieces: int = 1) -> int:
        lane = self.config.lanes[direction]
        load = nbytes + pieces * lane.piece_overhead
        return self._fabric.network.foresee(max(now, self._now), self._ports[direction], load, lane.first_byte_ns)

    def foresee_landing(self, transfer: Transfer) -> int:
        return self._fabric.network.foresee_landing(self._live[transfer.number].flow)

    def _arrived(self, flow: Flow) -> None:
        assert flow.ended is not None
        self._now = max(self._now, flow.ended)
        self._land(self._by_flow.pop(flow.number), flow.ended, flow.queued)
        self._on_landed(flow.ended)

    def _queue(self, transfer: BusTransfer, first_byte: int) -> None:
        transfer.flow = self._fabric.send(
            self._now, self._ports[transfer.direction], self._load(transfer), self._arrived, first_byte - self._now
        )
        self._by_flow[transfer.flow.number] = transfer

    def _drop(self, transfer: BusTransfer) -> None:
        del self._by_flow[transfer.flow.number]
        self._fabric.cancel(self._now, transfer.flow)

    def _run(self, now: int) -> None:
        """Land what is due on the fabric."""

    def _busy_ns(self, direction: Direction) -> int:
        return self._fabric.network.busy_ns(self._ports[direction][0])

    def leave_out_busy(self) -> None:
        """Leave the busy time to the network's account of its ports."""

    def check_integrity(self) -> None:
        super().check_integrity()
        assert {transfer.number for transfer in self._by_flow.values()} == self._live.keys(), (
            "a transfer without a flow"
        )
        self._fabric.network.check_integrity()
