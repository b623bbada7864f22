"""A plan: settings of a log, and the ranges that its requests are drawn from.

A family is a function that changes a plan before its requests are drawn. Texts share prefixes as conversations and system
prompts do: a later request may continue an earlier one, answer included.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FAMILIES: dict[str, Callable[[Plan], None]] = {}
DEFAULTS: dict[str, Any] = {
    "page_size": 16,
    "num_tokens": 4096,
    "max_running_requests": 16,
    "max_prefill_tokens": 16384,
    "chunked_prefill_size": 8192,
    "enable_mixed_chunk": False,
    "schedule_policy": "fcfs",
    "schedule_conservativeness": 1.0,
    "disable_radix_cache": False,
    "radix_eviction_policy": "lru",
    "overlap": False,
    "enable_priority_scheduling": False,
    "ignore_eos": False,
}
FRESH = 1 << 20
"""Token ids of answers and of texts that no other request has begin here."""
SPACING = 1 << 14


@dataclass
class Plan:
    """Settings of a log, and the ranges that its requests are drawn from."""

    rng: random.Random
    settings: dict[str, Any] = field(default_factory=lambda: dict(DEFAULTS))
    requests: tuple[int, int] = (16, 40)
    prompt: tuple[int, int] = (20, 600)
    """Tokens of a text that is new in a request."""
    output: tuple[int, int] = (1, 80)
    gap_ns: tuple[int, int] = (0, 40_000_000)
    burst: float = 0.3
    """Share of requests that arrive at the same instant as the one before."""
    shared: float = 0.5
    """Share of requests that begin with a system prompt."""
    continued: float = 0.35
    """Share of requests that continue an earlier request."""
    repeated: float = 0.05
    """Share of requests that repeat an earlier prompt."""
    priorities: tuple[int, int] | None = None
    aborted: float = 0.0
    """Share of requests that are aborted ..."""
    patience_ns: tuple[int, int] = (0, 400_000_000)
    """... this long after their arrival, if they have not ended by then."""


def family(change: Callable[[Plan], None]) -> Callable[[Plan], None]:
    FAMILIES[change.__name__.replace("_", "-")] = change
    return change


def workload(name: str, seed: int) -> tuple[dict[str, Any], dict[str, int], list[dict[str, Any]]]:
    """Settings, clock and requests of one log."""
    rng = random.Random(f"{name}@{seed}")
    plan = Plan(rng)
    FAMILIES[name](plan)
    plan.settings["seed"] = seed
    timing = {
        "base": rng.randrange(2_000_000, 9_000_000),
        "per_token": rng.randrange(2_000, 40_000),
        "per_request": rng.randrange(10_000, 100_000),
        "per_context": rng.randrange(0, 200),
    }
    return plan.settings, timing, _requests(plan)


def _requests(plan: Plan) -> list[dict[str, Any]]:
    rng = plan.rng
    capacity = request_capacity(plan.settings)
    systems = [[index * SPACING, rng.randint(8, 300)] for index in range(rng.randint(1, 4))]
    requests: list[dict[str, Any]] = []
    now = 0
    for index in range(rng.randint(*plan.requests)):
        fresh = FRESH + 2 * index * SPACING
        if rng.random() >= plan.burst:
            now += rng.randint(*plan.gap_ns)
        prompt: list[list[int]] = []
        draw = rng.random()
        if requests and draw < plan.continued:
            earlier = rng.choice(requests)
            prompt = [*earlier["prompt"], [earlier["output"][0], rng.randint(1, earlier["output"][1])]]
        elif requests and draw < plan.continued + plan.repeated:
            prompt = [list(run) for run in rng.choice(requests)["prompt"]]
        elif rng.random() < plan.shared:
            system = rng.choice(systems)
            prompt = [[system[0], rng.randint(1, system[1])] if rng.random() < 0.3 else list(system)]
        if not prompt or rng.random() < 0.9:
            prompt = [*prompt, [fresh, rng.randint(*plan.prompt)]]
        output = rng.randint(*plan.output)
        length = sum(count for _, count in prompt)
        if length + output > capacity:
            prompt, length = [[fresh, min(plan.prompt[0], capacity // 4)]], min(plan.prompt[0], capacity // 4)
            output = max(1, min(output, capacity - length))
        requests.append(
            {
                # An abort concerns every request whose name begins with the name it gives.
                "request": f"r{index:03}" if plan.aborted else f"r{index}",
                "arrival": now,
                "prompt": prompt,
                "output": [fresh + SPACING, output],
                "priority": rng.randint(*plan.priorities) if plan.priorities is not None else None,
                "ignore_eos": plan.settings["ignore_eos"],
            }
        )
        if "speculative" in plan.settings:
            most = _longest_accepted(plan.settings["speculative"])
            requests[-1]["holds"] = [rng.choice([0, most, rng.randint(0, most)]) for _ in range(rng.randint(1, 7))]
        if plan.aborted and rng.random() < plan.aborted:
            requests[-1]["abort"] = now + rng.randint(*plan.patience_ns)
    return requests


def request_capacity(settings: dict[str, Any]) -> int:
    """Tokens that one request has room for, prompt and answer."""
    return int(settings["num_tokens"]) - 2 * int(settings["page_size"]) - 1 - draft_reserve(settings)


def draft_reserve(settings: dict[str, Any]) -> int:
    """Tokens that a request holds beyond what it has computed, for drafts."""
    if "speculative" not in settings:
        return 0
    drafts, page = settings["speculative"], settings["page_size"]
    branches = drafts["eagle_topk"] if drafts["algorithm"] != "NGRAM" else 1
    per_branch = -(-(page - 1 + drafts["num_steps"]) // page) * page if branches > 1 else 0
    return 2 * max(drafts["num_draft_tokens"], per_branch * branches) + page


def _longest_accepted(drafts: dict[str, Any]) -> int:
    """Drafts that are accepted in one step at most."""
    drafted = drafts["num_draft_tokens"] - 1
    return drafted if drafts["algorithm"] == "NGRAM" else min(drafted, drafts["num_steps"])


def change_settings(plan: Plan, **settings: Any) -> None:
    plan.settings.update(settings)


def tighten(plan: Plan, page: int = 16, pages: tuple[int, int] | None = None) -> None:
    """A pool that a few requests fill, so that the tree is evicted from."""
    tokens = plan.rng.randint(*(pages or (1400 // page, 2600 // page))) * page
    change_settings(plan, page_size=page, num_tokens=tokens)


def pressed(plan: Plan, *, outgrow: bool) -> None:
    """Have requests with priorities where settings read them, and answers that ``outgrow`` the pool if asked for."""
    if plan.settings["enable_priority_scheduling"] or plan.settings["radix_eviction_policy"] == "priority":
        plan.priorities = (0, 30)
    if outgrow:
        change_settings(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]))
        plan.gap_ns, plan.output, plan.prompt = (0, 8_000_000), (100, 500), (20, 200)
