"""Every command in every file is one that kvyard takes, with flags that it has and configurations that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs PyYAML")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.deploy.support import DEPLOY, VARIANTS, compose, containers, kustomized, name_of

from kvyard.cli.app import build
from kvyard.errors import KvyardError


def commands() -> Iterator[tuple[str, list[str]]]:
    for name, service in compose()["services"].items():
        if service["image"].startswith("kvyard:"):
            yield f"compose {name}", service["command"]
    for variant in VARIANTS:
        for one in kustomized(DEPLOY / "kubernetes" / variant):
            for container in containers(one):
                if container["image"].startswith("kvyard:"):
                    yield f"{variant} {one['metadata']['name']}", container["args"]


FOUND = dict(commands())


def parsed(words: list[str]) -> Any:
    """A command's context, with its parameters read. Raises what the command line raises."""
    with build().make_context("kvyard", list(words)) as context:
        name, command, rest = context.command.resolve_command(context, list(words))
        while True:
            inner = command.make_context(name, rest, parent=context)
            if not hasattr(inner.command, "resolve_command"):
                return inner
            name, command, rest = inner.command.resolve_command(inner, rest)


def test_there_are_commands_of_all_parts() -> None:
    assert {words[0] for words in FOUND.values()} == {"gateway", "mock", "index", "epp"}
    assert len(FOUND) == 16


@pytest.mark.parametrize("where", FOUND)
def test_flags_are_real(where: str) -> None:
    words = FOUND[where]
    context = parsed(words)
    given = {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}
    flags = [word for word in words if word.startswith("--")]
    assert len({flag.partition("=")[0] for flag in flags}) == len(given)


def test_a_flag_that_there_isnt_would_be_seen() -> None:
    with pytest.raises(Exception, match=r"(?i)no such option"):
        parsed([*FOUND["compose gateway"], "--no-such-flag=1"])


def test_configurations_can_be_read(tmp_path: Path) -> None:
    from kvyard.server.gateway import config as gateway
    from kvyard.server.indexer import config as index

    maps = {
        name_of(one)[1]: one["data"]
        for one in kustomized(DEPLOY / "kubernetes" / "index")
        if one["kind"] == "ConfigMap"
    }
    for name, data in maps.items():
        for file, text in data.items():
            (tmp_path / file).write_text(text)
        assert f"{name}.toml" in data

    def read(module: ModuleType, file: str) -> Any:
        return module.convert(index.load(tmp_path / file), file)

    asks, knows = read(gateway, "gateway.toml"), read(index, "index.toml")
    assert asks.block_size == knows.block_size and asks.index_url == "http://index:8090"
    # Both sides call the same engines the same.
    assert {engine.called for engine in asks.engines} == {str(one.instance_id) for one in knows.subscriptions}
    assert {engine.model for engine in asks.engines} == {one.model_name for one in knows.subscriptions} == {"mock"}
    (tmp_path / "gateway.toml").write_text((tmp_path / "gateway.toml").read_text() + "\n[more]\n")
    with pytest.raises(KvyardError):
        read(gateway, "gateway.toml")


def test_ports_agree_between_the_files() -> None:
    from tests.deploy.support import documents

    services = compose()["services"]
    (scraping,) = documents(DEPLOY / "prometheus.yaml")
    for job in scraping["scrape_configs"]:
        assert job["metrics_path"] == "/metrics"
        for found in job["dns_sd_configs"]:
            for name in found["names"]:
                assert f"--port={found['port']}" in services[name]["command"]
    flags = {flag.partition("=")[0]: flag.partition("=")[2] for flag in services["engine"]["command"]}
    (dns,) = [flag.removeprefix("--dns=") for flag in services["gateway"]["command"] if flag.startswith("--dns=")]
    target, *rest = dns.split(",")
    given = dict(part.split("=") for part in rest)
    assert target == f"engine:{flags['--port']}"
    assert flags["--kv-events-endpoint"] == f"tcp://*:{given['events_port']}"
    assert flags["--kv-events-replay-endpoint"] == f"tcp://*:{given['replay_port']}"
    assert flags["--block-size"] == given["block_size"]
    for name, service in services.items():
        for published in service.get("ports", ()):
            host, _, port = published.rpartition(":")
            assert host.startswith("127.0.0.1:"), f"{name} listens to the world"
            if name == "gateway":
                assert f"--port={port}" in service["command"]
                first, last = host.removeprefix("127.0.0.1:").split("-")
                assert int(last) - int(first) + 1 == service["deploy"]["replicas"]
        for volume in service.get("volumes", ()):
            assert (DEPLOY / volume.split(":")[0]).exists(), volume
        for other in service.get("depends_on", ()):
            assert other in services
    (source,) = documents(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    (provider,) = documents(DEPLOY / "grafana" / "provisioning" / "dashboards" / "kvyard.yaml")
    folder = provider["providers"][0]["options"]["path"]
    assert any(volume.split(":")[1].startswith(f"{folder}/") for volume in services["grafana"]["volumes"])
