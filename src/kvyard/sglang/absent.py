"""Importing SGLang without the packages that it asks for and that have no CPU build."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
import warnings
from typing import Any

QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_LOG_LEVEL": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
ABSENT = ("torchvision", "vllm", "sgl_kernel")
"""Packages that SGLang imports and that have no fitting CPU build."""


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class Anything(metaclass=_AnyMeta):
    """Stands for whatever is asked of an absent package, and for parts whose effects are not recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _AbsentModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - the import system reads it from the module
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages in ``ABSENT`` that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class OrderedSet(dict[Any, None]):
    """A set that iterates in the order of insertion."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        self[item] = None


def import_sglang() -> str:
    """Import SGLang, which takes 10 to 30 s, with all it prints sent to stderr; returns its version."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    sys.meta_path.append(AbsentPackages())
    warnings.simplefilter("ignore")
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        import sglang.srt.managers.scheduler  # noqa: F401
        from sglang.srt.managers import schedule_policy
        from sglang.srt.mem_cache import allocation
        from sglang.version import __version__

        allocation.assign_req_to_token_pool_func = write_rows

        # Requests preempted at once come back in the order of a set, which differs from process to process.
        schedule_policy.set = OrderedSet
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
    logging.disable(logging.WARNING)
    return str(__version__)


def write_rows(rows: Any, table: Any, starts: Any, ends: Any, slots: Any, _: int) -> None:
    """Enter new slots into the rows of requests, which SGLang does by a kernel for GPUs."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[taken : taken + end - start]
        taken += end - start
