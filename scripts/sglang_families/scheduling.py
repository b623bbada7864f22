"""Families of the tree, admission, chunks, retraction, scheduling policies and overlap."""

from __future__ import annotations

from typing import Any

from sglang_families.plan import FAMILIES, Plan, change_settings, family, tighten

# -- the tree ---------------------------------------------------------------------------------------------------------


@family
def radix_p1(plan: Plan) -> None:
    """A tree of single tokens in a large pool."""
    change_settings(plan, page_size=1, num_tokens=8192)


@family
def radix_p16(plan: Plan) -> None:
    """A tree of pages of 16 in a large pool."""
    change_settings(plan, page_size=16, num_tokens=8192)


@family
def radix_p64(plan: Plan) -> None:
    """A tree of pages of 64 in a large pool."""
    change_settings(plan, page_size=64, num_tokens=16384)


@family
def radix_split(plan: Plan) -> None:
    """Texts that part within each other's runs, page by page."""
    tighten(plan, 1)
    plan.shared, plan.continued, plan.repeated, plan.prompt = 1.0, 0.5, 0.2, (1, 60)


@family
def radix_off(plan: Plan) -> None:
    """Without prefix caching."""
    tighten(plan)
    change_settings(plan, disable_radix_cache=True)


def _evicting(policy: str, page: int) -> None:
    def change(plan: Plan) -> None:
        tighten(plan, page)
        change_settings(plan, radix_eviction_policy=policy)
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
    tighten(plan, 1)
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 200)


@family
def admit_p16(plan: Plan) -> None:
    """More requests than fit, pages of 16."""
    tighten(plan, 16)
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 200)


@family
def admit_p64(plan: Plan) -> None:
    """More requests than fit, pages of 64."""
    tighten(plan, 64, (24, 60))
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 200)


@family
def admit_rows(plan: Plan) -> None:
    """More requests than may run at once."""
    change_settings(plan, max_running_requests=plan.rng.randint(1, 5))
    plan.gap_ns = (0, 10_000_000)


@family
def admit_cap(plan: Plan) -> None:
    """A small limit of prompt tokens in a batch."""
    change_settings(plan, max_prefill_tokens=plan.rng.randint(64, 600), chunked_prefill_size=None)
    plan.gap_ns = (0, 5_000_000)


@family
def admit_few(plan: Plan) -> None:
    """A limit of prompts in a batch."""
    change_settings(plan, prefill_max_requests=plan.rng.randint(1, 3))
    plan.gap_ns = (0, 5_000_000)


@family
def admit_bold(plan: Plan) -> None:
    """Little room is set aside for answers."""
    tighten(plan, 16)
    change_settings(plan, schedule_conservativeness=plan.rng.choice([0.1, 0.3, 0.6]))
    plan.gap_ns, plan.output = (0, 5_000_000), (40, 300)


@family
def admit_timid(plan: Plan) -> None:
    """All answers have room set aside."""
    tighten(plan, 16)
    change_settings(plan, schedule_conservativeness=plan.rng.choice([1.2, 1.5, 3.0]))
    plan.gap_ns, plan.output = (0, 5_000_000), (40, 300)


# -- chunks -----------------------------------------------------------------------------------------------------------


def _chunked(name: str, page: int, *, mixed: bool = False, tight: bool = False, doc: str) -> None:
    def change(plan: Plan) -> None:
        if tight:
            tighten(plan, page)
        change_settings(
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


# -- policies ---------------------------------------------------------------------------------------------------------


def _policy_family(name: str, policy: str, doc: str, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        tighten(plan, plan.rng.choice([1, 16]))
        change_settings(plan, schedule_policy=policy, **settings)
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
    change_settings(plan, schedule_policy="lpm", max_running_requests=4)
    plan.requests, plan.gap_ns, plan.output, plan.prompt = (140, 180), (0, 200_000), (1, 20), (1, 120)


@family
def twins(plan: Plan) -> None:
    """Longest cached prefix first; many begin alike with nothing cached yet."""
    change_settings(plan, schedule_policy="lpm", page_size=plan.rng.choice([1, 16]))
    plan.shared, plan.continued, plan.gap_ns, plan.burst = 1.0, 0.1, (0, 50_000_000), 0.8


@family
def refresh(plan: Plan) -> None:
    """Requests that wait long enough to have their prefixes touched, in a pool that is evicted from."""
    tighten(plan, 1)
    change_settings(plan, max_running_requests=3)
    plan.requests, plan.gap_ns, plan.output = (50, 80), (0, 500_000), (1, 30)


# -- answers of known length ------------------------------------------------------------------------------------------


@family
def ignore_eos(plan: Plan) -> None:
    """Answers have room set aside in full."""
    tighten(plan, 16)
    change_settings(plan, ignore_eos=True)
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 200)


@family
def ignore_eos_off(plan: Plan) -> None:
    """Answers of known length without prefix caching: admission looks at when each request ends."""
    tighten(plan, plan.rng.choice([1, 16]))
    change_settings(plan, ignore_eos=True, disable_radix_cache=True)
    plan.gap_ns, plan.output = (0, 5_000_000), (1, 300)


# -- overlap ----------------------------------------------------------------------------------------------------------


def _overlapping(name: str, doc: str, page: int = 16, *, outgrow: bool = False, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        tighten(plan, page)
        change_settings(plan, overlap=True, **settings)
        plan.gap_ns = (0, 15_000_000)
        if outgrow:
            change_settings(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]))
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
