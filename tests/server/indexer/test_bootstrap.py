"""A second service that starts from the first: it knows what the first knew, and goes on with the streams by itself."""

from __future__ import annotations

import random

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.index.fleet import PRESETS, prompts_of
from tests.server.indexer.test_service import right
from tests.server.support import LOOPBACK, LiveRank, Served
from tests.server.wire import Wire

from kvyard.errors import KvyardError
from kvyard.events import Batcher, GroupMeta, Tier
from kvyard.events.transport import Publisher
from kvyard.hashing import Run, TokenChain, algorithm

pytestmark = pytest.mark.zmq


@pytest.mark.parametrize("replay", [True, False])
def test_a_second_service_knows_what_the_first_knew(replay: bool) -> None:
    """Without replay there is nobody else to learn it from: the engine doesn't repeat itself."""
    prompts = prompts_of(random.Random(11), count=6)
    with (
        LiveRank("a", 0, PRESETS["full+window"], replay=replay, seed=1) as one,
        LiveRank("a", 1, PRESETS["full+window"], replay=replay, seed=2) as two,
        Served(block_size=2, token="t") as first,
    ):
        ranks = [one, two]
        for rank in ranks:
            first.register(**rank.registration())
        eventually(lambda: first.get("/workers")[0]["status"] == "active")
        for _ in range(40):
            for rank in ranks:
                rank.step(prompts)
        eventually(lambda: right(first, ranks, prompts), lambda: first.get("/workers"))
        assert any(rank.engine.longest(prompt) for rank in ranks for prompt in prompts)
        with Served(block_size=2, token="t", peers=["http://127.0.0.1:1", first.url]) as second:
            # Its workers come from the peer, too.
            eventually(lambda: right(second, ranks, prompts), lambda: second.get("/workers"))
            for _ in range(40):
                for rank in ranks:
                    rank.step(prompts)
            eventually(lambda: right(second, ranks, prompts), lambda: second.get("/workers"))
            eventually(lambda: right(first, ranks, prompts))
            assert first.get("/dump").keys() == second.get("/dump").keys()


def test_streams_that_the_peer_cannot_vouch_for_stay_stale() -> None:
    """The peer's stream is stale, and there is nobody to ask: so it is here."""
    text = list(range(8))
    with Wire(first=5) as wire, Served(block_size=4) as first:
        first.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: first.get("/workers")[0]["status"] == "active")
        wire.stored([1, 2], text, 4)
        eventually(lambda: first.get("/workers")[0]["listeners"]["0"]["sequence"] == 5)
        assert first.score(text)["1", 0]["state"] == "stale"
        with Served(peers=[first.url]) as second:
            assert second.score(text)["1", 0]["state"] == "stale"
            assert second.score(text)["1", 0]["tokens"] == 0
            assert second.post("/score", model_name="m", token_ids=text)["block_size"] == 4
            eventually(lambda: second.get("/workers")[0]["status"] == "active")
            wire.cleared()
            wire.stored([1, 2], text, 4)
            eventually(lambda: second.score(text)["1", 0]["tokens"] == 4)


@pytest.mark.parametrize("replay", [True, False])
def test_a_publisher_that_restarted_meanwhile_is_noticed(replay: bool) -> None:
    """Its numbers begin anew, below those that were taken over: they are news, and not what the dump covers."""
    text = list(range(40))
    with LiveRank("a", 0, PRESETS["full"], replay=replay) as rank, Served(block_size=4) as first:
        first.register(**rank.registration())
        eventually(lambda: first.get("/workers")[0]["status"] == "active")
        for start in range(0, 40, 8):
            rank.run(text[: start + 8])
        eventually(lambda: right(first, [rank], [text]))
        with Served(block_size=4, peers=[first.url]) as second:
            eventually(lambda: right(second, [rank], [text]))
            rank.restart()
            eventually(lambda: second.get("/workers")[0]["status"] == "active" and _reconnected(second))
            rank.run(text[:20])
            eventually(lambda: right(second, [rank], [text]), lambda: second.get("/workers"))
            assert second.score(text)["a", 0]["tokens"] == 20


def _reconnected(served: Served) -> bool:
    (listener,) = served.service.models["m", "default"].listeners.values()
    return listener.subscriber.counters.connections > 1


def test_streams_with_a_topic_are_one_stream() -> None:
    """Before its first batch a stream's topic is unknown; what was said of it then doesn't linger beside it."""
    text = list(range(12))
    batcher = Batcher([GroupMeta(block_size=4, kind="full_attention")])
    with (
        Publisher(LOOPBACK, batcher.resync, replay=LOOPBACK, topic="kv@pod@m") as publisher,
        Served(block_size=4) as first,
    ):
        first.register(instance_id=1, endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
        eventually(lambda: first.get("/workers")[0]["status"] == "active")
        batcher.entered(Run(TokenChain(text, 4, algorithm("xxh3")), 0, 3), 0, Tier.G1, True)
        batch = batcher.end_iteration(0)
        assert batch is not None
        publisher.publish(batch)
        eventually(lambda: first.score(text)["1", 0]["tokens"] == 8)
        with Served(block_size=4, peers=[first.url]) as second:
            for served in (first, second):
                eventually(lambda s=served: s.get("/workers")[0]["listeners"]["0"]["state"] == "fresh")
                assert served.score(text)["1", 0]["tokens"] == 8
                assert served.get("/health")["streams"] == {"fresh": 1}
                states = {name: value for name, value in served.metrics().items() if "stream_state" in name}
                assert list(states.values()) == [0.0] and 'topic="kv@pod@m"' in next(iter(states))


def test_no_peer_is_no_error_and_a_foreign_one_is() -> None:
    with Served(peers=["http://127.0.0.1:1"]) as alone:
        assert alone.get("/health")["status"] == "ok"
    with Wire() as wire, Served(block_size=4) as first:
        first.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: first.get("/workers")[0]["status"] == "active")
        wire.stored([1], list(range(4)), 4)
        eventually(lambda: first.get("/workers")[0]["listeners"]["0"]["sequence"] == 0)
        with pytest.raises(KvyardError, match="names blocks by"), Served(block_size=8, peers=[first.url]):
            pass
