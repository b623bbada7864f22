"""Two services on one Redis: each worker's streams are written by one of them, and both answer for all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("redis", reason="needs kvyard[redis]")

from tests.index.fleet import PRESETS, prompts_of
from tests.index.redis.server import RedisServer, run_redis
from tests.server.indexer.test_service import right
from tests.server.support import LiveRank, Served

pytestmark = [pytest.mark.zmq, pytest.mark.redis]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    yield from run_redis(tmp_path)


def test_a_reader_answers_for_what_another_wrote_and_a_crash_of_redis_is_survived(redis: RedisServer) -> None:
    prompts = prompts_of(random.Random(21), count=4)
    options = {"block_size": 2, "backend": "redis", "backend_options": {"url": redis.url, "lease": 1.0, "backoff": 0.2}}
    with (
        LiveRank("a", 0, PRESETS["full"], seed=1) as one,
        LiveRank("b", 0, PRESETS["full"], seed=2) as two,
        Served(**options) as writer,
        Served(**options, models=["m"]) as reader,
    ):
        ranks = [one, two]
        for rank in ranks:
            writer.register(**rank.registration())
        for turn in range(2):
            for _ in range(20):
                for rank in ranks:
                    rank.step(prompts)
            eventually(lambda: right(writer, ranks, prompts), lambda: writer.get("/workers"))
            eventually(lambda: right(reader, ranks, prompts), lambda: reader.score(prompts[0]))
            if not turn:
                redis.kill()
                # Nothing is believed while the rows are out of reach, and nothing is an error.
                eventually(lambda: not any(match["tokens"] for match in reader.score(prompts[0]).values()))
                redis.start()
        assert any(rank.engine.longest(prompt) for rank in ranks for prompt in prompts)
        writer.post("/unregister", model_name="m", instance_id="a")
        eventually(lambda: ("a", 0) not in reader.score(prompts[0]) or not reader.score(prompts[0])["a", 0]["tokens"])


def test_failures_of_the_server_are_in_log_and_health(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Killed, paused, out of memory, made a replica: each is a reason, and over when it is over."""
    options = {"block_size": 2, "backend": "redis"}
    fast = {"url": redis.url, "lease": 1.0, "backoff": 0.1, "timeout": 0.2}
    with LiveRank("a", 0, PRESETS["full"], seed=1) as rank, Served(**options, backend_options=fast) as served:
        served.register(**rank.registration())
        prompts = prompts_of(random.Random(3), count=4)

        def fine() -> bool:
            rank.step(prompts)
            return bool(served.get("/health")["status"] == "ok")

        def wrong(word: str) -> bool:
            rank.step(prompts)
            found = [one["why"] for one in served.get("/health")["reasons"] if one["code"] == "index-server"]
            return any(word in why for why in found) and "index-server" in caplog.text

        eventually(fine)
        redis.pause()
        eventually(lambda: wrong("Timeout"))
        redis.resume()
        eventually(fine)
        redis.ask("CONFIG", "SET", "maxmemory", "1")
        eventually(lambda: wrong("maxmemory"))
        redis.ask("CONFIG", "SET", "maxmemory", "0")
        eventually(fine)
        redis.ask("REPLICAOF", "127.0.0.1", "1")
        eventually(lambda: wrong("read-only"))
        redis.ask("REPLICAOF", "NO", "ONE")
        eventually(fine)
        redis.kill()
        eventually(lambda: wrong("refused"))
        redis.start()
        eventually(fine)
        eventually(lambda: "over: index-server" in caplog.text)
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize("given", [{}, {"namespace": "prod"}])
def test_models_and_tenants_are_kept_apart_whatever_they_are_called(redis: RedisServer, given: dict[str, str]) -> None:
    options = {"block_size": 2, "backend": "redis", "backend_options": {"url": redis.url, **given}}
    with LiveRank("w", 0, PRESETS["full"], seed=1) as rank, Served(**options) as served:
        served.register(**rank.registration(model_name="a:b", tenant_id="c"))
        prompt = list(range(40))
        rank.run(prompt)

        def hits(model: str, tenant: str) -> int:
            try:
                found = served.score(prompt, model_name=model, tenant_id=tenant)
            except AssertionError:
                return 0  # nobody answers for it
            return max((one["tokens"] for one in found.values()), default=0)

        eventually(lambda: hits("a:b", "c"), lambda: served.get("/workers"))
        nowhere = {"endpoint": "tcp://127.0.0.1:9", "replay_endpoint": None}
        served.register(**rank.registration(model_name="a", tenant_id="b:c", instance_id="v", **nowhere))
        assert not hits("a", "b:c") and not hits("a", "default") and not hits("a:b", "default")
