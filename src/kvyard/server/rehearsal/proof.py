"""The proof that live equals offline (I10): the same stamps and sequences in virtual time, and the two logs compared.

Decisions must be equal: who got a request and at what cost, when it was admitted and with how much of its prompt, what was
evicted, offloaded, loaded and announced, in order, each at its nanosecond. Latencies can't be equal: a client sees a token
only after the process had its turn and the wire its time; they must agree within a tolerance, and never be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvyard.clock import MS
from kvyard.errors import KvyardError
from kvyard.replay.report.numbers import Spread, spread
from kvyard.server.rehearsal.log import RunDifference, first_difference, tally
from kvyard.server.rehearsal.offline import Offline, Prompts
from kvyard.server.rehearsal.recording import LiveRecording


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """How much later than in virtual time a client may see a token, in real milliseconds."""

    p50_ms: float = 100.0
    p99_ms: float = 1000.0


class Observed(msgspec.Struct, frozen=True):
    """When a client saw a request's first and last token, on the engines' clock."""

    first: int
    last: int


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What came out."""

    difference: RunDifference | None
    """Where the decisions first differ; ``None`` where they are equal."""
    apart: str
    """Why virtual time couldn't follow to the end; empty where it could."""
    decisions: dict[str, int]
    """How many were compared, by kind."""
    requests: int
    first_token: Spread
    """How much later than in virtual time clients saw first tokens, in real milliseconds."""
    last_token: Spread
    tolerance: Tolerance

    @property
    def equal(self) -> bool:
        """Whether live and offline took the same decisions."""
        return self.difference is None and not self.apart

    @property
    def close(self) -> bool:
        """Whether latencies agree: never shorter than in virtual time, and longer only within the tolerance."""
        return all(
            one.min >= 0 and one.p50 <= self.tolerance.p50_ms and one.p99 <= self.tolerance.p99_ms
            for one in (self.first_token, self.last_token)
        )

    def __str__(self) -> str:
        if not self.equal:
            why = str(self.difference) if self.difference is not None else self.apart
            return f"Live is not offline: {why}."
        counts = ", ".join(f"{count:,} {what}" for what, count in sorted(self.decisions.items()))
        total = sum(self.decisions.values())
        first, last, most = self.first_token, self.last_token, self.tolerance
        return (
            f"Live = offline: all {total:,} decisions of {self.requests:,} requests are equal ({counts}).\n"
            f"Clients saw first tokens {first.p50:.1f} ms later than virtual time (median; p99 {first.p99:.1f} ms), last ones "
            f"{last.p50:.1f} ms (p99 {last.p99:.1f} ms), in real time; {'within' if self.close else 'NOT within'} the "
            f"tolerance of {most.p50_ms:g} ms and {most.p99_ms:g} ms."
        )


def prove(
    recording: LiveRecording,
    prompts: Prompts,
    observed: Mapping[str, Observed] | None = None,
    tolerance: Tolerance | None = None,
) -> Proof:
    """Repeat ``recording`` in virtual time and compare. ``observed`` is what clients saw, of requests that finished.

    Raises ``KvyardError`` for a recording that can't be repeated.
    """
    offline = Offline(recording, prompts)
    offline.run()
    log = offline.log
    difference = first_difference(recording.log, log)
    first, last = offline.first, offline.last
    speed = recording.fleet.speed
    seen = {} if difference is not None or offline.apart else dict(observed or {})
    missing = [name for name in seen if name not in first or name not in last]
    if missing:
        raise KvyardError(f"clients saw answers to requests that no engine had, {missing[0]} first: was it this fleet?")
    return Proof(
        difference=difference,
        apart=offline.apart,
        decisions=dict(tally(recording.log)),
        requests=len(recording.first),
        first_token=spread([(one.first - first[name]) / speed for name, one in seen.items()], MS),
        last_token=spread([(one.last - last[name]) / speed for name, one in seen.items()], MS),
        tolerance=tolerance or Tolerance(),
    )
