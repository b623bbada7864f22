"""The cases of Dynamo's own tests of its standalone indexer (``lib/kv-router/tests/standalone_indexer_http.rs``), over events.

Where ours answers otherwise, on purpose, the case says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.support import Served
from tests.server.wire import Wire

pytestmark = pytest.mark.zmq

SIZE = 4
TEXT = list(range(1, 13))
LOCAL = [14643705804678351452, 16777012769546811212, 483935686894639516]
"""Dynamo's hashes of the blocks of TEXT: constants of its ``lib/tokens``, seed 1337."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Workers 7 and 8 with two blocks on the device, 7 with a third on the host; 9 in another group, 10 and 11 with salts."""
    with (
        Wire() as seven,
        Wire() as eight,
        Wire() as nine,
        Wire() as ten,
        Wire() as eleven,
        Served(block_size=SIZE) as service,
    ):
        groups = {9: "group-b"}
        wires = {7: seven, 8: eight, 9: nine, 10: ten, 11: eleven}
        for instance, wire in wires.items():
            service.register(
                instance_id=instance,
                endpoint=wire.endpoint,
                block_size=SIZE,
                routing_group=groups.get(instance, "default"),
            )
        eventually(lambda: [worker["status"] for worker in service.get("/workers")] == ["active"] * len(wires))
        for wire in (seven, eight):
            wire.stored([11, 12], TEXT[:8], SIZE)
        seven.stored([13], TEXT[8:], SIZE, parent=12, medium="CPU_TIER1")
        nine.stored([11], TEXT[:4], SIZE)
        ten.stored([21, 22], TEXT[:8], SIZE, extra_keys=[["tenant-a"], None])
        eleven.stored([31, 32], TEXT[:8], SIZE, extra_keys=[["tenant-b"], None])
        seven.stored([11, 12], TEXT[:8], SIZE)
        sequences = {7: 2, 8: 0, 9: 0, 10: 0, 11: 0}
        eventually(
            lambda: {w["instance_id"]: w["listeners"]["0"]["sequence"] for w in service.get("/workers")} == sequences
        )
        yield service


def test_hashes_are_answered_per_instance_and_tier(served: Served) -> None:
    body = served.post("/query_by_hash", block_hashes=LOCAL, model_name="m", routing_group="default")
    assert body["scores"]["7"]["0"] == body["scores"]["8"]["0"] == 2 * SIZE
    seven, eight = body["instances"]["7"], body["instances"]["8"]
    assert (seven["gpu"], seven["cpu"], seven["disk"], seven["longest_matched"]) == (8, 12, 12, 12)
    assert seven["dp"] == {"0": 8}
    assert (eight["gpu"], eight["cpu"], eight["longest_matched"]) == (8, 8, 8)
    assert served.post("/query_by_hash", block_hashes=LOCAL, model_name="m", cache_salt=None) == body


def test_routing_groups_are_apart(served: Served) -> None:
    """Dynamo ignores ``tenant_id`` now; here it is the group's older name, and two names that differ are refused."""
    other = served.post("/query_by_hash", block_hashes=LOCAL, model_name="m", routing_group="group-b")
    assert other["scores"] == {"9": {"0": SIZE}}
    assert other == served.post("/query_by_hash", block_hashes=LOCAL, model_name="m", tenant_id="group-b")
    assert "9" not in served.post("/query_by_hash", block_hashes=LOCAL, model_name="m")["scores"]
    served.post("/query_by_hash", 422, block_hashes=LOCAL, model_name="m", tenant_id="default", routing_group="group-b")


@pytest.mark.parametrize(("salt", "worker"), [("tenant-a", "10"), ("tenant-b", "11")])
def test_salts_are_apart(served: Served, salt: str, worker: str) -> None:
    """By tokens as in Dynamo; by hashes too, where Dynamo refuses a salt since its clients hash it themselves."""
    assert served.post("/query", token_ids=TEXT[:8], model_name="m", cache_salt=salt)["scores"] == {worker: {"0": 8}}
    by_hash = served.post("/query_by_hash", block_hashes=LOCAL[:2], model_name="m", cache_salt=salt)
    assert by_hash["scores"] == {worker: {"0": 8}}


def test_an_unknown_model_is_not_found(served: Served) -> None:
    assert "no-such-model" in served.post("/query", 404, token_ids=[1, 2, 3], model_name="no-such-model")["error"]


def test_a_block_that_is_stored_twice_is_there_once(served: Served) -> None:
    """Dynamo counts a warning; here a second announcement changes nothing that is answered."""
    assert served.post("/query", token_ids=TEXT, model_name="m")["instances"]["7"]["gpu"] == 2 * SIZE


def test_tiered_events_over_zmq(served: Served) -> None:
    body = served.post("/query", token_ids=TEXT, model_name="m")
    assert (body["instances"]["7"]["gpu"], body["instances"]["7"]["cpu"]) == (8, 12)
