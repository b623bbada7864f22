"""Families with host memory (HiCache), below full attention and below sliding windows."""

from __future__ import annotations

from typing import Any

from sglang_families.plan import FAMILIES, Plan, change_settings, pressed, tighten


def hicache_family(
    name: str,
    page: int,
    doc: str,
    *,
    policy: str = "write_through",
    host: float = 2.0,
    per_page: tuple[int, int] = (100, 60_000),
    outgrow: bool = False,
    aborted: float = 0.0,
    tokens: tuple[int, int] = (1400, 2600),
    **settings: Any,
) -> None:
    """``host``: host memory at most, in sizes of the device's pool, which has ``tokens``."""

    def change(plan: Plan) -> None:
        tighten(plan, page, (tokens[0] // page, tokens[1] // page))
        change_settings(plan, **settings)
        pages = plan.settings["num_tokens"] // page
        hicache = {
            "write_policy": policy,
            "host_pages": plan.rng.randint(max(2, int(pages * host / 2)), max(3, int(pages * host))),
            "first_byte": plan.rng.randrange(0, 200_000),
            "per_page": plan.rng.randrange(*per_page) * page,
        }
        change_settings(plan, hicache=hicache)
        plan.requests, plan.gap_ns, plan.continued, plan.aborted = (24, 60), (0, 60_000_000), 0.5, aborted
        pressed(plan, outgrow=outgrow)

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    hicache_family(f"hicache-p{_page}", _page, f"Write-through to host memory, pages of {_page}.")
    hicache_family(f"hicache-small-p{_page}", _page, f"A small host memory, pages of {_page}.", host=0.5)
    hicache_family(f"hicache-large-p{_page}", _page, f"A large host memory, pages of {_page}.", host=8.0)
    hicache_family(
        f"hicache-selective-p{_page}",
        _page,
        f"What is used twice goes to host memory, pages of {_page}.",
        policy="write_through_selective",
    )
    hicache_family(
        f"hicache-slow-p{_page}", _page, f"Copies that hold the pool up, pages of {_page}.", per_page=(60_000, 900_000)
    )
    hicache_family(
        f"hicache-chunk-p{_page}", _page, f"Host memory and chunks, pages of {_page}.", chunked_prefill_size=64
    )
    hicache_family(f"hicache-overlap-p{_page}", _page, f"Host memory with overlap, pages of {_page}.", overlap=True)
    hicache_family(
        f"write-back-p{_page}", _page, f"What is evicted goes to host memory, pages of {_page}.", policy="write_back"
    )
    hicache_family(
        f"write-back-small-p{_page}",
        _page,
        f"Write-back to a small host memory, pages of {_page}.",
        policy="write_back",
        host=0.5,
    )
    hicache_family(
        f"write-back-overlap-p{_page}",
        _page,
        f"Write-back with overlap, pages of {_page}.",
        policy="write_back",
        overlap=True,
    )
for _policy in ("lfu", "fifo", "mru", "filo", "priority", "slru"):
    hicache_family(
        f"hicache-{_policy}", 16, f"Host memory with eviction {_policy}.", radix_eviction_policy=_policy, host=1.0
    )
hicache_family(
    "hicache-mixed",
    16,
    "Host memory, chunks and decodes in one batch.",
    chunked_prefill_size=64,
    enable_mixed_chunk=True,
)
hicache_family("hicache-retract", 16, "Host memory where answers outgrow the pool.", outgrow=True)
hicache_family("write-back-large", 16, "Write-back to a large host memory.", policy="write_back", host=8.0)
hicache_family(
    "write-back-retract", 16, "Write-back where answers outgrow the pool.", policy="write_back", outgrow=True
)
hicache_family("write-back-lpm", 16, "Write-back, longest prefix first.", policy="write_back", schedule_policy="lpm")
hicache_family("write-back-lfu", 16, "Write-back with eviction lfu.", policy="write_back", radix_eviction_policy="lfu")
hicache_family("write-back-slow", 16, "Write-back by slow copies.", policy="write_back", per_page=(60_000, 900_000))
hicache_family(
    "write-back-mixed",
    16,
    "Write-back, chunks and decodes in one batch, aborts.",
    policy="write_back",
    chunked_prefill_size=64,
    enable_mixed_chunk=True,
    aborted=0.4,
)
hicache_family("hicache-lpm", 16, "Host memory, longest prefix first.", schedule_policy="lpm")
hicache_family(
    "hicache-shortest", 16, "Host memory, the shortest prompt first.", schedule_policy="shortest-prefill-first"
)
hicache_family("hicache-preempt", 16, "Host memory, by priority, with preemption.", enable_priority_scheduling=True)
hicache_family("hicache-abort", 16, "Host memory and aborts.", aborted=0.4, chunked_prefill_size=64)
hicache_family(
    "hicache-overlap-chunk",
    16,
    "Host memory with overlap, chunks and decodes in one batch.",
    overlap=True,
    chunked_prefill_size=64,
    enable_mixed_chunk=True,
)
hicache_family(
    "hicache-overlap-retract",
    16,
    "Host memory with overlap where answers outgrow the pool.",
    overlap=True,
    outgrow=True,
)


# -- below windows ----------------------------------------------------------------------------------------------------


def _windows_on_host(name: str, page: int, doc: str, *, window: tuple[int, int] = (20, 200), **given: Any) -> None:
    hicache_family(name, page, doc, **given)
    below = FAMILIES[name]

    def change(plan: Plan) -> None:
        below(plan)
        share = round(plan.rng.uniform(0.5, 1.0), 3)
        change_settings(plan, sliding_window_size=plan.rng.randint(*window), swa_full_tokens_ratio=share)

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
