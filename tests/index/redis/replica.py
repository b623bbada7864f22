"""A replica as a process of its own: follows one stream and writes it to the server, until it is killed or its input ends.

python -m tests.index.redis.replica URL LEASE STREAM ENDPOINT REPLAY
"""

from __future__ import annotations

import sys
import threading

from tests.events.transport.blocking import BlockingSubscriber
from tests.index.fleet import PRESETS
from tests.index.redis.shape import IDENTITY, NAMESPACE, PRESET, QUICK

from kvyard.index import Source
from kvyard.index.redis import SharedIndexer


def main() -> None:
    url, lease, stream, endpoint, replay = sys.argv[1:]
    indexer = SharedIndexer(url, IDENTITY, namespace=NAMESPACE, lease=float(lease), timeout=1.0, backoff=0.2)
    indexer.register(Source(stream=stream, worker=stream, groups=PRESETS[PRESET], clear_scope="all"))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with BlockingSubscriber(endpoint, replay=replay, limits=QUICK, stream=stream) as subscriber:
        print("ready", flush=True)
        while not ended.is_set():
            update = subscriber.receive(0.02)
            if update is not None:
                indexer.apply(update)
            indexer.tick()


if __name__ == "__main__":
    main()
