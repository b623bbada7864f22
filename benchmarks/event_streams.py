"""What a stream costs: the engine per batch it publishes, a subscriber per batch it follows, and joining late.

Run with ``python benchmarks/event_streams.py`` (needs pyzmq). Everything is in one process over loopback: the engine's thread
publishes, the publisher's sends, the main thread reads. The engine and the subscriber are measured by their threads' CPU
time, joining and replay by the clock on the wall. Best of several runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import NamedTuple

from kvyard.events import Batcher, EventBatch, GroupMeta, Tier
from kvyard.events.transport import Limits, Publisher, State, Subscriber, fetch_replay
from kvyard.hashing import Run, TokenChain, algorithm

BLOCK = 16
RUNS = 5


class Figures(NamedTuple):
    publish: float
    """Microseconds of CPU time in the engine's thread, per batch."""
    follow: float
    """The same in the subscriber's."""
    rate: float
    """Batches per second, end to end."""
    join: float
    """Seconds until a late subscriber is fresh, by snapshot."""
    replay: float
    """Seconds to fetch all batches again."""


def batches_of(blocks: int, count: int) -> tuple[Batcher, list[EventBatch]]:
    """``count`` batches that store ``blocks`` blocks each."""
    batcher, how = Batcher([GroupMeta(block_size=BLOCK, kind="full_attention")]), algorithm("xxh3")
    batches = []
    for index in range(count):
        chain = TokenChain(range(index * blocks * BLOCK, (index + 1) * blocks * BLOCK), BLOCK, how)
        batcher.entered(Run(chain), 0, Tier.G1, True)
        batch = batcher.end_iteration(index)
        assert batch is not None
        batches.append(batch)
    return batcher, batches


def measure(blocks: int, count: int) -> Figures:
    batcher, batches = batches_of(blocks, count)
    publish: list[float] = []

    def engine() -> None:
        start = time.thread_time()
        for batch in batches:
            publisher.publish(batch, 0)
        publish.append(time.thread_time() - start)

    anywhere = "tcp://127.0.0.1:0"
    publisher = Publisher(anywhere, batcher.resync, replay=anywhere, max_events=1 << 30, buffer_steps=count, hwm=0)
    with publisher:
        replay = publisher.replay_endpoint
        assert replay is not None
        limits = Limits(held_batches=count, held_bytes=1 << 40)

        async def follow_live() -> tuple[float, float]:
            async with Subscriber(publisher.endpoint, replay=replay, hwm=0, limits=limits) as subscriber:
                while subscriber.state != State.FRESH:
                    await subscriber.receive(1.0)
                thread = threading.Thread(target=engine)
                start, cpu, seen = time.perf_counter(), time.thread_time(), 0
                thread.start()
                while seen < count:
                    update = await subscriber.receive(5.0)
                    assert update is not None
                    seen += bool(update.events)
                elapsed, follow = time.perf_counter() - start, time.thread_time() - cpu
                thread.join()
                return elapsed, follow

        async def join_late() -> float:
            start = time.perf_counter()
            async with Subscriber(publisher.endpoint, replay=replay) as late:
                while late.state != State.FRESH:
                    await late.receive(5.0)
                assert late.statuses()[0].counters.snapshots == 1
            return time.perf_counter() - start

        elapsed, follow = asyncio.run(follow_live())
        join = asyncio.run(join_late())
        start = time.perf_counter()
        assert sum(1 for _ in fetch_replay(replay)) == count
        return Figures(
            publish[0] / count * 1e6, follow / count * 1e6, count / elapsed, join, time.perf_counter() - start
        )


def main() -> None:
    print("blocks  publish   follow    batches/s   blocks/s    join by snapshot       replay")
    for blocks, count in ((1, 10_000), (16, 5_000), (256, 500)):
        runs = [measure(blocks, count) for _ in range(RUNS)]
        figures = Figures(*map(min, zip(*runs, strict=True)))._replace(rate=max(run.rate for run in runs))
        held = f"{figures.join:.2f} s for {blocks * count:,}"
        again = f"{figures.replay:.2f} s for {count:,}"
        print(
            f"{blocks:6}  {figures.publish:4.1f} µs  {figures.follow:5.1f} µs  {figures.rate:9,.0f}  "
            f"{figures.rate * blocks:9,.0f}   {held:>17}   {again:>16}"
        )


if __name__ == "__main__":
    main()
