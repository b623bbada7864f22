"""Families of hybrid models with sliding windows."""

from __future__ import annotations

from typing import Any

from sglang_families.plan import FAMILIES, Plan, change_settings, pressed, tighten


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
        tighten(plan, page, (1600 // page, 4000 // page))
        size = plan.rng.randint(*window)
        change_settings(
            plan, sliding_window_size=size, swa_full_tokens_ratio=round(plan.rng.uniform(*share), 3), **settings
        )
        plan.gap_ns, plan.output = (0, 40_000_000), (1, 160)
        pressed(plan, outgrow=outgrow)

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
