"""Findings: one thing worth saying about a stream each, and the report that they add up to. What to say is in ``norms``."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from kvyard.events.facts import Facts, Tally


class Severity(StrEnum):
    """How bad it is."""

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
    count: int
    what: str
    loss: str = ""
    """What a consumer that doesn't cope with it loses."""
    examples: list[str] = msgspec.field(default_factory=list)


CAUTIONS = {
    "vllm": [
        "A clear speaks of the GPU pool only, though it doesn't say so: copies in host memory may still be there.",
        "With adapters the hash covers the adapter's path, which isn't sent: such hashes can't be computed elsewhere.",
    ],
    "sglang": [
        "Adapters and extra keys are not part of its hashes: two adapters with one prompt share them.",
        "Groups aren't named: what a sliding window no longer has is announced as if all of it were there.",
    ],
    "trtllm": [
        "Its V1 manager announces a reclaimed block, not those below it: hashes of these stay in any mirror for ever.",
        "Adapters aren't named in its dicts, so requests with adapters can't be matched.",
    ],
}
"""What no check of the stream can see."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a stream."""

    engine: str
    guessed: bool
    findings: list[Finding]
    cautions: list[str]
    facts: Facts

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.severity == Severity.PROBLEM for finding in self.findings)


def tally_findings(
    code: str,
    tally: Tally,
    what: str,
    loss: str,
    *,
    normal_below: bool,
    below: str,
    normal_partial: bool,
    normal_finer: bool = False,
    normal_all: str = "",
    otherwise: Severity = Severity.PROBLEM,
) -> Iterator[Finding]:
    """A tally's findings: what is unexplained, and what is normal and why."""
    wrong = tally.unexplained + (0 if normal_below else tally.below) + (0 if normal_partial else tally.partial)
    wrong += 0 if normal_finer else tally.finer
    if wrong:
        severity = Severity.NORMAL if normal_all else otherwise
        why = f": {normal_all}" if normal_all else ""
        yield Finding(
            code=code, severity=severity, count=wrong, what=f"{wrong} {what}{why}.", loss=loss, examples=tally.examples
        )
    if normal_below and tally.below:
        yield Finding(
            code=code,
            severity=Severity.NORMAL,
            count=tally.below,
            what=f"{tally.below} {what}, below the device: {below}.",
            loss=loss,
        )
    if normal_partial and tally.partial:
        reason = "their groups don't keep every block of a prefix"
        yield Finding(
            code=code,
            severity=Severity.NORMAL,
            count=tally.partial,
            what=f"{tally.partial} {what}: {reason}.",
            loss=loss,
        )
    if normal_finer and tally.finer:
        reason = "they are for the beginning of a block, at a grain that isn't announced"
        yield Finding(
            code=code, severity=Severity.NORMAL, count=tally.finer, what=f"{tally.finer} {what}: {reason}.", loss=loss
        )
    if tally.excused:
        yield Finding(
            code=code,
            severity=Severity.NOTE,
            count=tally.excused,
            what=f"{tally.excused} {what}, after something was missed: to be expected.",
        )


def counted(count: int, one: str, many: str = "") -> str:
    """``count`` and its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"
