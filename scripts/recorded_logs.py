"""What recorders of scheduler logs share: their command line, the clock's formula, and the file of a log."""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Job = tuple[str, int]
"""A family and a seed, which name a log."""


def pass_ns(timing: Mapping[str, int], tokens: int, requests: int, context: int) -> int:
    """Return the duration of a pass over this many ``tokens`` and ``requests`` that attends to ``context`` tokens."""
    return (
        timing["base"]
        + timing["per_token"] * tokens
        + timing["per_request"] * requests
        + timing["per_context"] * context
    )


def write_log(out: Path, name: str, lines: Iterable[object]) -> str:
    """Write ``lines`` as JSON, packed, and return the name of the file."""
    path = out / f"{name}.jsonl.xz"
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(lzma.compress(text.encode(), preset=9))
    return path.name


class Arguments:
    """The command line of a recorder: which logs, and the folder to write them to."""

    def __init__(self, doc: str, families: Mapping[str, Any]) -> None:
        self._families = families
        self.parser = argparse.ArgumentParser(
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage="%(prog)s [--all] OUT [FAMILY@SEED ...]",
        )
        add = self.parser.add_argument
        add("out", nargs="?", type=Path, help="the folder to write to")
        add("logs", nargs="*", metavar="FAMILY@SEED", help="logs to record")
        add("--all", action="store_true", help="logs of every family")
        add("--family", "--families", dest="families", default="", metavar="A,B", help="logs of these families")
        add("--seed", "--seeds", dest="seeds", default="1", metavar="FIRST-LAST", help="seeds [default: 1]")
        add("--list", action="store_true", help="list the families")

    def parse(self, *, instead: str = "") -> tuple[argparse.Namespace, list[Job]] | None:
        """Return the arguments and the logs to record; ``None`` if families were to be listed. ``instead`` is an option
        that does without logs. Ends the process where the arguments make no sense.
        """
        parser = self.parser
        args = parser.parse_args()
        if args.list:
            for name, make in self._families.items():
                print(f"{name:20s} {(make.__doc__ or '').splitlines()[0]}" if callable(make) else name)
            return None
        jobs = self._jobs(args)
        unknown = sorted({name for name, _ in jobs} - set(self._families))
        if unknown:
            parser.error(f"no family is called {', '.join(unknown)}; --list names them")
        if args.out is None or not (jobs or (instead and getattr(args, instead))):
            parser.error("give the folder to write to, and logs, --family or --all")
        args.out.mkdir(parents=True, exist_ok=True)
        return args, jobs

    def _jobs(self, args: argparse.Namespace) -> list[Job]:
        chosen = list(self._families) if args.all else [name for name in args.families.split(",") if name]
        try:
            first, _, last = args.seeds.partition("-")
            jobs = [(name, seed) for name in chosen for seed in range(int(first), int(last or first) + 1)]
            return jobs + [(name, int(seed)) for name, _, seed in (log.rpartition("@") for log in args.logs)]
        except ValueError:
            self.parser.error("a log is FAMILY@SEED, and seeds are FIRST-LAST, in whole numbers")
