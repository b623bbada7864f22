"""States of SGLang's prefill adder."""

from __future__ import annotations

import random
from typing import Any


def admission_state(seed: int) -> dict[str, Any]:
    """A batch that decodes, a prompt under way or none, prompts that wait, and what there is for them."""
    rng = random.Random(f"admission@{seed}")
    page = rng.choice([1, 16, 64])
    pages = rng.choice([64, 400, 2000]) * 16 // page
    free = rng.randint(0, pages)
    off = rng.random() < 0.2
    chunk = rng.choice([None, rng.randint(1, 12) * max(page, 32)])
    running = [[rng.randint(1, 900), rng.randint(0, 200), rng.randint(201, 900)] for _ in range(rng.randint(0, 12))]
    waiting = []
    for _ in range(rng.randint(1, 8)):
        prompt, output = rng.randint(1, 1500), rng.choice([0, 0, 0, rng.randint(1, 100)])
        cached = 0 if off or rng.random() < 0.5 else rng.randint(0, (prompt + output - 1) // page) * page
        waiting.append([prompt, output, output + rng.choice([1, rng.randint(1, 800), 5000]), cached])
    chunked = None
    if chunk is not None and rng.random() < 0.4:
        prompt = rng.randint(2, 3000)
        chunked = [prompt, rng.randint(1, prompt - 1), rng.randint(1, 800)]
    evictable = 0 if off else pages - free
    held = sum(cached for *_, cached in waiting)
    return {
        "page": page,
        "free": free,
        "evictable": max(evictable, -(-held // page)),
        "disable_radix_cache": off,
        "ignore_eos": rng.random() < 0.4,
        "ratio": rng.choice([0.7, 0.098, rng.random()]),
        "inputs": rng.choice([16384, rng.randint(1, 2000)]),
        "chunk": chunk,
        "mixed": chunk is not None and rng.random() < 0.3,
        "running": running,
        "waiting": waiting,
        "chunked": chunked,
    }
