"""Families of models with states of recurrent layers (Mamba)."""

from __future__ import annotations

from typing import Any

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
