"""Decisions as text for people: the chosen worker, the reason, the cost, and the best alternative."""

from kvyard.events.types import Tier
from kvyard.router.config import RouterConfig
from kvyard.router.request import Decision

REASONS = {
    "cost": "it costs least",
    "hash": "its first tokens belong there",
    "guard": "loads were too far apart, and it has least to do",
    "load": "it has least to do",
    "match": "it has most of the prompt",
    "random": "by chance",
    "room": "it was given least so far",
    "session": "its session is there",
    "time": "its first token costs least time, there and for others",
    "turn": "it was its turn",
}
"""Texts of a decision's ``why``."""


def explain(decision: Decision, config: RouterConfig, block_size: int) -> str:
    """Return two to four sentences, and a table where the decision has everyone's figures."""
    why = REASONS.get(decision.why, decision.why)
    if decision.why == "cost" and config.temperature > 0:
        why = "drawn by cost"
    lines = [f"{decision.id}: {decision.policy} chose {decision.worker}: {why}{_ties(decision)}."]
    lines.append(
        f"Of {decision.num_tokens} tokens ({_blocks(decision.blocks)}) it has {_overlap(decision)}."
        if decision.overlap
        else f"It has nothing of the {decision.num_tokens} tokens ({_blocks(decision.blocks)})."
    )
    lines.append(
        f"Before this one it had {_count(decision.active_requests, 'request')} in flight, {decision.prefill_tokens} tokens "
        f"to prefill and {_blocks(decision.active_blocks)} held, {decision.shared_blocks} of them of this prompt."
    )
    if decision.why == "time":
        lines.append(f"Its cost is {decision.cost:.1f} ms.")
    elif decision.why == "cost" and decision.policy in ("kv", "approx", "affinity"):
        lines.append(f"Cost {_figure(decision.cost)} = {_sum(decision, config, block_size)}.")
    if decision.regret:
        were = "was" if decision.regret == 1 else "were"
        lines.append(
            f"{decision.best_worker} has {decision.best}: {_blocks(decision.regret)} {were} left on the table."
        )
    elif decision.best:
        lines.append("No worker has more.")
    if decision.candidates:
        lines.append("")
        lines += _table(decision)
    return "\n".join(lines)


def _sum(decision: Decision, config: RouterConfig, size: int) -> str:
    waiting = f"({decision.prefill_tokens} + {decision.num_tokens}) / {size}"
    credits = (config.overlap_credit, *config.lower_credits)
    credit = sum(worth * blocks for worth, blocks in zip(credits, decision.tiers, strict=False))
    parts = f"max(0, {waiting} - {_figure(credit)})" if credit else waiting
    if config.overlap_decay and decision.device:
        parts = f"max(0, {waiting} - credit of up to {_figure(credit)})"
    if config.prefill_scale != 1:
        parts = f"{_figure(config.prefill_scale)} * {parts}"
    parts = f"{parts} to prefill + {decision.active_blocks + decision.blocks - decision.shared_blocks} held"
    if config.request_weight:
        parts += f" + {_figure(config.request_weight)} * {_count(decision.active_requests, 'request')}"
    return parts


def _overlap(decision: Decision) -> str:
    parts = []
    for tier, blocks in zip(Tier, decision.tiers, strict=False):
        if blocks:
            more = "more " if tier > Tier.G1 else ""
            parts.append(f"{blocks} {more}in {tier.place}")
            if tier == Tier.G1 and decision.predicted:
                parts.append(f"{decision.predicted} of them not announced yet")
    return ", ".join(parts)


def _ties(decision: Decision) -> str:
    if decision.tied < 2 or decision.why in ("random", "turn"):
        return ""
    return f", like {_count(decision.tied - 1, 'other')}, and the seed decided"


def _table(decision: Decision) -> list[str]:
    depth = max(3, *(len(candidate.tiers) for candidate in decision.candidates))
    tiers = [tier.label for tier in Tier][:depth]
    rows = [["  worker", "cost", *tiers, "to prefill", "held", "shared", "requests"]]
    for candidate in sorted(decision.candidates, key=lambda option: (option.cost, option.worker)):
        mark = "* " if candidate.worker == decision.worker else "  "
        figures = [
            *candidate.tiers,
            *[0] * (depth - len(candidate.tiers)),
            candidate.prefill_tokens,
            candidate.active_blocks,
        ]
        figures += [candidate.shared_blocks, candidate.active_requests]
        rows.append([f"{mark}{candidate.worker}", _figure(candidate.cost), *map(str, figures)])
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))])
        for row in rows
    ]


def _blocks(count: int) -> str:
    return _count(count, "block")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _figure(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
