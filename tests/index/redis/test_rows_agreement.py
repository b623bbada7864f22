"""Indexers on a server, by themselves and as replicas, against one on the naive model, on the same random streams."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.index import test_scorer_agreement
from tests.index.naive import NaiveIndex
from tests.index.redis.server import RedisServer
from tests.index.redis.support import namespace, rows, shared

from kvyard.events.transport import Update
from kvyard.index import Holder, Scores
from kvyard.index.redis import SharedIndexer

pytestmark = pytest.mark.redis

SIZES = st.sampled_from([1, 2, 3, 4, 8, 12])


def but_reasons(scores: Scores) -> object:
    """All but the words: of a stream that is stale anyway, writers don't report each new reason at once."""
    return {worker: msgspec.structs.replace(match, reason="") for worker, match in scores.workers.items()}


@given(seed=st.integers(0, 1 << 32), size=SIZES)
@settings(max_examples=8)
def test_an_indexer_on_redis_agrees(shared_server: RedisServer, seed: int, size: int) -> None:
    with rows(shared_server) as index:
        test_scorer_agreement.agree(lambda: index, seed, size, 40)


@given(seed=st.integers(0, 1 << 32), size=SIZES)
@settings(max_examples=8)
def test_a_replica_agrees(shared_server: RedisServer, seed: int, size: int) -> None:
    with shared(shared_server, size, waiting=200, remembered=20) as indexer:
        model = test_scorer_agreement.indexer_on(NaiveIndex(), size)
        test_scorer_agreement.walk(test_scorer_agreement.furnished(indexer), model, seed, 40, but_reasons)  # type: ignore[arg-type]


class Relay(SharedIndexer):
    """Writes what it is told and answers through another replica, which was told nothing."""

    reader: SharedIndexer

    def apply(self, update: Update, now: int = 0) -> None:
        super().apply(update, now)
        self.reader.backend.session.look(now=True)  # else it learns with the next rows, and some prompts have none

    def score_keys(self, *args, **options):  # type: ignore[no-untyped-def]
        return self.reader.score_keys(*args, **options)

    def matches(self, keys):  # type: ignore[no-untyped-def]
        return self.reader.matches(keys)


@given(seed=st.integers(0, 1 << 32), size=SIZES)
@settings(max_examples=8)
def test_a_replica_that_only_reads_agrees(shared_server: RedisServer, seed: int, size: int) -> None:
    name = namespace()
    with (
        shared(shared_server, size, namespace=name) as reader,
        shared(shared_server, size, namespace=name, waiting=200, remembered=20) as writer,
    ):
        writer.__class__ = Relay
        writer.reader = reader  # type: ignore[attr-defined]
        test_scorer_agreement.furnished(writer)
        reader.share("store", [Holder("plain"), Holder("hybrid")])
        model = test_scorer_agreement.indexer_on(NaiveIndex(), size)
        test_scorer_agreement.walk(writer, model, seed, 40, but_reasons)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(seed=st.integers(0, 1 << 32), size=SIZES)
@settings(max_examples=10)
def test_a_replica_agrees_for_long(shared_server: RedisServer, seed: int, size: int) -> None:
    with shared(shared_server, size, waiting=200, remembered=20) as indexer:
        model = test_scorer_agreement.indexer_on(NaiveIndex(), size)
        test_scorer_agreement.walk(test_scorer_agreement.furnished(indexer), model, seed, 250, but_reasons)  # type: ignore[arg-type]
