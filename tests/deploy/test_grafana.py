"""The dashboard: well-formed, without overlaps, and asking only for what our processes really export.

The processes are those of ``compose.yaml`` and of ``kubernetes/index``, started by the very commands in there, with addresses
and ports of this machine in place of theirs, and a real Redis.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

pytest.importorskip("yaml", reason="needs PyYAML")
pytest.importorskip("zmq", reason="needs kvyard[zmq]")
pytest.importorskip("redis", reason="needs kvyard[redis]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.promql import asked
from tests.deploy.support import DEPLOY, compose, containers, documents, kustomized
from tests.index.redis.server import PROGRAM, RedisServer
from tests.ports import free_ports

from kvyard.lab.expect.watch import NAMES as EXPECTED
from kvyard.server.gateway.traffic import NAMES as GATEWAY
from kvyard.server.gateway.traffic import P

pytestmark = [pytest.mark.zmq, pytest.mark.redis]

BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "kvyard.json").read_text())
SCRAPED = {"instance", "job", "le"}
"""Labels that a scrape adds, and that of buckets."""
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
QUERIES += [
    (variable["name"], variable["query"]["query"])
    for variable in BOARD["templating"]["list"]
    if variable["type"] == "query"
]


def test_panels_have_unique_titles_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert len({panel["title"] for panel in PANELS if panel["type"] != "stat"}) == sum(
        panel["type"] != "stat" for panel in PANELS
    )
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD))) - {"__rate_interval", "__all"}
    assert used == names


def test_counters_are_rated_and_gauges_are_not() -> None:
    for title, query in QUERIES:
        for name in asked(query).metrics:
            if name.endswith(("_total", "_bucket")) and not query.startswith("label_values"):
                assert re.search(rf"(rate|increase)\({re.escape(name)}\b", query), (title, query)
            else:
                assert not re.search(rf"(rate|increase)\({re.escape(name)}\b", query), (title, query)


class Place:
    """This machine in place of a cluster: addresses and ports for those in the files."""

    def __init__(self) -> None:
        names = ("8000", "5557", "5558", "8080", "8090", "6379")
        self.ports = dict(zip(names, count(free_ports(len(names)))))

    def here(self, text: str, host: str) -> str:
        text = text.replace("0.0.0.0", host).replace("tcp://*:", f"tcp://{host}:")
        text = re.sub(r"engine-(\d)\.engines", lambda found: f"127.0.0.{int(found[1]) + 1}", text)
        text = re.sub(r"(--dns=)(engines|engine):", r"\1localhost:", text)
        text = re.sub(r"//(redis|index):", "//127.0.0.1:", text)
        return re.sub(r"\b(8000|5557|5558|8080|8090|6379)\b", lambda found: str(self.ports[found[1]]), text)

    def url(self, port: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.ports[port]}"


@contextlib.contextmanager
def started(words: list[str], log: Path) -> Iterator[None]:
    hidden = ("KVYARD_TOKEN", "KVYARD_UPSTREAM_TOKEN")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "kvyard", *words], stdout=out, stderr=out, env=env)
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    if PROGRAM is None:
        pytest.skip("needs redis-server: scripts/setup-test-deps.sh")
    server = RedisServer(tmp_path)
    yield server
    server.close()


def exported(*urls: str) -> dict[str, set[str] | None]:
    """Names of samples, and the labels that they have; ``None`` for what is declared and hasn't happened yet."""
    found: dict[str, Any] = {}
    for url in urls:
        reply = httpx.get(f"{url}/metrics", timeout=30, trust_env=False)
        assert reply.status_code == 200
        for family in text_string_to_metric_families(reply.text):
            ends = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
            for end in ends:
                found.setdefault(family.name + end, None)
            for sample in family.samples:
                found[sample.name] = (found.get(sample.name) or set()) | set(sample.labels)
    return found


def ask(url: str, text: str) -> int:
    body = {"model": "mock", "prompt": text, "max_tokens": 2}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_compose_runs_and_exports_all_that_is_drawn(tmp_path: Path, redis: RedisServer) -> None:
    place, services = Place(), compose()["services"]
    redis.port = place.ports["6379"]
    redis.start(*services["redis"]["command"][1:])
    words = {
        name: [place.here(word, "127.0.0.1") for word in services[name]["command"]] for name in ("engine", "gateway")
    }
    # What nobody asked for isn't exported: the dashboard has a panel for recordings too.
    words["gateway"] += [f"--record={tmp_path}/traffic.jsonl.gz"]
    with started(words["engine"], tmp_path / "engine"), started(words["gateway"], tmp_path / "gateway"):
        gateway = place.url("8080")
        eventually(lambda: well(gateway), (tmp_path / "gateway").read_text)
        assert ask(gateway, "Once upon a time " * 20) == 0
        eventually(lambda: ask(gateway, "Once upon a time " * 20) > 0)
        found = exported(gateway, place.url("8000"))
    # kvyard expect --watch is another process; tests/lab/expect/test_watch.py scrapes it.
    found |= {name: {"cause", "kind"} if name.endswith("_cause") else set() for name in EXPECTED}
    rules = [rule for group in documents(DEPLOY / "prometheus-rules.yaml")[0]["groups"] for rule in group["rules"]]
    for rule in rules:
        for name in re.findall(r"\bkvyard_\w+", rule["expr"]):
            known = name in found or name.removeprefix(P) in GATEWAY  # nothing may be missing by now
            assert known, f"{rule['alert']}: nobody exports {name}"
        assert rule["annotations"]["summary"] and rule["for"]
    for title, query in QUERIES:
        wanted = asked(query)
        for name, labels in wanted.metrics.items():
            if query.startswith("label_values") and name == "model":
                continue
            assert name in found, f"{title}: nobody exports {name}"
            has = found[name]
            if has is not None:
                missing = (labels | wanted.by) - has - SCRAPED
                assert not missing, f"{title}: {name} has no label {missing}"
    assert sum(found[name] is None for _, query in QUERIES for name in asked(query).metrics if name in found) < 8


@pytest.mark.slow
def test_the_index_of_kubernetes_answers_for_its_gateways(tmp_path: Path, redis: RedisServer) -> None:
    place = Place()
    redis.port = place.ports["6379"]
    redis.start()
    fleet = kustomized(DEPLOY / "kubernetes" / "index")
    for one in fleet:
        for name, text in one.get("data", {}).items():
            (tmp_path / name).write_text(place.here(text, "127.0.0.1"))

    def words(name: str, host: str = "127.0.0.1") -> list[str]:
        (one,) = [one for one in fleet if containers(one) and one["metadata"]["name"] == name]
        given = [place.here(word, host) for word in containers(one)[0]["args"]]
        return [word.replace("/etc/kvyard", str(tmp_path)) for word in given]

    with contextlib.ExitStack() as stack:
        for number in (1, 2):
            stack.enter_context(started(words("engine", f"127.0.0.{number}"), tmp_path / f"engine{number}"))
        stack.enter_context(started(words("index"), tmp_path / "index"))
        stack.enter_context(started(words("gateway"), tmp_path / "gateway"))
        gateway = place.url("8080")
        eventually(lambda: well(gateway), (tmp_path / "gateway").read_text)
        text = "All that is known of caches comes from the index here. " * 10
        ask(gateway, text)
        # By what the index says, and not by chance: whoever is asked for it has it.
        eventually(lambda: ask(gateway, text) > 0)

        def known() -> bool:
            body = {"body": {"model": "mock", "prompt": text, "max_tokens": 1}}
            reply = httpx.post(f"{gateway}/explain", json=body, timeout=30, trust_env=False)
            assert reply.status_code == 200, reply.text
            return '"best":0' not in reply.text.replace(" ", "")

        eventually(known)
        assert exported(place.url("8090"))["kvyard_indexer_requests_total"]


def test_queries_that_cant_be_read_are_seen() -> None:
    wanted = asked('sum by (a, b) (rate(x_total{model=~"$m",why!="y"}[5m])) / max(z)')
    assert wanted.metrics == {"x_total": {"model", "why"}, "z": set()} and wanted.by == {"a", "b"}
    for query in ("sum(x", "nope(x)", 'x{a~"b"}', "x ? y"):
        with pytest.raises(AssertionError):
            asked(query)
