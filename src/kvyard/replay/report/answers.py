"""A report in plain words: the parts of a request's time, the limit of the fleet, and what to try next.

Nothing that the figures don't show. Each resource is asked the same question: how much sooner would answers (or first
tokens) come if it were relieved: prefill or decode twice as fast, links twice as wide, a cache that loses nothing, a router
that finds every cached prefix. Waiting is assigned to what was short while requests waited, by the samples of the run. Work
that is saved shortens waits by more than its share, so a share f of work counts 1 - (1 - f)² of the wait for it. These are
estimates to rank by, and only their order is reported.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from kvyard.engine.timing.error_range import KNEE
from kvyard.replay.report.metrics import SERVED, offered_per_s
from kvyard.replay.report.report import Report
from kvyard.replay.report.room import more_room
from kvyard.replay.report.words import latency

Resource = Literal["prefill", "decode", "cache", "link", "router"]

HALF = 0.5
"""Share of the time that doubling a speed saves."""
SPARE = 0.1
"""The share of free device blocks below which a request that waits is taken to wait for blocks, or what a long prompt (p90)
needs if that is more: long ones wait longest, and others behind them."""
BLOCK = 64
"""Tokens of a block where a configuration leaves it open."""
BEFORE = ("prefill_queue", "prefill")
"""Stages of a request that is handed over which come before that."""
LITTLE = 0.02
"""A saving below this share of the time isn't worth a sentence."""
WORTH = 0.05
"""A lever that needs no cards is named from this share of the first token's time on."""
SEEN = 0.0005
"""Parts of the time below this share aren't listed."""
QUEUED = 0.2
"""From this share of the first token's time on, waiting is what more workers would shorten."""
NAMES: dict[Resource, str] = {
    "prefill": "Prefill limits",
    "decode": "Decode limits",
    "cache": "The cache limits",
    "link": "Links limit",
    "router": "Routing limits",
}
LEVERS: tuple[Resource, ...] = ("router", "cache", "link")
"""Remedies without more cards, cheapest first."""
IDLE = 0.5
"""A fleet whose busiest worker is busy for less of the time has room."""


class TimeParts(NamedTuple):
    """Parts of the mean request's milliseconds; they add up to its end-to-end latency."""

    waiting: float
    loading: float
    prefill: float
    decode: float
    handover: float = 0.0
    """From a prefill worker to a decode worker, and into a pass there."""

    @property
    def first(self) -> float:
        """Until the first token."""
        return self.waiting + self.loading + self.prefill + self.handover

    @property
    def whole(self) -> float:
        return self.first + self.decode


class Savings(NamedTuple):
    """Milliseconds that relieving each resource would save a mean request, as an estimate."""

    first: dict[Resource, float]
    """Until the first token."""
    whole: dict[Resource, float]
    """Until the last."""

    @property
    def of_first(self) -> Resource:
        return max(self.first, key=lambda resource: self.first[resource])

    @property
    def of_whole(self) -> Resource:
        return max(self.whole, key=lambda resource: self.whole[resource])


def time_parts(report: Report) -> TimeParts | None:
    """Return the parts of the time; ``None`` if nothing finished, or a client can't see it."""
    e2e, ttft, queue = (report.latency.get(key) for key in ("e2e", "ttft", "queue"))
    if e2e is None or ttft is None or queue is None or not e2e.count:
        return None
    loading = min(queue.mean, report.loading.mean * report.loading.count / e2e.count)
    waiting = min(queue.mean, ttft.mean) - loading
    computing = max(0.0, ttft.mean - queue.mean)
    handed = report.handovers
    handover = 0.0
    if handed is not None and handed.handed_over.whole:
        stages = sum(spread.mean * spread.count for name, spread in handed.stages.items() if name not in BEFORE)
        handover = min(computing, stages / e2e.count)
    decode = e2e.mean - waiting - loading - computing
    return TimeParts(waiting, loading, computing - handover, decode, handover)


def limits(report: Report, parts: TimeParts) -> Savings:
    """Return the savings of relieving each resource."""
    waits = _waits(report)
    computed = 1 - report.reuse["all"].value
    evicted, elsewhere = (share / computed if computed else 0.0 for share in _avoidable(report))
    wait = {kind: parts.waiting * share for kind, share in waits.items()}

    def less(share: float) -> float:
        """Return the savings of a share of prefill work that needn't be done."""
        return share * parts.prefill + (1 - (1 - share) ** 2) * wait["prefill"]

    first: dict[Resource, float] = {
        "prefill": less(HALF),
        # Who decodes holds blocks and a seat: quicker answers free both.
        "decode": (1 - HALF**2) * (wait["decode"] + wait["cache"]),
        "cache": less(evicted) + wait["cache"],
        "link": HALF * parts.loading,
        "router": less(elsewhere) + wait["router"],
    }
    return Savings(first, first | {"decode": first["decode"] + HALF * parts.decode})


def _waits(report: Report) -> dict[str, float]:
    """Return the causes of waiting, as shares: by samples of workers with a queue, each by its length."""
    shares = {"prefill": 0.0, "decode": 0.0, "cache": 0.0, "router": 0.0}
    values = report.timeline.values
    waiting, running, held = (values.get(key, []) for key in ("waiting", "running", "device"))
    engine = _engine(report)
    seats, blocks = engine.get("max_num_seqs"), engine.get("num_gpu_blocks", 0)
    size = _block_size(engine)
    need = report.lengths["input"].p90 / (size * blocks) if blocks and "input" in report.lengths else 0.0
    full = 1 - max(SPARE, need)
    roles = [worker.role for worker in report.workers]
    for index in range(len(report.timeline.times_s)):
        queues = [row[index] for row in waiting]
        idle = {role for role, queue, row in zip(roles, queues, running, strict=False) if not queue and not row[index]}
        for worker, queue in enumerate(queues):
            if not queue:
                continue
            if roles[worker] in idle:
                shares["router"] += queue
            elif held and held[worker][index] >= full:
                shares["cache"] += queue
            elif seats is not None and running[worker][index] >= seats:
                shares["decode"] += queue
            else:
                shares["prefill"] += queue
    total = sum(shares.values())
    if not total:
        return shares | {"prefill": 1.0}  # waits too short to be seen are for the pass in flight
    return {kind: amount / total for kind, amount in shares.items()}


def answers(report: Report) -> list[str]:
    """Return the report in a few sentences; empty if there are none."""
    parts = time_parts(report)
    if parts is None:
        return _live(report)
    if not report.reuse["all"].whole or report.pools:  # what is short differs from pool to pool
        return []
    savings = limits(report, parts)
    whole, first = savings.of_whole, savings.of_first
    why = _why(whole, report, parts)
    sentences = [
        f"{NAMES[whole]} this fleet: {_where(parts)}{'; ' if why else ''}{why}. Try {_next(whole, report, parts)}."
    ]
    if first != whole and savings.first[first] >= LITTLE * parts.first:
        start = f"{NAMES[first]} its first token, which comes after {latency(parts.first)}"
        sentences.append(_sentence(start, first, report, parts))
    offered, served = offered_per_s(report), report.throughput["requests_per_s"]
    if offered is not None and served <= SERVED * offered and parts.waiting >= KNEE * parts.first:
        sentences.insert(0, f"Overloaded: {served:,.2f} of {offered:,.2f} requests a second were served.")
    lever = max(LEVERS, key=lambda name: savings.first[name])
    if lever not in (whole, first) and savings.first[lever] >= WORTH * parts.first:
        sentences.append(
            f"Without more cards: {_why(lever, report, parts)}; try {_next(lever, report, parts, cards=False)}."
        )
    busy = report.balance.get("busy_max")
    if busy is not None and busy < IDLE and parts.waiting < LITTLE * parts.whole:
        sentences.append(f"The fleet has room: its busiest worker is busy for {busy:.0%} of the time.")
    return sentences


def _sentence(start: str, resource: Resource, report: Report, parts: TimeParts) -> str:
    why = _why(resource, report, parts)
    return f"{start}{'; ' if why else ''}{why}. Try {_next(resource, report, parts)}."


def _where(parts: TimeParts) -> str:
    pieces = {
        "waiting": parts.waiting,
        "loading": parts.loading,
        "computing its prompt": parts.prefill,
        "being handed over": parts.handover,
        "decoding": parts.decode,
    }
    parts_listed = [
        f"{latency(ms)} {words} ({ms / parts.whole:.0%})" for words, ms in pieces.items() if ms > SEEN * parts.whole
    ]
    if not parts_listed:
        return "a request takes no time at all"
    listed = parts_listed[0] if len(parts_listed) == 1 else f"{', '.join(parts_listed[:-1])} and {parts_listed[-1]}"
    return f"a request takes {latency(parts.whole)} on average, {listed}"


def _live(report: Report) -> list[str]:
    """Return sentences about a run that was observed from outside."""
    e2e, ttft = report.latency.get("e2e"), report.latency.get("ttft")
    if report.live is None or e2e is None or ttft is None or not e2e.count:
        return []
    share = ttft.mean / e2e.mean if e2e.mean else 0.0
    return [
        f"A request takes {latency(e2e.mean)} on average, {latency(ttft.mean)} of it ({share:.0%}) until its first "
        "token. What it waits for can't be seen from outside: replay the same trace without --live for that."
    ]


def _why(resource: Resource, report: Report, parts: TimeParts) -> str:
    """Return the figures that say so, where the parts of the time don't say it already."""
    waits = _waits(report)
    if resource == "cache":
        if _lacks_room(report, parts):
            return "requests wait while running ones hold the blocks"
        return _evicted_text(report)
    if resource == "router":
        _, elsewhere = _avoidable(report)
        if waits["router"] * parts.waiting > elsewhere * parts.prefill:
            return "requests wait at some workers while others are idle"
        return f"{elsewhere:.1%} of prompt tokens were computed though another worker had them"
    if resource == "link":
        return f"{report.loading.count:,} requests waited for loads from lower tiers"
    return ""


def _lacks_room(report: Report, parts: TimeParts) -> bool:
    """Return true if blocks are short for running requests, more than for reuse."""
    return _waits(report)["cache"] * parts.waiting > _avoidable(report)[0] * parts.first


def _avoidable(report: Report) -> tuple[float, float]:
    """Return prompt tokens that were computed though they had been cached, as shares of all: evicted by then, and on another
    worker.

    What another worker once computed may be gone there too. A router that looks at caches knows what was there when it
    chose; of one that doesn't, all of it counts as the router's.
    """
    evicted, elsewhere = (
        report.missed_tokens[key].part if key in report.missed_tokens else 0 for key in ("evicted", "other_worker")
    )
    router, engine = report.router, _engine(report)
    if router is not None and router.regret.whole:
        there = min(elsewhere, router.regret.part * _block_size(engine))
        evicted, elsewhere = evicted + elsewhere - there, there
    whole = report.reuse["all"].whole
    return evicted / whole, elsewhere / whole


def _evicted_text(report: Report) -> str:
    """Return the share of prompt tokens that were evicted before, with its two parts if it has two."""
    evicted, _ = _avoidable(report)
    here = report.missed_tokens["evicted"].value if "evicted" in report.missed_tokens else 0.0
    text = f"{evicted:.1%} of prompt tokens were computed again because they had been evicted"
    there = f"{evicted - here:.1%}"
    return text if float(there[:-1]) == 0 else f"{text} ({here:.1%} on their worker, {there} on another that had them)"


def _next(resource: Resource, report: Report, parts: TimeParts, *, cards: bool = True) -> str:
    """Return the next thing to try; unless ``cards``, nothing that needs more of them."""
    engine = _engine(report)
    workers, blocks = len(report.workers), engine.get("num_gpu_blocks", 0)
    more = f"--workers {workers * 2}"
    if report.handovers is not None and resource in ("prefill", "decode") and resource in report.handovers.roles:
        more = f"--{resource} {report.handovers.roles[resource].workers * 2}"
    elif report.scaling is not None:
        more = "a larger max of --autoscale"
    if resource == "prefill":
        policy = report.router.policy if report.router is not None else "least-time"
        free = "" if workers < 2 or policy == "least-time" else "; --router least-time costs nothing to try"
        if parts.waiting >= QUEUED * parts.first:
            return f"more workers ({more}), or a card that computes faster{free}"
        return f"a card that computes faster: little of it is waiting, so more workers change little{free}"
    if resource == "decode":
        if report.balance.get("busy_max", 1.0) < IDLE:
            return "a card with more memory bandwidth: workers have room, so more of them change little"
        return f"a card with more memory bandwidth, or more workers for smaller batches ({more})"
    if resource == "cache":
        room = more_room(engine) or f"more blocks (--num-gpu-blocks {blocks * 2})"
        if "host" not in report.tiers and not _lacks_room(report, parts):
            host = f"a host tier (--host-blocks {blocks * 2})"
            return f"{host}, {room}" if " or " in room else f"{host} or {room}"
        return room
    if resource == "link":
        return "a faster link (--host-bandwidth); if loads take longer than computing would, no lower tier"
    if report.router is not None and report.router.policy == "least-time":
        if _waits(report)["router"] * parts.waiting > _avoidable(report)[1] * parts.prefill:
            smaller = "smaller prompts per pass (--max-num-batched-tokens)"
            return f"{smaller}, or more workers ({more})" if cards else smaller
        return "a tier that all workers share (--host-blocks, --host-scope shared)"
    return "--router least-time"


def _block_size(engine: Mapping[str, Any]) -> int:
    """Return the tokens of a block; of a model with groups those of the largest."""
    sizes = [group["block_size"] for group in engine.get("groups") or () if group.get("block_size")]
    return int(engine.get("block_size") or max(sizes, default=BLOCK))


def _engine(report: Report) -> Mapping[str, Any]:
    """Return the settings of the first kind of workers."""
    kinds = report.config.get("workers")
    if not isinstance(kinds, list) or not kinds:
        return {}
    engine = kinds[0].get("engine", {})
    return engine if isinstance(engine, dict) else {}
