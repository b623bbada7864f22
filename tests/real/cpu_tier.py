"""Requests for an engine with a CPU tier, and what kvyard's own engine predicts of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from kvyard.blocks import Hints, Retention
from kvyard.engine.build import make_core
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job
from kvyard.engine.timing import FixedTiming
from kvyard.hashing import TokenChain, algorithm
from kvyard.tiers.config import OffloadConfig, TierConfig

BLOCK = 32
BLOCK_BYTES = 32768
"""Of the tiny Llama: keys and values, 2 layers, 2 heads of 32 floats, 32 tokens."""
KEPT, GIVEN_UP = 80, 10
"""Priorities of a conversation that goes on, and of one that doesn't."""


class TierRequest(msgspec.Struct):
    """One request: token ids, how many tokens it asks for, and its wishes."""

    prompt: list[int]
    output: int
    retention: list[Retention]


def conversations(count: int, seed: int) -> list[TierRequest]:
    """``count`` turns of conversations that go on side by side; each turn's prompt is all before it and something new.

    A turn says whether another will follow, as wishes for retention.
    """
    rng = random.Random(seed)
    systems = [_text(rng, rng.randint(40, 300)) for _ in range(4)]
    going: list[tuple[list[int], int]] = []
    made: list[TierRequest] = []
    while len(made) < count:
        if len(going) < 24 and (not going or rng.random() < 0.35):
            going.append((rng.choice(systems), rng.choice([1, 1, 2, 3, 5, 9])))
        said, left = going.pop(min(int(rng.expovariate(0.15)), len(going) - 1))
        said = said + _text(rng, rng.randint(10, 220))
        if len(said) > 1450:
            continue
        priority = KEPT if left > 1 else GIVEN_UP
        made.append(TierRequest(said, rng.randint(2, 6), [Retention(0, None, priority)]))
        if left > 1:
            going.insert(0, (said, left - 1))
    return made


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(count)]


def predict(
    requests: Sequence[TierRequest], *, blocks: int, host_blocks: int, order: str, wave: int = 1
) -> list[tuple[int, int]]:
    """Return the tokens that each request finds on the device and in the host, if ``wave`` of them are sent at a time.

    ``blocks`` are the device's, without the null block.
    """
    tier = TierConfig(num_blocks=host_blocks, eviction=order)
    config = EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks=blocks,
        max_model_len=1500,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        bytes_per_block=BLOCK_BYTES,
        timing=FixedTiming(prefill_ms=10, decode_ms=1),
        tiers=OffloadConfig(tiers=(tier,), last_block="recompute-token"),
    )
    core = make_core(config)
    hashing = algorithm("sha256_cbor")
    jobs: list[Job] = []
    now = 0
    for first in range(0, len(requests), wave):
        for at, request in enumerate(requests[first : first + wave], first):
            job = Job(
                f"r{at}",
                TokenChain(request.prompt, BLOCK, hashing),
                request.output,
                arrival=now,
                hints=Hints(retention=tuple(request.retention) if order == "priority" else ()),
                sample=lambda low, high: [1] * (high - low),
            )
            jobs.append(job)
            core.submit(job, now)
        core.begin(now)
        while (when := core.next_decision()) is not None:
            now = when
            core.advance(now)
            core.begin(now)
        now += 1
    return [(job.cached_tokens, job.external_tokens) for job in jobs]


def expect(
    requests: Sequence[TierRequest], device: Sequence[int], *, host_blocks: int, order: str
) -> list[tuple[int, int]]:
    """Return what each finds by the rule of vLLM's manager, put as plainly as it can be, if they come one after the other
    and find ``device`` tokens there.

    A request offers what it has computed; without a load, that is all of its prompt. All that it loaded or offered counts
    as used when it ends, the start of its prompt last. Making room costs nothing of what is being offered. But it may cost
    what was just loaded, which is as old as before.
    """
    chunks: dict[tuple[int, ...], list[int]] = {}
    """Priority and last use."""
    uses = 0
    found: list[tuple[int, int]] = []
    for request, cached in zip(requests, device, strict=False):
        keys = [tuple(request.prompt[:end]) for end in range(BLOCK, len(request.prompt) + 1, BLOCK)]
        first = last = cached // BLOCK
        while last < len(keys) and keys[last] in chunks:
            last += 1
        loads = last > first
        found.append((cached, min(last * BLOCK, len(request.prompt) - 1) - cached if loads else 0))
        offered = keys[last:] if loads else keys
        new = [key for key in offered if key not in chunks]
        line = sorted(chunks.keys() - set(offered), key=lambda key: chunks[key])
        excess = len(chunks) + len(new) - host_blocks
        if excess <= len(line):
            for key in line[: max(0, excess)]:
                del chunks[key]
            priority = request.retention[0].priority if order == "priority" else 0
            chunks |= {key: [priority, 0] for key in new}
        for key in reversed(keys[first:] if loads else keys):
            if key in chunks:
                uses += 1
                chunks[key][1] = uses
    return found
