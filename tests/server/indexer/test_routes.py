"""The service's HTTP: what is refused and how, what is answered, and that its own description is true."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")

from tests.server.support import Served
from tests.server.wire import Wire

from kvyard.index.metrics import NAMES
from kvyard.server.health import HealthReason
from kvyard.server.indexer import routes
from kvyard.server.indexer.measures import OWN, IndexerMetrics
from kvyard.server.indexer.routes import IndexerRoutes

pytestmark = pytest.mark.zmq

TEXT = list(range(1, 17))


@pytest.fixture(scope="module")
def served():
    """One worker, 12 of 16 tokens on the host and 8 on the device, as an engine of vLLM's says it."""
    with Wire() as wire, Served(block_size=4, limits={"body_bytes": 100_000, "tokens": 1000, "batch": 3}) as service:
        service.register(instance_id=1, endpoint=wire.endpoint, block_size=4)
        eventually(lambda: service.get("/workers")[0]["status"] == "active")
        wire.stored([11, 12], TEXT[:8], 4)
        wire.stored([11, 12, 13], TEXT[:12], 4, medium="CPU")
        eventually(lambda: service.get("/workers")[0]["listeners"]["0"]["sequence"] == 1)
        yield service


class TestDynamosClients:
    """Answers of Dynamo 1.6.1's own indexer to the very same stream and requests, recorded on 2026-11-15."""

    DYNAMO = {
        "scores": {"1": {"0": 8}},
        "frequencies": [],
        "instances": {"1": {"longest_matched": 12, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 12}},
    }

    def test_query(self, served: Served) -> None:
        assert served.post("/query", token_ids=TEXT, model_name="m") == self.DYNAMO
        assert served.post("/query", token_ids=TEXT, model_name="m", routing_group="default") == self.DYNAMO
        assert served.post("/query", token_ids=TEXT, model_name="m", tenant_id="default") == self.DYNAMO

    def test_query_by_hash(self, served: Served) -> None:
        """Local hashes as in Dynamo's /dump (tokens_hash), signed as its clients send them."""
        hashes = [14643705804678351452, 16777012769546811212, 483935686894639516]
        assert served.post("/query_by_hash", block_hashes=hashes, model_name="m") == self.DYNAMO
        signed = [one - (1 << 64) if one >> 63 else one for one in hashes]
        assert served.post("/query_by_hash", block_hashes=signed, model_name="m") == self.DYNAMO
        assert served.post("/query_by_hash", block_hashes=hashes[1:], model_name="m")["instances"] == {}

    def test_namespaces_count_for_hashes_too(self, served: Served) -> None:
        hashes = [14643705804678351452, 16777012769546811212]
        for space in ({"lora_name": "x"}, {"cache_salt": "y"}):
            assert served.post("/query", token_ids=TEXT, model_name="m", **space)["instances"] == {}
            assert served.post("/query_by_hash", block_hashes=hashes, model_name="m", **space)["instances"] == {}

    def test_workers(self, served: Served) -> None:
        (worker,) = served.get("/workers")
        assert worker["instance_id"] == 1 and worker["source"] == "zmq" and worker["status"] == "active"
        assert worker["routing_group"] == "default" and worker["block_size"] == 4
        assert worker["listeners"]["0"]["endpoint"] == worker["endpoints"]["0"]
        assert worker["listeners"]["0"]["state"] == "fresh"

    def test_statuses(self, served: Served) -> None:
        """201 to register, 409 to do so twice, 404 for what isn't there, 400 for no endpoint, 422 for no body of its type."""
        endpoint = served.get("/workers")[0]["endpoints"]["0"]
        body = {"instance_id": 1, "endpoint": endpoint, "model_name": "m", "block_size": 4}
        assert "registered already" in served.post("/register", 409, **body)["error"]
        served.post("/register", 400, **{**body, "instance_id": 2, "endpoint": "tcp://127.0.0.1:453591"})
        served.post("/query", 404, token_ids=TEXT, model_name="x")
        served.post("/unregister", 404, instance_id=7, model_name="m")
        served.post("/query", 422, token_ids="no", model_name="m")


class TestScore:
    def test_as_an_engine_would(self, served: Served) -> None:
        """The last token is always computed: of 12 cached tokens of a prompt of 12, 8 can be skipped."""
        match = served.score(TEXT)["1", 0]
        assert match["tokens"] == 12 and match["blocks"] == 3 and match["limited_by"] is None
        assert match["tiers"] == {
            "gpu": {"tokens": 8, "blocks": 2, "reach": 8},
            "cpu": {"tokens": 4, "blocks": 1, "reach": 12},
        }
        assert match["score"] == pytest.approx(2.75) and match["confidence"] == 1.0 and match["state"] == "fresh"
        assert served.score(TEXT[:12])["1", 0]["tokens"] == 8

    def test_a_batch(self, served: Served) -> None:
        batch = [{"token_ids": TEXT}, {"token_ids": TEXT[:6]}]
        found = served.post("/score", model_name="m", batch=batch)
        assert [result["best"] and result["best"]["tokens"] for result in found["results"]] == [12, 4]
        assert found["block_size"] == 4

    def test_only_some_workers(self, served: Served) -> None:
        assert served.score(TEXT, workers=["1"]).keys() == {("1", 0)} == served.score(TEXT, workers=[1]).keys()
        assert served.score(TEXT, workers=[2]) == {}

    def test_explain(self, served: Served) -> None:
        found = served.post("/explain", model_name="m", token_ids=TEXT)["explanations"]
        assert found[0]["groups"][0]["tokens"] == 12
        assert "all that could be used" in found[0]["groups"][0]["why"]
        more = served.post("/explain", model_name="m", token_ids=[*TEXT, 17])["explanations"][0]
        assert "no worker holds block 3" in more["summary"] and more["worker"]["limited_by"] is None
        other = served.post("/explain", model_name="m", token_ids=[9, *TEXT], instance_id=1)["explanations"][0]
        assert other["worker"]["tokens"] == 0 and "no worker holds block 0" in other["summary"]
        served.post("/explain", 404, model_name="m", token_ids=TEXT, instance_id=5)
        served.post("/explain", 422, model_name="m", token_ids=TEXT, dp_rank=0)


class TestText:
    def test_text_is_tokenized_where_a_tokenizer_is_configured(self, tmp_path) -> None:
        tokenizers = pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")
        path = word_tokenizer(tmp_path, tokenizers)
        with Wire() as wire, Served(block_size=4, tokenizers={"m": path}) as served:
            served.register(instance_id=1, endpoint=wire.endpoint)
            eventually(lambda: served.get("/workers")[0]["status"] == "active")
            wire.stored([1], [0, 1, 2, 3], 4)
            eventually(lambda: served.score([0, 1, 2, 3, 0])["1", 0]["tokens"] == 4)
            found = served.post("/score", model_name="m", text="alpha beta gamma delta alpha")
            assert found["results"][0]["tokens"] == 5 and found["results"][0]["best"]["tokens"] == 4
            found = served.post("/explain", model_name="m", text="alpha beta gamma delta alpha")
            assert found["explanations"][0]["worker"]["tokens"] == 4

    def test_without_one_it_says_so(self, served: Served) -> None:
        problem = served.post("/score", 422, model_name="m", text="hello")
        assert problem["field"] == "text" and "--tokenizer" in problem["fix"]


def word_tokenizer(folder, tokenizers) -> str:
    """A tokenizer.json of four words."""
    words = {"alpha": 0, "beta": 1, "gamma": 2, "delta": 3, "?": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = str(folder / "tokenizer.json")
    made.save(path)
    return path


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "status", "field", "words"),
        [
            ("/query", "{", 400, "", "not JSON"),
            ("/query", b"\xff\xfe", 400, "", "not JSON"),
            ("/query", "", 400, "", "not JSON"),
            ("/query", "[" * 10_000, 422, "", "object"),
            ("/query", '{"x":' * 10_000, 422, "x", "no field"),
            ("/query", "[]", 422, "", "object"),
            ("/query", {"token_ids": [1]}, 422, "model_name", "is missing"),
            ("/query", {"model_nam": "m"}, 422, "model_nam", "no field"),
            ("/query", {"model_name": "m", "token_ids": [1, -2]}, 422, "token_ids[1]", ">= 0"),
            ("/query", {"model_name": "m", "token_ids": [1 << 32]}, 422, "token_ids[0]", "<= 4294967295"),
            ("/query", {"model_name": "m", "token_ids": [1.5]}, 422, "token_ids[0]", "int"),
            ("/query", {"model_name": "", "token_ids": []}, 422, "model_name", "length >= 1"),
            ("/query", {"model_name": "m", "token_ids": [0] * 1001}, 413, "token_ids", "at most 1000"),
            (
                "/query",
                {"model_name": "m", "token_ids": [], "tenant_id": "a", "routing_group": "b"},
                422,
                "routing_group",
                "differ",
            ),
            (
                "/query",
                {"model_name": "m", "token_ids": [], "media": [{"hash": "x", "offset": 4, "length": 2}] * 2},
                422,
                "",
                "overlap",
            ),
            ("/query", {"model_name": "m", "token_ids": [10**30]}, 422, "token_ids[0]", "<= 4294967295"),
            ("/query_by_hash", {"model_name": "m", "block_hashes": ["1"]}, 422, "block_hashes[0]", "int"),
            ("/score", {"model_name": "m"}, 422, "token_ids", "one of them"),
            ("/explain", {"model_name": "m", "token_ids": [], "dp_rank": 10**30}, 422, "dp_rank", "<= 4095"),
            ("/score", {"model_name": "m", "token_ids": [1], "text": "x"}, 422, "token_ids", "one of them"),
            ("/score", {"model_name": "m", "batch": [{"token_ids": []}] * 4}, 413, "batch", "at most 3"),
            ("/score", {"model_name": "m", "token_ids": [], "batch": []}, 422, "batch", "stands alone"),
            ("/score", {"model_name": "m", "batch": [{"tokens": []}]}, 422, "batch[0].tokens", "no field"),
            ("/register", {"model_name": "m", "endpoint": "tcp://x:1"}, 422, "instance_id", "one pool"),
            ("/register", {"model_name": "m", "endpoint": "x", "instance_id": 9}, 400, "endpoint", "not an endpoint"),
            ("/register", {"model_name": "m", "endpoint": "inproc://x", "instance_id": 9}, 400, "endpoint", "inside"),
            (
                "/register",
                {"model_name": "m", "endpoint": "tcp://x:1", "instance_id": 1 << 64},
                422,
                "instance_id",
                "64 bits",
            ),
            (
                "/register",
                {"model_name": "m", "endpoint": "tcp://x:1", "instance_id": 9, "replay_endpoint": "http://x"},
                400,
                "replay_endpoint",
                "not an endpoint",
            ),
            (
                "/register",
                {"model_name": "m", "endpoint": "tcp://x:1", "instance_id": 9, "additional_salt": "s"},
                422,
                "additional_salt",
                "can't be honoured",
            ),
            (
                "/register",
                {"model_name": "m", "endpoint": "tcp://x:1", "instance_id": 9, "groups": [{"kind": "sliding_window"}]},
                422,
                "",
                "needs a window",
            ),
            (
                "/register",
                {"model_name": "m", "endpoint": "tcp://x:65000", "instance_id": 9, "dp_size": 1000},
                400,
                "endpoint",
                "65999",
            ),
            (
                "/register",
                {"model_name": "m", "endpoint": "tcp://x:1", "instance_id": 9, "engineType": "vllm"},
                422,
                "engineType",
                "no field",
            ),
            ("/unregister", {"model_name": "m"}, 422, "instance_id", "one pool"),
        ],
    )
    def test_name_the_field_and_the_fix(self, served: Served, path, body, status, field, words) -> None:
        content = json.dumps(body) if isinstance(body, dict) else body
        reply = served.client.post(path, content=content)
        problem = reply.json()
        assert reply.status_code == status, problem
        assert problem["field"] == field and words in problem["error"], problem
        assert reply.headers["content-type"] == "application/json"
        # Nothing of a refused registration is left.
        assert len(served.get("/workers")) == 1

    def test_a_body_that_is_too_long(self, served: Served) -> None:
        reply = served.client.post("/query", content=b" " * 100_001)
        assert reply.status_code == 413 and "100000 bytes" in reply.json()["error"]

        def endless():
            for _ in range(200):
                yield b" " * 1000

        reply = served.client.post("/query", content=endless())  # no length announced
        assert reply.status_code == 413
        assert served.get("/health")["status"] == "ok"

    def test_a_body_that_never_comes(self) -> None:
        with Served(limits={"body_seconds": 0.2}) as served:
            host, port = served.url.removeprefix("http://").split(":")
            import socket

            with socket.create_connection((host, int(port)), timeout=20) as slow:
                slow.sendall(b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
                assert slow.recv(1000).startswith(b"HTTP/1.1 408")

    def test_paths_and_methods(self, served: Served) -> None:
        reply = served.client.get("/query")
        assert reply.status_code == 405 and reply.json()["fix"] == "use POST" and reply.headers["allow"] == "POST"
        reply = served.client.get("/nothing")
        assert reply.status_code == 404 and "/query" in reply.json()["fix"]


class TestToken:
    def test_all_but_health_wants_it(self) -> None:
        with Served(token="s3cret") as served:
            assert served.get("/workers") == []
            with httpx.Client(base_url=served.url, trust_env=False) as stranger:
                assert stranger.get("/health").status_code == 200
                for method, path in (("GET", "/workers"), ("GET", "/dump"), ("GET", "/metrics"), ("POST", "/query")):
                    reply = stranger.request(method, path)
                    assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
                for header in ("Bearer s3cre", "Bearer s3cretx", "Basic s3cret", "s3cret", "Bearer"):
                    assert stranger.get("/workers", headers={"Authorization": header}).status_code == 401
                assert stranger.get("/workers", headers={"Authorization": "bearer s3cret"}).status_code == 200
            document = served.get("/openapi.json")
            assert document["paths"]["/query"]["post"]["security"] == [{"token": []}]
            assert "security" not in document["paths"]["/health"]["get"]


def test_every_metric_is_there(served: Served) -> None:
    names = {name.partition("{")[0] for name in served.metrics()}
    own = {f"{name}_count" if name.endswith("_seconds") else name for name in OWN}
    assert NAMES.keys() <= names and own <= names
    mine = {name for name in names if name.startswith(("kvyard_", "kvcache_")) and not name.endswith("_created")}
    assert {
        name.removesuffix("_count").removesuffix("_sum").removesuffix("_bucket") for name in mine
    } == NAMES.keys() | OWN.keys()


def test_answers_are_of_the_types_that_are_described(served: Served) -> None:
    """The slow suite sends requests made from the description; here each route is asked once."""
    document = served.get("/openapi.json")
    assert document["openapi"] == "3.1.0"
    asked = {
        "/query": {"token_ids": TEXT},
        "/query_by_hash": {"block_hashes": [1]},
        "/score": {"token_ids": TEXT},
        "/explain": {"token_ids": TEXT},
        "/register": {"instance_id": "other", "endpoint": "tcp://127.0.0.1:9"},
        "/unregister": {"instance_id": "other"},
    }
    for operation in IndexerRoutes(served.service, IndexerMetrics(served.service)).operations():
        described = document["paths"][operation.path][operation.method.lower()]
        body = None if operation.body is None else {"model_name": "m", **asked[operation.path]}
        reply = served.client.request(operation.method, operation.path, json=body)
        assert str(reply.status_code) in described["responses"] and reply.status_code < 300
        assert (
            reply.headers["content-type"].partition(";")[0] in described["responses"][str(reply.status_code)]["content"]
        )
        if operation.reply is not None:
            strict = msgspec.json.decode(reply.content, type=operation.reply)
            assert msgspec.json.decode(msgspec.json.encode(strict)) == reply.json()
    assert set(document["paths"]) >= asked.keys() | {"/workers", "/dump", "/health", "/metrics"}


def test_nothing_of_a_prompt_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        served.post("/query", token_ids=[123454321] * 8, model_name="m")
        served.post("/score", 422, text="a very private prompt", model_name="m")
        served.client.post("/query", content=b'{"token_ids": ["a very private prompt"')
    assert not any("123454321" in record.getMessage() or "private" in record.getMessage() for record in caplog.records)


def test_ranks_are_registered_by_their_ports_and_forgotten_one_by_one() -> None:
    with Wire() as wire, Served() as served:
        port = int(wire.endpoint.rpartition(":")[2])
        streams = served.register(instance_id=5, endpoint=f"tcp://127.0.0.1:{port}", dp_size=2)
        assert streams == ["m/default/5@0/engine", "m/default/5@1/engine"]
        (worker,) = served.get("/workers")
        assert worker["endpoints"] == {"0": f"tcp://127.0.0.1:{port}", "1": f"tcp://127.0.0.1:{port + 1}"}
        assert served.post("/unregister", instance_id=5, model_name="m", dp_rank=1)["streams"] == streams[1:]
        assert (
            served.post("/unregister", instance_id="5", model_name="m", tenant_id="default")["streams"] == streams[:1]
        )


def test_pools_tiers_and_several_streams_of_one_worker() -> None:
    text = list(range(16))
    with Wire() as engine, Wire() as connector, Wire() as store, Served(block_size=4) as served:
        served.register(instance_id="a", endpoint=engine.endpoint)
        served.register(instance_id="a", endpoint=connector.endpoint, stream="offload", tier="cpu")
        served.register(pool="fs", endpoint=store.endpoint, tier="disk", members=[{"instance_id": "a"}])
        eventually(lambda: {worker["status"] for worker in served.get("/workers")} == {"active"})
        engine.stored([1], text[:4], 4)
        connector.stored([71, 72], text[:8], 4)
        store.stored([81, 82, 83], text[:12], 4)
        wanted = {"longest_matched": 12, "gpu": 4, "dp": {"0": 4}, "cpu": 8, "disk": 12}
        eventually(lambda: served.post("/query", model_name="m", token_ids=text)["instances"].get("a") == wanted)
        listeners = next(one for one in served.get("/workers") if one["instance_id"] == "a")["listeners"]
        assert set(listeners) == {"0", "0/offload"}
        served.post("/unregister", model_name="m", pool="fs")
        served.post("/unregister", model_name="m", instance_id="a", stream="offload")
        assert served.post("/query", model_name="m", token_ids=text)["instances"]["a"]["disk"] == 4


def test_one_stream_may_speak_for_several_ranks() -> None:
    text = list(range(8))
    with Wire() as wire, Served(block_size=4) as served:
        served.register(instance_id=3, endpoint=wire.endpoint, rank_from_events=True)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        for rank, blocks in ((0, 2), (2, 1)):
            tokens = text[: 4 * blocks]
            event = {"type": "BlockStored", "block_hashes": [11, 12][:blocks], "parent_block_hash": None}
            wire.batch({**event, "token_ids": tokens, "block_size": 4}, rank=rank)
        wanted = {"longest_matched": 8, "gpu": 8, "dp": {"0": 8, "2": 4}, "cpu": 8, "disk": 8}
        eventually(lambda: served.post("/query", model_name="m", token_ids=text)["instances"].get("3") == wanted)


def test_hybrid_workers_are_held_to_their_windows() -> None:
    """Groups are learned from events: a window that was evicted limits the match, and the answer says so."""
    text = list(range(16))
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
    with Wire() as wire, Served(block_size=4) as served:
        served.register(instance_id=3, endpoint=wire.endpoint)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        for group in (full, window):
            wire.stored([1, 2, 3, 4], text, 4, **group)
        eventually(lambda: served.score([*text, 1])["3", 0]["tokens"] == 16)
        wire.removed([3, 4], group_idx=1)
        eventually(lambda: served.score([*text, 1])["3", 0]["tokens"] == 8)
        assert served.score([*text, 1])["3", 0]["limited_by"] == 1
        groups = served.post("/explain", model_name="m", token_ids=[*text, 1])["explanations"][0]["groups"]
        assert [(group["kind"], group["tokens"]) for group in groups] == [("full", 16), ("sliding_window", 8)]


def test_a_listener_that_fails_says_so_comes_back_and_takes_nobody_down(monkeypatch, caplog) -> None:
    text = list(range(8))
    with Wire() as wire, Wire() as other, Served(block_size=4) as served:
        (stream,) = served.register(instance_id=1, endpoint=wire.endpoint)
        served.register(instance_id=2, endpoint=other.endpoint)
        eventually(lambda: [one["status"] for one in served.get("/workers")] == ["active"] * 2)
        for one in (wire, other):
            one.stored([1, 2], text, 4)
        eventually(lambda: len(served.post("/query", model_name="m", token_ids=text)["scores"]) == 2)
        listener = served.service.models["m", "default"].listeners[stream]
        applying, fails = listener._applying, [True]

        def fail(update):
            if fails[0]:
                raise RuntimeError("a bug")
            yield from applying(update)

        monkeypatch.setattr(listener, "_applying", fail)
        wire.stored([1, 2], text, 4)
        eventually(lambda: listener.failures)
        fails[0] = False
        assert served.post("/query", model_name="m", token_ids=text)["scores"] == {"2": {"0": 8}}
        assert served.score(text)["1", 0]["state"] == "stale"
        health = served.get("/health")
        assert health["status"] == "degraded" and health["ready"]
        assert {(one["code"], one["about"]) for one in health["reasons"]} <= {
            ("stream-failed", stream),
            ("stream-stale", stream),
        }
        other.removed([2])
        eventually(lambda: served.post("/query", model_name="m", token_ids=text)["scores"] == {"2": {"0": 4}})
        said = [record.getMessage() for record in caplog.records if "is begun again" in record.getMessage()]
        assert len(said) == 1 and f"listener {stream} failed" in said[0] and "a bug" in said[0]
        assert served.metrics()["kvyard_indexer_task_failures_total"] == 1

        # Nothing has to be done to have it back.
        def is_back() -> bool:
            wire.cleared()
            wire.stored([1, 2], text, 4)
            return bool(
                served.post("/query", model_name="m", token_ids=text)["scores"] == {"1": {"0": 8}, "2": {"0": 4}}
            )

        eventually(is_back)
        assert served.get("/health")["status"] == "ok" and served.get("/ready")["ready"]


@pytest.mark.parametrize("direct", [None, {"algorithm": "sha256_cbor", "seed": "0"}])
def test_events_that_contradict_themselves_cost_themselves(direct) -> None:
    """A store that lists a hash twice, and one whose hashes are bytes and numbers."""
    text = list(range(16))
    with Wire() as wire, Served(block_size=4, direct=direct) as served:
        served.register(instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        names = [7, 8, 9, 10] if direct is None else keys_of(served, text)

        def hits() -> int:
            return int(served.score([*text, 1])["1", 0]["tokens"])

        wire.stored(names[:2], text[:8], 4)
        eventually(lambda: hits() == 8)
        wire.stored([71, 72, 71], list(range(100, 112)), 4)
        wire.stored([81, (82).to_bytes(32, "big"), 83], list(range(200, 212)), 4)
        wire.stored(names[2:], text[8:], 4, parent=names[1])
        eventually(lambda: hits() == 16)
        wire.removed([names[3], (82).to_bytes(32, "big"), names[3]])
        eventually(lambda: hits() == 12)
        wire.cleared()
        eventually(lambda: hits() == 0)
        wire.stored(names, text, 4)
        eventually(lambda: hits() == 16)
        assert served.get("/health")["status"] == "ok"
        (listener,) = served.service.models["m", "default"].listeners.values()
        assert listener.failures == 0


def keys_of(served: Served, text: list[int]) -> list[int]:
    (model,) = served.service.models.values()
    return model.indexer.identity.keys(text)


def test_models_and_tenants_never_meet() -> None:
    text = list(range(8))
    with Wire() as wire, Served(block_size=4) as served:
        for model, tenant in (("m", "one"), ("m", "two"), ("n", "one")):
            served.post("/register", 201, model_name=model, tenant_id=tenant, instance_id=1, endpoint=wire.endpoint)
        eventually(lambda: [one["status"] for one in served.get("/workers")] == ["active"] * 3)
        wire.stored([1, 2], text, 4)
        for model, tenant in (("m", "one"), ("m", "two"), ("n", "one")):
            eventually(
                lambda m=model, t=tenant: served.post("/query", model_name=m, tenant_id=t, token_ids=text)["scores"]
            )
        assert served.post("/unregister", model_name="m", instance_id=1)["streams"] == [
            "m/one/1@0/engine",
            "m/two/1@0/engine",
        ]
        assert served.post("/query", model_name="n", tenant_id="one", token_ids=text)["scores"]


def test_a_wrong_block_size_is_shown() -> None:
    with Wire() as wire, Served() as served:
        served.register(instance_id=1, endpoint=wire.endpoint, block_size=16)
        eventually(lambda: served.get("/workers")[0]["status"] == "active")
        wire.stored([1], list(range(4)), 4)
        eventually(lambda: served.get("/workers")[0]["listeners"]["0"]["block_sizes"] == [4])


def test_slow_clients_do_not_hold_up_others(served: Served) -> None:
    import socket

    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        slow.sendall(b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        began = time.monotonic()
        done = threading.Event()
        threading.Thread(target=lambda: (served.get("/health"), done.set())).start()
        assert done.wait(20), time.monotonic() - began


@pytest.mark.parametrize(("grade", "status"), [("unready", 503), ("degraded", 200)])
def test_who_is_not_ready_says_so_by_its_status(grade: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = HealthReason(code="x", why="y", grade=grade)  # type: ignore[arg-type]
    monkeypatch.setattr(routes, "conditions", lambda service: [reason])
    told = asyncio.run(routes.IndexerRoutes.ready(SimpleNamespace(service=None), None, {}))  # type: ignore[arg-type]
    assert told.status == status
