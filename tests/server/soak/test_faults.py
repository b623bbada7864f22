"""Five minutes in which everything breaks, by a seed: engines die, stand still, refuse, cut answers and lose events; the
gateway is stopped and runs out of file descriptors and disk; Redis dies. Every request is accounted for, health says what is
broken at every moment (``outages``), and afterwards the index is equal to the engines' caches.

``KVYARD_FAULTS_SEED`` and ``KVYARD_FAULTS_SECONDS`` are another seed and another time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("redis", reason="needs kvyard[redis]")

from tests.index.redis.server import PROGRAM, RedisServer
from tests.server.gateway.support import GatewayProcess, fleet
from tests.server.mirror import pool_of
from tests.server.mock.support import Served
from tests.server.soak.accounted import PROMPTS, AccountedLoad, prompt_of
from tests.server.soak.outages import HealthAnswer, Outages, misjudged
from tests.small_disk import small_disk

from kvyard.engine.timing import FixedTiming
from kvyard.events.types import Tier
from kvyard.hashing import Namespace, wire_hash

SEED = int(os.environ.get("KVYARD_FAULTS_SEED", "17"))
SECONDS = float(os.environ.get("KVYARD_FAULTS_SECONDS", "300"))
WORKERS = 4
RATE = 12.0
BUSY = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""How many times as long as on a quiet machine everything may take."""
LAG, LINGER = 3.0 * BUSY, 5.0 * BUSY
DISK = 4 << 20
ENDED = re.compile(r'^kvyard_gateway_requests_total\{model="[^"]*",outcome="(\w+)"\} (\S+)$', re.MULTILINE)
QUICK = {"reply_ms": 1000, "cooldown_ms": 500, "probe_ms": 200, "probe_most_ms": 1000}
SETTINGS: dict[str, Any] = {
    "tokenizer": "bytes",
    "router": {"policy": "kv"},
    "health_seconds": 0.3,
    "health_timeout": 5.0,
    "recovery_seconds": 0.1,
    "shun_seconds": 1.0,
    "silent_seconds": 6.0 * BUSY,
    "connect_seconds": 10.0,
    "streams": QUICK,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.zmq,
    pytest.mark.redis,
    pytest.mark.timeout(SECONDS * 3 + 600),
    # A mock worker that dies while a connection is being accepted drops that without closing it, as a process that dies would.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(PROGRAM is None, reason="needs redis-server: scripts/setup-test-deps.sh"),
]


class Watch:
    """Asks a gateway how it is all the time, over a connection of its own that it has from the start."""

    def __init__(self, url: str) -> None:
        self.answers: list[HealthAnswer] = []
        self.failed: list[str] = []
        self._url = url
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(120)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
            while not self._ending.wait(0.1):
                for path in ("/health", "/ready"):
                    asked = time.monotonic()
                    try:
                        reply = client.get(path)
                        answer = HealthAnswer(path, asked, time.monotonic(), reply.status_code, reply.json())
                        self.answers.append(answer)
                    except (httpx.HTTPError, ValueError) as error:
                        self.failed.append(f"{path}: {type(error).__name__} {error}")


class Trouble:
    """Everything that goes wrong, one thing or two at a time."""

    def __init__(self, served: Served, gateway: GatewayProcess, redis: RedisServer, disk: Path, seed: int) -> None:
        self.served, self.gateway, self.redis, self.disk = served, gateway, redis, disk
        self.rng = random.Random(seed)
        self.outages = Outages()
        self.done: dict[str, int] = {}
        self._client = httpx.AsyncClient(timeout=60, trust_env=False)
        self._busy: set[str] = set()

    async def run(self, seconds: float) -> None:
        """Let things break for ``seconds``; all is whole at the end."""
        end = time.monotonic() + seconds
        ways: list[Callable[[], Awaitable[None]]] = [
            *(self.kill, self.kill, self.kill_all, self.stall, self.errors, self.aborts, self.silence, self.loss),
            *(self.drain, self.stop, self.redis_dies, self.redis_stands_still, self.descriptors, self.disk_is_full),
        ]
        # Each once, and then by chance.
        order = self.rng.sample(ways, len(ways))
        running: set[asyncio.Task[None]] = set()
        while time.monotonic() < end:
            way = order.pop() if order else self.rng.choice(ways)
            if way.__name__ not in self._busy:
                task = asyncio.create_task(self._do(way))
                running.add(task)
            await asyncio.sleep(self.rng.uniform(1.0, 4.0))
            over, running = await asyncio.wait(running, timeout=0) if running else (set(), running)
            if len(running) >= 2:
                over, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in over:
                task.result()
        await asyncio.gather(*running)
        await self._client.aclose()

    async def _do(self, way: Callable[[], Awaitable[None]]) -> None:
        self._busy.add(way.__name__)
        self.done[way.__name__] = self.done.get(way.__name__, 0) + 1
        try:
            await way()
        finally:
            self._busy.discard(way.__name__)

    # -- engines --------------------------------------------------------------------------------------------------------

    async def kill(self) -> None:
        """An engine is gone for a while, with its cache and its stream."""
        number = self.rng.randrange(WORKERS)
        if "kill_all" in self._busy:
            return
        with self.outages.while_broken("killed", f"worker{number}"):
            self._kill(number)
            await asyncio.sleep(self.rng.uniform(0.5, 4.0 + LAG))
            await self._revive(number)

    async def kill_all(self) -> None:
        """All engines are."""
        while "kill" in self._busy or "drain" in self._busy:
            await asyncio.sleep(0.1)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.outages.while_broken("some killed"))
            for number in range(WORKERS):
                stack.enter_context(self.outages.while_broken("killed", f"worker{number}"))
                self._kill(number)
            for number in range(WORKERS):
                await asyncio.to_thread(eventually, lambda number=number: not self.served.fleet.workers[number].alive)
            with self.outages.while_broken("all killed"):
                await asyncio.sleep(self.rng.uniform(0.5, 1.0) + LAG)
            for number in range(WORKERS):
                await self._revive(number)

    def _kill(self, number: int) -> None:
        self.served.inside(lambda: self.served.fleet.do_later(0, self.served.fleet.kill, number, None))

    async def _revive(self, number: int) -> None:
        await asyncio.to_thread(eventually, lambda: not self.served.fleet.workers[number].alive)
        loop = self.served.fleet._loop
        assert loop is not None
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.served.fleet.revive(number), loop))

    async def stall(self) -> None:
        """An engine stands still, and its server doesn't."""
        worker = self.served.fleet.workers[self.rng.randrange(WORKERS)]
        seconds = self.rng.uniform(0.3, 2.0)
        self.served.inside(lambda: worker.stall(seconds) if worker.alive else None)
        await asyncio.sleep(seconds)

    async def errors(self) -> None:
        await self._faults("errors", error_rate=self.rng.uniform(0.2, 1.0), error_status=self.rng.choice((500, 503)))

    async def aborts(self) -> None:
        await self._faults("aborts", abort_rate=0.4, abort_after=self.rng.randint(0, 6))

    async def silence(self) -> None:
        await self._faults("silence", stall_rate=0.2, stall_after=self.rng.randint(0, 6))

    async def loss(self) -> None:
        await self._faults("loss", event_loss=self.rng.uniform(0.1, 0.6))

    async def _faults(self, kind: str, **given: float) -> None:
        from kvyard.server.mock.faults import MockFaults, changed

        worker = self.served.fleet.workers[self.rng.randrange(WORKERS)]
        with self.outages.while_broken(kind, worker.name if kind != "loss" else ""):
            worker.faults = changed(MockFaults(), given)
            await asyncio.sleep(self.rng.uniform(1.0, 5.0))
            worker.faults = MockFaults()
            if kind == "silence":
                await asyncio.sleep(float(SETTINGS["silent_seconds"]) + 1)  # until all that went silent was noticed

    async def drain(self) -> None:
        """An engine gets nothing new for a while."""
        name = f"worker{self.rng.randrange(WORKERS)}"
        with self.outages.while_broken("drained", name):
            for way in ("drain", "resume"):
                reply = await self._client.post(f"{self.gateway.url}/admin/{way}", json={"engine": name})
                assert reply.status_code == 200, reply.text
                await asyncio.sleep(self.rng.uniform(0.5, 3.0) if way == "drain" else 0)

    # -- the gateway and what it needs ----------------------------------------------------------------------------------

    async def stop(self) -> None:
        """The gateway's process doesn't run."""
        with self.outages.while_broken("stopped"):
            self.gateway.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self.rng.uniform(0.2, 3.0))
            self.gateway.process.send_signal(signal.SIGCONT)

    async def redis_dies(self) -> None:
        with self.outages.while_broken("redis"):
            self.redis.kill()
            await asyncio.sleep(self.rng.uniform(0.5, 3.0 + LAG))
            await asyncio.to_thread(self.redis.start)

    async def redis_stands_still(self) -> None:
        while "redis_dies" in self._busy:
            await asyncio.sleep(0.1)
        with self.outages.while_broken("redis paused"), self.outages.while_broken("descriptors"):
            self.redis.pause()
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            self.redis.resume()

    async def descriptors(self) -> None:
        """The gateway can open no file and no socket."""
        pid = self.gateway.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        with self.outages.while_broken("descriptors"), contextlib.ExitStack() as stack:
            used = len(os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
            address = httpx.URL(self.gateway.url)
            for _ in range(30):
                stack.enter_context(socket.create_connection((str(address.host), address.port or 0)))
            await asyncio.sleep(self.rng.uniform(0.5, 3.0))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    async def disk_is_full(self) -> None:
        """Journal, recording and access log have no room; the first two end for good."""
        filler = self.disk / "filler"
        self.outages.for_good("disk")
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        await asyncio.sleep(self.rng.uniform(1.0, 3.0))
        filler.unlink()


@contextlib.asynccontextmanager
async def loaded(load: AccountedLoad) -> AsyncIterator[None]:
    running = asyncio.create_task(load.run())
    try:
        yield
    finally:
        load.end()
        await running


def unlike(served: Served, url: str) -> list[str]:
    """Where the gateway's index is wrong about an engine's device, by all prompts there were."""
    found: list[str] = []
    held = {
        worker.name: {
            one for (tier, _), hashes in pool_of(worker.cores[0]).items() if tier is Tier.G1 for one in hashes
        }
        for worker in served.fleet.workers
    }
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for number in range(PROMPTS):
            ids = prompt_of(number)
            reply = client.post("/explain", json={"body": {"prompt": ids}})
            assert reply.status_code == 200, reply.text
            said = {
                one["worker"].partition("@")[0]: one["tiers"].get("device", 0) for one in reply.json()["candidates"]
            }
            for worker in served.fleet.workers:
                chain = worker.make_job("probe", ids, [1], Namespace()).chain
                names = [wire_hash(key) for key in chain.hashes(0, len(ids) // 16)]
                there = next((at for at, one in enumerate(names) if one not in held[worker.name]), len(names))
                if said.get(worker.name) != there:
                    found.append(f"{worker.name} has {there} blocks of prompt {number}, not {said.get(worker.name)}")
    return found


def unforeseen(text: str) -> list[str]:
    """Ends of tracebacks in a log. asyncio and ZeroMQ write one where there is no file descriptor, which is foreseen."""
    found = [part.splitlines() for part in text.split("Traceback (most recent call last):")[1:]]
    ends = [next(line for line in lines if line and not line.startswith(" ")) for lines in found]
    return [end for end in ends if "Too many open files" not in end]


def test_five_minutes_of_faults(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    engine = {"num_gpu_blocks": 700, "max_model_len": 4096, "timing": FixedTiming(prefill_ms=5, decode_ms=8)}
    with contextlib.ExitStack() as stack:
        stack.callback(redis.close)
        redis.start()
        disk = stack.enter_context(small_disk(tmp_path, DISK))
        served = stack.enter_context(fleet(workers=WORKERS, engine=engine))
        files = {name: str(disk / name) for name in ("journal", "record", "access_log")}
        config = tmp_path / "gateway.json"
        config.write_text(json.dumps({**SETTINGS, **files, "fleets": [served.url], "share": redis.url}))
        gateway = stack.enter_context(GatewayProcess("--config", str(config)))
        url = gateway.url
        eventually(lambda: httpx.get(f"{url}/health").json()["streams"].get("fresh") == WORKERS, lambda: gateway.text)
        eventually(lambda: httpx.get(f"{url}/health").json()["status"] == "ok", lambda: httpx.get(f"{url}/health").text)
        load = AccountedLoad(url, SEED, RATE)
        trouble = Trouble(served, gateway, redis, disk, SEED)
        with Watch(url) as watch:

            async def main() -> None:
                async with loaded(load):
                    await trouble.run(SECONDS)

            asyncio.run(main())
            over = time.monotonic()
            # What no engine is asked any more stays as it is: the index has to get there.
            eventually(lambda: not any(worker.load for worker in served.fleet.workers))
            eventually(lambda: not unlike(served, url), lambda: unlike(served, url)[:10])
            took = time.monotonic() - over
            # The machine may have got busier since the start.
            busier = max(1.0, max(os.getloadavg()) / (os.cpu_count() or 1) / BUSY)
        view = httpx.get(f"{url}/dashboard/view", timeout=60).json()["totals"]
        said = httpx.get(f"{url}/metrics", timeout=60).text
        ended = {outcome: int(float(count)) for outcome, count in ENDED.findall(said)}
        engines = [worker.name for worker in served.fleet.workers]
        wrong = misjudged(trouble.outages, watch.answers, LAG, LINGER * busier, engines)
        print(
            f"\n{SECONDS:.0f} s, seed {SEED}, load {BUSY:.1f} times the cores: {load.sent} requests: {dict(load.outcomes)}; "
            f"refused because {dict(load.reasons)}; faults {trouble.done}; health asked {len(watch.answers)} times, "
            f"the slowest after {max(one.answered - one.asked for one in watch.answers):.2f} s; "
            f"the index equal to the caches {took:.2f} s after"
        )
        assert not load.unaccounted, load.unaccounted[:10]
        assert load.sent == load.outcomes.total()
        assert view["under_way"] == 0
        assert load.sent == sum(ended.values()), ended
        assert not watch.failed, watch.failed[:10]
        assert not wrong, "\n".join(wrong[:10])
        assert took < 5.0 * BUSY * busier
        assert gateway.process.poll() is None
        assert not unforeseen(gateway.text)
        gc.collect()  # what that mark is about is said now, and not later in another test
        assert len(gateway.text) < 1_000_000, "a log that fills disks"
