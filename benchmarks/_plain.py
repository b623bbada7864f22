"""What a plain ``pip install`` gives: benchmarks measure that, since that is what people run.

The checkout's own environment is editable, hence uncompiled. So the sources are installed once more into ``build/``, compiled
as for any user, and our side runs from there. It is made again when a source changes; that takes some four minutes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def plain_environment(source: bool = False) -> dict[str, str]:
    """The environment of a Python that imports kvyard as plainly installed; with ``source``, as it lies in the checkout."""
    if source:
        print("measuring the uncompiled source", flush=True)
        return {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    target = ROOT / "build" / "plain"
    stamp, now = target / "digest", digest()
    if not stamp.exists() or stamp.read_text() != now:
        print(
            "installing kvyard plainly into build/plain (some four minutes, once per change of the sources)", flush=True
        )
        shutil.rmtree(target, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        with tempfile.TemporaryDirectory() as folder:
            # The wheel first: pip by itself has it compiled twice, once to ask for its metadata.
            build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
            subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wheels = [str(path) for path in Path(folder).glob("*.whl")]
            subprocess.run([*install, "--target", str(target), *wheels], check=True)
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
