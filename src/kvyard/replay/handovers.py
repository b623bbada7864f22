"""Hand-overs: requests whose prompt one worker computes and whose answer another one generates. There are two protocols:

    source-first       the prefill worker computes and holds the blocks; a decode worker is chosen and makes room
    destination-first  a decode worker is chosen and makes room; the prefill worker computes and holds the blocks

Then, with either, the blocks travel and the decode worker decodes. Blocks at both ends are held until the transfer has landed.
It shares the network with all others: a worker's way out and in, and its node's. If either worker fails before that, the
request starts over, and nothing stays behind.
"""

from kvyard.blocks.use import RequestFacts
from kvyard.engine.handovers import EngineHandovers, HandoverPeer
from kvyard.engine.job import Job
from kvyard.integers import ceil_div
from kvyard.replay.config import HandoverConfig
from kvyard.replay.record import Record, Stages
from kvyard.replay.worker import Worker
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.network import Flow


class Handover:
    """Request in flight from a prefill worker to a decode worker."""

    __slots__ = (
        "blocks",
        "decode",
        "facts",
        "flow",
        "missing",
        "prefill",
        "record",
        "source",
        "stages",
        "target",
    )

    def __init__(self, record: Record, facts: RequestFacts) -> None:
        self.record = record
        self.facts = facts
        self.stages = Stages()
        record.stages = self.stages
        self.source: tuple[Worker, int] | None = None
        """Worker and rank that compute the prompt."""
        self.target: tuple[Worker, int] | None = None
        """Worker and rank that decode."""
        self.prefill: Job | None = None
        self.decode: Job | None = None
        self.missing = 0
        """Tokens that the target lacked when it was last asked."""
        self.blocks = 0
        """Blocks that those fill."""
        self.flow: Flow | None = None


class Handovers:
    """All hand-overs of a fleet, and the network that they share. The placement decides who computes and who decodes."""

    def __init__(self, config: HandoverConfig, fabric: Fabric, block_bytes: int, block_size: int) -> None:
        self.config = config
        self._block_bytes = block_bytes
        self._block_size = block_size
        self.fabric = fabric
        self.network = fabric.network
        self.in_flight: dict[str, Handover] = {}
        """By request, from its arrival until it decodes."""
        self._by_flow: dict[int, Handover] = {}
        self._to_compute: list[Handover] = []

    # -- workers ------------------------------------------------------------------------------------------------------

    def join(self, worker: int) -> "WorkerPeer":
        """Let a worker take part; returns what its engine talks to."""
        self.fabric.join(worker)
        return WorkerPeer(self)

    def send_ms(self, tokens: int) -> float:
        """Return milliseconds that ``tokens`` would take on an idle network."""
        return self.fabric.alone_ms(self._bytes(tokens, ceil_div(tokens, self._block_size)))

    def _bytes(self, tokens: int, blocks: int) -> int:
        return self.config.sent_bytes(tokens, blocks, self._block_bytes, self._block_size)

    # -- steps --------------------------------------------------------------------------------------------------------

    def needs_transfer(self, hand: Handover, missing: int, blocks: int) -> bool:
        """True if ``hand`` must wait for its blocks once the target has room for them."""
        hand.missing, hand.blocks = missing, blocks
        if hand.stages.held < 0:
            return True  # they aren't computed yet
        assert hand.source is not None and hand.target is not None
        ports = self.fabric.ports(hand.source[0].number, hand.target[0].number)
        # The target computes the last token of a prompt again, so one of a single token brings nothing.
        return hand.record.input > 1 and self._amount(hand) > 0 and self.network.takes_time(ports)

    def _amount(self, hand: Handover) -> int:
        tokens = hand.record.input if self.config.sends == "prompt" else hand.missing
        return self._bytes(tokens, hand.blocks)

    def held(self, hand: Handover, now: int) -> None:
        """Note that the prompt is computed, and its blocks stay where they are."""
        hand.stages.held = now
        if hand.stages.reserved >= 0:
            self._send(hand, now)

    def reserved(self, hand: Handover, now: int) -> None:
        """Note that the target has reserved blocks for it."""
        hand.stages.reserved = now
        if hand.stages.held >= 0:
            self._send(hand, now)
        else:
            self._to_compute.append(hand)

    def take_reserved(self) -> list[Handover]:
        """Return the hand-overs for which there is room since the last call, and whose prompts are to be computed now."""
        if not self._to_compute:
            return self._to_compute
        taken, self._to_compute = self._to_compute, []
        return taken

    def _send(self, hand: Handover, now: int) -> None:
        assert hand.source is not None and hand.target is not None
        hand.stages.sent = self._amount(hand)
        ports = self.fabric.ports(hand.source[0].number, hand.target[0].number)
        hand.flow = self.fabric.send(now, ports, hand.stages.sent, self._arrived)
        self._by_flow[hand.flow.number] = hand

    def entered(self, hand: Handover, now: int) -> None:
        """Note that the target decodes it from now on."""
        stages = hand.stages
        stages.entered = now
        del self.in_flight[hand.record.id]
        if stages.activated < 0:
            stages.reserved = now
            self._activate(hand, now)

    def _arrived(self, flow: Flow) -> None:
        now = flow.ended
        assert now is not None
        hand = self._by_flow.pop(flow.number)
        hand.stages.queued = flow.queued
        self._activate(hand, now)
        assert hand.target is not None and hand.decode is not None
        _loads(hand.target).landed(hand.decode)
        worker = hand.target[0]
        worker.engine.cut(now)
        worker.touch()

    def _activate(self, hand: Handover, now: int) -> None:
        hand.stages.activated = now
        self._release(hand, now)

    def _release(self, hand: Handover, now: int) -> None:
        """Let the prefill worker evict what it computed."""
        if hand.source is None or hand.prefill is None or hand.stages.held < 0 or hand.stages.released >= 0:
            return
        hand.stages.released = now
        worker, rank = hand.source
        if worker.alive:
            _loads(hand.source).release(hand.prefill.id)
            if len(worker.cores) > 1 or not worker.cores[rank].freed(now):
                worker.engine.cut(now)
                worker.touch()

    # -- failures -----------------------------------------------------------------------------------------------------

    def lost(self, worker: Worker) -> list[Handover]:
        """Return hand-overs that can't continue without ``worker``."""
        return [
            hand
            for hand in self.in_flight.values()
            if (hand.target is not None and hand.target[0] is worker)
            or (hand.source is not None and hand.source[0] is worker and hand.stages.activated < 0)
        ]

    def give_up(self, hand: Handover, now: int) -> None:
        """Cancel the transfer of ``hand``, and free what the prefill worker holds for it."""
        self.in_flight.pop(hand.record.id, None)
        if hand in self._to_compute:
            self._to_compute.remove(hand)
        if hand.flow is not None and self._by_flow.pop(hand.flow.number, None) is not None:
            self.fabric.cancel(now, hand.flow)
        self._release(hand, now)

    def withdraw(self, place: tuple[Worker, int], job: Job) -> None:
        """Note that the blocks reserved at ``place`` for ``job``, which was cancelled, will never be filled."""
        _loads(place).landed(job)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every transfer has its two ends, and shares are fair."""
        self.network.check_integrity()
        for hand in self._by_flow.values():
            assert self.in_flight.get(hand.record.id) is hand, f"{hand.record.id} is sent and not in flight"


class WorkerPeer(HandoverPeer):
    """Finds the hand-over that a worker's engine reports about."""

    def __init__(self, handovers: Handovers) -> None:
        super().__init__(reserves_one=handovers.config.reserves == "one")
        self._handovers = handovers

    def needs_transfer(self, job: Job, missing: int, blocks: int) -> bool:
        return self._handovers.needs_transfer(self._handovers.in_flight[job.id], missing, blocks)

    def reserved(self, job: Job, now: int) -> None:
        self._handovers.reserved(self._handovers.in_flight[job.id], now)

    def entered(self, job: Job, now: int) -> None:
        self._handovers.entered(self._handovers.in_flight[job.id], now)


def _loads(place: tuple[Worker, int]) -> EngineHandovers:
    worker, rank = place
    loads = worker.cores[rank].handovers
    assert loads is not None
    return loads
