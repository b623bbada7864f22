"""Cases that a hunt of SGLang tries: settings and requests, drawn at random, changed at random, and made smaller.

A case is plain JSON, as ``driver`` takes it. No request is longer than the pool has room for: SGLang would clip its answer.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from kvyard.lab.hunt.simpler import earlier, fewer_requests, shorter_prompts, without_each

Case = dict[str, Any]

TEXTS = 4
"""Prefixes that requests of a case share."""
SPACING = 1 << 14
"""Token ids between two texts."""
FRESH = 1 << 20
"""First token id of texts that no other request has."""
POLICIES = ("fcfs", "fcfs", "lpm", "lof", "dfs-weight", "random")
EVICTIONS = ("lru", "lru", "lru", "lfu", "fifo", "mru", "filo", "slru", "priority")


def draw(rng: random.Random) -> Case:
    """Return a case by chance."""
    page = rng.choice([1, 4, 16])
    priorities = rng.random() < 0.3
    settings: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "page_size": page,
        "num_tokens": page * rng.randint(8, 60) if page > 1 else rng.randint(60, 400),
        "max_running_requests": rng.choice([1, 2, 4, 16]),
        "max_prefill_tokens": rng.choice([16384, 16384, 32, 128]),
        "chunked_prefill_size": rng.choice([8192, 8192, None, 2 * max(page, 8), 4 * max(page, 8)]),
        "enable_mixed_chunk": rng.random() < 0.25,
        "schedule_policy": "fcfs" if priorities else rng.choice(POLICIES),
        "schedule_conservativeness": rng.choice([1.0, 1.0, 0.05, 0.3, 1.5]),
        "disable_radix_cache": rng.random() < 0.15,
        "radix_eviction_policy": rng.choice(EVICTIONS),
        "overlap": rng.random() < 0.5,
        "enable_priority_scheduling": priorities,
    }
    if priorities:
        settings["priority_scheduling_preemption_threshold"] = rng.choice([0, 1, 10])
    if rng.random() < 0.2:
        settings["sliding_window_size"] = page * rng.randint(1, 6)
        settings["swa_full_tokens_ratio"] = rng.choice([0.3, 0.5, 0.8, 1.0])
        settings["radix_eviction_policy"] = "lru"
    case: Case = {"settings": settings, "requests": []}
    for _ in range(rng.randint(1, 10)):
        case["requests"].append(draw_request(rng, case))
    return _named(case)


def capacity(settings: dict[str, Any]) -> int:
    """Return tokens that one request may have, its answer included."""
    page: int = settings["page_size"]
    pages = int(settings["num_tokens"] * settings.get("swa_full_tokens_ratio", 1.0)) // page
    return (pages - 2) * page - 1


def draw_request(rng: random.Random, case: Case) -> dict[str, Any]:
    """Return one request for a case."""
    most = max(2, capacity(case["settings"]))
    prompt = rng.randint(1, most - 1)
    output = rng.choice([1, rng.randint(1, most - prompt), most - prompt])
    shared = rng.choice([0, 0, prompt, rng.randint(0, prompt)])
    own = FRESH + rng.randrange(1_000) * SPACING
    parts = [[SPACING * rng.randint(1, TEXTS), shared], [own, prompt - shared]]
    request: dict[str, Any] = {
        "at": rng.choice([0, 0, rng.randint(0, 40)]),
        "prompt": [part for part in parts if part[1]],
        "output": [(1 << 26) + rng.randrange(1_000) * SPACING, output],
    }
    if case["settings"]["enable_priority_scheduling"]:
        request["priority"] = rng.randint(0, 20)
    if rng.random() < 0.15:
        request["abort"] = request["at"] + rng.randint(0, 30)
    if rng.random() < 0.1:
        request["salt"] = str(rng.randint(1, 2))
    return request


def change(case: Case, rng: random.Random) -> Case:
    """Return a case like ``case``: a few requests or settings are others."""
    changed = copy.deepcopy(case)
    for _ in range(rng.randint(1, 3)):
        requests, settings = changed["requests"], changed["settings"]
        kind = rng.randrange(6)
        if kind == 0 and len(requests) < 16:
            requests.append(draw_request(rng, changed))
        elif kind == 1 and len(requests) > 1:
            requests.pop(rng.randrange(len(requests)))
        elif kind == 2:
            requests[rng.randrange(len(requests))] = draw_request(rng, changed)
        elif kind == 3:
            rng.choice(requests)["at"] = rng.randint(0, 40)
        elif kind == 4:
            settings["overlap"] = not settings["overlap"]
        else:
            settings["schedule_conservativeness"] = rng.choice([1.0, 0.05, 0.3, 1.5])
    return _named(changed)


def smaller(case: Case) -> Iterator[Case]:
    """Yield simpler cases than ``case``, the largest steps first."""
    requests, settings = case["requests"], case["settings"]
    for fewer in fewer_requests(requests):
        yield _named({**case, "requests": fewer})
    for name, value in PLAIN.items():
        if name in settings and settings[name] != value:
            yield {**case, "settings": {**settings, name: value}}
    if "sliding_window_size" in settings:
        without = {"sliding_window_size", "swa_full_tokens_ratio"}
        yield {**case, "settings": {name: value for name, value in settings.items() if name not in without}}
    for at, request in enumerate(requests):
        for simple in _smaller_request(request):
            yield {**case, "requests": [*requests[:at], simple, *requests[at + 1 :]]}


PLAIN: dict[str, Any] = {
    "seed": 0,
    "overlap": False,
    "enable_mixed_chunk": False,
    "schedule_policy": "fcfs",
    "schedule_conservativeness": 1.0,
    "disable_radix_cache": False,
    "radix_eviction_policy": "lru",
    "enable_priority_scheduling": False,
    "chunked_prefill_size": 8192,
    "max_prefill_tokens": 16384,
    "max_running_requests": 16,
    "swa_full_tokens_ratio": 1.0,
}
"""Settings that need no explanation in a reproducer."""


def _smaller_request(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from without_each(request, ("abort", "salt", "priority"))
    yield from earlier(request)
    first, output = request["output"]
    for less in (1, output // 2, output - 1):
        if 0 < less < output:
            yield {**request, "output": [first, less]}
    yield from shorter_prompts(request)


def features(case: Case) -> set[str]:
    """Return the features of a case beside plain requests: findings that differ in them are listed apart."""
    settings = case["settings"]
    found = {
        "windows": "sliding_window_size" in settings,
        "overlap": settings["overlap"],
        "mixed chunks": settings["enable_mixed_chunk"],
        "priorities": settings["enable_priority_scheduling"],
        "no radix cache": settings["disable_radix_cache"],
        "chunks": (settings["chunked_prefill_size"] or 8192) < settings["num_tokens"],
        "aborts": any("abort" in request for request in case["requests"]),
    }
    return {name for name, needed in found.items() if needed}


def _named(case: Case) -> Case:
    """Return ``case`` with names by position. An abort concerns all names that begin with its own, so all are equally long."""
    return {
        **case,
        "requests": [{"request": f"r{at:02}", **_unnamed(each)} for at, each in enumerate(case["requests"])],
    }


def _unnamed(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "request"}
