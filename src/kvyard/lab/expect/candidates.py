"""Candidates for the cause of a difference: each says which hits the engine would have counted with it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvyard.lab.expect.causes import FAULTS, say
from kvyard.lab.expect.difference import Difference
from kvyard.lab.expect.traffic import Tokens, shared_tokens
from kvyard.replay.settings import OF_TIERS

BLOCK_SIZES = (16, 32, 64, 128, 256, 528, 784, 1056, 2096)
"""Block sizes that engines have, for counts from which it doesn't follow."""
SIZES_TRIED = 2
"""Of those, sizes that are replayed where only sums were counted."""
CLOSE = 0.02
"""Share of the counted tokens by which a pool may be off that is named."""
POOLS_TRIED = 4
"""Replays of smaller pools on a sample; half as many on the whole traffic."""
MOSTLY = 0.5
"""Share of requests that must end at one place for the place to be named; others may end before it by a second fault."""
ALIKE = 0.9
"""Share of a difference that resets must explain."""
ODD = 20
"""Requests that are owed what isn't a multiple of the block size that all counts are multiples of, for it to be no chance."""
TIERS_TRIED = 5
"""Halvings of a lower tier."""
RESETS = 4
"""Times that a cache is taken to have been emptied, at most."""
BLIND = ("round-robin", "least-loaded", "random")
"""Policies that a router falls back to without events."""
NOT_REPORTED = ", and nothing here says if caching is on, as --metrics or --engine would"
COUNTED, TOLD = "The engine's hits are those of", "The engine reports"
OTHERS_FILL_IT = (
    "the engine reports {reported:,} blocks, so look for what else fills them: requests that aren't in this traffic"
)
COMPARE_BLOCKS = (
    "compare num_gpu_blocks in vllm:cache_config_info with --gpu-memory-utilization: another process may have taken the "
    "memory"
)


class Candidate(NamedTuple):
    """A cause, how the hits that it would give are worked out, and figures for its sentence."""

    code: str
    hits: Callable[[Difference], Tokens | None]
    """``None`` if the cause is impossible."""
    figures: Mapping[str, object] = MappingProxyType({})
    guess: Callable[[Difference], int] | None = None
    """About the sum of the hits, where reuse distances tell."""

    def unexplained(self, difference: Difference) -> float:
        """Return share of ``difference`` that is left with this cause."""
        hits = self.hits(difference)
        return math.inf if hits is None else difference.unexplained(hits)

    @property
    def sentence(self) -> str:
        """The cause and its fix."""
        return say(FAULTS[self.code], **self.figures)


Source = Callable[[Difference], Iterator[Candidate]]


def _nothing(difference: Difference) -> Iterator[Candidate]:
    """No hits at all."""
    if difference.total > difference.tolerance * difference.prompts / 10:
        return
    on = difference.counted.facts.get("enable_prefix_caching") == "True"
    unnamed = "never-shared" if on else "caching-off"
    code = next((code for code in ("salts", "adapters") if code in difference.evidence), unnamed)
    figures = {"found": "nothing at all", "reported": NOT_REPORTED}
    yield Candidate(code, lambda compared: np.zeros_like(compared.replayed.hits), figures)


def reported(difference: Difference) -> Iterator[Candidate]:
    """Another block size or pool than configured, by what the engine itself reports."""
    engine = difference.replayed.run.fleet.config.workers[0].engine
    facts = {name: int(value) for name, value in difference.counted.facts.items() if value.isdecimal()}
    size = facts.get("block_size", difference.block_size)
    if size != difference.block_size and len(engine.specs) == 1:
        yield _of_size(difference, size)
    blocks = facts.get("num_gpu_blocks", engine.num_gpu_blocks + 1) - 1  # vLLM counts the null block
    if 1 <= blocks < engine.num_gpu_blocks and size == difference.block_size:
        yield _of_pool(difference, blocks)


def _store_only(difference: Difference) -> Iterator[Candidate]:
    """Lower tiers that nothing is loaded from."""
    if difference.replayed.loaded == 0 or difference.counted.external_hits:
        return
    changed = dict.fromkeys(name for name in difference.settings if name in OF_TIERS)
    if difference.by_request:
        alone = difference.replay(**changed)
        if (
            alone is None
            or (difference.counts - alone[difference.known]).clip(0).sum() > CLOSE * difference.replayed.loaded
        ):
            return  # something was loaded
    yield Candidate(
        "store-only",
        lambda compared: compared.replay(**changed),
        {"queried": difference.counted.external_queries},
    )


def _blind(difference: Difference) -> Iterator[Candidate]:
    """A router that doesn't see what workers have."""
    config = difference.replayed.run.fleet.config
    if sum(kind.count for kind in config.workers) < 2 or config.router.policy in BLIND:
        return
    code = "hash-seed" if "hash-seed" in difference.evidence else "events-off"
    for policy in BLIND:
        figures = {"policy": policy, "configured": config.router.policy}
        yield Candidate(
            code, partial(Difference.replay, router=policy), figures, partial(Difference.guess, policy=policy)
        )


def block_sizes(difference: Difference) -> Iterator[Candidate]:
    """Blocks of another size than configured."""
    configured = difference.block_size
    if (
        len(difference.replayed.run.fleet.config.workers[0].engine.specs) > 1
        or "block_size" in difference.counted.facts
    ):
        return
    if difference.by_request:
        step = math.gcd(*difference.counted.by_request.values())
        if not step or step == configured:
            return
        # All counts may be multiples of more than one block.
        sizes = [size for size in dict.fromkeys((step, *BLOCK_SIZES)) if step % size == 0 and size != configured]
    else:
        shared = np.minimum(shared_tokens(difference.traffic.requests), difference.lengths - 1)[difference.known]

        def far(size: int) -> float:
            """Return tokens between the sum counted and about what blocks of ``size`` give."""
            ratio = int((shared // size * size).sum()) / max(1, int((shared // configured * configured).sum()))
            return abs(difference.owed * ratio - difference.total)

        sizes = sorted((size for size in BLOCK_SIZES if size != configured), key=far)[:SIZES_TRIED]
    for size in sizes:
        yield _of_size(difference, size)


def _of_size(difference: Difference, size: int) -> Candidate:
    """The same number of tokens in blocks of ``size``."""
    configured = difference.block_size
    tokens = difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks * configured
    hits = partial(Difference.replay, block_size=size, num_gpu_blocks=max(1, tokens // size))
    figures = {"told": COUNTED, "block": size, "configured": configured}
    return Candidate("block-size", hits, figures, partial(Difference.guess, block_size=size))


def _media(difference: Difference) -> Iterator[Candidate]:
    """Hits that end at the first image."""
    media, block = difference.traffic.media, difference.block_size
    if not media:
        return
    ends = [
        min((item.at for item in media.get(request.id, ())), default=request.input_length) // block * block
        for request in difference.traffic.requests
    ]
    yield Candidate("media", lambda compared: np.minimum(compared.replayed.hits, np.array(ends, dtype=np.int64)))


def _parting(difference: Difference) -> Iterator[Candidate]:
    """Hits that end at one place in most prompts, and nowhere behind it."""
    if not difference.by_request:
        return
    hits, counts = difference.replayed.hits, difference.all_counts
    end = int(difference.counts.max())
    longer = difference.known & (hits > end)
    if end and longer.sum() > len(difference.counts) / 10 and (counts[longer] == end).mean() >= MOSTLY:
        seen = "media" in difference.evidence or difference.counted.new_media > len(difference.counts) / 2
        code = "media" if seen else "changing-text"
        yield Candidate(code, lambda compared: np.minimum(compared.replayed.hits, end), {"parting": end})


def _answers(difference: Difference) -> Iterator[Candidate]:
    """Answers that are never found again."""
    if not any(request.output_tokens for request in difference.traffic.requests):
        return
    yield Candidate("answers", Difference.replay_without_answers)


def _late_states(difference: Difference) -> Iterator[Candidate]:
    """States that are kept at the last two block boundaries of a prompt alone, as earlier versions of vLLM kept them."""
    specs = difference.replayed.run.fleet.config.workers[0].engine.specs
    requests = difference.traffic.requests
    if not any(spec.is_state for spec in specs) or any(request.tokens is None for request in requests):
        return
    block = difference.block_size
    kept: dict[int, set[bytes]] = {}
    hits: list[int] = []
    for request in requests:
        text = array("Q", request.tokens or ())
        last = (len(text) - 1) // block * block
        hits.append(
            max((end for end, texts in kept.items() if end <= last and text[:end].tobytes() in texts), default=0)
        )
        for end in (last, last - block):
            if end > 0:
                kept.setdefault(end, set()).add(text[:end].tobytes())
    yield Candidate("late-states", lambda compared: np.array(hits, dtype=np.int64), {"block": block})


def drafts(difference: Difference) -> Iterator[Candidate]:
    """A draft head where none was configured, or none where one was."""
    if not difference.by_request:
        return
    hits = difference.replayed.hits[difference.known]
    apart = np.abs(hits - difference.counts)[hits > 0]
    if not len(apart) or np.median(apart) != difference.block_size:
        return  # it costs most hits one block
    configured = difference.replayed.run.fleet.config.workers[0].engine.speculative is not None
    there, named = ("no draft head", "one") if configured else ("a draft head (EAGLE, MTP)", "none")
    yield Candidate(
        "draft-head",
        partial(Difference.replay, num_speculative_tokens=None if configured else 1),
        {"there": there, "named": named},
    )


def _tiers(difference: Difference) -> Iterator[Candidate]:
    """A smaller tier below the device."""
    engine = difference.replayed.run.fleet.config.workers[0].engine
    if engine.tiers is None or not engine.bytes_per_block or not difference.replayed.loaded:
        return
    configured = engine.tiers.tiers[0].capacity(engine.bytes_per_block)
    for part in range(1, TIERS_TRIED + 1):
        blocks = configured >> part
        candidate = Candidate(
            "tier",
            partial(Difference.replay, host_blocks=max(1, blocks), host_bytes=None),
            {"blocks": blocks, "configured": configured},
        )
        yield candidate
        hits = candidate.hits(difference)
        if not blocks or hits is None or hits[difference.known].clip(0).sum() <= difference.total:
            return


def _resets(difference: Difference) -> Iterator[Candidate]:
    """A cache that was emptied in between: each time it begins anew where counts are first too low."""
    config = difference.replayed.run.fleet.config
    if not difference.by_request or sum(kind.count * kind.dp_size for kind in config.workers) > 1:
        return
    hits, starts = difference.replayed.hits, [0]
    while len(starts) <= RESETS:
        low = difference.known & (difference.all_counts < hits)
        low[: starts[-1] + 1] = False
        if not low.any():
            break
        start = int(low.argmax())
        rest = difference.replay_from(start)
        if rest is None:
            return
        hits = np.concatenate([hits[:start], rest])
        starts.append(start)
    if len(starts) > 1 and difference.unexplained(hits) <= 1 - ALIKE:
        first = difference.traffic.requests[starts[1]].id
        yield Candidate("reset", lambda compared: hits, {"request": first, "times": len(starts) - 1})


def _sessions(difference: Difference) -> Iterator[Candidate]:
    """Sessions that share nothing with each other."""
    if difference.by_request and len({request.session for request in difference.traffic.requests}) > 1:
        yield Candidate("sessions-apart", Difference.replay_sessions_apart)


def pools(difference: Difference) -> Iterator[Candidate]:
    """Pools with fewer blocks than configured: one by reuse distances, then those between the two nearest."""
    blocks, least = difference.pool_guess(), difference.longest_blocks
    low, high = (least - 1, 0), (difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks, difference.owed)
    if not difference.by_request and difference.reuse_tells:
        if blocks >= least and not _full_pool_reported(difference):
            yield _of_pool(difference, blocks)
        return
    blocks = max(blocks, least)
    for _ in range(POOLS_TRIED if difference.by_request else POOLS_TRIED // 2):
        candidate = _of_pool(difference, blocks)
        yield candidate
        hits = candidate.hits(difference)
        total = 0 if hits is None else int(hits[difference.known].clip(0).sum())
        if abs(total - difference.total) <= CLOSE * difference.total:
            return
        if total < difference.total:
            low = blocks, total
        else:
            high = blocks, total
        share = (difference.total - low[1]) / max(1, high[1] - low[1])
        blocks = low[0] + round((high[0] - low[0]) * min(max(share, 0.1), 0.9))
        if not low[0] < blocks < high[0]:
            return


def _of_pool(difference: Difference, blocks: int) -> Candidate:
    configured = difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks
    full = _full_pool_reported(difference)
    fix = OTHERS_FILL_IT.format(reported=int(difference.counted.facts["num_gpu_blocks"])) if full else COMPARE_BLOCKS
    figures = {"blocks": blocks, "configured": configured, "compare": fix}
    return Candidate(
        "pool", partial(Difference.replay, num_gpu_blocks=blocks), figures, lambda compared: compared.total
    )


def _full_pool_reported(difference: Difference) -> bool:
    """True if the engine reports as many blocks as are configured here."""
    blocks = difference.counted.facts.get("num_gpu_blocks", "")
    configured = difference.replayed.run.fleet.config.workers[0].engine.num_gpu_blocks
    return blocks.isdecimal() and int(blocks) >= configured


def told_size(difference: Difference) -> Candidate | None:
    """Return the block size that the engine reports, if another is configured and hits differ."""
    size, engine = (
        difference.counted.facts.get("block_size", ""),
        difference.replayed.run.fleet.config.workers[0].engine,
    )
    if not size.isdecimal() or int(size) in (0, difference.block_size) or len(engine.specs) > 1:
        return None
    figures = {"told": TOLD, "block": int(size), "configured": difference.block_size}
    return Candidate("block-size", lambda compared: None, figures)


def contradicted_size(difference: Difference) -> Iterator[Candidate]:
    """Yield another block size if counts can't be, or by chance wouldn't be, those of the configured one."""
    engine = difference.replayed.run.fleet.config.workers[0].engine
    if not difference.by_request or difference.counted.warmed or len(engine.specs) > 1:
        return
    step = math.gcd(*difference.counts.tolist())
    odd = int((difference.replayed.hits[difference.known] % step != 0).sum()) if step else 0
    if step and (step % difference.block_size or odd >= ODD):
        yield from block_sizes(difference)


SOURCES: tuple[tuple[Source, bool], ...] = (
    (_late_states, False),
    (reported, True),
    (_nothing, False),
    (_media, False),
    (_parting, False),
    (_store_only, True),
    (block_sizes, True),
    (drafts, True),
    (_answers, True),
    (_sessions, True),
    (_resets, True),
    (_blind, True),
    (_tiers, True),
    (pools, True),
)
"""Cheap and telling ones first, and whether they replay; the search ends with one that gives the counts."""
GUESSED: tuple[Source, ...] = (block_sizes, _blind, pools)
"""Those of which reuse distances tell the sum."""
