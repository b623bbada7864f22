"""vLLM's groups as kvyard's: vLLM isn't installed here, so a few classes stand in for its specifications."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvyard.blocks import GroupSpec
from kvyard.vllm.version import UnsupportedError


class Spec(SimpleNamespace):
    """One of vLLM's specifications."""


KINDS: dict[str, Any] = {
    name: type(name, (Spec,), {})
    for name in (
        "ChunkedLocalAttentionSpec",
        "CircularBufferSpec",
        "CrossAttentionSpec",
        "FullAttentionSpec",
        "MambaSpec",
        "MLAAttentionSpec",
        "SlidingWindowMLASpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
    )
}
ROLE = SimpleNamespace(DEFAULT="default")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    name = "vllm.v1.kv_cache_interface"
    module = ModuleType(name)
    vars(module).update(KINDS, KVCacheGroupRole=ROLE)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvyard.vllm.groups", raising=False)
    yield import_module("kvyard.vllm.groups")
    sys.modules.pop("kvyard.vllm.groups", None)


def config(*inner: Spec) -> Any:
    """One group, of layers that have these."""
    spec = KINDS["UniformTypeKVCacheSpecs"](kv_cache_specs={f"layer {at}": one for at, one in enumerate(inner)})
    group = SimpleNamespace(role=ROLE.DEFAULT, kv_cache_spec=spec, is_eagle_group=False)
    return SimpleNamespace(kv_cache_groups=[group])


def test_layers_that_differ_in_size_alone_are_one_group(groups: ModuleType) -> None:
    full = KINDS["FullAttentionSpec"]
    layers = full(block_size=16, head_size=64), full(block_size=16, head_size=128)
    assert groups.group_specs(config(*layers)) == [GroupSpec(kind="full", block_size=16)]


def test_layers_of_several_kinds_are_refused_by_the_group(groups: ModuleType) -> None:
    full, sliding = KINDS["FullAttentionSpec"], KINDS["SlidingWindowSpec"]
    for other in (full(block_size=32), sliding(block_size=16, sliding_window=64)):
        with pytest.raises(UnsupportedError, match="group 0 mixes kinds of attention"):
            groups.group_specs(config(full(block_size=16), other))
