"""Compiles the hot modules of kvyard with mypyc when a wheel is built.

A plain ``pip install`` of a checkout or a source distribution runs this. It is optional: without a C compiler, or with
``KVYARD_PURE=1``, the wheel holds the Python source alone, which behaves the same and is slower. ``KVYARD_COMPILE=1`` makes
a failure to compile an error. Editable installs are never compiled: what one edits is what runs.

mypyc writes the C in a process of its own (``python hatch_build.py``), so that its memory is free again when the C compiler
starts. The C is then compiled in ``UNITS`` translation units, on several cores.
"""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES = {
    ".": "integers",
    "blocks": "agreement attention/window cache_map coordinator eviction/lru eviction/quota eviction/radix extent group holds "
    "ledger manager pool radix registration request rule spans step table tree_eviction",
    "engine": "core decode_batch decode_blocks handovers horizon job lifecycle load_source loads passes queue scheduler "
    "stores policies/chunks policies/maker policies/mixed policies/sglang_admission policies/sglang_budget "
    "policies/sglang_decoding policies/sglang_drafts policies/sglang_order policies/sglang_passes policies/sglang_queue "
    "timing/interpolation timing/polynomial_model timing/roofline timing/table_model",
    "events": "batcher",
    "hashing": "chain digest_keys prefix_tree",
    "index": "bits chains dedup digests memory roster rows runs",
    "replay": "agenda arrivals fleet gaps handovers index_sync intake jobs listeners loop passes placement process_arrivals "
    "recorder rendering seen split_placement worker worker_pool",
    "router": "active cost inputs matches memory overlaps pace ranking router search time_cost tree worker",
    "tiers": "cleaner copies copy_totals hicache layout links/fair links/fifo links/link links/sharing loader network offload "
    "path_chain prefix_lookup state store storer",
}
"""Modules in which replays and routing decisions spend their time, by package. Not listed: msgspec's types, and classes that
people derive from or pickle.
"""
UNITS = 8
"""C files that the modules are put together into: each costs another reading of the headers, fewer cost more memory each."""
CORES = min(os.cpu_count() or 1, 4)
HIDDEN = "-fvisibility=hidden"
"""Calls between compiled modules are direct ones; else each would go through the linker's table, as if another library could
replace the function."""


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds compiled modules to a wheel, beside their source."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the hot modules into the wheel and tag it for this Python; leave it pure where that fails."""
        if version == "editable":
            return
        if os.environ.get("KVYARD_PURE"):
            self.app.display_info("kvyard: not compiled, since KVYARD_PURE is set; it works the same but slower")
            return
        self._folder = Path(tempfile.mkdtemp(prefix="kvyard-compile-"))
        try:
            libraries = compile_modules(Path(self.root) / "src", self._folder, Progress(self.app.display_info))
        except BaseException as problem:  # setuptools and mypyc leave by SystemExit too
            if isinstance(problem, KeyboardInterrupt) or os.environ.get("KVYARD_COMPILE"):
                raise
            self.app.display_warning(
                f"kvyard: not compiled, it works the same but slower ({type(problem).__name__}: {problem})"
            )
            return
        for path in libraries:
            build_data["force_include"][str(path)] = str(path.relative_to(self._folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class Progress:
    """Reports how far the build is: lines for a log (``pip -v`` shows them), a counter on a terminal."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._began = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def step(self, text: str) -> None:
        """Report a step of the build, with the seconds since it began."""
        self._clear()
        self._line(f"kvyard: {text} ({time.monotonic() - self._began:.0f} s)")

    def count(self, done: int, total: int) -> None:
        """Move the counter on a terminal."""
        if self._terminal:
            print(f"\rkvyard: compiled {done} of {total} C files", end="", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def module_files() -> list[str]:
    """The files that are compiled, from ``src/``."""
    return [str(Path("kvyard", package, f"{name}.py")) for package, names in MODULES.items() for name in names.split()]


def compile_modules(source: Path, target: Path, progress: Progress) -> list[Path]:
    """Compile ``MODULES`` of ``source`` to extension modules below ``target`` and return their paths.

    Raises ``FileNotFoundError`` where there is no C compiler, and whatever mypyc and the C compiler raise.
    """
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC")  # Windows has none of them, and finds its own
    if compiler and shutil.which(shlex.split(compiler)[0]) is None:
        raise FileNotFoundError(f"no C compiler: {compiler}")
    progress.step(f"compiling {len(module_files())} modules, about a minute of CPU time; KVYARD_PURE=1 skips this")
    work = target / "work"
    shutil.copytree(source / "kvyard", work / "kvyard", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
    command = [sys.executable, str(Path(__file__).resolve()), str(target / "c"), str(target / "extensions")]
    written = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if written.returncode:
        raise RuntimeError(f"mypyc failed:\n{written.stdout}{written.stderr}")
    extensions = pickle.loads((target / "extensions").read_bytes())
    size = sum(path.stat().st_size for path in (target / "c").rglob("*.c"))
    progress.step(f"mypyc wrote {size / 1e6:.1f} MB of C")
    library = next(extension for extension in extensions if len(extension.sources) > 1)
    library.sources = join_units(library.sources, target / "c")
    build(extensions, target, progress)
    return sorted(path for path in target.rglob("*") if path.suffix in (".so", ".pyd"))


def write_c(target: str, extensions: str) -> None:
    """Write the C of the modules below the working directory to ``target``, and the list of extensions to a file."""
    import setuptools  # noqa: F401 (mypyc looks whether it is imported)
    from mypyc.build import mypycify

    # Types of other packages change nothing in the C but cost half of the time and memory.
    options = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent", *module_files()]
    # -Og would take 60 % of the C compiler's time, and replays 13 % more.
    built = mypycify(options, opt_level="1", debug_level="0", multi_file=True, group_name="kvyard", target_dir=target)
    Path(extensions).write_bytes(pickle.dumps(built))
    sys.stdout.flush()
    os._exit(0)  # freeing mypy's objects one by one would take seconds


def join_units(sources: list[str], folder: Path) -> list[str]:
    """Write ``UNITS`` C files of about equal size that include ``sources``, and one that includes mypyc's runtime."""
    units: list[list[str]] = [[] for _ in range(UNITS)]
    sizes = [0] * UNITS
    runtime = []
    for source in sorted(sources, key=os.path.getsize, reverse=True):
        if not Path(source).name.startswith("__native"):
            runtime.append(source)
            continue
        smallest = sizes.index(min(sizes))
        units[smallest].append(source)
        sizes[smallest] += os.path.getsize(source)
    paths = []
    for number, parts in enumerate([*units, runtime]):
        path = folder / f"unit_{number}.c"
        path.write_text("".join(f'#include "{Path(part).resolve().as_posix()}"\n' for part in parts))
        paths.append(str(path))
    return paths


def build(extensions: list[Any], target: Path, progress: Progress) -> None:
    """Compile and link ``extensions`` into ``target``."""
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class BuildUnits(build_ext):
        """Compiles several C files of one extension at a time, where setuptools compiles one."""

        def build_extensions(self) -> None:
            with ThreadPoolExecutor(CORES) as pool:
                jobs = {
                    pool.submit(self.compile_source, extension, source): extension
                    for extension in self.extensions
                    for source in extension.sources
                }
                try:
                    for done, job in enumerate(as_completed(jobs), start=1):
                        jobs[job].extra_objects += job.result()
                        progress.count(done, len(jobs))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            progress.step(f"compiled {len(jobs)} C files")
            for extension in self.extensions:
                extension.sources = []
            super().build_extensions()

        def compile_source(self, extension: Any, source: str) -> list[str]:
            unix = self.compiler.compiler_type == "unix"
            objects: list[str] = self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=extension.include_dirs,
                extra_postargs=[*extension.extra_compile_args, *([HIDDEN] if unix else [])],
            )
            return objects

    command = BuildUnits(Distribution({"name": "kvyard", "ext_modules": extensions}))
    command.build_lib = str(target)
    command.build_temp = str(target / "temp")
    command.parallel = CORES
    command.ensure_finalized()
    command.run()
    progress.step(f"linked {len(extensions)} extension modules")


if __name__ == "__main__":
    write_c(sys.argv[1], sys.argv[2])
