"""Redis dies and comes back under two gateways that share their load: no request notices, and then they share again."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("redis", reason="needs kvyard[redis]")

from tests.index.redis.server import PROGRAM, RedisServer
from tests.server.gateway.support import Gated, fleet

from kvyard.errors import KvyardError

pytestmark = [
    pytest.mark.zmq,
    pytest.mark.redis,
    pytest.mark.skipif(PROGRAM is None, reason="needs redis-server: scripts/setup-test-deps.sh"),
]


class Crowd:
    """Clients that ask all the time, and what became of their requests."""

    def __init__(self, *gateways: Gated) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(gated, at)) for at, gated in enumerate(gateways * 2)]

    def _ask(self, gated: Gated, seed: int) -> None:
        number = 0
        while not self._stop.wait(0.01):
            number += 1
            try:
                gated.complete([seed, number % 5] * 40)
                self.answered += 1
            except Exception as error:
                self.failed.append(repr(error))

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self) -> None:
        """Wait until some more requests were answered."""
        before = self.answered
        eventually(lambda: self.answered > before + 20, lambda: self.failed)


def sharing(gated: Gated) -> Any:
    return gated.gateway.members.pools["mock"].sharing


def test_no_request_notices(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    with contextlib.closing(redis), fleet(workers=2) as served:
        shared = {"fleets": [served.url], "share": redis.url}
        with Gated(**shared) as one, Gated(**shared) as other:
            for gated in (one, other):
                gated.ready(2, 2)
                eventually(lambda gated=gated: sharing(gated).peers)
            with Crowd(one, other) as crowd:
                crowd.goes_on()
                redis.kill()
                eventually(lambda: not sharing(one).connected and not sharing(other).connected)
                crowd.goes_on()
                redis.start()
                eventually(lambda: sharing(one).peers and sharing(other).peers and sharing(one).connected)
                crowd.goes_on()
                assert not crowd.failed
            for gated in (one, other):
                # All that the others had is over, and has been heard of.
                eventually(lambda gated=gated: not gated.gateway.members.pools["mock"].router.loads.active)
                gated.idle()
            assert one.metrics()['kvyard_gateway_share_outages_total{model="mock"}'] >= 1
            assert one.metrics()['kvyard_gateway_share_connected{model="mock"}'] == 1


def test_a_wrong_password_ends_the_start_and_an_unreachable_server_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    redis = RedisServer(tmp_path)
    right = redis.url.replace("//", "//:secret@")
    with contextlib.closing(redis), fleet(workers=1) as served:
        with Gated(fleets=[served.url], share=right) as gated:
            gated.ready(1)
            gated.complete("x")
            assert "can't be shared through redis://127.0.0.1" in caplog.text and "secret" not in caplog.text
            assert not sharing(gated).connected
            redis.start("--requirepass", "secret")
            eventually(lambda: sharing(gated).connected, lambda: sharing(gated).reason)
            for url in (redis.url, right.replace("secret", "guess")):
                with pytest.raises(KvyardError, match="can't share load through redis://127"):
                    Gated(fleets=[served.url], share=url).__enter__()


def test_gateways_that_name_blocks_otherwise_go_on_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That is known only once an engine has said its model: too late to refuse, and no reason to refuse requests."""
    redis = RedisServer(tmp_path)
    redis.start()
    with contextlib.closing(redis), fleet(workers=1) as served:
        with (
            Gated(fleets=[served.url], share=redis.url) as one,
            Gated(fleets=[served.url], share=redis.url, block_size=32) as other,
        ):
            one.ready(1)
            other.ready(1)
            eventually(lambda: sharing(one).connected != sharing(other).connected)
            for gated in (one, other):
                assert gated.complete("x").status_code == 200
        assert "name blocks otherwise" in caplog.text and "Traceback" not in caplog.text
