"""The index on Redis that fails over: a primary with a replica watched by Sentinels, and a cluster of three with replicas.

    .venv/bin/python benchmarks/redis_failover.py [--blocks 50000]

Everything is on loopback and ends with the script. One writer (``RedisIndex``) with ``--blocks`` blocks; the primary is
killed with -9. Printed: when Sentinel or the cluster had another primary, and when the index answered as before again. The
index knows one address, so a forwarder stands there that asks who is primary, as a virtual address would; the cluster's
stands before the node that has the namespace's slot.

A cluster is refused by the index as it is: its scripts touch many keys, which lie on many nodes. What it would take is tried
here: names with a common hash tag, so that all of a namespace is on one node.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import redis

from kvyard.errors import KvyardError
from kvyard.index.redis import RedisIndex
from kvyard.index.redis.server import Server

TAG = "{m}"
"""What names have in common that lie on one node."""
DEPTH = 500


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(
    folder: Path, *options: str, port: int | None = None, sentinel: str = ""
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A redis-server with these options, or a Sentinel with that configuration; its port and process."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("needs redis-server: scripts/setup-test-deps.sh, or apt-get install redis-server")
    port = port or free_port()
    home = folder / str(port)
    home.mkdir()
    given = [*options, "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
    if sentinel:
        (home / "sentinel.conf").write_text(sentinel)
        given = [str(home / "sentinel.conf"), "--sentinel"]
    command = [program, *(given if sentinel else []), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)]
    process = subprocess.Popen(
        [*command, *([] if sentinel else given)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: bool(redis.Redis(port=port, socket_timeout=2).ping()))
        yield port, process
    finally:
        process.kill()
        process.wait()


def until(true: Callable[[], bool], patience: float = 60.0) -> float:
    """Seconds until it is so."""
    began = time.perf_counter()
    while time.perf_counter() - began < patience:
        with suppress(redis.RedisError, OSError, KvyardError):
            if true():
                return time.perf_counter() - began
        time.sleep(0.01)
    raise SystemExit(f"{true.__doc__ or 'it'} wasn't so within {patience:g} s")


class Forwarder:
    """One address for whoever is primary: each new connection is asked for and carried on."""

    def __init__(self, primary: Callable[[], tuple[str, int]]) -> None:
        self.primary = primary
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.listener.getsockname()[1]}/0"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                other = socket.create_connection(self.primary(), timeout=1)
                other.settimeout(None)
            except (OSError, redis.RedisError):
                client.close()
                continue
            for source, target in ((client, other), (other, client)):
                threading.Thread(target=self.pump, args=(source, target), daemon=True).start()

    @staticmethod
    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def filled(url: str, blocks: int, namespace: str) -> tuple[RedisIndex, list[list[int]]]:
    """An index with that many blocks."""
    rng = random.Random(0)
    texts = [[rng.getrandbits(64) for _ in range(DEPTH)] for _ in range(blocks // DEPTH)]
    index = RedisIndex(url, namespace=namespace, timeout=2.0, backoff=0.2, lease=3.0)
    for number, text in enumerate(texts):
        index.store(number % 8, text)
    index.flush()
    return index, texts


def failed_over(
    index: RedisIndex, texts: list[list[int]], kill: Callable[[], None], promoted: Callable[[], bool], what: str
) -> None:
    """Kill the primary; print how it went."""

    def right() -> bool:
        index.flush()
        index.session.maintain()
        return all(index.lookup(text) == [(DEPTH, 1 << number % 8)] for number, text in enumerate(texts))

    assert right()
    kill()
    began = time.perf_counter()
    elsewhere = until(promoted)
    until(right)
    took = time.perf_counter() - began
    print(
        f"{what}: another primary after {elsewhere:.2f} s, all {len(texts) * DEPTH:,} blocks right after {took:.2f} s",
        flush=True,
    )


def by_sentinel(folder: Path, blocks: int) -> None:
    with ExitStack() as stack:
        primary, process = stack.enter_context(server(folder))
        replica, _ = stack.enter_context(server(folder, "--replicaof", "127.0.0.1", str(primary)))
        watching = (
            f"sentinel monitor m 127.0.0.1 {primary} 2\nsentinel down-after-milliseconds m 1000\n"
            "sentinel failover-timeout m 5000\n"
        )
        sentinels = [stack.enter_context(server(folder, sentinel=watching))[0] for _ in range(3)]
        asked = redis.Redis(port=sentinels[0], socket_timeout=2, decode_responses=True)
        until(
            lambda: (
                asked.sentinel_master("m")["num-other-sentinels"] == 2 and asked.sentinel_master("m")["num-slaves"] == 1
            )
        )

        def whose() -> tuple[str, int]:
            host, port = asked.sentinel_get_master_addr_by_name("m")
            return host, int(port)

        index, texts = filled(Forwarder(whose).url, blocks, "m")
        failed_over(
            index, texts, process.kill, lambda: whose()[1] == replica, "primary and replica, three Sentinels (1 s)"
        )


def by_cluster(folder: Path, blocks: int) -> None:
    with ExitStack() as stack:
        nodes = {}
        for _ in range(6):
            # A cluster's nodes talk at 10,000 ports further.
            port = next(port for port in iter(free_port, 0) if port < 50_000)
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
            nodes[port] = stack.enter_context(server(folder, *options, port=port))[1]
        made = ["redis-cli", "--cluster", "create", *(f"127.0.0.1:{port}" for port in nodes)]
        subprocess.run([*made, "--cluster-replicas", "1", "--cluster-yes"], check=True, stdout=subprocess.DEVNULL)
        any_of = list(nodes)
        asked = [redis.Redis(port=port, decode_responses=True) for port in any_of]
        until(lambda: all(node.cluster("info")["cluster_state"] == "ok" for node in asked))
        try:
            RedisIndex(f"redis://127.0.0.1:{any_of[0]}/0")
        except KvyardError as refused:
            print(f"as it is: {refused}")

        slot = redis.Redis(port=any_of[0]).execute_command("CLUSTER KEYSLOT", f"kvyard:{TAG}")

        def whose() -> tuple[str, int]:
            for port in any_of:
                with suppress(redis.RedisError, OSError):
                    for low, high, owner in slots(port):
                        if low <= slot <= high:
                            return "127.0.0.1", owner
            raise OSError("no node answers")

        stack.enter_context(tagged())
        index, texts = filled(Forwarder(whose).url, blocks, TAG)
        holds = {port: redis.Redis(port=port).dbsize() for port in any_of}
        owner = whose()[1]
        print(
            f"tagged names: the namespace's {holds[owner]:,} keys are on one primary of three and on its replica, "
            f"the others have {sum(holds.values()) - 2 * holds[owner]}"
        )
        failed_over(
            index,
            texts,
            nodes[owner].kill,
            lambda: whose()[1] != owner,
            "cluster of three with replicas (node timeout 1 s)",
        )


def slots(port: int) -> list[tuple[int, int, int]]:
    """First and last slot, and the port of their primary, as a node sees it."""
    node = redis.Redis(port=port, socket_timeout=1, decode_responses=True)
    found = []
    for address, facts in node.cluster("nodes").items():
        if "master" in facts["flags"] and "fail" not in facts["flags"].replace("fail?", ""):
            found += [(int(part[0]), int(part[-1]), int(address.rpartition(":")[2])) for part in facts["slots"]]
    return found


@contextmanager
def tagged() -> Iterator[None]:
    """What it would take: epochs whose names have the namespace's tag, and no refusal of clusters."""
    made, exchange = secrets.token_urlsafe, Server._exchange

    def allowed(self: Server, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        mode = b"redis_mode:cluster", b"redis_mode:standalone"
        return [one.replace(*mode) if isinstance(one, bytes) else one for one in exchange(self, commands)]

    with (
        patch.object(secrets, "token_urlsafe", lambda size: TAG + made(size)),
        patch.object(Server, "_exchange", allowed),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=50_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        by_sentinel(Path(folder), given.blocks)
        by_cluster(Path(folder), given.blocks)


if __name__ == "__main__":
    main()
