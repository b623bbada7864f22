"""The schemas of the Kubernetes objects that ``deploy/`` has, cut from those of all objects, without their descriptions.

    pip download --no-deps kubernetes-validate==1.37.0
    python tests/deploy/vectors/make_kubernetes.py kubernetes_validate-1.37.0-py3-none-any.whl

The package has 22 MB, which is too much to ask of those who run the tests. Fields that aren't in a schema are refused.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

KINDS = (
    "core.v1.ConfigMap",
    "core.v1.Namespace",
    "core.v1.Service",
    "core.v1.ServiceAccount",
    "apps.v1.Deployment",
    "apps.v1.StatefulSet",
    "networking.v1.NetworkPolicy",
    "policy.v1.PodDisruptionBudget",
)


def cut(value: Any, found: set[str]) -> Any:
    """A schema without words; what it refers to is added to ``found``."""
    if isinstance(value, list):
        return [cut(one, found) for one in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for key, inner in value.items():
        if key == "$ref":
            found.add(inner.rpartition("/")[2])
            out[key] = f"#/definitions/{inner.rpartition('.')[2]}"
        elif key == "properties":
            out[key] = {name: cut(one, found) for name, one in inner.items()}
        elif key not in ("description", "default") and not key.startswith("x-kubernetes"):
            out[key] = cut(inner, found)
    if "properties" in out:
        out["additionalProperties"] = False
    return out


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (one for one in packed.namelist() if one.endswith("v1.37.0-local/_definitions.json"))
        schemas = json.loads(packed.read(name))["$defs"]
    waiting = {name for name in schemas for kind in KINDS if name.endswith(f".api.{kind}")}
    assert len(waiting) == len(KINDS)
    done: dict[str, Any] = {}
    while waiting:
        name = waiting.pop()
        found: set[str] = set()
        done[name] = cut(schemas[name], found)
        waiting |= found - done.keys()
    short = {name.rpartition(".")[2]: schema for name, schema in sorted(done.items())}
    assert len(short) == len(done)
    Path(__file__).with_name("kubernetes-1.37.json").write_text(json.dumps(short, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
