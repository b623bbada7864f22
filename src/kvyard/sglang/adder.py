"""Answers of SGLang's prefill adder in a given state."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from kvyard.sglang.absent import Anything
from kvyard.sglang.memory import DEVICE


class LockedTree(Anything):
    """Stands for a tree of which only the number of evictable tokens is asked; a lock holds a request's prefix."""

    disable = False
    buffer_pipeline = None

    def __init__(self, evictable: int, disable: bool) -> None:
        self.evictable = evictable
        self.disable = disable

    def evictable_size(self) -> int:
        return self.evictable

    def supports_mamba(self) -> bool:
        return False

    def lock(self, tokens: int) -> int:
        self.evictable -= tokens
        return tokens

    def unlock(self, tokens: int) -> None:
        self.evictable += tokens


def admit(state: dict[str, Any]) -> list[list[Any]]:
    """Ask the real ``PrefillAdder`` which prompts of a state get into a batch: tokens computed of each, and its answer."""
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.sampling.sampling_params import SamplingParams

    def request(name: str, prompt: int, output: int, answer: int, cached: int) -> Any:
        params = SamplingParams(max_new_tokens=answer, ignore_eos=state["ignore_eos"])
        req = Req(name, "", array("q", range(prompt)), params)
        req.output_ids = array("q", range(output))
        req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
        req.prefix_len, req.last_node = cached, cached
        return req

    page, free, evictable = state["page"], state["free"] * state["page"], state["evictable"] * state["page"]
    kv_cache = SimpleNamespace(device=DEVICE)
    allocator: Any = TokenToKVPoolAllocator(free, torch.float16, DEVICE, kv_cache, need_sort=False)
    if page > 1:
        allocator = PagedTokenToKVPoolAllocator(free, page, torch.float16, DEVICE, kv_cache, need_sort=False)
    decoding = [
        request(f"d{at}", prompt, output, answer, 0) for at, (prompt, output, answer) in enumerate(state["running"])
    ]
    running = SimpleNamespace(reqs=decoding)
    adder = PrefillAdder(
        page,
        LockedTree(evictable, state["disable_radix_cache"]),
        allocator,
        running,
        state["ratio"],
        state["inputs"],
        state["chunk"],
        len(running.reqs) if state["mixed"] else 0,
        prefill_max_requests=None,
    )
    answers: list[list[Any]] = []
    chunked = None
    if state["chunked"] is not None:
        prompt, past, answer = state["chunked"]
        req = request("c", prompt, 0, answer, past)
        chunked = adder.add_chunked_req(req)
        answers.append([req.extend_len, "CONTINUED" if chunked is not None else "LAST"])
    for at, (prompt, output, answer, cached) in enumerate(state["waiting"]):
        if adder.budget_state() == AddReqResult.OTHER:
            break
        req = request(f"w{at}", prompt, output, answer, cached)
        before = len(adder.can_run_list)
        result = adder.add_one_req(req, has_chunked_req=chunked is not None, truncation_align_size=None)
        answers.append([req.extend_len if len(adder.can_run_list) > before else 0, result.name])
        if result != AddReqResult.CONTINUE:
            break
    return answers
