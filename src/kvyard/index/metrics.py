"""Metrics: every figure of an index by name, as plain numbers. How they are written down is the server's business.

Names that end in ``_total`` only go up. Labels are part of a sample: (name, labels, value).
"""

from typing import TypeAlias

from kvyard.index.indexer import Indexer
from kvyard.index.stream import SEVERITY, FollowedStream

Sample: TypeAlias = tuple[str, dict[str, str], float]

NAMES: dict[str, str] = {
    "kvcache_kvevents_dedup_removed_hashes_suppressed_total": "Removed hashes not passed on: another announcement stands.",
    "kvcache_kvevents_dedup_removed_hashes_forwarded_total": "Removed hashes passed on to the index.",
    "kvcache_kvevents_dedup_outstanding_references": "References beyond the first that were not taken back, by pod.",
    "kvcache_kvevents_dedup_uncounted_hashes_total": "Repetitions not counted because the filter was full.",
    "kvyard_index_blocks": "Different blocks that are held anywhere.",
    "kvyard_index_rows": "Runs of equal rows.",
    "kvyard_index_bytes": "Estimated bytes.",
    "kvyard_index_evicted_blocks_total": "Blocks forgotten to keep the budget.",
    "kvyard_index_unknown_stream_updates_total": "Updates of streams that are not registered.",
    "kvyard_index_stream_state": "0 fresh, 1 catching up, 2 stale.",
    "kvyard_index_stream_distrusted_blocks": "Blocks that a stream announced and that earn nothing: its worker lacks many.",
    "kvyard_index_stream_sequence": "The last batch applied.",
    "kvyard_index_stream_resets_total": "Restarts and snapshots.",
    "kvyard_index_feed_stored_blocks_total": "Blocks stored.",
    "kvyard_index_feed_removed_blocks_total": "Blocks removed.",
    "kvyard_index_feed_unresolved_blocks_total": "Blocks announced without a known text.",
    "kvyard_index_feed_orphan_blocks_total": "Blocks announced before their parent.",
    "kvyard_index_feed_refused_blocks_total": "Blocks that can't be named.",
    "kvyard_index_feed_waiting_blocks": "Blocks that wait for a parent or a text.",
    "kvyard_index_feed_dropped_blocks_total": "Blocks that waited too long.",
    "kvyard_index_bridge_hashes": "Engine hashes whose text is known.",
}
"""Every metric and its help text. ``collect`` brings each of them, and nothing else."""

MOST_PODS = 256
"""Pods with a label of their own, those with the most references; the rest is ``other``."""


def collect(indexer: Indexer) -> list[Sample]:
    """Return every sample of an index."""
    usage = indexer.backend.usage()
    dedup = indexer.dedup.counters
    out: list[Sample] = [
        ("kvcache_kvevents_dedup_removed_hashes_suppressed_total", {}, dedup.suppressed),
        ("kvcache_kvevents_dedup_removed_hashes_forwarded_total", {}, dedup.forwarded),
        *_outstanding(indexer),
        ("kvcache_kvevents_dedup_uncounted_hashes_total", {}, dedup.uncounted),
        ("kvyard_index_blocks", {}, usage.blocks),
        ("kvyard_index_rows", {}, usage.rows),
        ("kvyard_index_bytes", {}, usage.bytes),
        ("kvyard_index_evicted_blocks_total", {}, usage.evicted),
        ("kvyard_index_unknown_stream_updates_total", {}, indexer.unknown_streams),
    ]
    for (name, topic), stream in indexer.streams.items():
        labels = {"stream": name, "topic": topic}
        out += [
            ("kvyard_index_stream_state", labels, SEVERITY[stream.state]),
            ("kvyard_index_stream_distrusted_blocks", labels, _distrusted(stream)),
            ("kvyard_index_stream_sequence", labels, stream.seq),
            ("kvyard_index_stream_resets_total", labels, stream.resets),
        ]
    for name, feed in indexer.feeds():
        labels = {"stream": name, "holder": str(feed.holder)}
        counters = feed.counters
        out += [
            ("kvyard_index_feed_stored_blocks_total", labels, counters.stored),
            ("kvyard_index_feed_removed_blocks_total", labels, counters.removed),
            ("kvyard_index_feed_unresolved_blocks_total", labels, counters.unresolved),
            ("kvyard_index_feed_orphan_blocks_total", labels, counters.orphans),
            ("kvyard_index_feed_refused_blocks_total", labels, counters.refused),
            ("kvyard_index_feed_waiting_blocks", labels, len(feed.waiting)),
            ("kvyard_index_feed_dropped_blocks_total", labels, feed.waiting.dropped),
            ("kvyard_index_bridge_hashes", labels, len(feed.bridge)),
        ]
    return out


def _distrusted(stream: FollowedStream) -> int:
    if not stream.distrusted:
        return 0
    return sum(max(0, feed.counters.stored - feed.counters.removed) for feed in stream.feeds.values())


def _outstanding(indexer: Indexer) -> list[Sample]:
    """Return references by pod, that is by worker or by the pool that several workers share."""
    by_pod: dict[str, int] = {}
    for _, feed in indexer.feeds():
        pod = feed.holder.name
        by_pod[pod] = by_pod.get(pod, 0) + indexer.dedup.outstanding_at(feed.places.values())
    named = sorted(by_pod, key=lambda pod: (-by_pod[pod], pod))[:MOST_PODS]
    rest = sum(by_pod.values()) - sum(by_pod[pod] for pod in named)
    name = "kvcache_kvevents_dedup_outstanding_references"
    return [*((name, {"pod": pod}, by_pod[pod]) for pod in named), (name, {"pod": "other"}, rest)]
