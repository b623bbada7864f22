"""Decision logs: what the router and every engine decided, in order, and where two logs first differ.

A log has one list per place: the router, and each rank of each engine. Within a place the order is the order of decisions;
between places there is none to compare, since they decide at the same time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

from kvyard.blocks import NO_HINTS, Hints
from kvyard.clock import SECOND
from kvyard.engine.job import Job
from kvyard.engine.watcher import Watcher
from kvyard.events.types import Cleared, EventBatch, Stored
from kvyard.events.wire import Encoder
from kvyard.router.journal import Applied, Entry, NotRouted, Routed
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.mock.config import MockConfig

ROUTER = "router"
NETWORK = "network"


class LogLine(msgspec.Struct, frozen=True, gc=False):
    """One decision."""

    at: int
    """Nanoseconds of the place's own clock."""
    what: str
    of: str
    """The request it is about; empty if it is about none."""
    facts: dict[str, object]

    def words(self, since: int) -> str:
        """Return a line for people, with the time since ``since``."""
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        about = f" {self.of}" if self.of else ""
        return f"{self.what}{about} at {(self.at - since) / SECOND:.9f} s" + (f" ({facts})" if facts else "")


Log = dict[str, list[LogLine]]
"""By place."""


class RunDifference(msgspec.Struct, frozen=True, kw_only=True):
    """First difference of two logs."""

    place: str
    number: int
    """Number of the line, from 0."""
    live: LogLine | None
    """``None`` where that log has ended."""
    offline: LogLine | None
    since: int = 0

    def __str__(self) -> str:
        sides = (("live", self.live), ("offline", self.offline))
        difference = "; ".join(
            f"{name}: {line.words(self.since) if line is not None else 'nothing more'}" for name, line in sides
        )
        parts = ""
        if self.live is not None and self.offline is not None and self.live.what == self.offline.what:
            names = [name for name in self.live.facts if self.live.facts.get(name) != self.offline.facts.get(name)]
            names += ["its time"] if self.live.at != self.offline.at else []
            parts = f"; what differs is {', '.join(names)}" if names else ""
        return f"{self.place}, decision {self.number + 1}: {difference}{parts}"


def first_difference(
    live: Mapping[str, Sequence[LogLine]], offline: Mapping[str, Sequence[LogLine]]
) -> RunDifference | None:
    """Return the first difference of the logs of two runs, the earliest of all places; ``None`` if they are equal."""
    differences: list[RunDifference] = []
    for place in sorted(set(live) | set(offline)):
        ours, theirs = live.get(place, ()), offline.get(place, ())
        since = min((lines[0].at for lines in (ours, theirs) if lines), default=0)
        for number in range(max(len(ours), len(theirs))):
            line = ours[number] if number < len(ours) else None
            other = theirs[number] if number < len(theirs) else None
            if line != other:
                differences.append(RunDifference(place=place, number=number, live=line, offline=other, since=since))
                break
    # A wrong choice of the router shows in engines too; it is the cause and they are the effect.
    return min(differences, key=lambda difference: (difference.place != ROUTER, _time(difference)), default=None)


def _time(difference: RunDifference) -> int:
    return min(line.at for line in (difference.live, difference.offline) if line is not None)


def tally(log: Mapping[str, Sequence[LogLine]]) -> Counter[str]:
    """Count the decisions of each kind."""
    return Counter(line.what for lines in log.values() for line in lines)


# -- what is written down -----------------------------------------------------------------------------------------------------


def router_lines(entries: Iterable[Entry]) -> list[LogLine]:
    """Return a router's journal as lines: what it decided, and between decisions which batches it had applied."""
    lines: list[LogLine] = []
    for entry in entries:
        if isinstance(entry, Routed):
            decision = msgspec.structs.asdict(entry.decision)
            for name in ("id", "candidates"):
                del decision[name]
            facts = {"worker": str(decision.pop("worker")), **decision, "tail": entry.tail}
            if entry.router:
                facts["router"] = entry.router
            facts["best_worker"] = str(entry.decision.best_worker)
            lines.append(LogLine(entry.at, "routed", entry.id, facts))
        elif isinstance(entry, NotRouted):
            lines.append(LogLine(entry.at, "refused", entry.id, {"why": entry.why}))
        elif isinstance(entry, Applied):
            facts = {"stream": entry.stream, "epoch": entry.epoch, "sequence": entry.seq, "events": entry.events}
            lines.append(LogLine(entry.at, "applied", "", facts | {"origin": entry.origin, "state": entry.state}))
    return lines


def whole_log(
    entries: Iterable[Entry], logs: "Mapping[str, Sequence[EngineLog]]", network: list[LogLine] | None = None
) -> Log:
    """Return the decisions of the router, of every rank of every worker, and the network between them; ``logs`` are by
    worker."""
    lines = {f"{name}@{rank}": log.lines for name, ranks in logs.items() for rank, log in enumerate(ranks)}
    if network:
        lines[NETWORK] = network
    return {**lines, ROUTER: router_lines(entries)}


class EngineLog(Watcher):
    """Writes down what one rank decides: admissions with their hits, loads, preemptions, ends, and every batch of events,
    which tells of evictions and offloads.
    """

    def __init__(self) -> None:
        self.lines: list[LogLine] = []
        self.first: dict[str, int] = {}
        """Time of each request's first token."""
        self._begun: set[str] = set()
        self.last: dict[str, int] = {}
        """Time of each finished request's last token."""
        self.answers: dict[str, list[int]] = {}
        """Answers, by the jobs' ids."""
        self.batches: dict[int, tuple[bytes, EventBatch]] | None = None
        """Batches, as they go over the wire and as they are, by sequence, if they are wanted."""
        self._encoder = Encoder()

    def admitted(self, job: Job, now: int, cached: int, external: int) -> None:
        facts: dict[str, object] = {"cached": cached, "loaded": external, "preemptions": job.preemptions}
        self.lines.append(LogLine(now, "admitted", request_of(job), facts))

    def produced(self, job: Job, count: int, end: int) -> None:
        name = request_of(job)
        if name not in self._begun:
            self._begun.add(name)
            if not job.handed_over:  # of those the client sees no token
                self.first[name] = end
            self.lines.append(LogLine(end, "first token", name, {}))

    def preempted(self, job: Job, now: int) -> None:
        self.lines.append(LogLine(now, "preempted", request_of(job), {}))

    def loading(self, job: Job, now: int, tokens: int) -> None:
        self.lines.append(LogLine(now, "loading", request_of(job), {"tokens": tokens}))

    def ended(self, job: Job, now: int, reason: str) -> None:
        name = request_of(job)
        if not job.handed_over:
            self.last[name] = now
        tokens = job.chain.tokens[job.num_prompt_tokens :]  # type: ignore[union-attr]
        self.answers[job.id] = list(tokens)
        facts: dict[str, object] = {"state": job.state.name.lower(), "output": job.output, "reason": reason}
        self.lines.append(LogLine(now, "ended", name, facts))

    def announced(self, batch: EventBatch, now: int) -> None:
        payload = self._encoder.encode(batch)
        if self.batches is not None:
            self.batches[batch.seq] = (payload, batch)
        counts: Counter[str] = Counter()
        for event in batch.events:
            if isinstance(event, Cleared):
                counts["cleared"] += 1
            else:
                action = "stored" if isinstance(event, Stored) else "removed"
                counts[f"{action} {event.tier.name}"] += len(event.hashes)
        facts: dict[str, object] = {"sequence": batch.seq, **dict(sorted(counts.items()))}
        self.lines.append(LogLine(now, "announced", "", facts | {"digest": xxhash.xxh3_64_hexdigest(payload)}))


def request_of(job: Job) -> str:
    """Return the client's name for a job's request, and the job's own if there is none."""
    own, _, name = job.id.partition(" ")
    return name or own


class EngineAction(msgspec.Struct, frozen=True, gc=False):
    """Something that was asked of an engine, with the stamp it got on receipt."""

    stamp: int
    what: str
    """One of the mock's ``ACTIONS``."""
    job: str
    request: str
    rank: int
    max_tokens: int
    priority: int
    hints: Hints = NO_HINTS
    handed_over: bool = False
    """True if its prompt is for another worker."""
    source: int = -1
    """The number of the worker that its prompt comes from; -1 if it comes from none."""

    @classmethod
    def of(cls, stamp: int, what: str, job: Job, rank: int, source: int = -1) -> "EngineAction":
        """Return the action of a mock's journal."""
        return cls(
            stamp=stamp,
            what=what,
            job=job.id,
            request=request_of(job),
            rank=rank,
            max_tokens=job.max_tokens,
            priority=job.priority,
            hints=job.hints,
            handed_over=job.handed_over,
            source=source,
        )


class TransferAction(msgspec.Struct, frozen=True, gc=False):
    """Prompt that was sent from one worker to another, or given up in flight; with the stamp that the network gave it."""

    stamp: int
    what: str
    """``sent`` or ``stopped``."""
    job: str
    source: int
    target: int


def transfer_facts(what: str, source: int, target: int, amount: int) -> dict[str, object]:
    """Return the facts of a transfer for a log."""
    facts: dict[str, object] = {"source": source, "target": target}
    return facts | {"sent": {"bytes": amount}, "landed": {"queued": amount}}.get(what, {})


def network_lines(transfers: Iterable[tuple[int, str, str, dict[str, object]]]) -> list[LogLine]:
    """Return the log of a network, (time, what, job, facts), in an order that doesn't depend on when it was read."""
    lines = [LogLine(time, what, job.partition(" ")[2] or job, facts) for time, what, job, facts in transfers]
    return sorted(lines, key=lambda line: (line.at, line.what, line.of))


class RecordedPrompt(msgspec.Struct, frozen=True, gc=False):
    """Content of a request, and its tenant."""

    tokens: Sequence[int]
    salt: str | None = None
    session: str | None = None


class LiveRecording(msgspec.Struct, kw_only=True):
    """One live run."""

    fleet: MockConfig
    gateway: GatewayConfig
    entries: list[Entry]
    """The router's journal."""
    actions: list[list[EngineAction]]
    """By worker, in the order in which they were carried out."""
    transfers: list[TransferAction] = []
    """Transfers between workers."""
    answers: dict[str, list[int]]
    """Tokens of each job, by its id: a mock's words are an input too."""
    log: Log
    first: dict[str, int]
    """Time of each request's first token, by the engine's clock."""
    last: dict[str, int]
    """Time of each request's last token."""
