"""What is broken when, and what a gateway's health has to say of it: a model that its answers are held against afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

FOREVER = float("inf")


class Outage(NamedTuple):
    """One thing that was broken for a while."""

    kind: str
    about: str
    begin: float
    end: float


class HealthAnswer(NamedTuple):
    """What /health or /ready said, and between which two moments it did."""

    path: str
    asked: float
    answered: float
    status: int
    body: dict[str, Any]


class Outages:
    """All that was broken, in order."""

    def __init__(self) -> None:
        self.all: list[Outage] = []
        self._open: dict[tuple[str, str], float] = {}

    @contextmanager
    def while_broken(self, kind: str, about: str = "") -> Iterator[None]:
        """Within this, ``kind`` is broken; nothing is known of the moments at which it begins and ends, but the order."""
        begin = time.monotonic()
        self._open[kind, about] = begin
        try:
            yield
        finally:
            del self._open[kind, about]
            self.all.append(Outage(kind, about, begin, time.monotonic()))

    def for_good(self, kind: str, about: str = "") -> None:
        """``kind`` is broken from now on."""
        if not any(one.kind == kind and one.end == FOREVER for one in self.all):
            self.all.append(Outage(kind, about, time.monotonic(), FOREVER))

    def lately(self, kinds: set[str], answer: HealthAnswer, linger: float, about: str | None = None) -> bool:
        """Whether one of ``kinds`` was broken when ``answer`` was made, or up to ``linger`` before."""
        return any(
            one.kind in kinds
            and (about is None or one.about in ("", about))
            and one.begin <= answer.answered
            and one.end + linger >= answer.asked
            for one in self.all
        )

    def all_along(self, kind: str, answer: HealthAnswer, lag: float) -> list[str]:
        """What was broken in that way from ``lag`` before the question until the answer."""
        return [
            one.about
            for one in self.all
            if one.kind == kind and one.begin + lag <= answer.asked and answer.answered <= one.end
        ]


CAUSES: dict[str, set[str]] = {
    "engine-down": {"killed", "errors", "aborts", "silence", "descriptors", "stopped"},
    "no-engine-up": {"all killed", "some killed", "descriptors", "stopped"},
    "stream-stale": {"killed", "loss", "descriptors", "stopped"},
    "stream-failed": {"killed", "descriptors", "stopped"},
    "share-away": {"redis", "descriptors", "stopped"},
    "task-failed": {"descriptors", "redis"},
    "journal": {"disk"},
    "record": {"disk"},
    "access-log": {"disk"},
}
"""What each reason may come from."""
ENGINE_OUT = {"killed", "errors", "aborts", "silence", "drained"}
"""What keeps one engine from getting requests."""


def may_be_unready(outages: Outages, answer: HealthAnswer, linger: float, engines: list[str]) -> bool:
    """Whether something for all of the gateway, or for each of its engines, was broken then."""
    return outages.lately(CAUSES["no-engine-up"], answer, linger) or all(
        outages.lately(ENGINE_OUT, answer, linger, name) for name in engines
    )


def misjudged(
    outages: Outages, answers: list[HealthAnswer], lag: float, linger: float, engines: list[str]
) -> list[str]:
    """Where health was wrong, in words: a reason without cause, a cause of at least ``lag`` seconds without its reason, ready
    where it wasn't or the other way round. A cause counts for ``linger`` seconds after its end.
    """
    found: list[str] = []
    for answer in answers:
        reasons = {(one["code"], one.get("about", "")) for one in answer.body["reasons"]}
        codes = {code for code, _ in reasons}
        ready = answer.status == 200
        if ready != answer.body["ready"]:
            found.append(f"{answer.path} answers {answer.status} and says ready: {answer.body['ready']}")
        unready = may_be_unready(outages, answer, linger, engines)
        if not ready and not unready:
            found.append(f"unready for no reason: {answer}")
        if ready and outages.all_along("all killed", answer, lag):
            found.append(f"ready without engines: {answer}")
        for code, about in reasons:
            which = about if code == "engine-down" else None
            caused = outages.lately(CAUSES.get(code, set()), answer, linger, which)
            if not (unready if code == "no-engine-up" else caused):
                found.append(f"{code} ({about}) for no reason: {answer}")
        for name in outages.all_along("killed", answer, lag):
            if ("engine-down", name) not in reasons:
                found.append(f"nothing said of {name}, which is dead: {answer}")
        for kind, code in (("redis", "share-away"), ("disk", "record"), ("disk", "journal")):
            if outages.all_along(kind, answer, lag) and code not in codes:
                found.append(f"nothing said of {kind}: {answer}")
    return found
