"""The family ``random-settings``: any combination of settings that SGLang allows."""

from __future__ import annotations

from typing import Any

from sglang_families.drafts import drafter
from sglang_families.plan import Plan, change_settings, family
from sglang_families.storage import draw_storage

POLICIES = ("fcfs", "fcfs", "lpm", "dfs-weight", "lof", "random", "hrrn", "shortest-prefill-first")
EVICTIONS = ("lru", "lru", "lfu", "fifo", "mru", "filo", "priority", "slru")


@family
def random_settings(plan: Plan) -> None:
    """Any combination of settings that SGLang allows."""
    rng = plan.rng
    _draw_texts(plan)
    _draw_scheduling(plan)
    windows, states = (
        _chance(plan, 0.4),
        rng.choice((None, None, None, "no_buffer", "extra_buffer", "extra_buffer_lazy")),
    )
    page = 1 if states == "no_buffer" else rng.choice((1, 1, 16, 16, 64))
    tokens = rng.randint(1400, 4000) // page * page
    change_settings(plan, page_size=page, num_tokens=tokens)
    if windows:
        share = round(rng.uniform(0.4, 1.0), 3)
        change_settings(plan, sliding_window_size=rng.randint(1, 300), swa_full_tokens_ratio=share)
    if states is not None:
        _draw_states(plan, states)
    elif not plan.settings["disable_radix_cache"] and rng.random() < 0.5:
        _draw_host(plan)
    if rng.random() < 0.3:
        _draw_drafts(plan)
    chunk = plan.settings["chunked_prefill_size"]
    if chunk is not None:
        change_settings(plan, chunked_prefill_size=-(-chunk // page) * page)


def _chance(plan: Plan, share: float) -> bool:
    return plan.rng.random() < share


def _draw_texts(plan: Plan) -> None:
    rng = plan.rng
    plan.requests = (16, 50)
    plan.prompt = rng.choice(((20, 600), (1, 60), (20, 200), (200, 900)))
    plan.output = rng.choice(((1, 80), (1, 200), (100, 500), (1, 5)))
    plan.gap_ns = (0, rng.choice((200_000, 5_000_000, 20_000_000, 60_000_000, 200_000_000)))
    plan.burst, plan.shared = rng.choice((0.0, 0.3, 0.8)), rng.choice((0.2, 0.5, 1.0))
    plan.continued, plan.repeated = rng.choice((0.1, 0.35, 0.6)), rng.choice((0.0, 0.05, 0.3))
    if _chance(plan, 0.25):
        plan.aborted = rng.choice((0.1, 0.4))
        plan.patience_ns = (0, rng.choice((20_000_000, 400_000_000, 2_000_000_000)))


def _draw_scheduling(plan: Plan) -> None:
    rng = plan.rng
    settings: dict[str, Any] = {
        "schedule_policy": rng.choice(POLICIES),
        "radix_eviction_policy": rng.choice(EVICTIONS),
        "schedule_conservativeness": rng.choice((0.05, 0.3, 1.0, 1.0, 1.5)),
        "overlap": _chance(plan, 0.4),
        "ignore_eos": _chance(plan, 0.2),
        "disable_radix_cache": _chance(plan, 0.12),
        "max_running_requests": rng.choice((2, 5, 16, 16, 32)),
        "chunked_prefill_size": rng.choice((None, 64, 128, 192, 512, 8192)),
        "enable_priority_scheduling": _chance(plan, 0.25),
    }
    settings["enable_mixed_chunk"] = settings["chunked_prefill_size"] is not None and _chance(plan, 0.35)
    if _chance(plan, 0.15):
        settings["prefill_max_requests"] = rng.randint(1, 4)
    if _chance(plan, 0.15):
        settings["max_prefill_tokens"] = max(settings["chunked_prefill_size"] or 0, rng.randint(64, 900))
    if settings["enable_priority_scheduling"]:
        settings["schedule_policy"] = rng.choice(("fcfs", "lof"))
        settings["disable_priority_preemption"] = _chance(plan, 0.3)
        settings["schedule_low_priority_values_first"] = _chance(plan, 0.3)
        settings["priority_scheduling_preemption_threshold"] = rng.choice((0, 3, 10))
    if settings["enable_priority_scheduling"] or settings["radix_eviction_policy"] == "priority":
        plan.priorities = (0, rng.choice((3, 30)))
    change_settings(plan, **settings)


def _draw_states(plan: Plan, strategy: str) -> None:
    rng, rows = plan.rng, min(12, plan.settings["max_running_requests"])
    change_settings(plan, max_running_requests=rows)
    most = rng.choice((1.1, 3.0, 20.0))
    least = {"no_buffer": 3, "extra_buffer": 5, "extra_buffer_lazy": 4}[strategy] * rows
    change_settings(plan, max_mamba_cache_size=rng.randint(least, int(least * most) + 1))
    if strategy == "no_buffer":
        change_settings(plan, overlap=False)
        return
    interval = rng.choice((64, 128, 256))
    change_settings(plan, mamba_radix_cache_strategy=strategy, mamba_track_interval=interval)
    if strategy == "extra_buffer_lazy":
        change_settings(plan, overlap=True)


def _draw_drafts(plan: Plan) -> None:
    algorithm = plan.rng.choice(("EAGLE", "EAGLE", "STANDALONE", "NGRAM"))
    trees = algorithm != "NGRAM" and _chance(plan, 0.4)
    change_settings(plan, speculative=drafter(plan, algorithm, trees=trees))
    if algorithm != "EAGLE":
        change_settings(plan, enable_mixed_chunk=False)


def _draw_host(plan: Plan) -> None:
    rng, page = plan.rng, plan.settings["page_size"]
    pages = plan.settings["num_tokens"] // page
    policies = ["write_through", "write_through_selective"]
    if "sliding_window_size" not in plan.settings:
        policies.append("write_back")
    most = rng.choice((0.5, 2.0, 8.0))
    hicache = {
        "write_policy": rng.choice(policies),
        "host_pages": rng.randint(max(2, int(pages * most / 2)), max(3, int(pages * most))),
        "first_byte": rng.randrange(0, 200_000),
        "per_page": rng.randrange(*rng.choice(((100, 60_000), (60_000, 900_000)))) * page,
    }
    change_settings(plan, hicache=hicache)
    if "sliding_window_size" not in plan.settings and hicache["write_policy"] != "write_back" and _chance(plan, 0.4):
        prefetch = rng.choice(("best_effort", "wait_complete", "timeout"))
        draw_storage(plan, prefetch, (1, 6), rng.choice(((1, 2, 5, 10), (20, 50))))
