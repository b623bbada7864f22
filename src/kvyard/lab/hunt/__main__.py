"""The process that hunts, run with the engine's own Python: ``python -m kvyard.lab.hunt ENGINE FOLDER SECONDS SEED``.

Progress goes to stdout, a line of JSON each; what the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import import_module
from pathlib import Path

from kvyard.lab.hunt.engine import HuntedEngine
from kvyard.lab.hunt.hunter import Hunter


def main() -> int:
    """Hunt, and return the exit code."""
    name, folder, seconds, seed = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    hunted: HuntedEngine = import_module(f"kvyard.{name}.hunt").ENGINE
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**line: object) -> None:
        print(json.dumps(line), file=lines)

    try:
        engine = f"{name} {hunted.import_engine()}"
    except ImportError as missing:
        say(refused=f"{hunted.title} can't be imported by {sys.executable} ({missing})")
        return 2
    logging.disable(logging.CRITICAL)
    try:
        hunter = Hunter(hunted, engine, folder, seed)
    except ValueError as bad:
        say(refused=str(bad))
        return 2
    say(progress=f"{engine}, {hunter.tried} cases tried before")
    try:
        hunter.search(seconds, lambda text: say(progress=text))
    except KeyboardInterrupt:
        say(progress="interrupted; the same command goes on from here")
        return 130
    finally:
        say(result={"engine": engine, "seed": seed, "tried": hunter.tried, "findings": hunter.findings})
    return int(bool(hunter.findings))


if __name__ == "__main__":
    sys.exit(main())
