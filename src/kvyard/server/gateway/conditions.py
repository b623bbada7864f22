"""Health reasons of a gateway: engines, the knowledge of their caches, Redis, and files."""

from collections.abc import Iterable, Iterator

from kvyard.router.journal import JournalFile
from kvyard.router.policies import make_policy
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.gateway.members import Membership
from kvyard.server.gateway.traffic import GatewayTraffic
from kvyard.server.health import HealthReason
from kvyard.server.indexer.conditions import index_conditions, task_conditions
from kvyard.server.indexer.service import Service

SAID_AT_ONCE = frozenset({"draining", "engine-down", "share-away", "index-away", "record", "access-log", "config"})
"""Codes of what the parts themselves log in the moment when it happens."""


def conditions(
    config: GatewayConfig, members: Membership, index: Service, traffic: GatewayTraffic, journals: Iterable[JournalFile]
) -> Iterator[HealthReason]:
    """Yield all problems."""
    yield from _engines(config, members)
    for pool in members.pools.values():
        if pool.remote is not None and pool.remote.error:
            yield HealthReason(code="index-away", about=pool.model, why=pool.remote.error)
        if pool.sharing is not None and pool.sharing.reason:
            yield HealthReason(code="share-away", about=pool.model, why=pool.sharing.reason)
    yield from index_conditions(index)
    yield from task_conditions(index)
    for journal in journals:
        if journal.error:
            yield HealthReason(code="journal", about=str(journal.path), why=journal.error)
    if traffic.access_log is not None and traffic.access_log.error:
        yield HealthReason(code="access-log", about=traffic.access_log.path, why=traffic.access_log.error)
    recorder = traffic.recorder
    if recorder is not None and recorder.stopped:
        yield HealthReason(code="record", about=str(recorder.path), why=recorder.stopped)


def _engines(config: GatewayConfig, members: Membership) -> Iterator[HealthReason]:
    engines = members.engines.values()
    if not engines:
        why = "there is none: give --engine, --fleet or --dns, or POST /admin/engines"
        yield HealthReason(code="no-engines", why=why, grade="unready")
    elif not any(engine.up and not engine.draining for engine in engines):
        yield HealthReason(code="no-engine-up", why="none answers, or all drain", grade="unready")
    yield from _roles(members)
    listens = config.index_url is None and make_policy(config.router).needs_index
    for engine in engines:
        if engine.state == "down":
            yield HealthReason(code="engine-down", about=engine.name, why=engine.reason)
        elif listens and engine.streams_error:
            yield HealthReason(code="no-stream", about=engine.name, why=engine.streams_error)
        elif listens and engine.config.events is None:
            why = f"it has no event endpoint, so that policy {config.router.policy} knows nothing of its cache"
            yield HealthReason(code="no-stream", about=engine.name, why=why)


def _roles(members: Membership) -> Iterator[HealthReason]:
    answers = any(engine.config.role != "prefill" for engine in members.engines.values())
    for model, pool in members.pools.items():
        roles = {engine.config.role for engine in pool.engines.values()}
        if roles == {"prefill"}:
            why = "all its engines compute prompts for others: add one of role decode, or both"
            yield HealthReason(
                code="no-decode-engine", about=model, why=why, grade="degraded" if answers else "unready"
            )
        elif roles == {"decode"}:
            why = "no engine computes prompts for those that decode: add one of role prefill, or leave the roles out"
            yield HealthReason(code="no-prefill-engine", about=model, why=why)
