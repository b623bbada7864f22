"""Compiles the hot part of kvyard when a wheel is built: the same source, by mypyc.

A plain ``pip install`` of a checkout or a source distribution runs this, so it has what it takes to be quick. Nothing depends
on it: without a C compiler, or with ``KVYARD_PURE=1``, the wheel holds the Python source alone, which behaves the
same. ``KVYARD_COMPILE=1`` makes it an error instead. Editable installs are never compiled: what one edits is what runs.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES = {
    "blocks": "agreement attention/chunked attention/cross attention/full attention/state attention/window "
    "cache_map coordinator eviction/lru eviction/priority extent fine group manager pool registration "
    "request rule spans step table",
    "engine": "core decode_batch decode_blocks handovers horizon job lifecycle load_source loads passes queue scheduler "
    "speculative policies/adapters policies/chunks policies/maker policies/mixed policies/sglang policies/trtllm "
    "timing/polynomial_model",
    "events": "batcher",
    "hashing": "chain digest_keys stretches",
    "index": "bits chains dedup digests hybrids memory roster rows runs views",
    "replay": "agenda arrivals fleet gaps handovers index_sync intake jobs listeners loop passes placement recorder "
    "seen shared split_placement worker worker_pool",
    "router": "active cost inputs memory overlaps pace ranking router tally time_cost tree",
    "tiers": "cleaner copies copy_totals layout links/fair links/fifo links/link links/sharing loader network offload policy "
    "prefix_lookup state store storer",
}
"""What a replay spends its time in. Left out are types that msgspec makes, what users derive from, and all that is not hot."""


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds compiled modules to a wheel, beside their source."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the wheel hold the result and say for which Python it is. Leaves it pure where that fails."""
        if version == "editable" or os.environ.get("KVYARD_PURE"):
            return
        self.app.display_info(
            "compiling kvyard's hot modules: this takes some four minutes; KVYARD_PURE=1 leaves it out"
        )
        self._made = Path(tempfile.mkdtemp(prefix="kvyard-compile-"))
        try:
            found = compile_modules(Path(self.root) / "src", self._made)
        except BaseException as problem:  # setuptools and mypyc leave by SystemExit too
            if isinstance(problem, KeyboardInterrupt) or os.environ.get("KVYARD_COMPILE"):
                raise
            self.app.display_warning(
                "kvyard is installed uncompiled, which works the same but slower; what went wrong:"
            )
            self.app.display_warning(f"{type(problem).__name__}: {problem}")
            return
        for path in found:
            build_data["force_include"][str(path)] = str(path.relative_to(self._made))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Clean up."""
        made = getattr(self, "_made", None)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def compile_modules(source: Path, made: Path) -> list[Path]:
    """Compile ``MODULES`` of ``source`` to extension modules below ``made``; returns their paths.

    Raises whatever mypyc or the C compiler do.
    """
    from mypyc.build import mypycify
    from setuptools import Distribution

    work = made / "work"
    shutil.copytree(source / "kvyard", work / "kvyard", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
    files = [f"kvyard/{package}/{name}.py" for package, names in MODULES.items() for name in names.split()]
    before = Path.cwd()
    os.chdir(work)  # mypyc names modules by their path from here
    sys.path.insert(0, str(work))
    try:
        options = ["--ignore-missing-imports", "--follow-imports=silent", *files]
        extensions = mypycify(options, opt_level="1", debug_level="0", group_name="kvyard", target_dir=str(made / "c"))
        distribution = Distribution({"name": "kvyard", "ext_modules": extensions})
        command = distribution.get_command_obj("build_ext")
        command.build_lib = str(made)
        command.build_temp = str(made / "temp")
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
        sys.path.remove(str(work))
    for leftover in ("work", "c", "temp"):
        shutil.rmtree(made / leftover, ignore_errors=True)
    return sorted(path for path in made.rglob("*") if path.suffix in (".so", ".pyd"))
