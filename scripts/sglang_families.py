"""Workloads for logs of SGLang's scheduler: families of settings and requests, each a function of a seed.

A family is a function that changes a ``Plan`` before its requests are drawn. Texts share prefixes as conversations and system
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
    capacity = plan.settings["num_tokens"] - 2 * plan.settings["page_size"] - 1
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
        if plan.aborted and rng.random() < plan.aborted:
            requests[-1]["abort"] = now + rng.randint(*plan.patience_ns)
    return requests


def _set(plan: Plan, **settings: Any) -> None:
    plan.settings.update(settings)


def _tight(plan: Plan, page: int = 16, pages: tuple[int, int] | None = None) -> None:
    """A pool that a few requests fill, so that the tree is evicted from."""
    tokens = plan.rng.randint(*(pages or (1400 // page, 2600 // page))) * page
    _set(plan, page_size=page, num_tokens=tokens)


# -- the tree ---------------------------------------------------------------------------------------------------------


@family
def radix_p1(plan: Plan) -> None:
    """A tree of single tokens in a large pool."""
    _set(plan, page_size=1, num_tokens=8192)


@family
def radix_p16(plan: Plan) -> None:
    """A tree of pages of 16 in a large pool."""
    _set(plan, page_size=16, num_tokens=8192)


@family
def radix_p64(plan: Plan) -> None:
    """A tree of pages of 64 in a large pool."""
    _set(plan, page_size=64, num_tokens=16384)


@family
def radix_split(plan: Plan) -> None:
    """Texts that part within each other's runs, page by page."""
    _tight(plan, 1)
    plan.shared, plan.continued, plan.repeated, plan.prompt = 1.0, 0.5, 0.2, (1, 60)


@family
def radix_off(plan: Plan) -> None:
    """Without prefix caching."""
    _tight(plan)
    _set(plan, disable_radix_cache=True)


def _evicting(policy: str, page: int) -> None:
    def change(plan: Plan) -> None:
        _tight(plan, page)
        _set(plan, radix_eviction_policy=policy)
        plan.gap_ns = (0, 120_000_000)
        if policy == "priority":
            plan.priorities = (0, 3)

    change.__doc__ = f"Eviction {policy} in a small pool of pages of {page}."
    FAMILIES[f"evict-{policy}-p{page}"] = change


for _policy in ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru"):
    for _page in (1, 16):
        _evicting(_policy, _page)
_evicting("lru", 64)


# -- admission --------------------------------------------------------------------------------------------------------


@family
def admit_p1(plan: Plan) -> None:
    """More requests than fit, single tokens."""
    _tight(plan, 1)
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 200)


@family
def admit_p16(plan: Plan) -> None:
    """More requests than fit, pages of 16."""
    _tight(plan, 16)
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 200)


@family
def admit_p64(plan: Plan) -> None:
    """More requests than fit, pages of 64."""
    _tight(plan, 64, (24, 60))
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 200)


@family
def admit_rows(plan: Plan) -> None:
    """More requests than may run at once."""
    _set(plan, max_running_requests=plan.rng.randint(1, 5))
    plan.gap_ns = (0, 10_000_000)


@family
def admit_cap(plan: Plan) -> None:
    """A small limit of prompt tokens in a batch."""
    _set(plan, max_prefill_tokens=plan.rng.randint(64, 600), chunked_prefill_size=None)
    plan.gap_ns = (0, 5_000_000)


@family
def admit_few(plan: Plan) -> None:
    """A limit of prompts in a batch."""
    _set(plan, prefill_max_requests=plan.rng.randint(1, 3))
    plan.gap_ns = (0, 5_000_000)


@family
def admit_bold(plan: Plan) -> None:
    """Little room is set aside for answers."""
    _tight(plan, 16)
    _set(plan, schedule_conservativeness=plan.rng.choice([0.1, 0.3, 0.6]))
    plan.gap_ns, plan.output = (0, 5_000_000), (40, 300)


@family
def admit_timid(plan: Plan) -> None:
    """All answers have room set aside."""
    _tight(plan, 16)
    _set(plan, schedule_conservativeness=plan.rng.choice([1.2, 1.5, 3.0]))
    plan.gap_ns, plan.output = (0, 5_000_000), (40, 300)


# -- chunks -----------------------------------------------------------------------------------------------------------


def _chunked(name: str, page: int, *, mixed: bool = False, tight: bool = False, doc: str) -> None:
    def change(plan: Plan) -> None:
        if tight:
            _tight(plan, page)
        _set(
            plan,
            page_size=page,
            chunked_prefill_size=plan.rng.choice([2, 4, 8, 12]) * max(page, 16),
            enable_mixed_chunk=mixed,
        )
        plan.gap_ns, plan.output = (0, 20_000_000), (1, 120)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _chunked(f"chunk-p{_page}", _page, doc=f"Prompts in chunks, pages of {_page}.")
    _chunked(f"chunk-tight-p{_page}", _page, tight=True, doc=f"Prompts in chunks in a small pool, pages of {_page}.")
    _chunked(f"mixed-p{_page}", _page, mixed=True, doc=f"Chunks and decodes in one batch, pages of {_page}.")
_chunked("mixed-tight-p16", 16, mixed=True, tight=True, doc="Chunks and decodes in one batch in a small pool.")
_chunked(
    "mixed-tight-p1", 1, mixed=True, tight=True, doc="Chunks and decodes in one batch in a small pool, single tokens."
)


# -- retraction -------------------------------------------------------------------------------------------------------


def _retracting(name: str, page: int, doc: str, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        _tight(plan, page)
        _set(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]), **settings)
        plan.gap_ns, plan.output, plan.prompt = (0, 8_000_000), (100, 500), (20, 200)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _retracting(f"retract-p{_page}", _page, f"Answers that outgrow the pool, pages of {_page}.")
_retracting("retract-chunk", 16, "Answers that outgrow the pool while prompts come in chunks.", chunked_prefill_size=64)
_retracting(
    "retract-mixed",
    16,
    "Answers that outgrow the pool, chunks and decodes in one batch.",
    chunked_prefill_size=64,
    enable_mixed_chunk=True,
)
_retracting("retract-lpm", 16, "Answers that outgrow the pool, longest prefix first.", schedule_policy="lpm")
_retracting("retract-off", 16, "Answers that outgrow the pool without prefix caching.", disable_radix_cache=True)


@family
def decay(plan: Plan) -> None:
    """Long answers, so that the share of output set aside falls to its floor."""
    _tight(plan, 16, (200, 300))
    plan.requests, plan.output, plan.gap_ns = (10, 20), (300, 900), (0, 900_000_000)


# -- policies ---------------------------------------------------------------------------------------------------------


def _policy_family(name: str, policy: str, doc: str, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        _tight(plan, plan.rng.choice([1, 16]))
        _set(plan, schedule_policy=policy, **settings)
        plan.gap_ns, plan.requests = (0, 4_000_000), (20, 50)
        if settings.get("enable_priority_scheduling"):
            plan.priorities = (0, 30)

    change.__doc__ = doc
    FAMILIES[name] = change


_policy_family("lpm", "lpm", "Longest cached prefix first.")
_policy_family("lpm-chunk", "lpm", "Longest cached prefix first, prompts in chunks.", chunked_prefill_size=128)
_policy_family("dfs-weight", "dfs-weight", "The heaviest branch of the tree first.")
_policy_family("lof", "lof", "Longest answer first.")
_policy_family("random", "random", "Any order.")
_policy_family("hrrn", "hrrn", "Highest response ratio next.")
_policy_family("shortest", "shortest-prefill-first", "The shortest prompt first.")
_policy_family(
    "shortest-chunk", "shortest-prefill-first", "The shortest prompt first, in chunks.", chunked_prefill_size=128
)
_policy_family("priority", "fcfs", "By priority, with preemption.", enable_priority_scheduling=True)
_policy_family(
    "priority-rows",
    "fcfs",
    "By priority, with preemption for a row.",
    enable_priority_scheduling=True,
    max_running_requests=4,
)
_policy_family(
    "priority-low",
    "fcfs",
    "Low values first, with preemption.",
    enable_priority_scheduling=True,
    schedule_low_priority_values_first=True,
    max_running_requests=5,
    priority_scheduling_preemption_threshold=3,
)
_policy_family(
    "priority-wait",
    "fcfs",
    "By priority, without preemption.",
    enable_priority_scheduling=True,
    disable_priority_preemption=True,
)
_policy_family("priority-lof", "lof", "By priority, then longest answer first.", enable_priority_scheduling=True)


@family
def lpm_crowd(plan: Plan) -> None:
    """Longest cached prefix first, with more waiting than are sorted."""
    _set(plan, schedule_policy="lpm", max_running_requests=4)
    plan.requests, plan.gap_ns, plan.output, plan.prompt = (140, 180), (0, 200_000), (1, 20), (1, 120)


@family
def twins(plan: Plan) -> None:
    """Longest cached prefix first; many begin alike with nothing cached yet."""
    _set(plan, schedule_policy="lpm", page_size=plan.rng.choice([1, 16]))
    plan.shared, plan.continued, plan.gap_ns, plan.burst = 1.0, 0.1, (0, 50_000_000), 0.8


@family
def refresh(plan: Plan) -> None:
    """Requests that wait long enough to have their prefixes touched, in a pool that is evicted from."""
    _tight(plan, 1)
    _set(plan, max_running_requests=3)
    plan.requests, plan.gap_ns, plan.output = (50, 80), (0, 500_000), (1, 30)


# -- answers of known length ------------------------------------------------------------------------------------------


@family
def ignore_eos(plan: Plan) -> None:
    """Answers have room set aside in full."""
    _tight(plan, 16)
    _set(plan, ignore_eos=True)
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 200)


@family
def ignore_eos_off(plan: Plan) -> None:
    """Answers of known length without prefix caching: admission looks at when each request ends."""
    _tight(plan, plan.rng.choice([1, 16]))
    _set(plan, ignore_eos=True, disable_radix_cache=True)
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 300)


# -- overlap ----------------------------------------------------------------------------------------------------------


def _overlapping(name: str, doc: str, page: int = 16, *, outgrow: bool = False, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        _tight(plan, page)
        _set(plan, overlap=True, **settings)
        plan.gap_ns = (0, 15_000_000)
        if outgrow:
            _set(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]))
            plan.output, plan.prompt = (100, 500), (20, 200)

    change.__doc__ = doc
    FAMILIES[name] = change


_overlapping("overlap-p1", "A batch is decided on while the one before it runs, single tokens.", 1)
_overlapping("overlap-p16", "A batch is decided on while the one before it runs.")
_overlapping("overlap-p64", "A batch is decided on while the one before it runs, pages of 64.", 64)
_overlapping("overlap-chunk", "Overlap with chunks.", chunked_prefill_size=64)
_overlapping(
    "overlap-mixed", "Overlap with chunks and decodes in one batch.", chunked_prefill_size=64, enable_mixed_chunk=True
)
_overlapping("overlap-retract", "Overlap where answers outgrow the pool.", outgrow=True)
_overlapping("overlap-retract-p1", "Overlap where answers outgrow the pool, single tokens.", 1, outgrow=True)
_overlapping("overlap-lpm", "Overlap, longest prefix first.", schedule_policy="lpm")


# -- hybrid models with sliding windows -------------------------------------------------------------------------------


def _windowed(
    name: str,
    page: int,
    doc: str,
    *,
    window: tuple[int, int] = (20, 200),
    share: tuple[float, float] = (0.6, 1.0),
    outgrow: bool = False,
    **settings: Any,
) -> None:
    def change(plan: Plan) -> None:
        _tight(plan, page, (1600 // page, 4000 // page))
        size = plan.rng.randint(*window)
        _set(plan, sliding_window_size=size, swa_full_tokens_ratio=round(plan.rng.uniform(*share), 3), **settings)
        plan.gap_ns, plan.output = (0, 40_000_000), (1, 160)
        if settings.get("radix_eviction_policy") == "priority" or settings.get("enable_priority_scheduling"):
            plan.priorities = (0, 30)
        if outgrow:
            _set(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]))
            plan.gap_ns, plan.output, plan.prompt = (0, 8_000_000), (100, 500), (20, 200)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _windowed(f"swa-p{_page}", _page, f"Full attention and windows, pages of {_page}.")
    _windowed(f"swa-chunk-p{_page}", _page, f"Windows with chunks, pages of {_page}.", chunked_prefill_size=128)
    _windowed(
        f"swa-scarce-p{_page}",
        _page,
        f"Few window pages, pages of {_page}.",
        share=(0.35, 0.5),
        window=(10, 100),
        chunked_prefill_size=128,
    )
    _windowed(
        f"swa-retract-p{_page}", _page, f"Windows where answers outgrow the pools, pages of {_page}.", outgrow=True
    )
    _windowed(f"swa-overlap-p{_page}", _page, f"Windows with overlap, pages of {_page}.", overlap=True)
for _policy in ("lfu", "fifo", "mru", "filo", "priority", "slru"):
    _windowed(f"swa-{_policy}", 16, f"Windows with eviction {_policy}.", radix_eviction_policy=_policy)
_windowed(
    "swa-capped",
    16,
    "Prompts that exceed the window pool, one at a time.",
    share=(0.2, 0.4),
    window=(10, 100),
    max_running_requests=1,
)
_windowed("swa-narrow", 16, "Windows of less than a page.", window=(1, 20))
_windowed("swa-wide", 16, "Windows that few prompts leave.", window=(300, 900))
_windowed(
    "swa-mixed", 16, "Windows, chunks and decodes in one batch.", chunked_prefill_size=128, enable_mixed_chunk=True
)
_windowed("swa-lpm", 16, "Windows, longest prefix first.", schedule_policy="lpm")
_windowed("swa-off", 16, "Windows without prefix caching.", disable_radix_cache=True)
_windowed(
    "swa-off-chunk",
    16,
    "Windows without prefix caching, in chunks.",
    disable_radix_cache=True,
    chunked_prefill_size=128,
)
_windowed(
    "swa-off-eos",
    16,
    "Windows without prefix caching, answers of known length.",
    disable_radix_cache=True,
    ignore_eos=True,
)
_windowed(
    "swa-off-overlap",
    16,
    "Windows without prefix caching, in chunks, with overlap.",
    disable_radix_cache=True,
    chunked_prefill_size=128,
    overlap=True,
)
_windowed("swa-overlap-chunk", 16, "Windows with overlap and chunks.", overlap=True, chunked_prefill_size=128)
_windowed(
    "swa-overlap-retract", 16, "Windows with overlap where answers outgrow the pools.", overlap=True, outgrow=True
)
_windowed(
    "swa-overlap-mixed",
    16,
    "Windows with overlap, chunks and decodes in one batch.",
    overlap=True,
    chunked_prefill_size=128,
    enable_mixed_chunk=True,
)
_windowed("swa-priorities", 16, "Windows, by priority, with preemption.", enable_priority_scheduling=True)
_windowed(
    "swa-shortest",
    16,
    "Windows, the shortest prompt first, in chunks.",
    schedule_policy="shortest-prefill-first",
    chunked_prefill_size=128,
)


# -- many retractions -------------------------------------------------------------------------------------------------


def _outgrowing(name: str, page: int, doc: str, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        _set(plan, page_size=page, num_tokens=plan.rng.randint(1500 // page, 2500 // page) * page, **settings)
        _set(plan, schedule_conservativeness=plan.rng.choice([0.0, 0.01, 0.05]), max_running_requests=32)
        plan.requests, plan.gap_ns, plan.burst = (20, 36), (0, 30_000_000), 0.7
        plan.prompt, plan.output, plan.shared, plan.continued = (5, 60), (60, 200), 0.2, 0.1

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16):
    _outgrowing(f"outgrow-p{_page}", _page, f"Many short prompts whose answers outgrow the pool, pages of {_page}.")
    _outgrowing(f"overlap-outgrow-p{_page}", _page, f"The same with overlap, pages of {_page}.", overlap=True)
_outgrowing("outgrow-chunk", 16, "The same with small chunks.", chunked_prefill_size=32)
_outgrowing(
    "outgrow-mixed", 16, "The same, chunks and decodes in one batch.", chunked_prefill_size=64, enable_mixed_chunk=True
)


# -- aborts -----------------------------------------------------------------------------------------------------------


def _aborting(name: str, page: int, doc: str, *, outgrow: bool = False, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        _tight(plan, page, (1600 // page, 4000 // page) if "sliding_window_size" in settings else None)
        _set(plan, **settings)
        plan.requests, plan.gap_ns, plan.output = (20, 50), (0, 20_000_000), (1, 160)
        plan.aborted = plan.rng.choice([0.3, 0.6])
        if settings.get("enable_priority_scheduling"):
            plan.priorities = (0, 30)
        if outgrow:
            _set(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]))
            plan.gap_ns, plan.output, plan.prompt = (0, 8_000_000), (100, 500), (20, 200)
            plan.patience_ns = (0, 2_000_000_000)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _aborting(f"abort-p{_page}", _page, f"Requests that are aborted, pages of {_page}.")
    _aborting(
        f"abort-chunk-p{_page}", _page, f"Aborts of prompts in chunks, pages of {_page}.", chunked_prefill_size=64
    )
_aborting("abort-retract", 16, "Aborts where answers outgrow the pool.", outgrow=True)
_aborting(
    "abort-mixed", 16, "Aborts, chunks and decodes in one batch.", chunked_prefill_size=64, enable_mixed_chunk=True
)
for _page in (1, 16):
    _aborting(f"abort-overlap-p{_page}", _page, f"Aborts with overlap, pages of {_page}.", overlap=True)
_aborting("abort-overlap-chunk", 16, "Aborts with overlap and chunks.", overlap=True, chunked_prefill_size=64)
_aborting(
    "abort-overlap-retract", 16, "Aborts with overlap where answers outgrow the pool.", overlap=True, outgrow=True
)
_aborting(
    "abort-overlap-mixed",
    16,
    "Aborts with overlap, chunks and decodes in one batch.",
    overlap=True,
    chunked_prefill_size=64,
    enable_mixed_chunk=True,
)
_aborting("abort-lpm", 16, "Aborts, longest prefix first.", schedule_policy="lpm")
_aborting("abort-priority", 16, "Aborts, by priority, with preemption.", enable_priority_scheduling=True)
_aborting("abort-off", 16, "Aborts without prefix caching.", disable_radix_cache=True, chunked_prefill_size=64)
_WINDOW = {"sliding_window_size": 64, "swa_full_tokens_ratio": 0.7}
_aborting("abort-swa", 16, "Aborts with windows.", **_WINDOW)
_aborting("abort-swa-chunk", 16, "Aborts with windows and chunks.", chunked_prefill_size=128, **_WINDOW)
_aborting("abort-swa-retract", 16, "Aborts with windows where answers outgrow the pools.", outgrow=True, **_WINDOW)


# -- host memory ------------------------------------------------------------------------------------------------------


def _hicache(
    name: str,
    page: int,
    doc: str,
    *,
    policy: str = "write_through",
    host: float = 2.0,
    per_page: tuple[int, int] = (100, 60_000),
    outgrow: bool = False,
    aborted: float = 0.0,
    **settings: Any,
) -> None:
    """``host``: host memory at most, in sizes of the device's pool."""

    def change(plan: Plan) -> None:
        _tight(plan, page)
        _set(plan, **settings)
        pages = plan.settings["num_tokens"] // page
        hicache = {
            "write_policy": policy,
            "host_pages": plan.rng.randint(max(2, int(pages * host / 2)), max(3, int(pages * host))),
            "first_byte": plan.rng.randrange(0, 200_000),
            "per_page": plan.rng.randrange(*per_page) * page,
        }
        _set(plan, hicache=hicache)
        plan.requests, plan.gap_ns, plan.continued, plan.aborted = (24, 60), (0, 60_000_000), 0.5, aborted
        if settings.get("enable_priority_scheduling") or settings.get("radix_eviction_policy") == "priority":
            plan.priorities = (0, 30)
        if outgrow:
            _set(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]))
            plan.gap_ns, plan.output, plan.prompt = (0, 8_000_000), (100, 500), (20, 200)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _hicache(f"hicache-p{_page}", _page, f"Write-through to host memory, pages of {_page}.")
    _hicache(f"hicache-small-p{_page}", _page, f"A small host memory, pages of {_page}.", host=0.5)
    _hicache(f"hicache-large-p{_page}", _page, f"A large host memory, pages of {_page}.", host=8.0)
    _hicache(
        f"hicache-selective-p{_page}",
        _page,
        f"What is used twice goes to host memory, pages of {_page}.",
        policy="write_through_selective",
    )
    _hicache(
        f"hicache-slow-p{_page}", _page, f"Copies that hold the pool up, pages of {_page}.", per_page=(60_000, 900_000)
    )
    _hicache(f"hicache-chunk-p{_page}", _page, f"Host memory and chunks, pages of {_page}.", chunked_prefill_size=64)
    _hicache(f"hicache-overlap-p{_page}", _page, f"Host memory with overlap, pages of {_page}.", overlap=True)
    _hicache(
        f"write-back-p{_page}", _page, f"What is evicted goes to host memory, pages of {_page}.", policy="write_back"
    )
    _hicache(
        f"write-back-small-p{_page}",
        _page,
        f"Write-back to a small host memory, pages of {_page}.",
        policy="write_back",
        host=0.5,
    )
    _hicache(
        f"write-back-overlap-p{_page}",
        _page,
        f"Write-back with overlap, pages of {_page}.",
        policy="write_back",
        overlap=True,
    )
for _policy in ("lfu", "fifo", "mru", "filo", "priority", "slru"):
    _hicache(f"hicache-{_policy}", 16, f"Host memory with eviction {_policy}.", radix_eviction_policy=_policy, host=1.0)
_hicache(
    "hicache-mixed",
    16,
    "Host memory, chunks and decodes in one batch.",
    chunked_prefill_size=64,
    enable_mixed_chunk=True,
)
_hicache("hicache-retract", 16, "Host memory where answers outgrow the pool.", outgrow=True)
_hicache("write-back-large", 16, "Write-back to a large host memory.", policy="write_back", host=8.0)
_hicache("write-back-retract", 16, "Write-back where answers outgrow the pool.", policy="write_back", outgrow=True)
_hicache("write-back-lpm", 16, "Write-back, longest prefix first.", policy="write_back", schedule_policy="lpm")
_hicache("write-back-lfu", 16, "Write-back with eviction lfu.", policy="write_back", radix_eviction_policy="lfu")
_hicache("write-back-slow", 16, "Write-back by slow copies.", policy="write_back", per_page=(60_000, 900_000))
_hicache(
    "write-back-mixed",
    16,
    "Write-back, chunks and decodes in one batch, aborts.",
    policy="write_back",
    chunked_prefill_size=64,
    enable_mixed_chunk=True,
    aborted=0.4,
)
_hicache("hicache-lpm", 16, "Host memory, longest prefix first.", schedule_policy="lpm")
_hicache("hicache-shortest", 16, "Host memory, the shortest prompt first.", schedule_policy="shortest-prefill-first")
_hicache("hicache-preempt", 16, "Host memory, by priority, with preemption.", enable_priority_scheduling=True)
_hicache("hicache-abort", 16, "Host memory and aborts.", aborted=0.4, chunked_prefill_size=64)
_hicache(
    "hicache-overlap-chunk",
    16,
    "Host memory with overlap, chunks and decodes in one batch.",
    overlap=True,
    chunked_prefill_size=64,
    enable_mixed_chunk=True,
)
_hicache(
    "hicache-overlap-retract",
    16,
    "Host memory with overlap where answers outgrow the pool.",
    overlap=True,
    outgrow=True,
)


# -- host memory below windows ----------------------------------------------------------------------------------------


def _windows_on_host(name: str, page: int, doc: str, *, window: tuple[int, int] = (20, 200), **given: Any) -> None:
    _hicache(name, page, doc, **given)
    below = FAMILIES[name]

    def change(plan: Plan) -> None:
        below(plan)
        share = round(plan.rng.uniform(0.5, 1.0), 3)
        _set(plan, sliding_window_size=plan.rng.randint(*window), swa_full_tokens_ratio=share)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _windows_on_host(f"swa-hicache-p{_page}", _page, f"Write-through of full pages and windows, pages of {_page}.")
    _windows_on_host(f"swa-hicache-small-p{_page}", _page, f"Windows and a small host, pages of {_page}.", host=0.5)
    _windows_on_host(f"swa-hicache-large-p{_page}", _page, f"Windows and a large host, pages of {_page}.", host=8.0)
    _windows_on_host(
        f"swa-hicache-selective-p{_page}",
        _page,
        f"Full pages and windows that are used twice go to the host, pages of {_page}.",
        policy="write_through_selective",
    )
_windows_on_host("swa-hicache-chunk", 16, "Windows, host memory and chunks.", chunked_prefill_size=128)
_windows_on_host("swa-hicache-overlap", 16, "Windows and host memory with overlap.", overlap=True)
_windows_on_host("swa-hicache-slow", 16, "Windows and slow copies.", per_page=(60_000, 900_000))
_windows_on_host("swa-hicache-narrow", 16, "Windows of less than a page and host memory.", window=(1, 20))
_windows_on_host("swa-hicache-lfu", 16, "Windows and host memory with eviction lfu.", radix_eviction_policy="lfu")
_windows_on_host("swa-hicache-retract", 16, "Windows and host memory where answers outgrow the pools.", outgrow=True)
_windows_on_host("swa-hicache-lpm", 16, "Windows and host memory, longest prefix first.", schedule_policy="lpm")
_windows_on_host(
    "swa-hicache-mixed",
    16,
    "Windows and host memory, chunks and decodes in one batch.",
    chunked_prefill_size=128,
    enable_mixed_chunk=True,
)


# -- states -----------------------------------------------------------------------------------------------------------


def _with_states(
    name: str, doc: str, *, most: float = 8.0, outgrow: bool = False, aborted: float = 0.0, **settings: Any
) -> None:
    """``most``: state slots per running request at most. Without a buffer for states inside a request SGLang has pages of one
    token and no overlap.
    """

    def change(plan: Plan) -> None:
        _tight(plan, 1, (1600, 4000))
        _set(plan, max_running_requests=plan.rng.randint(2, 12))
        _set(plan, **settings)
        rows = plan.settings["max_running_requests"]
        _set(plan, max_mamba_cache_size=plan.rng.randint(3 * rows + 1, int(most * rows) + 2))
        plan.requests, plan.gap_ns, plan.output, plan.aborted = (20, 50), (0, 40_000_000), (1, 160), aborted
        plan.continued = 0.5
        if settings.get("radix_eviction_policy") == "priority" or settings.get("enable_priority_scheduling"):
            plan.priorities = (0, 30)
        if outgrow:
            _set(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]))
            plan.gap_ns, plan.output, plan.prompt = (0, 8_000_000), (100, 500), (20, 200)

    change.__doc__ = doc
    FAMILIES[name] = change


_with_states("mamba", "Full attention and states.")
_with_states("mamba-few", "Few slots for states.", most=3.2)
_with_states("mamba-many", "Many slots for states.", most=60.0)
_with_states("mamba-chunk", "States with chunks.", chunked_prefill_size=128)
_with_states("mamba-few-chunk", "Few slots for states, with chunks.", most=3.2, chunked_prefill_size=64)
_with_states(
    "mamba-mixed", "States, chunks and decodes in one batch.", chunked_prefill_size=128, enable_mixed_chunk=True
)
_with_states("mamba-retract", "States where answers outgrow the pool.", outgrow=True)
_with_states("mamba-lpm", "States, longest prefix first.", schedule_policy="lpm")
_with_states("mamba-abort", "States and aborts.", aborted=0.4, chunked_prefill_size=128)
_with_states("mamba-off", "States without prefix caching.", disable_radix_cache=True)
_with_states("mamba-preempt", "States, by priority, with preemption.", enable_priority_scheduling=True)
for _policy in ("lfu", "fifo", "mru", "filo", "priority", "slru"):
    _with_states(f"mamba-{_policy}", f"States with eviction {_policy}.", radix_eviction_policy=_policy)


def _tracked(name: str, page: int, doc: str, **given: Any) -> None:
    """With a buffer for states inside a request."""
    _with_states(name, doc, **given)
    states = FAMILIES[name]

    def change(plan: Plan) -> None:
        states(plan)
        rows, tokens = plan.settings["max_running_requests"], plan.settings["num_tokens"] // page * page
        slots = plan.rng.randint(5 * rows + 1, int(2 * given.get("most", 8.0) * rows) + 2)
        _set(plan, page_size=page, num_tokens=tokens, max_mamba_cache_size=slots)
        _set(plan, mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=plan.rng.choice([64, 128, 256]))

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _tracked(f"mamba-tracked-p{_page}", _page, f"States inside requests, pages of {_page}.")
    _tracked(f"mamba-tracked-few-p{_page}", _page, f"Few slots for states inside requests, pages of {_page}.", most=3.2)
    _tracked(
        f"mamba-tracked-chunk-p{_page}",
        _page,
        f"States inside requests, chunks, pages of {_page}.",
        chunked_prefill_size=128,
    )
    _tracked(
        f"mamba-tracked-overlap-p{_page}", _page, f"States inside requests, overlap, pages of {_page}.", overlap=True
    )
_tracked(
    "mamba-tracked-mixed",
    16,
    "States inside requests, chunks and decodes in one batch.",
    chunked_prefill_size=192,
    enable_mixed_chunk=True,
)
_tracked(
    "mamba-tracked-overlap-mixed",
    16,
    "States inside requests, overlap, chunks and decodes in one batch.",
    overlap=True,
    chunked_prefill_size=192,
    enable_mixed_chunk=True,
)
_tracked(
    "mamba-tracked-overlap-retract",
    16,
    "States inside requests, overlap, answers outgrow the pool.",
    overlap=True,
    outgrow=True,
)
_tracked(
    "mamba-tracked-overlap-abort",
    16,
    "States inside requests, overlap, chunks, aborts.",
    overlap=True,
    aborted=0.4,
    chunked_prefill_size=128,
)
_tracked("mamba-tracked-retract", 16, "States inside requests whose answers outgrow the pool.", outgrow=True)
_tracked("mamba-tracked-lpm", 16, "States inside requests, longest prefix first.", schedule_policy="lpm")
_tracked("mamba-tracked-abort", 16, "States inside requests, aborts.", aborted=0.4, chunked_prefill_size=128)


# -- states of admission ----------------------------------------------------------------------------------------------


def admission_state(seed: int) -> dict[str, Any]:
    """A batch that decodes, a prompt under way or none, prompts that wait, and what there is for them."""
    rng = random.Random(f"admission@{seed}")
    page = rng.choice([1, 16, 64])
    pages = rng.choice([64, 400, 2000]) * 16 // page
    free = rng.randint(0, pages)
    off = rng.random() < 0.2
    chunk = rng.choice([None, rng.randint(1, 12) * max(page, 32)])
    running = [[rng.randint(1, 900), rng.randint(0, 200), rng.randint(201, 900)] for _ in range(rng.randint(0, 12))]
    waiting = []
    for _ in range(rng.randint(1, 8)):
        prompt, output = rng.randint(1, 1500), rng.choice([0, 0, 0, rng.randint(1, 100)])
        cached = 0 if off or rng.random() < 0.5 else rng.randint(0, (prompt + output - 1) // page) * page
        waiting.append([prompt, output, output + rng.choice([1, rng.randint(1, 800), 5000]), cached])
    chunked = None
    if chunk is not None and rng.random() < 0.4:
        prompt = rng.randint(2, 3000)
        chunked = [prompt, rng.randint(1, prompt - 1), rng.randint(1, 800)]
    evictable = 0 if off else pages - free
    held = sum(cached for *_, cached in waiting)
    return {
        "page": page,
        "free": free,
        "evictable": max(evictable, -(-held // page)),
        "disable_radix_cache": off,
        "ignore_eos": rng.random() < 0.4,
        "ratio": rng.choice([0.7, 0.098, rng.random()]),
        "inputs": rng.choice([16384, rng.randint(1, 2000)]),
        "chunk": chunk,
        "mixed": chunk is not None and rng.random() < 0.3,
        "running": running,
        "waiting": waiting,
        "chunked": chunked,
    }
