"""What events cost: events and bytes per evicted block, blocks per second through the batcher, the encoders and decoders,
and the time they add to the block manager.

Run with ``python benchmarks/events.py``. The baseline for size is one event per hash, which is what vLLM's pool emits; the
baseline for decoding is msgspec alone, into the same shapes and without any of our rules; the baseline for the manager is
the same workload without events, ours and vLLM's (see ``benchmarks/blocks.py``). Best of several runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from _peers import peer_python
from blocks import one

from kvyard.events import Batcher, EventBatch, GroupMeta, Removed, Tier
from kvyard.events.wire import Decoder, Encoder, written_dialects
from kvyard.events.wire.vllm import MapEvent, VllmBatch
from kvyard.hashing import Run, TokenChain, TraceChain, algorithm

BLOCK = 16
GROUPS = (
    GroupMeta(block_size=BLOCK, kind="full_attention"),
    GroupMeta(block_size=BLOCK, kind="sliding_window", window=1024),
)


def best(work: Callable[[], object], runs: int = 7) -> float:
    """The shortest of several runs, in seconds of CPU time: the machines are shared."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def evictions(iterations: int, per_iteration: int) -> list[EventBatch]:
    """Pressure on two groups: evictions come block by block, alternating, with one store per group and iteration.

    The hashes are real ones of 64 bits. A trace's keys are small numbers, which msgpack writes in fewer bytes than any
    engine's hashes take, and would flatter the batched form.
    """
    batcher = Batcher(GROUPS)
    batches = []
    how = algorithm("xxh3")
    for index in range(iterations):
        old = TokenChain([2 * index] * per_iteration * BLOCK, BLOCK, how)
        new = TokenChain([2 * index + 1] * per_iteration * BLOCK, BLOCK, how)
        for position in reversed(range(per_iteration)):
            for group in (0, 1):
                batcher.left(Run(old, position, position + 1), group, Tier.G1, True)
        for group in (0, 1):
            batcher.entered(Run(new, 0, per_iteration), group, Tier.G1, True)
        batch = batcher.end_iteration(index)
        assert batch is not None
        batches.append(batch)
    return batches


def singly(batch: EventBatch) -> EventBatch:
    """The removals of ``batch`` as one event per hash; nothing else of it."""
    events = [
        Removed(hashes=[key], group=event.group, tier=event.tier)
        for event in batch.events
        if isinstance(event, Removed)
        for key in event.hashes
    ]
    return EventBatch(stream="", seq=0, events=list(events))


def removals(batch: EventBatch) -> EventBatch:
    return EventBatch(stream="", seq=0, events=[event for event in batch.events if isinstance(event, Removed)])


def report_sizes() -> None:
    print(f"{'per evicted block':34}{'events':>10}{'bytes':>10}{'decode ns':>12}")
    for per_iteration in (4, 32, 256):
        batches = evictions(50, per_iteration)
        for name, kind in (("one event per hash", singly), ("batched", removals)):
            encoder = Encoder()
            shaped = [kind(batch) for batch in batches]
            payloads = [encoder.encode(batch) for batch in shaped]
            blocks = sum(len(event.hashes) for batch in shaped for event in batch.events if isinstance(event, Removed))
            events = sum(len(batch.events) for batch in shaped)
            decoder = Decoder()
            spent = best(lambda d=decoder, p=payloads: [d.decode(payload) for payload in p])
            label = f"{name}, {2 * per_iteration} a pass"
            size = sum(map(len, payloads))
            print(f"{label:34}{events / blocks:>10.3f}{size / blocks:>10.1f}{spent / blocks * 1e9:>12.0f}")


def report_batcher() -> None:
    print(f"\n{'batcher':34}{'ns a call':>12}{'blocks/s':>14}")
    calls, length = 20_000, 32
    chain = TraceChain(range(calls * length), BLOCK, calls * length * BLOCK, BLOCK, 1)
    runs = [Run(chain, index * length, (index + 1) * length) for index in range(calls)]
    scattered = runs[::2] + runs[1::2]

    def work(action: str, order: list[Run]) -> None:
        batcher = Batcher(GROUPS)
        call = batcher.entered if action == "entered" else batcher.left
        for run in order:
            call(run, 0, Tier.G1, True)
        batcher.end_iteration(0)

    def calls_only(action: str, order: list[Run], flag: bool) -> None:
        batcher = Batcher(GROUPS, max_runs=1 << 40)
        call = batcher.entered if action == "entered" else batcher.left
        for run in order:
            call(run, 0, Tier.G1, flag)

    for label, action, order, flag in (
        ("entered, one growing chain", "entered", runs, True),
        ("entered, scattered", "entered", scattered, True),
        ("left", "left", runs, True),
        ("left, other copies stay", "left", runs, False),
    ):
        call = best(lambda d=action, o=order, f=flag: calls_only(d, o, f)) / calls
        blocks = calls * length / best(lambda d=action, o=order: work(d, o)) if flag else float("nan")
        print(f"{label:34}{call * 1e9:>12.0f}{blocks:>14,.0f}")


def report_speed() -> None:
    print(f"\n{'blocks/s, ' + str(BLOCK) + ' tokens each':34}{'encode':>14}{'decode':>14}{'bytes/block':>14}")
    tokens, count = 64 * BLOCK, 64
    for hashes in ("xxh3", "sha256"):
        batcher = Batcher(GROUPS)
        for index in range(count):
            chain = TokenChain(range(index * tokens, (index + 1) * tokens), BLOCK, algorithm(hashes))
            batcher.entered(Run(chain), index % 2, Tier.G1, True)
        batch = batcher.end_iteration(0)
        assert batch is not None
        blocks = count * tokens // BLOCK
        for dialect in written_dialects():
            payload = Encoder(dialect).encode(batch)
            slow = dialect == "trtllm"
            written = best(lambda d=dialect, b=batch: Encoder(d).encode(b), 3 if slow else 15)
            read = best(lambda p=payload: Decoder().decode(p), 3 if slow else 15)
            label = f"{dialect}, {hashes}"
            print(f"{label:34}{blocks / written:>14,.0f}{blocks / read:>14,.0f}{len(payload) / blocks:>14.1f}")
            if dialect == "vllm":
                bare = msgspec.msgpack.Decoder(VllmBatch[MapEvent])
                read = best(lambda p=payload, d=bare: d.decode(p), 15)
                print(f"{'  msgspec alone':34}{'':>14}{blocks / read:>14,.0f}")
        spoiled = payload_with_a_bad_event(batch)
        read = best(lambda p=spoiled: Decoder().decode(p), 15)
        print(f"{'vllm with one bad event, ' + hashes:34}{'':>14}{blocks / read:>14,.0f}")


def payload_with_a_bad_event(batch: EventBatch) -> bytes:
    ts, events, rank = msgspec.msgpack.decode(Encoder().encode(batch))
    return msgspec.msgpack.encode([ts, [*events, {"type": "BlockMoved"}], rank])


def report_manager(repeats: int = 5) -> None:
    print(f"\n{'manager, us a request':34}{'without':>12}{'with events':>14}{'times':>8}")
    peer = peer_python("vllm")
    for groups in ("full", "full+swa"):
        for side, python in {"kvyard": None, "vllm": peer}.items() if peer else [("kvyard", None)]:
            spent = {False: float("inf"), True: float("inf")}
            for _ in range(repeats if side == "kvyard" else 2):
                for events in (False, True):
                    work = {"groups": groups, "requests": 1500, "events": events}
                    spent[events] = min(spent[events], one(python, work)["managed"] / 1500 * 1e6)
            label = f"{side}, {groups}"
            print(f"{label:34}{spent[False]:>12.0f}{spent[True]:>14.0f}{spent[True] / spent[False]:>8.2f}")


if __name__ == "__main__":
    report_sizes()
    report_batcher()
    report_speed()
    report_manager()
