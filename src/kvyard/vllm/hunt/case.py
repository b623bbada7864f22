"""Cases that a hunt tries: settings and requests, drawn at random, changed at random, and made smaller.

A case is plain JSON, as ``driver`` takes it. Every case that is drawn is one that vLLM would start with: the pool has room
for a request of ``max_model_len`` tokens, and no request is longer.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from kvyard.integers import ceil_div
from kvyard.lab.hunt.simpler import earlier, fewer_requests, shorter_prompts, without_each

Case = dict[str, Any]

TEXTS = 4
"""Prefixes that requests of a case share."""
LARGEST_TEXT = 100_000
PLAIN: Case = {
    "resets": [],
    "num_speculative_tokens": 0,
    "async_scheduling": False,
    "policy": "fcfs",
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "scheduler_reserve_full_isl": True,
    "kv_load_failure_policy": "recompute",
    "max_num_seqs": 16,
}
"""Settings that need no explanation in a reproducer."""


def draw(rng: random.Random) -> Case:
    """Return a case by chance."""
    block = rng.choice([4, 16])
    longest = block * rng.randint(8, 40)
    hybrid = rng.random() < 0.15
    groups = [{"type": "full", "block_size": block}]
    if hybrid:
        groups.append({"type": "sliding_window", "block_size": block, "window": block * rng.randint(1, 4)})
    asynchronous = rng.random() < 0.4
    case: Case = {
        "groups": groups,
        "max_model_len": longest,
        "num_blocks": 1 + _smallest_pool(longest, groups) + rng.choice([0, 0, 1, rng.randint(0, longest // block)]),
        "max_num_seqs": rng.choice([1, 2, 4, 16]),
        "max_num_batched_tokens": rng.choice([block, 2 * block, 64, 256, longest]),
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "async_scheduling": asynchronous,
        "enable_prefix_caching": rng.random() < 0.8,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": rng.choice([0, 0, 0, block]),
        "scheduler_reserve_full_isl": rng.random() < 0.8,
        "num_speculative_tokens": 0 if asynchronous else rng.choice([0, 0, 1, 3]),
        "connector": rng.random() < 0.7,
        "kv_load_failure_policy": rng.choice(["recompute", "recompute", "fail"]),
        "requests": [],
        "resets": [],
    }
    # vLLM asks for a step that has room for every running request and its drafts.
    least = (1 + case["num_speculative_tokens"]) * case["max_num_seqs"]
    case["max_num_batched_tokens"] = max(case["max_num_batched_tokens"], least)
    for _ in range(rng.randint(1, 10)):
        case["requests"].append(draw_request(rng, case))
    if rng.random() < 0.1:
        case["resets"] = sorted(rng.randint(0, 60) for _ in range(rng.randint(1, 2)))
    return case


def draw_request(rng: random.Random, case: Case) -> dict[str, Any]:
    """Return one request for a case."""
    longest = case["max_model_len"]
    prompt = rng.randint(1, longest - 1)
    output = rng.choice([1, rng.randint(1, longest - prompt), longest - prompt])
    shared = rng.choice([0, 0, prompt, rng.randint(0, prompt)])
    # The first token identifies a text; what isn't shared is new.
    own = LARGEST_TEXT * (TEXTS + 1) + rng.randrange(1_000) * LARGEST_TEXT
    parts = [[LARGEST_TEXT * rng.randint(1, TEXTS), shared], [own, prompt - shared]]
    request: dict[str, Any] = {
        "at": rng.choice([0, 0, rng.randint(0, 40)]),
        "prompt": [part for part in parts if part[1]],
        "output": output,
    }
    if case["policy"] == "priority":
        request["priority"] = rng.randint(0, 2)
    if rng.random() < 0.15:
        request["abort"] = request["at"] + rng.randint(0, 30)
    if rng.random() < 0.1:
        request["salt"] = rng.randint(1, 2)
    if case["num_speculative_tokens"]:
        request["holds"] = rng.randint(0, case["num_speculative_tokens"])
    if case["connector"] and rng.random() < 0.7:
        request["load"] = {
            "tokens": rng.choice([prompt, rng.randint(1, prompt)]),
            "steps": rng.choice([None, 1, rng.randint(1, 20), rng.randint(1, 20)]),
            # Connectors report blocks that failed to load; vLLM takes that for one group only.
            "fails": rng.choice([0, 0, 0, 1]) if len(case["groups"]) == 1 else 0,
            "once": rng.random() < 0.5,
            "unknown": rng.choice([0, 0, 0, rng.randint(1, 5)]),
        }
    if case["connector"] and rng.random() < 0.3:
        request["send"] = rng.randint(1, 20)
    return request


def change(case: Case, rng: random.Random) -> Case:
    """Return a case like ``case``: a few requests or settings are others."""
    changed = copy.deepcopy(case)
    for _ in range(rng.randint(1, 3)):
        requests = changed["requests"]
        kind = rng.randrange(5)
        if kind == 0 and len(requests) < 16:
            requests.append(draw_request(rng, changed))
        elif kind == 1 and len(requests) > 1:
            requests.pop(rng.randrange(len(requests)))
        elif kind == 2:
            requests[rng.randrange(len(requests))] = draw_request(rng, changed)
        elif kind == 3:
            rng.choice(requests)["at"] = rng.randint(0, 40)
        else:
            least = _smallest_pool(changed["max_model_len"], changed["groups"])
            changed["num_blocks"] = 1 + least + rng.randint(0, 4)
    return changed


def smaller(case: Case) -> Iterator[Case]:
    """Yield simpler cases than ``case``, the largest steps first."""
    requests = case["requests"]
    for fewer in fewer_requests(requests):
        yield {**case, "requests": fewer}
    plain = {"groups": case["groups"][:1], "max_num_batched_tokens": max(case["max_model_len"], 64), **PLAIN}
    for name, value in plain.items():
        if case[name] != value:
            yield {**case, name: value}
    if case["connector"] and not any(each.get("load") or each.get("send") for each in requests):
        yield {**case, "connector": False}
    for at, request in enumerate(requests):
        for simple in _smaller_request(request):
            yield {**case, "requests": [*requests[:at], simple, *requests[at + 1 :]]}
    longest = max(sum(count for _, count in each["prompt"]) + each["output"] for each in requests)
    for length in (longest, (case["max_model_len"] + longest) // 2):
        if longest <= length < case["max_model_len"]:
            blocks = 1 + _smallest_pool(length, case["groups"])
            yield {**case, "max_model_len": length, "num_blocks": blocks}
            yield {**case, "max_model_len": length}


def _smaller_request(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from without_each(request, ("abort", "salt", "send", "load", "priority", "holds"))
    load = request.get("load")
    if load:
        for name in ("unknown", "fails", "once"):
            if load[name]:
                yield {**request, "load": {**load, name: 0}}
        prompt = sum(count for _, count in request["prompt"])
        for tokens in (prompt, load["tokens"] // 2):
            if 0 < tokens < load["tokens"]:
                yield {**request, "load": {**load, "tokens": tokens}}
        for steps in (1, (load["steps"] or 1) // 2):
            if load["steps"] and 0 < steps < load["steps"]:
                yield {**request, "load": {**load, "steps": steps}}
    yield from earlier(request)
    for output in (1, request["output"] // 2):
        if 0 < output < request["output"]:
            yield {**request, "output": output}
    yield from shorter_prompts(request)


def features(case: Case) -> set[str]:
    """Return the features of a case beside plain requests: findings that differ in them are listed apart."""
    loads = [request["load"] for request in case["requests"] if request.get("load")]
    found = {
        "windows": len(case["groups"]) > 1,
        "drafts": case["num_speculative_tokens"] > 0,
        "asynchronous": case["async_scheduling"],
        "priority": case["policy"] == "priority",
        "failing load": any(load["fails"] for load in loads),
        "load": bool(loads),
        "send": any(request.get("send") for request in case["requests"]),
    }
    return {name for name, needed in found.items() if needed}


def _smallest_pool(length: int, groups: list[dict[str, Any]]) -> int:
    """Return blocks for one request of ``length`` tokens: fewer, and vLLM would not start."""
    return sum(ceil_div(length, group["block_size"]) for group in groups)
