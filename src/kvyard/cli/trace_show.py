"""What ``kvyard trace info`` prints."""

from __future__ import annotations

from collections.abc import Iterator

from kvyard.replay.traces.info import Info, LengthSpread, Reuse

COLUMNS = ("mean", "min", "p50", "p90", "p95", "p99", "max", "std")


def info_lines(info: Info) -> Iterator[str]:
    """The lines, for people."""
    yield f"{info.name} ({info.format})"
    yield f"  requests   {info.requests:,}"
    if info.sessions:
        yield f"  sessions   {info.sessions:,}, with {info.waiting:,} requests that start after others end"
    yield f"  tokens     {info.input.total:,} in, {info.output.total:,} out"
    if info.rate is not None and info.peak is not None:
        burst = "" if info.burstiness is None else f"; gaps vary by {info.burstiness:.2f} (1: Poisson)"
        yield (
            f"  arrivals   over {info.duration:,.0f} s, {info.rate:.2f} a second, at most {info.peak:.2f} in "
            f"{info.window:.1f} s{burst}"
        )
    else:
        yield "  arrivals   all at once" + (": sessions have no place on a common clock" if info.sessions > 1 else "")
    yield ""
    yield f"  {'':<14}" + "".join(f"{name:>12}" for name in COLUMNS)
    yield _row("input tokens", info.input)
    yield _row("output tokens", info.output)
    if info.think is not None:
        yield _row("think ms", info.think)
    yield ""
    if info.reuse is None:
        yield "  reuse      not known: the trace doesn't say what prompts share"
    else:
        yield from _reuse_lines(info.reuse, bool(info.sessions) and info.rate is None)
    for reason, count in info.left_out.items():
        yield f"  {count:,} rows left out: {reason}"
    if info.skipped:
        yield f"  {info.skipped:,} bad rows skipped, the first of them:"
        yield from (f"    {example}" for example in info.skipped_examples)


def _row(name: str, spread: LengthSpread) -> str:
    return f"  {name:<14}" + "".join(f"{getattr(spread, column):>12,.0f}" for column in COLUMNS)


def _reuse_lines(reuse: Reuse, one_by_one: bool) -> Iterator[str]:
    yield f"  blocks     {reuse.blocks:,} of {reuse.block_size} tokens looked up, {reuse.unique:,} different"
    yield (
        f"  bound      {reuse.infinite_blocks:.4f} of blocks, {reuse.infinite_tokens:.4f} of prompt tokens hit, with room for "
        "everything"
    )
    if reuse.median_session_tokens is not None:
        yield f"             {reuse.median_session_tokens:.4f} of prompt tokens in the median session"
    yield "  hits       blocks hit / blocks looked up, prompts in order, without time passing"
    if one_by_one:
        yield "             (sessions one after the other; side by side they need more room)"
    yield f"  {'cache blocks':>16}{'LRU':>10}{'Belady':>10}"
    for one in reuse.capacities:
        yield f"  {one.blocks:>16,}{one.lru:>10.4f}{one.belady:>10.4f}"
    if reuse.distances:
        middle = next(blocks for blocks, share in reuse.distances if share >= 0.5)
        most = next(blocks for blocks, share in reuse.distances if share >= 0.9)
        yield (
            f"  distance   half of what is used again has at most {middle:,} other blocks in between, nine tenths at most "
            f"{most:,}"
        )
    if reuse.unknown:
        yield f"  {reuse.unknown:,} requests without ids are left out of blocks, bound and hits"
