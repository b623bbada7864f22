"""Families with draft tokens: EAGLE, whose tree is of pairs of tokens, a model of its own, and n-grams."""

from __future__ import annotations

from typing import Any

from sglang_families.plan import (
    FAMILIES,
    Plan,
    change_settings,
    draft_reserve,
    pressed,
    request_capacity,
    tighten,
)

LEAST_CAPACITY = 400
"""Tokens that a request may have at least, prompt and answer: the slots for trees of drafts can take a small pool."""


def drafter(plan: Plan, algorithm: str, *, trees: bool = False) -> dict[str, Any]:
    """Settings of a drafter; ``trees``: it proposes several tokens at a position."""
    steps = plan.rng.randint(1, 6)
    topk = plan.rng.choice((2, 4, 8)) if trees else 1
    if algorithm == "NGRAM":
        drafted = plan.rng.randint(2, 12)
        return {"algorithm": algorithm, "num_steps": drafted, "eagle_topk": 1, "num_draft_tokens": drafted}
    drafted = plan.rng.randint(steps + 1, steps * topk + 1) if trees else steps + 1
    return {"algorithm": algorithm, "num_steps": steps, "eagle_topk": topk, "num_draft_tokens": drafted}


def add_drafts(plan: Plan, algorithm: str, *, trees: bool = False) -> None:
    """Add a drafter, and tokens where its slots would take too many."""
    change_settings(plan, speculative=drafter(plan, algorithm, trees=trees))
    if request_capacity(plan.settings) < LEAST_CAPACITY:
        change_settings(plan, num_tokens=plan.settings["num_tokens"] + draft_reserve(plan.settings))


def _drafted(
    name: str,
    page: int,
    doc: str,
    *,
    algorithm: str = "EAGLE",
    trees: bool = False,
    outgrow: bool = False,
    aborted: float = 0.0,
    window: tuple[int, int] | None = None,
    **settings: Any,
) -> None:
    def change(plan: Plan) -> None:
        tighten(plan, page, (1600 // page, 4000 // page))
        change_settings(plan, **settings)
        add_drafts(plan, algorithm, trees=trees)
        if window is not None:
            share = round(plan.rng.uniform(0.6, 1.0), 3)
            change_settings(plan, sliding_window_size=plan.rng.randint(*window), swa_full_tokens_ratio=share)
        plan.gap_ns, plan.output, plan.continued, plan.aborted = (0, 30_000_000), (1, 160), 0.45, aborted
        pressed(plan, outgrow=outgrow)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _drafted(f"eagle-p{_page}", _page, f"Drafts of EAGLE, pages of {_page}.")
    _drafted(f"eagle-overlap-p{_page}", _page, f"Drafts of EAGLE with overlap, pages of {_page}.", overlap=True)
    _drafted(f"eagle-tree-p{_page}", _page, f"Trees of drafts, pages of {_page}.", trees=True)
    _drafted(f"ngram-p{_page}", _page, f"Drafts of n-grams, pages of {_page}.", algorithm="NGRAM")
    _drafted(
        f"eagle-retract-p{_page}", _page, f"Drafts where answers outgrow the pool, pages of {_page}.", outgrow=True
    )
    _drafted(f"eagle-chunk-p{_page}", _page, f"Drafts and chunks, pages of {_page}.", chunked_prefill_size=128)
    _drafted(
        f"eagle-mixed-p{_page}",
        _page,
        f"Drafts, chunks and decodes in one batch, pages of {_page}.",
        chunked_prefill_size=128,
        enable_mixed_chunk=True,
    )
    _drafted(f"eagle-swa-p{_page}", _page, f"Drafts and windows, pages of {_page}.", window=(10, 200))
_drafted("eagle-overlap-retract", 16, "Drafts, overlap, answers outgrow the pool.", overlap=True, outgrow=True)
_drafted("eagle-overlap-retract-p1", 1, "Drafts, overlap, answers outgrow the pool.", overlap=True, outgrow=True)
_drafted(
    "eagle-overlap-mixed",
    16,
    "Drafts, overlap, chunks and decodes in one batch.",
    overlap=True,
    chunked_prefill_size=128,
    enable_mixed_chunk=True,
)
_drafted("eagle-overlap-abort", 16, "Drafts, overlap, aborts.", overlap=True, aborted=0.4, chunked_prefill_size=128)
_drafted("eagle-abort", 16, "Drafts and aborts.", aborted=0.4, chunked_prefill_size=128)
_drafted("eagle-off", 16, "Drafts without prefix caching.", disable_radix_cache=True)
_drafted("eagle-lpm", 16, "Drafts, longest prefix first.", schedule_policy="lpm")
_drafted("eagle-lfu", 16, "Drafts with eviction lfu.", radix_eviction_policy="lfu")
_drafted("eagle-preempt", 16, "Drafts, by priority, with preemption.", enable_priority_scheduling=True)
_drafted("eagle-swa-overlap", 16, "Drafts, windows, overlap.", window=(10, 200), overlap=True)
_drafted(
    "eagle-swa-chunk", 16, "Drafts, windows, chunks, aborts.", window=(10, 200), chunked_prefill_size=128, aborted=0.3
)
_drafted("eagle-eos-off", 16, "Drafts, answers of known length.", disable_radix_cache=True, ignore_eos=True)
_drafted("standalone", 16, "Drafts of a model of its own.", algorithm="STANDALONE")
_drafted("standalone-tree", 16, "Trees of drafts of a model of its own.", algorithm="STANDALONE", trees=True)
_drafted("ngram-overlap", 16, "Drafts of n-grams, overlap.", algorithm="NGRAM", overlap=True)
_drafted("ngram-retract", 1, "Drafts of n-grams, answers outgrow the pool.", algorithm="NGRAM", outgrow=True)
