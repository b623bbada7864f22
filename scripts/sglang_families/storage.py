"""Families with files behind HiCache's host memory, and prefetches from them."""

from __future__ import annotations

from typing import Any

from sglang_families.drafts import add_drafts
from sglang_families.host import hicache_family
from sglang_families.plan import FAMILIES, Plan


def draw_storage(plan: Plan, prefetch: str, threshold: tuple[int, int], slow: tuple[int, ...]) -> None:
    """Draw files behind the host memory of ``plan``. ``threshold``: of a prefetch, in pages of 16 tokens. ``slow``: times
    that a page takes from storage, in times that it takes from the host.
    """
    rng, hicache = plan.rng, plan.settings["hicache"]
    hicache["storage"] = {
        "prefetch_policy": prefetch,
        "prefetch_threshold": rng.randint(*threshold) * 16,
        "prefetch_timeout_base": rng.choice((0.0, 0.002, 0.01, 1.0)),
        "prefetch_timeout_per_ki_token": rng.choice((0.0, 0.01, 0.25)),
        "retry_poll_interval": rng.choice((0, 1, 3, 8)),
        "retry_max_attempts": rng.choice((0, 1, 8)),
        "first_byte": rng.randrange(1, rng.choice((50_000, 5_000_000, 30_000_000))),
        "per_page": hicache["per_page"] * rng.choice(slow),
        "pages": None,
    }


def storage_family(
    name: str,
    page: int,
    doc: str,
    *,
    prefetch: str = "timeout",
    host: float = 0.8,
    per_page: tuple[int, int] = (100, 8_000),
    slow: tuple[int, ...] = (1, 2, 5, 10),
    threshold: tuple[int, int] = (1, 3),
    pages: tuple[float, float] | None = None,
    drafts: str | None = None,
    **given: Any,
) -> None:
    """``pages``: pages of storage at most, in sizes of the device's pool; without limit if not given."""
    hicache_family(name, page, doc, host=host, per_page=per_page, tokens=(1800, 4200), **given)
    below = FAMILIES[name]

    def change(plan: Plan) -> None:
        below(plan)
        if not given.get("outgrow"):
            # Time enough to write what is computed, and requests that ask for what was evicted.
            plan.requests, plan.gap_ns = (40, 80), (0, plan.rng.choice((60, 200, 400, 800)) * 1_000_000)
            plan.prompt, plan.output = (20, 400), (1, 50)
        plan.continued, plan.repeated = 0.4, 0.25
        draw_storage(plan, prefetch, threshold, slow)
        if pages is not None:
            size = plan.settings["num_tokens"] // page
            plan.settings["hicache"]["storage"]["pages"] = max(2, int(size * plan.rng.uniform(*pages)))
        if drafts is not None:
            add_drafts(plan, drafts)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    for _prefetch in ("best_effort", "wait_complete", "timeout"):
        _name = _prefetch.replace("_", "-")
        storage_family(
            f"l3-{_name}-p{_page}", _page, f"Files behind the host, {_prefetch}, pages of {_page}.", prefetch=_prefetch
        )
    storage_family(
        f"l3-selective-p{_page}", _page, f"What is used twice, pages of {_page}.", policy="write_through_selective"
    )
    storage_family(
        f"l3-write-back-p{_page}", _page, f"What is evicted, pages of {_page}.", policy="write_back", host=4.0
    )
    storage_family(
        f"l3-small-p{_page}", _page, f"A host of a few requests, pages of {_page}.", host=0.25, threshold=(1, 2)
    )
    storage_family(f"l3-large-p{_page}", _page, f"A large host, pages of {_page}.", host=4.0)
    storage_family(f"l3-limit-p{_page}", _page, f"Files have a limit, pages of {_page}.", pages=(1.0, 4.0))
    storage_family(f"l3-overlap-p{_page}", _page, f"Files with overlap, pages of {_page}.", overlap=True)
for _prefetch in ("best_effort", "wait_complete", "timeout"):
    _name = _prefetch.replace("_", "-")
    storage_family(f"l3-{_name}-abort", 16, f"Files, {_prefetch} and aborts.", prefetch=_prefetch, aborted=0.4)
    storage_family(
        f"l3-{_name}-retract",
        16,
        f"Files, {_prefetch}, where answers outgrow the pool.",
        prefetch=_prefetch,
        outgrow=True,
    )
    storage_family(
        f"l3-{_name}-overlap",
        16,
        f"Files, {_prefetch}, with overlap, aborts, chunks and decodes in one batch.",
        prefetch=_prefetch,
        overlap=True,
        aborted=0.3,
        chunked_prefill_size=64,
        enable_mixed_chunk=True,
    )
    storage_family(f"l3-{_name}-slow", 16, f"Files, {_prefetch}, slow copies.", prefetch=_prefetch, slow=(20, 50))
storage_family("l3-slow-host", 16, "Files, and slow copies to the host.", per_page=(60_000, 900_000))
storage_family("l3-best-effort-limit", 16, "Few files, best effort.", prefetch="best_effort", pages=(0.5, 2.0))
storage_family("l3-wait-complete-limit", 16, "Few files, waited for.", prefetch="wait_complete", pages=(0.5, 2.0))
storage_family("l3-chunk", 16, "Files and chunks.", chunked_prefill_size=64)
storage_family("l3-preempt", 16, "Files, by priority, with preemption.", enable_priority_scheduling=True)
storage_family("l3-lpm", 16, "Files, longest prefix first.", schedule_policy="lpm")
storage_family("l3-shortest", 16, "Files, shortest prompt first.", schedule_policy="shortest-prefill-first")
for _eviction in ("lfu", "fifo", "mru", "filo", "priority", "slru"):
    storage_family(f"l3-{_eviction}", 16, f"Files with eviction {_eviction}.", radix_eviction_policy=_eviction)
for _drafts in ("EAGLE", "NGRAM"):
    storage_family(f"l3-{_drafts.lower()}", 16, f"Files and drafts of {_drafts}.", drafts=_drafts)
storage_family("l3-eagle-overlap", 1, "Files and drafts of EAGLE with overlap.", drafts="EAGLE", overlap=True)
storage_family(
    "l3-write-back-overlap", 16, "What is evicted, with overlap.", policy="write_back", host=4.0, overlap=True
)
storage_family(
    "l3-write-back-abort",
    16,
    "What is evicted, and aborts.",
    policy="write_back",
    host=4.0,
    aborted=0.4,
    threshold=(1, 2),
)
storage_family(
    "l3-write-back-best-effort",
    16,
    "What is evicted, best effort.",
    policy="write_back",
    host=4.0,
    prefetch="best_effort",
)
