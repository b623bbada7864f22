"""Families of models with states of recurrent layers (Mamba)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_families.drafts import add_drafts
from sglang_families.plan import FAMILIES, Plan, change_settings, pressed, tighten


def _with_states(
    name: str, doc: str, *, most: float = 8.0, outgrow: bool = False, aborted: float = 0.0, **settings: Any
) -> None:
    """``most``: state slots per running request at most. Without a buffer for states inside a request SGLang has pages of one
    token and no overlap.
    """

    def change(plan: Plan) -> None:
        tighten(plan, 1, (1600, 4000))
        change_settings(plan, max_running_requests=plan.rng.randint(2, 12))
        change_settings(plan, **settings)
        rows = plan.settings["max_running_requests"]
        change_settings(plan, max_mamba_cache_size=plan.rng.randint(3 * rows + 1, int(most * rows) + 2))
        plan.requests, plan.gap_ns, plan.output, plan.aborted = (20, 50), (0, 40_000_000), (1, 160), aborted
        plan.continued = 0.5
        pressed(plan, outgrow=outgrow)

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
        change_settings(plan, page_size=page, num_tokens=tokens, max_mamba_cache_size=slots)
        change_settings(
            plan, mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=plan.rng.choice([64, 128, 256])
        )

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


def _lazily_tracked(name: str, page: int, doc: str, **given: Any) -> None:
    """With the second slot of that buffer taken only where a state is written. It needs overlap."""
    _tracked(name, page, doc, overlap=True, **given)
    tracked = FAMILIES[name]

    def change(plan: Plan) -> None:
        tracked(plan)
        change_settings(plan, mamba_radix_cache_strategy="extra_buffer_lazy")
        if given.get("most", 8.0) < 5:
            rows = plan.settings["max_running_requests"]
            change_settings(plan, max_mamba_cache_size=plan.rng.randint(4 * rows, 5 * rows))

    change.__doc__ = doc
    FAMILIES[name] = change


for _page in (1, 16, 64):
    _lazily_tracked(f"mamba-lazy-p{_page}", _page, f"Second slots on demand, pages of {_page}.")
    _lazily_tracked(
        f"mamba-lazy-few-p{_page}", _page, f"Second slots on demand, few slots, pages of {_page}.", most=3.2
    )
_lazily_tracked("mamba-lazy-retract", 16, "Second slots on demand, answers outgrow the pool.", outgrow=True)
_lazily_tracked(
    "mamba-lazy-few-retract", 1, "Second slots on demand, few slots, answers outgrow the pool.", most=3.2, outgrow=True
)
_lazily_tracked(
    "mamba-lazy-abort", 16, "Second slots on demand, chunks, aborts.", aborted=0.4, chunked_prefill_size=128
)
_lazily_tracked(
    "mamba-lazy-mixed",
    16,
    "Second slots on demand, chunks and decodes in one batch.",
    chunked_prefill_size=192,
    enable_mixed_chunk=True,
)
_lazily_tracked("mamba-lazy-lpm", 16, "Second slots on demand, longest prefix first.", schedule_policy="lpm")
_lazily_tracked(
    "mamba-lazy-preempt", 16, "Second slots on demand, by priority, with preemption.", enable_priority_scheduling=True
)


def _states(name: str, page: int, doc: str, *, tracked: bool, lazy: bool, **given: Any) -> Callable[[Plan], None]:
    """Make the family ``name`` with states by one of the three strategies, and return it for another to build on."""
    if lazy:
        _lazily_tracked(name, page, doc, **given)
    elif tracked:
        _tracked(name, page, doc, **given)
    else:
        _with_states(name, doc, **given)
    return FAMILIES[name]


def _add_windows(plan: Plan, sizes: tuple[int, int]) -> None:
    share = round(plan.rng.uniform(0.6, 1.0), 3)
    change_settings(plan, sliding_window_size=plan.rng.randint(*sizes), swa_full_tokens_ratio=share)


def _beside_windows(name: str, page: int, doc: str, *, tracked: bool = True, lazy: bool = False, **given: Any) -> None:
    """States and sliding windows beside full attention."""
    states = _states(name, page, doc, tracked=tracked, lazy=lazy, **given)

    def change(plan: Plan) -> None:
        states(plan)
        _add_windows(plan, (10, 200))

    change.__doc__ = doc
    FAMILIES[name] = change


_beside_windows("mamba-swa", 1, "States and windows.", tracked=False)
_beside_windows("mamba-swa-few", 1, "States and windows, few slots.", tracked=False, most=3.2)
_beside_windows("mamba-swa-chunk", 1, "States and windows, chunks.", tracked=False, chunked_prefill_size=128)
_beside_windows("mamba-swa-retract", 1, "States and windows, answers outgrow the pools.", tracked=False, outgrow=True)
for _page in (1, 16, 64):
    _beside_windows(f"mamba-swa-tracked-p{_page}", _page, f"States inside requests and windows, pages of {_page}.")
    _beside_windows(
        f"mamba-swa-tracked-overlap-p{_page}",
        _page,
        f"States inside requests, windows, overlap, pages of {_page}.",
        overlap=True,
    )
_beside_windows(
    "mamba-swa-tracked-retract", 16, "States inside requests, windows, answers outgrow the pools.", outgrow=True
)
_beside_windows(
    "mamba-swa-tracked-mixed",
    16,
    "States inside requests, windows, overlap, chunks and decodes in one batch.",
    overlap=True,
    chunked_prefill_size=192,
    enable_mixed_chunk=True,
)
_beside_windows("mamba-swa-tracked-few", 16, "States inside requests, windows, few slots.", most=3.2)
_beside_windows(
    "mamba-swa-tracked-abort",
    16,
    "States inside requests, windows, overlap, aborts.",
    overlap=True,
    aborted=0.4,
    chunked_prefill_size=128,
)
_beside_windows("mamba-swa-off", 16, "States and windows without prefix caching.", disable_radix_cache=True)
_beside_windows("mamba-swa-lazy", 16, "Second slots on demand, windows.", lazy=True)
_beside_windows("mamba-swa-lazy-few", 1, "Second slots on demand, windows, few slots.", lazy=True, most=3.2)
_beside_windows("mamba-swa-lpm", 16, "States inside requests, windows, longest prefix first.", schedule_policy="lpm")
_beside_windows("mamba-swa-tracked-chunk", 16, "States inside requests, windows, chunks.", chunked_prefill_size=192)


def _beside_drafts(
    name: str,
    page: int,
    doc: str,
    algorithm: str = "EAGLE",
    *,
    trees: bool = False,
    tracked: bool = True,
    lazy: bool = False,
    window: tuple[int, int] | None = None,
    **given: Any,
) -> None:
    """States and draft tokens."""
    states = _states(name, page, doc, tracked=tracked, lazy=lazy, **given)

    def change(plan: Plan) -> None:
        states(plan)
        add_drafts(plan, algorithm, trees=trees)
        if window is not None:
            _add_windows(plan, window)

    change.__doc__ = doc
    FAMILIES[name] = change


_beside_drafts("mamba-eagle", 1, "States and drafts of EAGLE.", tracked=False)
_beside_drafts("mamba-ngram", 1, "States and drafts of n-grams.", "NGRAM", tracked=False)
for _page in (1, 16, 64):
    _beside_drafts(
        f"mamba-eagle-tracked-p{_page}", _page, f"States inside requests, drafts of EAGLE, pages of {_page}."
    )
    _beside_drafts(
        f"mamba-eagle-overlap-p{_page}",
        _page,
        f"States inside requests, drafts of EAGLE, overlap, pages of {_page}.",
        overlap=True,
    )
for _page in (1, 16, 64):
    _beside_drafts(
        f"mamba-eagle-lazy-p{_page}", _page, f"Second slots on demand, drafts of EAGLE, pages of {_page}.", lazy=True
    )
_beside_drafts("mamba-eagle-lazy-few", 16, "Second slots on demand, drafts, few slots.", lazy=True, most=3.2)
_beside_drafts(
    "mamba-eagle-lazy-few-p1", 1, "Second slots on demand, drafts, few slots, single tokens.", lazy=True, most=3.2
)
_beside_drafts(
    "mamba-eagle-lazy-retract", 16, "Second slots on demand, drafts, answers outgrow the pool.", lazy=True, outgrow=True
)
_beside_drafts(
    "mamba-eagle-lazy-abort",
    16,
    "Second slots on demand, drafts, chunks, aborts.",
    lazy=True,
    aborted=0.4,
    chunked_prefill_size=128,
)
_beside_drafts(
    "mamba-eagle-lazy-mixed",
    16,
    "Second slots on demand, drafts, chunks and decodes in one batch.",
    lazy=True,
    chunked_prefill_size=192,
    enable_mixed_chunk=True,
)
_beside_drafts(
    "mamba-eagle-lazy-mixed-p1",
    1,
    "Second slots on demand, drafts, chunks and decodes in one batch, single tokens.",
    lazy=True,
    chunked_prefill_size=192,
    enable_mixed_chunk=True,
)
_beside_drafts("mamba-eagle-tree", 16, "States inside requests, trees of drafts, overlap.", trees=True, overlap=True)
_beside_drafts(
    "mamba-eagle-mixed",
    16,
    "States inside requests, drafts, chunks and decodes in one batch.",
    chunked_prefill_size=192,
    enable_mixed_chunk=True,
)
_beside_drafts(
    "mamba-eagle-overlap-mixed",
    16,
    "States inside requests, drafts, overlap, chunks and decodes in one batch.",
    overlap=True,
    chunked_prefill_size=192,
    enable_mixed_chunk=True,
)
_beside_drafts(
    "mamba-eagle-overlap-retract",
    16,
    "States inside requests, drafts, overlap, answers outgrow the pool.",
    overlap=True,
    outgrow=True,
)
_beside_drafts("mamba-eagle-retract", 1, "States, drafts, answers outgrow the pool.", tracked=False, outgrow=True)
_beside_drafts(
    "mamba-eagle-abort", 1, "States, drafts, chunks, aborts.", tracked=False, aborted=0.4, chunked_prefill_size=128
)
_beside_drafts(
    "mamba-eagle-overlap-abort", 16, "States inside requests, drafts, overlap, aborts.", overlap=True, aborted=0.4
)
_beside_drafts(
    "mamba-eagle-off", 16, "States and drafts without prefix caching.", overlap=True, disable_radix_cache=True
)
_beside_drafts("mamba-swa-eagle", 1, "States, windows, drafts.", tracked=False, window=(10, 200))
_beside_drafts("mamba-swa-eagle-tracked", 16, "States inside requests, windows, drafts.", window=(10, 200))
_beside_drafts(
    "mamba-swa-eagle-overlap", 16, "States inside requests, windows, drafts, overlap.", overlap=True, window=(10, 200)
)
_beside_drafts("mamba-swa-eagle-lazy", 16, "Second slots on demand, windows, drafts.", lazy=True, window=(10, 200))
_beside_drafts("mamba-ngram-tracked", 16, "States inside requests, drafts of n-grams.", "NGRAM")
_beside_drafts("mamba-ngram-overlap", 16, "States inside requests, drafts of n-grams, overlap.", "NGRAM", overlap=True)
