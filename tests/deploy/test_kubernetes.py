"""The manifests: every field is one that there is, and whatever refers to something else finds it there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs PyYAML")
pytest.importorskip("jsonschema_rs", reason="comes with schemathesis")

from jsonschema_rs import Draft7Validator
from tests.deploy.support import DEPLOY, ROOT, VARIANTS, containers, documents, kustomized, name_of, pod_of

from kvyard import __version__

SCHEMAS = json.loads((Path(__file__).parent / "vectors" / "kubernetes-1.37.json").read_text())
"""By kind, and by the names that they use for their parts."""
VERSIONS = {
    "Namespace": "v1",
    "ConfigMap": "v1",
    "ServiceAccount": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|Ki|Mi|Gi|k|M|G)?")


def problems(one: dict[str, Any]) -> list[str]:
    """Return the objections of Kubernetes' own schema to an object; unknown fields are objections."""
    schema = {"$ref": f"#/definitions/{one['kind']}", "definitions": SCHEMAS}
    return [f"{list(error.instance_path)}: {error.message}" for error in Draft7Validator(schema).iter_errors(one)]


@pytest.fixture(params=VARIANTS)
def fleet(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return kustomized(DEPLOY / "kubernetes" / request.param)


def test_every_object_is_one_that_kubernetes_takes(fleet: list[dict[str, Any]]) -> None:
    for one in fleet:
        kind, name = name_of(one)
        assert one["apiVersion"] == VERSIONS[kind] and NAME.fullmatch(name)
        assert problems(one) == [], name
        for container in containers(one):
            for wanted in container["resources"].values():
                assert all(QUANTITY.fullmatch(str(value)) for value in wanted.values()), wanted


@pytest.mark.parametrize(
    ("at", "field", "value"),
    [
        (("spec",), "replica", 2),
        (("spec", "template", "spec"), "terminationGracePeriodSecond", 60),
        (("spec", "template", "spec", "containers", 0), "arg", []),
        (("spec", "template", "spec", "containers", 0), "args", [5]),
        (("spec", "template", "spec", "containers", 0, "readinessProbe"), "httpget", {}),
        (("metadata",), "label", {}),
    ],
)
def test_a_slip_in_a_field_is_found(at: tuple[str | int, ...], field: str, value: object) -> None:
    (gateway,) = [
        one for one in kustomized(DEPLOY / "kubernetes" / "mock") if name_of(one) == ("Deployment", "gateway")
    ]
    inner: Any = gateway
    for key in at:
        inner = inner[key]
    inner[field] = value
    assert any(field in problem for problem in problems(gateway))


def test_containers_have_limits_probes_and_no_privileges(fleet: list[dict[str, Any]]) -> None:
    for one in fleet:
        pod = pod_of(one)
        for container in containers(one):
            assert pod is not None
            assert pod["spec"]["automountServiceAccountToken"] is False
            assert container["readinessProbe"] and container["livenessProbe"]
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            image, _, tag = container["image"].rpartition(":")
            assert image and tag and tag != "latest"
            if image == "kvyard":
                assert tag == __version__
            if not image.startswith("vllm/"):
                context = container["securityContext"]
                assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


def test_selectors_select_and_ports_are_there(fleet: list[dict[str, Any]]) -> None:
    pods = [(one, pod) for one in fleet if (pod := pod_of(one)) is not None]
    for one, pod in pods:
        labels = pod["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ports = {port["name"]: port["containerPort"] for port in containers(one)[0]["ports"]}
        annotations = pod["metadata"].get("annotations", {})
        if "prometheus.io/port" in annotations:
            assert int(annotations["prometheus.io/port"]) in ports.values()
        for container in containers(one):
            for name in ("readinessProbe", "livenessProbe", "startupProbe"):
                probe = container.get(name, {})
                for way in ("httpGet", "tcpSocket"):
                    if way in probe:
                        assert probe[way]["port"] in ports
        if one["kind"] == "StatefulSet":
            assert ("Service", one["spec"]["serviceName"]) in map(name_of, fleet)
        account = pod["spec"].get("serviceAccountName")
        assert account is None or ("ServiceAccount", account) in map(name_of, fleet)
    for one in fleet:
        kind, name = name_of(one)
        if kind == "Service":
            chosen = _chosen(pods, one["spec"]["selector"])
            assert len(chosen) == 1, name
            names = {port["name"] for port in containers(chosen[0])[0]["ports"]}
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= names
        elif kind == "PodDisruptionBudget":
            (found,) = _chosen(pods, one["spec"]["selector"]["matchLabels"])
            assert found["spec"]["replicas"] > one["spec"]["minAvailable"]
        elif kind == "NetworkPolicy":
            (found,) = _chosen(pods, one["spec"]["podSelector"]["matchLabels"])
            ports = {port["containerPort"] for port in containers(found)[0]["ports"]}
            same = [other for other in fleet if other["kind"] == kind and _selected(other) == _selected(one)]
            allowed = {port["port"] for other in same for rule in other["spec"]["ingress"] for port in rule["ports"]}
            assert allowed == ports, name


def _selected(policy: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = policy["spec"]["podSelector"]["matchLabels"]
    return labels


@pytest.mark.parametrize("overlay", ["epp", "vllm-epp"])
def test_with_a_picker_the_clusters_gateway_reaches_engines(overlay: str) -> None:
    """Its pods are in a namespace that the manifests don't know, so a rule without ``from`` must open the port of the pool."""
    fleet = kustomized(DEPLOY / "kubernetes" / overlay)
    (pool,) = documents(DEPLOY / "kubernetes" / "epp" / "pool.yaml")
    open_to_all = {
        (label, port["port"])
        for one in fleet
        if one["kind"] == "NetworkPolicy"
        for rule in one["spec"]["ingress"]
        if "from" not in rule
        for label in _selected(one).values()
        for port in rule["ports"]
    }
    engine = pool["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
    assert {(engine, target["number"]) for target in pool["spec"]["targetPorts"]} <= open_to_all
    picker = pool["spec"]["endpointPickerRef"]
    assert (picker["name"], picker["port"]["number"]) in open_to_all


def test_the_route_leads_to_the_pool() -> None:
    gateway, route = documents(DEPLOY / "kubernetes" / "epp" / "route.yaml")
    (pool,) = documents(DEPLOY / "kubernetes" / "epp" / "pool.yaml")
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == [gateway["metadata"]["name"]]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert backend["group"] == pool["apiVersion"].partition("/")[0]
    assert {one["metadata"]["namespace"] for one in (gateway, route, pool)} == {"kvyard"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for its kustomize")
def test_kubectl_makes_the_same_of_them(fleet: list[dict[str, Any]], request: pytest.FixtureRequest) -> None:
    folder = DEPLOY / "kubernetes" / request.node.callspec.params["fleet"]
    made = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=True)
    import yaml

    real = [
        (one["kind"], re.sub(r"-[a-z0-9]{10}$", "", one["metadata"]["name"])) for one in yaml.safe_load_all(made.stdout)
    ]
    assert sorted(real) == sorted(map(name_of, fleet))


def _chosen(pods: list[tuple[dict[str, Any], dict[str, Any]]], labels: dict[str, str]) -> list[dict[str, Any]]:
    return [one for one, pod in pods if labels.items() <= pod["metadata"]["labels"].items()]


def test_mounts_exist_and_are_writable_where_needed(fleet: list[dict[str, Any]]) -> None:
    for one in fleet:
        pod = pod_of(one)
        if pod is None:
            continue
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        for container in containers(one):
            mounts = {mount["name"]: mount for mount in container.get("volumeMounts", ())}
            assert mounts.keys() == volumes.keys()
            for name, volume in volumes.items():
                if "configMap" in volume:
                    (data,) = [
                        other["data"] for other in fleet if name_of(other) == ("ConfigMap", volume["configMap"]["name"])
                    ]
                    files = {f"{mounts[name]['mountPath']}/{file}" for file in data}
                    assert any(word.partition("=")[2] in files for word in container["args"])


def test_every_host_name_is_a_service(fleet: list[dict[str, Any]]) -> None:
    """Hosts and ports in commands and files are services of the fleet, at ports that they have."""
    services = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]}
        for one in fleet
        if one["kind"] == "Service"
    }
    replicas = {one["metadata"]["name"]: one["spec"]["replicas"] for one in fleet if one["kind"] == "StatefulSet"}
    texts = [word for one in fleet for container in containers(one) for word in container["args"]]
    texts += [text for one in fleet if one["kind"] == "ConfigMap" for text in one["data"].values()]
    seen: set[str] = set()
    for text in texts:
        for host, port in re.findall(r"(?:redis|http|tcp)://([\w.-]+):(\d+)", text):
            pod, _, service = host.rpartition(".")
            seen.add(service)
            if host == "0.0.0.0":
                continue
            assert int(port) in services[service], (host, port)
            if pod:
                stem, _, number = pod.rpartition("-")
                assert int(number) < replicas[stem]
        found = re.fullmatch(r"--dns=([\w.-]+):(\d+),(.*)", text)
        if found:
            seen.add(found[1])
            ports = {int(found[2]), *map(int, re.findall(r"_port=(\d+)", found[3]))}
            assert ports == services[found[1]]
    assert seen >= {"redis", "engines"}


def test_all_that_end_get_the_time_they_take(fleet: list[dict[str, Any]]) -> None:
    (gateway,) = [one for one in fleet if name_of(one) == ("Deployment", "gateway")]
    pod, (container,) = gateway["spec"]["template"]["spec"], containers(gateway)
    texts = [
        *container["args"],
        *(text for one in fleet if one["kind"] == "ConfigMap" for text in one["data"].values()),
    ]
    (drain,) = {float(value) for text in texts for value in re.findall(r"drain_seconds ?= ?([\d.]+)", text)}
    rest = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= drain + rest + 5


def test_vllm_publishes_where_the_service_says() -> None:
    (engine,) = documents(DEPLOY / "kubernetes" / "vllm" / "engine.yaml")
    (container,) = containers(engine)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    words = dict(word.removeprefix("--").split("=", 1) for word in container["args"] if "=" in word)
    events = json.loads(words["kv-events-config"])
    assert events["enable_kv_cache_events"] is True and events["publisher"] == "zmq"
    assert (
        events["endpoint"] == f"tcp://*:{ports['events']}" and events["replay_endpoint"] == f"tcp://*:{ports['replay']}"
    )
    assert int(words["port"]) == ports["http"]


def test_the_image_has_all_files_that_the_install_needs(tmp_path: Path) -> None:
    for words in re.findall(r"^COPY (?!--from)(.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        for source in words.split()[:-1]:
            path = ROOT / source
            if path.is_dir():
                shutil.copytree(path, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(path, tmp_path / source)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out"]
    env = {**os.environ, "KVYARD_PURE": "1"}  # compiling is tested elsewhere, and takes a while
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=100)
    (wheel,) = (tmp_path / "out").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvyard/server/gateway/gateway.py" in names and any(name.endswith("entry_points.txt") for name in names)


def test_the_image_is_made_of_what_is_there() -> None:
    import tomllib

    lines = (DEPLOY / "Dockerfile").read_text()
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for words in re.findall(r"^COPY (?!--from)(.*)$", lines, re.MULTILINE):
        for source in words.split()[:-1]:
            assert (ROOT / source).exists() and f"!{source}" in kept
    extras = re.search(r"\.\[([\w,]+)\]", lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert set(extras[1].split(",")) >= {"server", "zmq", "redis"}
    versions = re.findall(r"^FROM python:([\d.]+)", lines, re.MULTILINE)
    assert len(versions) == 2 and len(set(versions)) == 1, "what one Python compiled, another can't load"
    assert 'ENTRYPOINT ["kvyard"]' in lines and "kvyard" in project["scripts"]
    assert f"kvyard:{__version__}" in lines
    assert re.search(r"^USER 10001", lines, re.MULTILINE)
