"""A publisher that never rests, and a subscriber that is held up for seconds at a time; each a process of its own.

python -m tests.events.transport.held_up publish
python -m tests.events.transport.held_up follow ENDPOINT REPLAY SECONDS TIMES
"""

from __future__ import annotations

import asyncio
import sys
import time

from kvyard.events import Batcher, GroupMeta, Tier
from kvyard.events.transport import Publisher, State, Subscriber
from kvyard.hashing import Run, TokenChain, algorithm

BLOCK, BLOCKS = 16, 64


def publish() -> None:
    """Prints its addresses; some 200 batches a second until it is killed."""
    batcher, how = Batcher([GroupMeta(block_size=BLOCK, kind="full_attention")]), algorithm("xxh3")
    with Publisher("tcp://127.0.0.1:0", batcher.resync, replay="tcp://127.0.0.1:0") as publisher:
        print(publisher.endpoint, publisher.replay_endpoint, flush=True)
        number = 0
        while True:
            first = number * BLOCK * BLOCKS
            batcher.entered(Run(TokenChain(range(first, first + BLOCK * BLOCKS), BLOCK, how)), 0, Tier.G1, True)
            batch = batcher.end_iteration(number)
            assert batch is not None
            publisher.publish(batch, 0)
            number += 1
            time.sleep(0.004)


async def follow(endpoint: str, replay: str, seconds: float, times: int) -> None:
    """Prints ``fresh`` each time it has caught up."""
    async with Subscriber(endpoint, replay=replay) as subscriber:
        for turn in range(times + 1):
            if turn:
                time.sleep(seconds)  # as if it had been stopped: nothing is read, and the socket fills up
            seen = 0
            while seen < 500 or subscriber.state != State.FRESH:
                seen += await subscriber.receive(1.0) is not None
            print("fresh", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        publish()
    else:
        asyncio.run(follow(sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5])))
