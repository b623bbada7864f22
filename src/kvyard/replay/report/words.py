"""Names and numbers as people read them, the same in the table, the page and the comparison."""

from collections.abc import Mapping, Sequence
from math import floor, log10

from kvyard.clock import SECOND
from kvyard.engine.timing.error_range import LEVEL
from kvyard.events.tier import LOWER_TIERS
from kvyard.integers import ceil_div
from kvyard.replay.report.fleet_report import (
    CacheTime,
    FlowReport,
    HandoverReport,
    PullReport,
    ScalingCost,
    ScalingReport,
    TenantReport,
)
from kvyard.replay.report.ranges import RANGED, STATISTICS
from kvyard.replay.report.report import (
    MOVES,
    REJECTED,
    Goodput,
    Report,
    Slo,
    StatedRange,
    TimingReport,
    too_many_rejected,
)
from kvyard.replay.report.room import what_ifs
from kvyard.tiers.load_policy import REASONS as WHY_LEFT

SOURCES = {
    "device": "Found on the device",
    **{tier.label: f"Loaded from {tier.place}" for tier in LOWER_TIERS},
    "cached": "Cached, as the endpoint says",
}
"""Sources of prompt tokens that were not computed."""
REASONS = {
    "never_seen": "Never seen before",
    "other_worker": "Only on another worker",
    "evicted": "Evicted before",
    "left": "Left in a lower tier",
    "partial_block": "Less than a block",
    "none": "Always computed again",
    "unknown": "Reason not known",
}
"""Why prompt tokens had to be computed."""
SHORT = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "queue": "Queue",
    "input": "Input",
    "output": "Output",
}
MET, NOT_MET = "SLO met", "SLO NOT met"
LATE_MS = 100.0
"""Delay of the latest 1 % of sends from which on a reader is warned."""
COLUMNS = ("mean", "min", "max", "p50", "p90", "p95", "p99", "std")


def measured(value: float) -> str:
    """Return a measurement: digits by its size, also where it happens to be whole."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 10_000 else f"{value:,.1f}" if size >= 100 else f"{value:,.2f}"


def short(value: float) -> str:
    """Format a value if there is little room."""
    size = abs(value)
    return f"{value / 1000:,.0f}k" if size >= 100_000 else f"{value:,.0f}" if size >= 1000 else measured(value)


def whole(value: float) -> str:
    """Round to the next whole number."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """Return a share."""
    return f"{value:.2%}"


def amount(nbytes: float) -> str:
    """Return bytes, in the unit that fits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} PB"


def span(seconds: float) -> str:
    """Format a duration."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def latency(ms: float) -> str:
    """Return a latency in the unit that fits, for a sentence."""
    if ms < 1000:
        return f"{measured(ms)} ms"
    if ms >= 120_000:
        return span(ms / 1000)
    digits = f"{ms / 1000:.3f}" if ms < 10_000 else f"{ms / 1000:.2f}"
    return f"{digits.rstrip('0').rstrip('.')} s"


def limit_time(ms: float) -> str:
    """Return a limit that somebody set, in the unit that fits: without digits that nobody wrote."""
    return f"{ms:g} ms" if ms < 1000 else latency(ms)


def limits(slo: Slo) -> str:
    """Format the limits of a good request."""
    given = ((name, slo.limit(name)) for name in ("ttft", "itl", "e2e"))
    return ", ".join(f"{name.upper()} ≤ {limit_time(ms)}" for name, ms in given if ms is not None) or "no limit"


def verdicts(goodput: Goodput) -> list[tuple[str, str, str]]:
    """Return the name and limit, value and verdict of each percentile of an SLO."""
    rows = []
    for name, percentile_limit in (goodput.percentiles or {}).items():
        kind, _, percentile = name.partition("_")
        words = f"{kind.upper()} {percentile} ≤ {limit_time(percentile_limit.limit_ms)}"
        rows.append((words, latency(percentile_limit.value_ms), "met" if percentile_limit.met else "NOT met"))
    if goodput.rejected:
        met = "NOT met" if too_many_rejected(goodput.rejected) else "met"
        rows.append((f"Rejected ≤ {REJECTED:.0%}", percent(goodput.rejected), met))
    return rows


def name_of(report: Report) -> str:
    """Return the name of a run: its label, or its trace."""
    return report.label or str(report.trace.get("name") or "") or "replay"


def summary(report: Report) -> str:
    """Return a run in one line: what was asked of what."""
    requests = report.requests
    parts = [f"{requests['all']:,} requests"]
    trace = report.trace.get("name")
    if trace:
        parts[0] += f" of {trace}"
    if report.live is not None:
        parts.append(f"live at {report.live.endpoint}")
    if report.workers:
        most = "" if report.scaling is None else "at most "
        parts.append(f"{most}{len(report.workers)} worker{'s' if len(report.workers) != 1 else ''}")
    if report.router is not None:
        parts.append(f"routed by {report.router.policy}")
    if report.live is None:
        parts.append(f"{span(report.duration_s)} simulated")
    else:
        speed = report.live.speed
        parts.append(span(report.duration_s) + (f" at {speed:g} times the speed" if speed != 1 else ""))
    others = [f"{count:,} {status}" for status, count in requests.items() if status not in ("all", "finished")]
    return " · ".join(parts + others)


UNKNOWN = "no published run is comparable, so how far off they are isn't known"


def timing_text(timing: TimingReport) -> str:
    """Describe the source of times, and their own known error."""
    if timing.held_out:
        each = ", ".join(f"{SHORT[name]} {error * 100:.2g}%" for name, error in timing.held_out.items())
        return f"{timing.source}: {each} off in time that was held out of the fit"
    return (
        timing.source if timing.error is None else f"{timing.source}: single passes about {timing.error * 100:.2g}% off"
    )


def times(report: Report) -> str:
    """Describe the sources of a run's times, and their certainty, in a sentence or two; empty if a clock was read."""
    if not report.timing:
        return ""
    if len(report.timing) == 1:
        words = timing_text(report.timing[0])
    else:
        words = "; ".join(f"{timing_text(timing)} (of {timing.workers} workers)" for timing in report.timing)
    return " ".join(filter(None, (f"Times: {words}.", how_sure(report))))


def how_sure(report: Report) -> str:
    """Return the range of the mean TTFT, or that there is no evidence, as a sentence; empty for timing that stands
    for no card.
    """
    stated, first = report.ranges.get("ttft_mean"), report.latency.get("ttft")
    if stated is not None and first is not None:
        return f"TTFT mean {measured(first.mean)} ms; range {ranged(stated)} ms ({basis_text(stated)})."
    comparable = any(timing.run_class is not None for timing in report.timing)
    return f"{UNKNOWN[0].upper()}{UNKNOWN[1:]}." if comparable and first is not None and first.count else ""


def basis_text(stated: StatedRange) -> str:
    """Describe the basis of a range."""
    if stated.basis == "published":
        sources = "1 source" if stated.sources == 1 else f"{stated.sources} sources"
        return f"{LEVEL:.0%} of comparable published runs: {stated.of}; {stated.runs} runs of {sources}"
    return "its error in held-out time" if stated.basis == "held-out" else "the mean error of single passes"


def ranged(stated: StatedRange, by: float = 1.0) -> str:
    """Return a range in three digits: more would say more than is known."""
    return f"{three(stated.low / by)}–{three(stated.high / by)}"


def three(value: float) -> str:
    """Return a number in three digits."""
    digits = max(0, 2 - floor(log10(value))) if value > 0 else 0
    return f"{float(f'{value:.3g}'):,.{digits}f}"


def range_title(report: Report) -> str:
    """Return the head of the table of ranges."""
    published = any(stated.basis == "published" for stated in report.ranges.values())
    return f"{LEVEL:.0%} of comparable runs" if published else "Give or take its error"


def range_rows(report: Report) -> list[list[str]]:
    """Return rows of a table of ranges: the latency's key, and the columns ``STATISTICS``, ``-`` without evidence."""
    keys = [key for key in RANGED if any(f"{key}_{name}" in report.ranges for name in STATISTICS)]
    return [
        [
            key,
            *(
                ranged(stated) if (stated := report.ranges.get(f"{key}_{name}")) is not None else "-"
                for name in STATISTICS
            ),
        ]
        for key in keys
    ]


def range_note(report: Report) -> str:
    """Describe the bases of a report's ranges, each class of runs once."""
    by: dict[str, list[str]] = {}
    for key in RANGED:
        for name, words in (("mean", ""), ("p99", " p90 and p99")):
            stated = report.ranges.get(f"{key}_{name}")
            if stated is not None:
                by.setdefault(basis_text(stated), []).append(f"{SHORT[key]}{words}")
    return ". ".join(f"{', '.join(names)}: {text}" for text, names in by.items()) + ("." if by else "")


def common_times(runs: Sequence[str], reports: Sequence[Report]) -> str:
    """Describe the times of compared runs in a sentence or two."""
    simulated = [(run, report) for run, report in zip(runs, reports, strict=False) if report.timing]
    if not simulated:
        return ""
    texts = {run: "; ".join(map(timing_text, report.timing)) for run, report in simulated}
    if len(set(texts.values())) == 1 and len(simulated) == len(reports):
        known = any(report.ranges for _, report in simulated)
        cancels = " An error that all runs have cancels in their changes." if known else ""
        return f"Times of all runs: {texts[simulated[0][0]]}.{cancels}"
    each = "; ".join(f"{run}, {text}" for run, text in texts.items())
    return f"Times are not of one kind ({each}): changes smaller than these errors may be theirs."


TRANSFERS = ("count", "blocks", "bytes", "waited in all", "each")


def transfer_rows(report: Report) -> list[list[str]]:
    """Return rows of a table of transfers: what moved, and the columns ``TRANSFERS``."""
    rows = []
    for name, words in MOVES.items():
        flow = report.transfers.get(name)
        if flow is not None:
            each = flow.waiting_ms / flow.transfers if flow.transfers else 0.0
            counts = (whole(flow.transfers), whole(flow.blocks), amount(flow.bytes))
            rows.append([words.capitalize(), *counts, span(flow.waiting_ms / 1000), f"{measured(each)} ms"])
    return rows


def left_loads(report: Report) -> str:
    """Describe the tokens that load policies left in lower tiers, and why."""
    why = ", ".join(f"{WHY_LEFT.get(name, name)} {tokens:,}" for name, tokens in report.left_tokens.items())
    tokens = sum(report.left_tokens.values())
    who = "1 request" if report.left_requests == 1 else f"{report.left_requests:,} requests"
    return f"{who} computed {tokens:,} tokens that lower tiers had: {why}"


def pulled(pulls: PullReport) -> str:
    """Describe pulls in a sentence."""
    tokens = pulls.tokens
    words = (
        f"{tokens.part:,} tokens ({percent(tokens.value)} of prompts) were pulled from other workers' {pulls.source}"
    )
    words += f" in {pulls.landed:,} pulls of {measured(pulls.ms)} ms on average"
    refused = sum(pulls.refused.values())
    left = [
        (refused, "computed by choice"),
        (pulls.busy, "computed because too many were in flight"),
        (pulls.no_room, "computed for want of room"),
        (pulls.gone, "found nothing there any more"),
        (pulls.failed, "lost with their source"),
    ]
    reasons = [f"{number:,} {what}" for number, what in left if number]
    return f"{words}; {', '.join(reasons)}" if reasons else words


STAGES = {
    "prefill_queue": "Waiting for a prefill worker",
    "prefill": "Computing the prompt",
    "room": "Waiting for room on a decode worker",
    "transfer": "Blocks on their way",
    "decode_queue": "Waiting for a decode pass",
    "first_step": "First decode step",
}
"""Stages of a request that is handed over, from arrival to first token."""


def stage_rows(handovers: HandoverReport) -> list[list[str]]:
    """Return rows of a table of stages: its words, and ``COLUMNS`` in milliseconds."""
    return [
        [
            words,
            *(
                measured(getattr(handovers.stages[name], column)) if handovers.stages[name].count else "-"
                for column in COLUMNS
            ),
        ]
        for name, words in STAGES.items()
    ]


def role_rows(handovers: HandoverReport) -> list[list[str]]:
    """Return rows of a table of roles and ways between workers: who, how many, busy, bytes, of bandwidth."""
    rows = []
    for role, used in handovers.roles.items():
        rows.append([f"{role.capitalize()} workers", whole(used.workers), percent(used.busy.value), "", ""])
    for way, use in handovers.network.items():
        share = percent(use.bandwidth.value) if use.bandwidth is not None else "no limit"
        rows.append([way.capitalize(), whole(use.links), percent(use.busy.value), amount(use.bytes), share])
    return rows


def handed_over(handovers: HandoverReport) -> str:
    """Describe the split policy's choices, and the cost of others' transfers, in a sentence."""
    share = handovers.handed_over
    waited = handovers.waiting_ms / max(1, handovers.stages["transfer"].count)
    return (
        f"{handovers.decider}: {share.part:,} of {share.whole:,} prompts handed over, {handovers.protocol}; "
        f"{amount(handovers.bytes)} sent, each {measured(waited)} ms later than on an idle network."
    )


TENANTS = (
    "requests",
    "rejected",
    "prompt tokens",
    "reused",
    "computed",
    "token-s held",
    "of cache",
    "lost to others",
    "waited",
    "TTFT mean",
    "p99",
)


def tenant_rows(tenants: Mapping[str, TenantReport], times: Mapping[str, CacheTime]) -> list[list[str]]:
    """Return each tenant's name and ``TENANTS``. ``times`` are those of the tiers."""
    pool = sum(time.pool_token_s for time in times.values())
    return [
        [
            name or "(none)",
            whole(tenant.requests),
            whole(tenant.rejected),
            whole(tenant.input_tokens),
            percent(tenant.reused.value),
            whole(tenant.computed_tokens),
            whole(tenant.held_token_s),
            percent(sum(tenant.resident_token_s.values()) / pool) if pool else "",
            whole(sum(tenant.lost_tokens.values())) if pool else "",
            latency(tenant.waited_ms),
            latency(tenant.ttft.mean),
            latency(tenant.ttft.p99),
        ]
        for name, tenant in tenants.items()
    ]


def held_back(flow: FlowReport) -> str:
    """Describe flow control in a sentence or two."""
    text = f"{flow.policy}: {flow.held.part:,} of {flow.held.whole:,} requests waited before the router"
    if flow.waited.count:
        text += f", {latency(flow.waited.mean)} on average, p99 {latency(flow.waited.p99)}"
        text += f", {flow.longest:,} at a time at most"
    text += f"; a worker had {flow.engine_requests:,} requests at most."
    if flow.overtaken:
        text += f" Those that waited saw later ones go first {flow.overtaken:,} times."
    kinds = {"full": "the queue was full", "share": "their tenant had its share of it", "shed": "they were shed"}
    reasons = [f"{count:,} because {kinds.get(kind, kind)}" for kind, count in flow.refused.items()]
    return f"{text} Refused: {', '.join(reasons)}." if reasons else text


WAITS = ("request, and why it waited", "session", "tenant", "at", "waited", "behind", "overtaken by")


def wait_rows(flow: FlowReport) -> list[list[str]]:
    """Return the requests that flow control held back longest: ``WAITS``."""
    return [
        [
            f"{wait.id}: {wait.why}",
            wait.session,
            wait.tenant,
            span(wait.arrival_s),
            latency(wait.waited_ms),
            f"{wait.ahead:,}",
            f"{wait.overtaken:,}",
        ]
        for wait in flow.longest_waits
    ]


def longest_wait(flow: FlowReport) -> str:
    """Say which request waited longest, and why; empty if none did."""
    if not flow.longest_waits:
        return ""
    wait = flow.longest_waits[0]
    later = f", and {wait.overtaken:,} that came later went first" if wait.overtaken else ""
    return f"{wait.id} waited longest, {latency(wait.waited_ms)} behind {wait.ahead:,} requests{later}: {wait.why}."


def failed_workers(config: Mapping[str, object]) -> str:
    """Say how many workers failed by their configuration, and when; empty if none did."""
    kinds = config.get("workers")
    failures = [
        (kind["fail"], kind.get("count", 1))
        for kind in (kinds if isinstance(kinds, list) else ())
        if isinstance(kind, dict) and isinstance(kind.get("fail"), int)
    ]
    return ", ".join(
        f"{count} worker{'' if count == 1 else 's'} failed after {span(at_ns / SECOND)}" for at_ns, count in failures
    )


def scaled(scaling: ScalingReport) -> list[str]:
    """Describe an autoscaler's decisions in sentences."""
    hours = []
    for role, seconds in scaling.worker_seconds.items():
        kind = "" if role == "both" else f"{role} "
        hours.append(
            f"{measured(seconds / 3600)} {kind}worker-hours ({measured(scaling.mean_workers[role])} on average)"
        )
    spent = f", {card_hours(scaling)} card-hours" if scaling.card_seconds else ""
    if scaling.cost is not None:
        spent += f", {money(scaling.cost)} ({price_text(scaling.cost)})"
    ups = sum(after > before for _, _, before, after in scaling.actions)
    off = "1 worker was" if scaling.stops == 1 else f"{scaling.stops:,} workers were"
    return [
        f"Autoscaled by {scaling.policy}, start-up {span(scaling.startup_s)}: {' and '.join(hours)}{spent}.",
        f"{ups:,} time{'' if ups == 1 else 's'} up and {len(scaling.actions) - ups:,} down; {off} switched off and "
        f"{scaling.cancelled:,} start-ups cancelled. {scaling.lost_blocks:,} cached blocks went with them: "
        f"{percent(scaling.lost.value)} of the prompt tokens that were computed had been there.",
        *([_only_up(scaling)] if ups and ups == len(scaling.actions) else []),
        *([flapping(scaling, ups)] if scaling.flap_s and ups else []),
    ]


def _only_up(scaling: ScalingReport) -> str:
    """Describe a fleet that grew and never shrank."""
    latest = {role: (at_s, after) for at_s, role, _, after in scaling.actions}
    ends = [
        f"{after:,} {'' if role == 'both' else role + ' '}workers from {span(at_s)} on"
        for role, (at_s, after) in latest.items()
    ]
    return f"It only went up: {' and '.join(ends)}. For this traffic compare it with a fixed fleet of that size."


def flapping(scaling: ScalingReport, ups: int) -> str:
    """Describe how many of ``ups`` scale-ups were soon undone, in a sentence."""
    within = f"{scaling.flap_s / 60:g} minutes"
    if not scaling.flaps:
        return f"It doesn't flap: no scale-up was undone within {within}."
    lower = (
        ", or a lower low (the share of its limits below which it removes workers),"
        if "threshold" in scaling.policy
        else ""
    )
    count = f"{scaling.flaps:,} of {ups:,}"
    return f"It flaps: {count} scale-ups were undone within {within}. A larger patience{lower} steadies it."


def card_hours(scaling: ScalingReport) -> str:
    """Return hours that cards were in use."""
    return measured(sum(scaling.card_seconds.values()) / 3600)


def money(cost: ScalingCost) -> str:
    """Format the cost of cards, with the currency."""
    return f"{cost.amount:,.2f} {cost.currency}"


def price_text(cost: ScalingCost) -> str:
    """Describe the prices that the cost is made of."""
    cards = ", ".join(f"{card.upper()} at {price:g}" for card, price in cost.cards.items())
    return f"{cards} an hour, prices of {cost.prices_of}"


DAY = ("workers", "requests arriving/s", "within the SLO")
DAY_ROWS = 12


def day_rows(report: Report) -> list[list[str]]:
    """Return rows of a table of a day: when it begins, and the columns ``DAY``; windows are taken together so that there are
    few.
    """
    scaling, series = report.scaling, report.series
    if scaling is None or not scaling.workers:
        return []
    count = len(series.arrived)
    step = ceil_div(count, DAY_ROWS)
    rows = []
    for first in range(0, count, step):
        some = slice(first, first + step)
        arrived = series.arrived[some]
        workers = " + ".join(measured(sum(on[some]) / len(arrived)) for on in scaling.workers.values())
        rate = measured(sum(arrived) / (len(arrived) * series.window_s))
        pairs = zip(arrived, scaling.within_slo[some], strict=False)
        good = [(arrivals, share) for arrivals, share in pairs if share is not None]
        kept = (
            sum(arrivals * share for arrivals, share in good) / sum(arrivals for arrivals, _ in good) if good else None
        )
        rows.append([span(first * series.window_s), workers, rate, "–" if kept is None else percent(kept)])
    return rows


def notes(report: Report) -> list[str]:
    """Return the caveats of the figures."""
    caveats = []
    if not report.complete:
        caveats.append("The run was interrupted: figures cover what had happened until then.")
    if report.percentiles:
        caveats.append(
            f"More than {report.percentiles.exact_up_to:,} requests: percentiles of requests are within "
            f"{report.percentiles.relative_error:.1%}; all else is exact."
        )
    missing = report.requests["all"] - report.requests.get("finished", 0)
    if missing and report.complete:
        caveats.append(f"{missing:,} of {report.requests['all']:,} requests did not finish; latencies leave them out.")
    caveats += what_ifs(report.config)
    live = report.live
    if live is not None:
        for reason, count in live.errors.items():
            caveats.append(f"{count:,} without an answer: {reason}.")
        if live.inexact:
            caveats.append(f"{live.inexact:,} answers had another length than was asked for.")
        if live.lateness.p99 > LATE_MS:
            caveats.append(
                f"The driver was late: 1 % of the requests left {measured(live.lateness.p99)} ms or more after they were due. "
                "Latencies include that; the endpoint may be faster than they say."
            )
        caveats.append(f"Not to be seen from outside, and so not in here: {', '.join(live.absent)}.")
    return caveats
