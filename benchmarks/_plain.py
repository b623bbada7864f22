"""A plain ``pip install`` of the checkout below ``build/``: benchmarks measure that, since that is what people run.

The checkout's own environment is editable, hence uncompiled. The install is made again when a source changes, which takes
about a minute of CPU time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def plain_environment(source: bool = False) -> dict[str, str]:
    """Environment of a Python that imports kvyard from a plain install, or with ``source`` from the checkout."""
    if source:
        print("measuring the uncompiled source", flush=True)
        return {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    target = ROOT / "build" / "plain"
    stamp, now = target / "digest", digest()
    if not stamp.exists() or stamp.read_text() != now:
        print("installing kvyard plainly into build/plain (about a minute, once per change of the sources)", flush=True)
        shutil.rmtree(target, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--no-build-isolation", "--target", str(target), str(ROOT)], check=True)
        stamp.write_text(now)
    count = sum(1 for path in (target / "kvyard").rglob("*") if path.suffix in (".so", ".pyd"))
    print(
        f"measuring a plain install ({count} compiled modules)" if count else "measuring a plain install: no C compiler"
    )
    sys.stdout.flush()
    return {**os.environ, "PYTHONPATH": str(target)}


def digest() -> str:
    """A fingerprint of all that goes into an install."""
    paths = [ROOT / "pyproject.toml", ROOT / "hatch_build.py", *sorted((ROOT / "src").rglob("*.py"))]
    parts = [sys.version]
    parts += [f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
