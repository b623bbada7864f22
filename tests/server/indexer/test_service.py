"""The service end to end: real engines with other hashes and block sizes than the index, over real sockets and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time

import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.index.fleet import PRESETS, prompts_of
from tests.server.support import PATIENCE, LiveRank, Served
from tests.server.wire import Wire

from kvyard.events.faults import Faults

pytestmark = pytest.mark.zmq

LOSSY = Faults(drop=0.2, duplicate=0.1, reorder=0.1)


def right(served: Served, ranks: list[LiveRank], prompts: list[list[int]]) -> bool:
    """Return true if the service agrees with every rank's own manager."""
    for prompt in prompts:
        found = served.score(prompt)
        for rank in ranks:
            match = found.get((rank.worker, rank.rank))
            if match is None or match["state"] != "fresh" or match["tokens"] != rank.engine.longest(prompt):
                return False
    return True


@pytest.mark.parametrize("preset", ["full+window", "mla"])
def test_scores_are_the_managers_own_with_loss_and_a_restart(preset: str) -> None:
    prompts = prompts_of(random.Random(5), count=6)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                LiveRank(worker, rank, PRESETS[preset], faults=LOSSY if rank else None, seed=10 * at + rank)
            )
            for at, worker in enumerate("ab")
            for rank in (0, 1)
        ]
        served = stack.enter_context(Served(block_size=2))
        for rank in ranks:
            served.register(**rank.registration())
        for turn in range(3):
            for _ in range(20):
                for rank in ranks:
                    rank.step(prompts)
                time.sleep(0.002)
            if turn == 1:
                ranks[0].restart()
                ranks[0].step(prompts)
            eventually(lambda: right(served, ranks, prompts), lambda: served.get("/workers"))
        assert any(rank.engine.longest(prompt) for rank in ranks for prompt in prompts)
        # The answer for Dynamo's clients counts whole prompts, and per instance its best rank.
        for prompt in prompts:
            whole = served.post("/query", model_name="m", token_ids=prompt)
            for name, instance in whole["instances"].items():
                assert instance["gpu"] == max(instance["dp"].values()) == instance["longest_matched"]
                assert whole["scores"][name] == instance["dp"]
                for rank in ranks:
                    if rank.worker == name:
                        assert instance["dp"].get(str(rank.rank), 0) >= rank.engine.longest(prompt)


def test_answers_stay_whole_while_events_come_in() -> None:
    """Many askers during ingestion: every answer is one that was true at some time, and none is an error."""
    prompts = prompts_of(random.Random(6), count=5)
    with LiveRank("a", 0, PRESETS["full"], seed=3) as rank, Served(block_size=4) as served:
        served.register(**rank.registration())
        stop = threading.Event()
        bad: list[object] = []
        asked = [0]

        def ask() -> None:
            while not stop.is_set():
                for prompt in prompts:
                    found = served.score(prompt)
                    asked[0] += 1
                    for match in found.values():
                        if not 0 <= match["tokens"] < len(prompt) or match["tokens"] % 4:
                            bad.append((prompt, match))

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        for _ in range(150):
            rank.step(prompts)
            time.sleep(0.002)  # so that questions come between batches
        eventually(lambda: right(served, [rank], prompts))
        stop.set()
        for asker in askers:
            asker.join()
        assert not bad and asked[0] > 20


def test_unregistered_workers_leave_nothing_behind() -> None:
    """D13 and D14 at the service: rows, counts, groups and metrics go, and batches on their way revive nothing."""
    prompts = prompts_of(random.Random(7), count=4)
    with LiveRank("a", 0, PRESETS["full"]) as rank, LiveRank("b", 0, PRESETS["full"]) as other, Served() as served:
        for one in (rank, other):
            served.register(**one.registration())
            for _ in range(30):
                one.step(prompts)
        eventually(lambda: right(served, [rank, other], prompts))
        streams = served.post("/unregister", model_name="m", instance_id="a")["streams"]
        assert streams == ["m/default/a@0/engine"]
        for _ in range(10):
            rank.step(prompts)
            other.step(prompts)
        eventually(lambda: right(served, [other], prompts))
        assert not any('stream="m/default/a' in name for name in served.metrics())
        assert {worker["instance_id"] for worker in served.get("/workers")} == {"b"}
        assert all(place["instance_id"] == "b" for place in served.get("/dump")["m:default"]["places"])
        served.post("/unregister", 404, model_name="m", instance_id="a")
        # And it may come back.
        served.register(**rank.registration())
        eventually(lambda: right(served, [rank, other], prompts))
        served.post("/unregister", model_name="m", instance_id="a")
        served.post("/unregister", model_name="m", instance_id="b")
        served.post("/query", 404, model_name="m", token_ids=[1])
        assert served.get("/health") == {
            "status": "ok",
            "live": True,
            "ready": True,
            "degraded": False,
            "reasons": [],
            "models": 0,
            "streams": {},
        }


def test_without_anybody_to_ask_a_loss_earns_nothing_until_a_clear() -> None:
    """No replay endpoint: what is lost makes the stream stale, and stale earns nothing."""
    text = list(range(40))
    with LiveRank("a", 0, PRESETS["full"], replay=False) as rank, Served() as served:
        served.register(**rank.registration())
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        rank.run(text)
        eventually(lambda: right(served, [rank], [text]))
        assert served.score(text)["a", 0]["tokens"] == 36
        rank.engine.batcher._seq += 1  # a batch that nobody gets
        rank.run(list(range(100, 120)))
        eventually(lambda: served.score(text)["a", 0]["state"] == "stale")
        found = served.score(text)["a", 0]
        assert found["tokens"] == 0 and found["confidence"] == 0 and "missing" in found["reason"]
        assert served.post("/query", model_name="m", token_ids=text)["instances"] == {}
        rank.engine.manager.reset()
        rank.publisher.publish(rank.engine.batcher.resync(0), 0)  # a clear of everything
        rank.run(text)
        eventually(lambda: right(served, [rank], [text]))
        assert served.score(text)["a", 0]["tokens"] == 36


def test_d15_a_busy_service_has_a_bounded_queue_and_reports_losses() -> None:
    """While the loop is kept busy more arrives than the queues take; the loss is seen and counted, and a clear heals it."""
    text = list(range(16))
    with Wire(hwm=5) as wire, Served(block_size=4, streams={"queue": 5, "held_batches": 10}) as served:
        (stream,) = served.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        wire.stored([1, 2, 3, 4], text, 4)
        eventually(lambda: served.score(text)["1", 0]["tokens"] == 12)
        stalled, over = threading.Event(), threading.Event()

        async def stall() -> None:
            stalled.set()
            over.wait(PATIENCE)

        (task,) = [one.task for one in served.service.supervisor.tasks if one.name == f"listener {stream}"]
        assert task is not None
        busy = asyncio.run_coroutine_threadsafe(stall(), task.get_loop())
        assert stalled.wait(PATIENCE)
        hashes = list(range(1 << 40, (1 << 40) + 8000))
        for _ in range(500):  # some 36 MB, far more than sockets hold
            wire.removed(hashes)
        over.set()
        busy.result(PATIENCE)

        def lost() -> bool:
            wire.removed([5])
            return served.score(text)["1", 0]["state"] == "stale"

        eventually(lost)
        assert served.score(text)["1", 0]["tokens"] == 0
        labels = f'{{model="m",stream="{stream}",tenant="default"}}'
        metrics = served.metrics()
        assert metrics[f"kvyard_indexer_stream_gaps_total{labels}"] > 0
        assert metrics[f"kvyard_indexer_stream_waiting{labels}"] < 500  # what is read at once, and a few that wait
        wire.cleared()
        wire.stored([1, 2, 3, 4], text, 4)
        eventually(lambda: served.score(text)["1", 0]["tokens"] == 12, lambda: served.get("/workers"))


def test_a_stream_of_overlapping_chunks_through_wire_dedup_and_index() -> None:
    """Two chunks list one block: the first removal keeps it, the second drops it (llm-d #680), over the wire."""
    from tests.index.support import hashes_of

    text = list(range(1000, 1016))
    with Wire() as wire, Served(block_size=4) as served:
        served.register(instance_id=7, endpoint=wire.endpoint, block_size=4)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        names = [int.from_bytes(key[-8:], "big") for key in hashes_of(text, 4)]
        wire.stored(names, text, 4)
        chunk_one, chunk_two = names[:3], names[1:]
        for chunk, at in ((chunk_one, 0), (chunk_two, 1)):
            parent = None if at == 0 else names[0]
            wire.stored(chunk, text[at * 4 : at * 4 + 12], 4, parent=parent, medium="CPU")

        def on_cpu() -> int:
            return served.post("/query", model_name="m", token_ids=text)["instances"].get("7", {}).get("cpu", -1)

        wire.removed(names)  # from the device
        eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["sequence"] == 3)
        assert served.post("/query", model_name="m", token_ids=text)["instances"]["7"]["gpu"] == 0
        assert on_cpu() == 16
        wire.removed(chunk_one, medium="CPU")
        eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["sequence"] == 4)
        found = served.post("/query", model_name="m", token_ids=text)["instances"]
        assert found == {}  # block 0 was in one chunk only, and a prefix begins there
        wire.stored(names[:1], text[:4], 4, medium="CPU")
        eventually(lambda: served.post("/query", model_name="m", token_ids=text)["instances"].get("7"))
        assert on_cpu() == 16  # blocks 1 and 2 are still in the other chunk
        wire.removed(chunk_two, medium="CPU")
        eventually(lambda: on_cpu() == 4)
        metrics = served.metrics()
        labels = '{model="m",tenant="default"}'
        assert metrics[f"kvcache_kvevents_dedup_removed_hashes_suppressed_total{labels}"] == 2
