"""Hits that an engine counted: pages of metrics of vLLM, SGLang and TensorRT-LLM, and counts per request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.replay.live.facts import cache_labels, is_asleep
from kvyard.replay.live.metrics_page import MetricsPage
from kvyard.replay.traces.files import records

VLLM = (
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ("vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"),
)
"""Queries and hits in tokens, of this version and of earlier ones."""
VLLM_MEDIA = ("vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total")
"""Images and other media that were looked up in the cache of processed inputs, and found."""
VLLM_EXTERNAL = ("vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total")
SGLANG = ("sglang:prompt_tokens_total", "sglang:cached_tokens_total")
UNCHECKED = (
    "TensorRT-LLM's counters are of blocks and couldn't be checked against a real engine here: take them as a hint."
)


class Counted(msgspec.Struct, kw_only=True):
    """Tokens that an engine counted, all requests together or by request."""

    source: str
    backend: str = ""
    """vllm, sglang or trtllm; empty if it isn't known."""
    queries: int | None = None
    """Prompt tokens that were looked up, if it counts them."""
    hits: int = 0
    """Of those, tokens found on the device or, for engines that count both in one, in any tier."""
    external_queries: int = 0
    external_hits: int = 0
    """Tokens loaded by a connector, which vLLM counts apart."""
    new_media: int = 0
    """Images and other media that the engine hadn't seen before."""
    by_request: dict[str, int] = {}
    facts: dict[str, str] = {}
    """Engine's description of its cache: block_size, num_gpu_blocks, enable_prefix_caching, ..."""
    warmed: bool = False
    """True if caches were warmed before the traffic: a request that found more than it is owed is no difference."""
    asleep: bool = False
    """True if vllm:engine_sleep_state isn't awake."""
    notes: list[str] = []

    @property
    def total(self) -> int:
        """Tokens found in any tier."""
        return self.hits + self.external_hits

    def since(self, before: Counted) -> Counted:
        """Return the counts since ``before``. Raises ``KvyardError`` where counters went back: the engine was restarted."""
        later = msgspec.structs.replace(
            self,
            queries=None if self.queries is None else self.queries - (before.queries or 0),
            hits=self.hits - before.hits,
            external_queries=self.external_queries - before.external_queries,
            external_hits=self.external_hits - before.external_hits,
            new_media=self.new_media - before.new_media,
        )
        if min(later.queries or 0, later.hits, later.external_queries, later.external_hits) < 0:
            raise KvyardError(
                "counters are lower than in the earlier page: the engine was restarted in between, so leave that page out"
            )
        return later


def read_page(text: str, name: str = "metrics") -> Counted:
    """Read a page of metrics: Prometheus text, or TensorRT-LLM's JSON statistics.

    Raises ``KvyardError`` if it has no counter of hits.
    """
    if text.lstrip().startswith(("[", "{")):
        return _from_trtllm(text, name)
    page = MetricsPage(text)
    counters = (*(name for pair in (*VLLM, VLLM_EXTERNAL) for name in pair), *SGLANG)
    negative = next((name for name in counters if page.total(name) < 0), None)
    if negative is not None:
        raise KvyardError(f"{name} isn't what an engine counted: {negative} is below 0")
    for queries, hits in VLLM:
        if queries in page:
            return Counted(
                source=f"{queries.removesuffix('_queries_total')}_*",
                backend="vllm",
                queries=round(page.total(queries)),
                hits=round(page.total(hits)),
                external_queries=round(page.total(VLLM_EXTERNAL[0])),
                external_hits=round(page.total(VLLM_EXTERNAL[1])),
                new_media=round(page.total(VLLM_MEDIA[0]) - page.total(VLLM_MEDIA[1])),
                facts={label: value for label, value in cache_labels(page).items() if value not in ("", "None")},
                asleep=is_asleep(page),
            )
    if SGLANG[0] in page:
        return Counted(
            source="sglang:cached_tokens_total",
            backend="sglang",
            queries=round(page.total(SGLANG[0])),
            hits=round(page.total(SGLANG[1])),
        )
    raise KvyardError(
        f"{name} has no counter of prefix hits: it needs vllm:prefix_cache_queries, sglang:prompt_tokens_total "
        "(--enable-metrics) or TensorRT-LLM's kvCacheStats"
    )


def _from_trtllm(text: str, name: str) -> Counted:
    """Read TensorRT-LLM's ``/metrics``: statistics by iteration, the latest last. It counts blocks."""
    try:
        decoded: Any = msgspec.json.decode(text)
        stats = decoded[-1] if isinstance(decoded, list) else decoded
        cache = stats["kvCacheStats"]
        size = _natural(cache["tokensPerBlock"])
        reused, missed = _natural(cache["reusedBlocks"]), _natural(cache["missedBlocks"])
        if not size:
            raise ValueError("blocks of no tokens")
    except (*DECODE_ERRORS, LookupError, TypeError, ValueError):
        raise KvyardError(f"{name} has no kvCacheStats with reusedBlocks, missedBlocks and tokensPerBlock") from None
    return Counted(
        source="kvCacheStats (TensorRT-LLM)",
        backend="trtllm",
        queries=(reused + missed) * size,
        hits=reused * size,
        facts={"block_size": str(size), "num_gpu_blocks": str(cache.get("maxNumBlocks", ""))},
        notes=[UNCHECKED],
    )


class _Answer(msgspec.Struct):
    """A row of counts: a request's id and what its answer reported."""

    request_id: str | int | None = None
    id: str | int | None = None
    cached: int | None = None
    cached_tokens: int | None = None
    usage: dict[str, Any] | None = None


def _natural(count: Any) -> int:
    if int(count) < 0:
        raise ValueError(f"{count} tokens")
    return int(count)


def read_answers(path: Path) -> dict[str, int]:
    """Read counts per request from JSON lines: ``request_id`` (or the row's number) and ``cached``, ``cached_tokens`` or an
    answer's ``usage``.

    Raises ``KvyardError`` for rows that have none of them.
    """
    cached: dict[str, int] = {}
    for number, record in records(path):
        try:
            row = msgspec.json.decode(record, type=_Answer)
            details = (row.usage or {}).get("prompt_tokens_details") or {}
            reported = (row.cached, row.cached_tokens, details.get("cached_tokens"))
            counts = [count for count in reported if count is not None]
            name = next((name for name in (row.request_id, row.id) if name is not None), number)
            cached[str(name)] = _natural(counts[0])
        except (*DECODE_ERRORS, IndexError, TypeError, ValueError, AttributeError):
            raise KvyardError(
                f"{path}, line {number}: it needs cached, cached_tokens or an answer's usage with prompt_tokens_details"
            ) from None
    return cached
