"""Shared parts of the deployment's tests: files read as their tools read them, and as much of kustomize as ours use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VARIANTS = ("mock", "vllm", "index", "epp", "vllm-epp", "roles")
KNOWN = {"apiVersion", "kind", "namespace", "resources", "labels", "images", "configMapGenerator", "patches"}
"""Fields of a kustomization that ``kustomized`` understands. One more needs one more rule."""
KEYS = {"containers": "name", "volumes": "name", "volumeMounts": "mountPath", "env": "name", "ports": "containerPort"}
"""By which field lists are merged."""


def documents(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file; a key that is there twice is an error."""
    return [one for one in yaml.load_all(path.read_text(), Loader=_Strict) if one is not None]


class _Strict(yaml.SafeLoader):
    pass


def _mapping(loader: _Strict, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    assert len(keys) == len(set(keys)), f"a key is there twice: {sorted(keys)}, {node.start_mark}"
    loader.flatten_mapping(node)
    return {loader.construct_object(key, True): loader.construct_object(value, True) for key, value in node.value}


_Strict.add_constructor("tag:yaml.org,2002:map", _mapping)


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """Return what ``kubectl kustomize`` would make of a folder, but for hashes behind the names of config maps."""
    (config,) = documents(folder / "kustomization.yaml")
    assert set(config) <= KNOWN, config
    found: list[dict[str, Any]] = []
    for name in config["resources"]:
        path = folder / name
        found += kustomized(path) if path.is_dir() else documents(path)
    for made in config.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text() for name in made["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    for patch in config.get("patches", ()):
        (change,) = documents(folder / patch["path"])
        targets = [one for one in found if name_of(one) == name_of(change)]
        assert len(targets) == 1, f"{patch['path']} is about {name_of(change)}, which isn't there once"
        found[found.index(targets[0])] = merged(targets[0], change)
    for one in found:
        if one["kind"] != "Namespace":
            one["metadata"]["namespace"] = config["namespace"]
        for container in containers(one):
            for image in config.get("images", ()):
                if container["image"] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    names = [name_of(one) for one in found]
    assert len(names) == len(set(names)), names
    return found


def merged(base: Any, change: Any) -> Any:
    """A strategic merge: mappings by key, lists of ``KEYS`` by that, all else replaced."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return copy.deepcopy(change)
    out = copy.deepcopy(base)
    for key, value in change.items():
        if key in KEYS and key in out:
            by = KEYS[key]
            for item in value:
                at = next((at for at, one in enumerate(out[key]) if one[by] == item[by]), None)
                if at is None:
                    out[key].append(copy.deepcopy(item))
                else:
                    out[key][at] = merged(out[key][at], item)
        else:
            out[key] = merged(out[key], value) if key in out else copy.deepcopy(value)
    return out


def name_of(one: dict[str, Any]) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def pod_of(one: dict[str, Any]) -> dict[str, Any] | None:
    """The template of the pods that an object makes."""
    return one["spec"]["template"] if one["kind"] in ("Deployment", "StatefulSet") else None


def containers(one: dict[str, Any]) -> list[dict[str, Any]]:
    pod = pod_of(one)
    return [] if pod is None else pod["spec"]["containers"]


def compose() -> dict[str, Any]:
    (found,) = documents(DEPLOY / "compose.yaml")
    return found
