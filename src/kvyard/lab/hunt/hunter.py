"""The search: tries cases for a time, keeps and minimizes findings, and can be continued."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvyard.clock import SECOND, WallClock
from kvyard.lab.hunt.engine import Case, HuntedEngine
from kvyard.lab.hunt.script import reproducer

Say = Callable[[str], None]

KEPT = 64
"""Cases that came near to trouble, from which the search goes on."""
CHANGED = 0.5
"""Share of tries that change such a case instead of drawing a new one."""
SHRINK_TRIES = 600
SHRINK_S = 60.0
"""Seconds after which a finding is small enough."""
STATE = "hunt.json"


class Hunter:
    """Tries cases against an engine. ``folder`` has the state of the search and a reproducer of each finding."""

    def __init__(self, hunted: HuntedEngine, engine: str, folder: Path, seed: int) -> None:
        """Go on with the search that ``folder`` has, if it is one of the same ``engine``, a name and a version, and seed.

        Raises ``ValueError`` where the folder's state can't be read or belongs to another search.
        """
        self._hunted = hunted
        self._run = hunted.run
        self._folder = folder
        self.engine = engine
        self.seed = seed
        self.tried = 0
        self.findings: list[dict[str, Any]] = []
        self._near: list[tuple[float, Case]] = []
        self._load()

    def search(self, seconds: float, say: Say) -> None:
        """Try cases for about ``seconds``; what is being made smaller when they end is finished."""
        self._folder.mkdir(parents=True, exist_ok=True)
        clock = WallClock()
        reported = clock.now()
        ends = reported + round(seconds * SECOND)
        try:
            while clock.now() < ends:
                self._try(say)
                if clock.now() - reported >= 10 * SECOND:
                    reported = clock.now()
                    left = max(0, ends - reported) / SECOND
                    say(f"{self.tried} cases tried, {len(self.findings)} findings, {left:.0f} s left")
        finally:
            self._save()

    def _try(self, say: Say) -> None:
        rng = random.Random(f"{self.engine}/{self.seed}/{self.tried}")
        self.tried += 1
        drawn = (
            self._hunted.change(rng.choice(self._near)[1], rng)
            if self._near and rng.random() < CHANGED
            else self._hunted.draw(rng)
        )
        finding, pressure = self._run(drawn)
        if finding is None:
            self._near = sorted([*self._near, (pressure, drawn)], key=lambda each: -each[0])[:KEPT]
            return
        known = {self._name(each["finding"], each["case"]) for each in self.findings}
        if self._name(finding, drawn) in known:
            return
        small, finding = self._shrink(drawn, finding)
        if self._name(finding, small) in known:
            return
        script = self._folder / f"{len(self.findings) + 1:02d}-{finding['kind'].replace(' ', '-')}.py"
        script.write_text(reproducer(self._hunted, self.engine, finding, small))
        self.findings.append({"finding": finding, "case": small, "tries": self.tried, "script": script.name})
        self._save()
        say(f"found after {self.tried} cases: {finding['kind']}: {finding['detail']} ({script})")

    def _shrink(self, case: Case, finding: dict[str, Any]) -> tuple[Case, dict[str, Any]]:
        """Return a smaller case that goes wrong in the same way, and its finding."""
        tries = 0
        smallest = copy.deepcopy(case)
        progress = True
        clock = WallClock()
        ends = clock.now() + round(SHRINK_S * SECOND)
        while progress and tries < SHRINK_TRIES and clock.now() < ends:
            progress = False
            for simple in self._hunted.smaller(smallest):
                tries += 1
                met, _ = self._run(simple)
                if met is not None and _cause(met) == _cause(finding):
                    smallest, finding, progress = simple, met, True
                    break
                if tries >= SHRINK_TRIES or clock.now() >= ends:
                    break
        return smallest, finding

    def _name(self, finding: dict[str, Any], case: Case) -> tuple[str, ...]:
        """Return the key of a finding: its cause and what the case needs beside plain requests."""
        return (_cause(finding), *sorted(self._hunted.features(case)))

    # -- kept between runs ------------------------------------------------------------------------------------------

    def _load(self) -> None:
        path = self._folder / STATE
        if not path.exists():
            return
        try:
            state = json.loads(path.read_text())
            belongs = state["engine"], state["seed"]
            self.tried, self.findings = state["tried"], state["findings"]
            self._near = [(pressure, kept) for pressure, kept in state["near"]]
        except (OSError, ValueError, KeyError, TypeError) as bad:
            raise ValueError(f"{path} isn't the state of a hunt ({bad!r}): remove it, or name another folder") from None
        if belongs != (self.engine, self.seed):
            raise ValueError(
                f"{path} belongs to a hunt of {belongs[0]} with seed {belongs[1]}, this is {self.engine} with seed "
                f"{self.seed}: name another folder"
            )

    def _save(self) -> None:
        state = {
            "engine": self.engine,
            "seed": self.seed,
            "tried": self.tried,
            "findings": self.findings,
            "near": self._near,
        }
        part = self._folder / (STATE + ".part")
        part.write_text(json.dumps(state))
        part.replace(self._folder / STATE)


def _cause(finding: dict[str, Any]) -> str:
    """Return the key by which two findings are taken for one defect: the kind, for a crash its place, and for a standstill
    whether a request runs."""
    kind, detail = str(finding["kind"]), str(finding["detail"])
    if kind == "stuck" and " 0 running" in detail:
        kind = "stuck, none running"
    return kind + (detail.split(": ", maxsplit=1)[0] if kind == "crash" else "")
