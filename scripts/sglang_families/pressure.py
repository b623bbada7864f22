"""Families of answers that outgrow the pool and of requests that are aborted."""

from __future__ import annotations

from typing import Any

from sglang_families.plan import FAMILIES, Plan, change_settings, family, pressed, tighten

# -- retraction -------------------------------------------------------------------------------------------------------


def _retracting(name: str, page: int, doc: str, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        tighten(plan, page)
        change_settings(plan, schedule_conservativeness=plan.rng.choice([0.05, 0.2, 0.4]), **settings)
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
    tighten(plan, 16, (200, 300))
    plan.requests, plan.output, plan.gap_ns = (10, 20), (300, 900), (0, 900_000_000)


# -- many retractions -------------------------------------------------------------------------------------------------


def _outgrowing(name: str, page: int, doc: str, **settings: Any) -> None:
    def change(plan: Plan) -> None:
        change_settings(
            plan, page_size=page, num_tokens=plan.rng.randint(1500 // page, 2500 // page) * page, **settings
        )
        change_settings(plan, schedule_conservativeness=plan.rng.choice([0.0, 0.01, 0.05]), max_running_requests=32)
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
        tighten(plan, page, (1600 // page, 4000 // page) if "sliding_window_size" in settings else None)
        change_settings(plan, **settings)
        plan.requests, plan.gap_ns, plan.output = (20, 50), (0, 20_000_000), (1, 160)
        plan.aborted = plan.rng.choice([0.3, 0.6])
        pressed(plan, outgrow=outgrow)
        if outgrow:
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
