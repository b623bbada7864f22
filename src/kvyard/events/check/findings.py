"""Findings: one thing worth saying each, about a stream, an engine or a prompt; and the report on a stream.

What they say is in files of texts, one table per finding.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from kvyard.events.check.checker import Facts


class Severity(StrEnum):
    PROBLEM = "problem"
    """A consumer loses something, or has to do something it may not do."""
    NORMAL = "normal"
    """This engine always does so; a consumer has to expect it."""
    NOTE = "note"
    """Good to know."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing worth saying."""

    code: str
    severity: Severity
    seen: str
    """What was seen."""
    means: str = ""
    """What follows from it: what a consumer that doesn't cope with it loses, or why a prompt can't match."""
    fix: str = ""
    where: str = ""
    """The endpoint, URL or file, where several are looked at."""
    count: int = 1
    examples: list[str] = []

    @property
    def broken(self) -> bool:
        return self.severity == Severity.PROBLEM


class Texts:
    """The texts of findings, from a TOML file: a table per finding with ``seen``, ``means`` and ``fix``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _texts(self) -> dict[str, dict[str, str]]:
        return tomllib.loads(self._path.read_text(encoding="utf-8"))

    def finding(
        self,
        name: str,
        severity: Severity,
        *,
        where: str = "",
        count: int = 1,
        examples: Sequence[str] = (),
        **values: Any,
    ) -> Finding:
        """The finding of that table; its code is what comes before a dot. ``values`` and ``count`` are put into its texts."""
        said = {part: text.format(count=count, **values) for part, text in self._texts[name].items()}
        code = name.partition(".")[0]
        return Finding(code=code, severity=severity, where=where, count=count, examples=[*examples], **said)


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a stream."""

    engine: str
    """A name in ``WIRES``, or ``unknown``."""
    title: str
    """The engine's name, for people."""
    guessed: bool
    findings: list[Finding]
    cautions: list[str]
    """What no check of the stream can see."""
    facts: Facts

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.broken for finding in self.findings)
