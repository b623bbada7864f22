"""The part of vLLM that this package stands on, as text: what it replaces, who asks what of it, and what it reads.

None of it is a public interface of vLLM's, so it is pinned: ``interface-0.32.txt`` holds what 0.32 has. It is read from vLLM's
source without importing it. After an upgrade, this says what is different:

    python -m kvyard.vllm.interface             a diff against the vLLM that is installed; exit status 1 if there is one
    python -m kvyard.vllm.interface --print     what the installed one has, for the next pinned file
"""

import ast
import difflib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvyard.vllm.version import KNOWN, VersionError, installed_version

PINNED = Path(__file__).with_name(f"interface-{KNOWN}.txt")

_MANAGER = "v1/core/kv_cache_manager.py"
_SCHEDULER = "v1/core/sched/scheduler.py"
_SPECS = "v1/kv_cache_interface.py"
_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
_OFFLOAD = "v1/kv_offload/base.py"
_CLASSES = [
    (_MANAGER, "KVCacheManager"),
    (_MANAGER, "KVCacheBlocks"),
    ("v1/core/sched/async_scheduler.py", "AsyncScheduler"),
    ("v1/kv_offload/cpu/policies/base.py", "CachePolicy"),
    ("v1/kv_offload/cpu/policies/base.py", "ChunkStatus"),
    ("v1/kv_offload/cpu/spec.py", "CPUOffloadingSpec"),
    (_OFFLOAD, "OffloadingSpec"),
    (_OFFLOAD, "OffloadingWorker"),
    (_OFFLOAD, "BlockIDsLoadStoreSpec"),
    (_OFFLOAD, "GPULoadStoreSpec"),
]
"""Classes that are replaced or derived from, with all their members."""
_METHODS = [
    (_SCHEDULER, "Scheduler", ("__init__", "schedule", "update_from_output", "add_request", "finish_requests")),
    (_SCHEDULER, "Scheduler", ("_preempt_request", "_free_request", "shutdown")),
    (_SCHEDULER, "Scheduler", ("_update_request_with_output", "get_request_counts")),
    ("config/vllm.py", "VllmConfig", ("max_concurrent_batches",)),
    (_OFFLOAD, "ReqContext", ("get_offload_key_position",)),
    ("v1/core/kv_cache_coordinator.py", "KVCacheCoordinator", ("get_num_blocks_to_allocate",)),
    ("v1/core/block_pool.py", "BlockPool", ("get_num_free_blocks", "get_usage", "free_blocks", "evict_blocks")),
    (_CONNECTOR, "KVConnectorBase_V1", ("bind_kv_cache_manager", "bind_gpu_block_pool")),
    ("v1/core/kv_cache_utils.py", None, ("generate_block_hash_extra_keys", "to_event_extra_keys")),
    ("v1/core/kv_cache_utils.py", None, ("maybe_convert_block_hash", "make_block_hash_with_group_id")),
    (_SPECS, None, ("get_kv_cache_spec_kind", "get_kv_cache_spec_sliding_window")),
]
_FIELDS = [
    ("distributed/kv_events.py", ("BlockStored", "BlockRemoved", "AllBlocksCleared")),
    ("v1/core/kv_cache_utils.py", ("KVCacheBlock", "KVCacheBlockCopy")),
    (
        _SPECS,
        (
            "KVCacheSpec",
            "AttentionSpec",
            "FullAttentionSpec",
            "MLAAttentionSpec",
            "SlidingWindowSpec",
            "SlidingWindowMLASpec",
            "ChunkedLocalAttentionSpec",
            "MambaSpec",
            "CircularBufferSpec",
            "CrossAttentionSpec",
            "UniformTypeKVCacheSpecs",
            "KVCacheGroupSpec",
            "KVCacheConfig",
        ),
    ),
    ("v1/metrics/stats.py", ("PrefixCacheStats",)),
    ("v1/core/sched/output.py", ("SchedulerOutput", "NewRequestData", "CachedRequestData")),
    (
        _OFFLOAD,
        ("ReqContext", "TransferResult", "CanonicalKVCaches", "CanonicalKVCacheTensor", "CanonicalKVCacheRef"),
    ),
]
"""Values that are made or read: a field more may carry a rule more."""
_REQUEST = (
    "all_token_ids",
    "arrival_time",
    "block_hashes",
    "cache_salt",
    "kv_cache_report_mode",
    "lora_request",
    "max_tokens",
    "mm_features",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_output_tokens",
    "num_preemptions",
    "num_prompt_tokens",
    "num_tokens",
    "priority",
    "prompt_embeds",
    "request_id",
    "session_id",
    "skip_reading_prefix_cache",
    "status",
)
"""Attributes of a request that are read."""
_USERS = [
    _SCHEDULER,
    "v1/core/sched/async_scheduler.py",
    "v1/engine/core.py",
    _CONNECTOR,
]
"""Users of the manager."""


def describe(vllm: Path) -> list[str]:
    """Return the interface of the vLLM in folder ``vllm``, a line each. Raises ``VersionError`` if a file or class is gone."""
    lines: list[str] = []
    for file, name in _CLASSES:
        cls = _class(vllm, file, name)
        lines += [f"{name}.{line}" for line in _methods(cls)]
        lines += [f"{name} has {attribute}" for attribute in sorted(_attributes(cls))]
    for file, owner, names in _METHODS:
        body = _class(vllm, file, owner).body if owner else _parse(vllm, file).body
        prefix = f"{owner}." if owner else ""
        lines += [f"{prefix}{_signature(item)}" for item in body if _is_one_of(item, names)]
    for file, classes in _FIELDS:
        for name in classes:
            body = _class(vllm, file, name).body
            lines += [f"{name}: {ast.unparse(item)}" for item in body if isinstance(item, ast.AnnAssign)]
    request = _class(vllm, "v1/request.py", "Request")
    there = _attributes(request) | {item.name for item in request.body if isinstance(item, ast.FunctionDef)}
    lines += [f"Request has {name}" for name in _REQUEST if name in there]
    lines += [f"the scheduler makes {call}" for call in _constructions(vllm)]
    for file in _USERS:
        lines += [f"{file} asks for {path}" for path in sorted(_asked(_parse(vllm, file)))]
    return lines


def pinned() -> list[str]:
    """Return the interface of ``KNOWN``."""
    return PINNED.read_text(encoding="utf-8").splitlines()


def drift(vllm: Path) -> list[str]:
    """Return the difference of the vLLM in folder ``vllm`` from the pinned one, as a diff; empty if there is none."""
    return list(difflib.unified_diff(pinned(), describe(vllm), f"vLLM {KNOWN}, pinned", str(vllm), lineterm="", n=1))


def asked_for() -> set[str]:
    """Return the attributes of the manager that ``KNOWN`` asks for, such as ``block_pool.free_blocks``."""
    return {line.partition(" asks for ")[2] for line in pinned() if " asks for " in line}


def signatures(source: str, name: str) -> dict[str, list[str]]:
    """Return the methods of class ``name`` in Python text ``source``, each with its parameters and their defaults."""
    class_ = next(item for item in ast.parse(source).body if isinstance(item, ast.ClassDef) and item.name == name)
    return {item.name: _parameters(item) for item in class_.body if isinstance(item, ast.FunctionDef)}


def installed() -> Path:
    """Return the folder of the vLLM that is installed, which is not imported. Raises ``VersionError`` if there is none."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise VersionError("no vLLM is installed for this Python")
    return Path(spec.submodule_search_locations[0])


def _parse(vllm: Path, file: str) -> ast.Module:
    try:
        return ast.parse((vllm / file).read_text(encoding="utf-8"), file)
    except OSError as gone:
        raise VersionError(f"{vllm} has no {file}: vLLM {KNOWN} has") from gone


def _class(vllm: Path, file: str, name: str) -> ast.ClassDef:
    for item in _parse(vllm, file).body:
        if isinstance(item, ast.ClassDef) and item.name == name:
            return item
    raise VersionError(f"{vllm / file} has no class {name}: vLLM {KNOWN} has")


def _methods(class_: ast.ClassDef) -> Iterator[str]:
    for item in class_.body:
        if isinstance(item, ast.FunctionDef) and not any("overload" in ast.unparse(d) for d in item.decorator_list):
            yield _signature(item)


def _is_one_of(item: ast.stmt, names: tuple[str, ...]) -> bool:
    return isinstance(item, ast.FunctionDef) and item.name in names


def _signature(item: ast.stmt) -> str:
    assert isinstance(item, ast.FunctionDef)
    returns = f" -> {ast.unparse(item.returns)}" if item.returns else ""
    return f"{item.name}({ast.unparse(item.args)}){returns}"


def _parameters(item: ast.FunctionDef) -> list[str]:
    """Return the parameters without their types."""
    bare = ast.parse(f"def f({ast.unparse(item.args)}): ...").body[0]
    assert isinstance(bare, ast.FunctionDef)
    for argument in (*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs):
        argument.annotation = None
    return ast.unparse(bare.args).split(", ")


def _attributes(class_: ast.ClassDef) -> set[str]:
    """Return the attributes that its constructor sets."""
    names = set()
    for item in class_.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            for node in ast.walk(item):
                stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if stored and isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                    names.add(node.attr)
    return names


def _constructions(vllm: Path) -> Iterator[str]:
    """Yield the scheduler's construction of its manager: a replacement must take these arguments."""
    for node in ast.walk(_class(vllm, _SCHEDULER, "Scheduler")):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "KVCacheManager":
            yield ast.unparse(node)


def _asked(module: ast.Module) -> set[str]:
    """Return what follows ``kv_cache_manager.`` in ``module``, the longest of each chain of attributes."""
    paths = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            for name in ("kv_cache_manager.", "cache_manager."):
                head, separator, path = text.rpartition(name)
                if (
                    separator
                    and (not head or head.endswith("."))
                    and all(part.isidentifier() for part in path.split("."))
                ):
                    paths.add(path)
    return {path for path in paths if not any(other.startswith(f"{path}.") for other in paths)}


def main(arguments: list[str]) -> int:
    """``--print``, or the diff."""
    vllm = installed()
    if arguments == ["--print"]:
        print("\n".join(describe(vllm)))
        return 0
    drifted = drift(vllm)
    print("\n".join(drifted) or f"vLLM {installed_version()} has what is pinned for {KNOWN}")
    return 1 if drifted else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except VersionError as refused:
        sys.exit(f"kvyard.vllm.interface: {refused}")
