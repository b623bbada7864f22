"""The gateway's state as samples for Prometheus, read at each scrape. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kvyard.index.metrics import Sample, collect
from kvyard.server.gateway.members import Membership
from kvyard.server.gateway.metrics import P
from kvyard.server.gateway.traffic import Traffic
from kvyard.server.indexer.measures import stream_samples
from kvyard.server.indexer.service import Service

STATES = ("fresh", "catching up", "stale")


def state_samples(members: Membership, traffic: Traffic, index: Service) -> Iterator[Sample]:
    """Everything that is kept anyway."""
    yield P + "under_way", {}, traffic.counters.under_way
    for model, pool in members.pools.items():
        labels = {"model": model}
        yield P + "queued", labels, pool.queued
        yield P + "queue_refused_total", labels, pool.refused
        yield P + "queue_expired_total", labels, pool.expired
        yield P + "forgotten_total", labels, pool.router.forgotten
        yield P + "unread_prompts_total", labels, pool.prompting.unread
        if pool.remote is not None:
            yield P + "index_failures_total", labels, pool.remote.failures
        if pool.sharing is not None:
            peers, shared = pool.sharing.peers, pool.sharing.counters
            yield P + "share_connected", labels, pool.sharing.connected
            yield P + "share_peers", labels, len(peers)
            yield P + "share_foreign_requests", labels, sum(peers.values())
            yield P + "share_outages_total", labels, shared.outages
            yield P + "share_unknown_workers_total", labels, shared.unknown_workers
    if traffic.recorder is not None:
        written = traffic.recorder.counters
        yield P + "recording", {}, not traffic.recorder.stopped
        yield P + "recorded_requests_total", {}, written.rows
        yield P + "recorded_bytes_total", {}, written.bytes
        yield P + "unrecorded_requests_total", {}, written.left_out + written.late
    for name, engine in members.engines.items():
        labels = {"model": engine.model, "engine": name}
        yield P + "engine_up", labels, engine.up
        yield P + "engine_draining", labels, engine.draining
        yield P + "engine_requests", labels, engine.in_flight
        yield P + "engine_failures_total", labels, engine.failed
        yield P + "engine_downs_total", labels, engine.downs
    for known in index.models.values():
        for name, labels, value in collect(known.indexer):
            yield name, {"model": known.name, "tenant": known.tenant, **labels}, value
        for stream, listener in known.listeners.items():
            labels = {"model": known.name, "stream": stream}
            yield P + "stream_state", labels, STATES.index(listener.info().state)
            yield from stream_samples(P, labels, listener)
