"""Links done the slow and obvious way, with fractions: the oracles of the tests here."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from fractions import Fraction

from kvyard.tiers.links import Direction, LinkConfig

NS = Fraction(1, 10**9)


class Job:
    """A transfer of an oracle. ``left`` is in bytes, overhead of pieces included."""

    def __init__(self, config: LinkConfig, now: int, way: Direction, nbytes: int, client: str, pieces: int) -> None:
        lane = config.lanes[way]
        self.way = way
        self.client = client
        self.start = now + lane.first_byte_ns
        self.left = Fraction(nbytes + pieces * lane.piece_overhead)
        self.ended: int | None = None
        self.cancelled = False

    def limits(self, config: LinkConfig) -> dict[Hashable, int]:
        lane = config.lanes[self.way]
        named = {
            "both": config.duplex_bandwidth,
            self.way: lane.bandwidth,
            (self.way, self.client): lane.client_bandwidth,
        }
        return {name: limit for name, limit in named.items() if limit is not None}


def shares(jobs: Iterable[Job], config: LinkConfig) -> dict[Job, Fraction]:
    """Raise all rates alike; whoever is under a limit that is full stays where it is. In bytes per second."""
    rates = dict.fromkeys(jobs, Fraction(0))
    rising = set(rates)
    limits = {name: limit for job in rates for name, limit in job.limits(config).items()}
    under = {name: [job for job in rates if name in job.limits(config)] for name in limits}
    while rising:
        room = {
            name: (limits[name] - sum((rates[job] for job in members), Fraction(0))) / len(rising.intersection(members))
            for name, members in under.items()
            if rising.intersection(members)
        }
        rise = min(room.values())
        for job in rising:
            rates[job] += rise
        for name, space in room.items():
            if space == rise:
                rising -= set(under[name])
    return rates


class NanoModel:
    """Time passes nanosecond by nanosecond; in each, those that have bytes left at its beginning share the link."""

    def __init__(self, config: LinkConfig) -> None:
        self.config = config
        self.now = 0
        self.jobs: list[Job] = []

    def submit(self, way: Direction, nbytes: int, client: str, pieces: int) -> Job:
        job = Job(self.config, self.now, way, nbytes, client, pieces)
        self.jobs.append(job)
        return job

    def cancel(self, job: Job) -> None:
        self._land()
        if job.ended is None:
            job.ended, job.cancelled = self.now, True

    def advance(self, now: int) -> None:
        while self.now < now:
            self._land()
            for job, rate in shares(self.moving(), self.config).items():
                job.left = max(Fraction(0), job.left - rate * NS)
            self.now += 1
        self._land()

    def moving(self) -> list[Job]:
        return [job for job in self.jobs if job.ended is None and job.start <= self.now]

    def _land(self) -> None:
        for job in self.moving():
            if not job.left or not job.limits(self.config):
                job.ended = self.now


def fluid_ends(jobs: list[Job], config: LinkConfig) -> list[Fraction]:
    """When each lands in a world where time is no whole number: shares change at the very instant at which one lands."""
    now = Fraction(0)
    ends: dict[Job, Fraction] = {}
    left = {job: job.left for job in jobs}
    while len(ends) < len(jobs):
        in_flight = [job for job in jobs if job not in ends]
        for job in in_flight:
            if job.start <= now and not left[job]:
                ends[job] = now
        moving = [job for job in in_flight if job not in ends and job.start <= now]
        rates = shares(moving, config)
        events = [now + left[job] / (rates[job] * NS) for job in moving]
        events += [Fraction(job.start) for job in in_flight if job.start > now]
        if events:
            then = min(events)
            for job in moving:
                left[job] -= rates[job] * NS * (then - now)
            now = then
    return [ends[job] for job in jobs]
