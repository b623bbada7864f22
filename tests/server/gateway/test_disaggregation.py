"""Prefill and decode on different engines, through a real gateway: mock workers with roles, and engines with a script."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.waiting import eventually

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("aiohttp", reason="needs kvyard[server]")

from tests.server.gateway.scripted_engine import MODELS, ScriptedEngine, answer, chunked
from tests.server.gateway.support import PATIENCE, Gated, Served, cached, fleet

from kvyard.errors import KvyardError
from kvyard.openai import CHAT, COMPLETIONS
from kvyard.replay.config import HandoverConfig
from kvyard.server.gateway.config import convert
from kvyard.server.gateway.disaggregation import decode_body, divisible, prefill_body, room_bodies

pytestmark = pytest.mark.zmq

ENGINE = {"bytes_per_block": 2 << 20}
PROMPT = list(range(2000, 2300))
P = "kvyard_gateway_"


@contextlib.contextmanager
def split(
    prefill: int = 2, decode: int = 2, mock: dict[str, Any] | None = None, **more: Any
) -> Iterator[tuple[Gated, Served]]:
    """A gateway in front of workers with roles, all ready."""
    with fleet(prefill=prefill, decode=decode, speed=5.0, engine=ENGINE, **(mock or {})) as served:
        with Gated(fleets=[served.url], **more) as gated:
            yield gated.ready(prefill + decode, prefill + decode), served


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Gated, Served]]:
    with split() as (gated, served):
        yield gated, served
        gated.idle()
        handovers = served.fleet.handovers
        assert handovers is not None
        eventually(lambda: served.inside(lambda: handovers.idle))
        served.check()


def ids(reply: httpx.Response) -> list[int]:
    return list(reply.json()["choices"][0]["token_ids"])


def test_a_request_takes_both_ways(both: tuple[Gated, Served]) -> None:
    gated, served = both
    alone = served.complete(PROMPT, max_tokens=20, return_token_ids=True)["choices"][0]["token_ids"]
    served.post("/reset_prefix_cache")
    before = gated.metrics()
    first = gated.complete(PROMPT, max_tokens=20, return_token_ids=True, headers={"x-request-id": "two-ways"})
    assert ids(first) == alone
    assert first.headers["x-mock-worker"].startswith("d") and first.json()["id"] == "cmpl-two-ways"
    assert first.headers["x-kvyard-prefill"].startswith("worker=p")
    assert cached(first) == 299  # all but the last token came from the other worker

    after = gated.metrics()

    def more(name: str) -> float:
        return after.get(P + name, 0) - before.get(P + name, 0)

    assert more('handovers_total{model="mock",outcome="handed-over"}') == 1
    for stage in ("prefill", "hand-over", "decode"):
        assert more(f'stage_seconds_count{{model="mock",stage="{stage}"}}') == 1
    # What came from elsewhere is no promise kept: the decode engine had nothing.
    assert more('reported_cached_tokens_total{model="mock"}') == 0
    told = {name: one for name, one in gated.engines().items() if one["requests"]}
    assert sorted(one["role"] for one in told.values()) == ["decode", "prefill"]
    # The same once more, and longer: either side has it by now.
    eventually(lambda: gated.client.post("/explain", json={"body": {"prompt": PROMPT}}).json()["hit_blocks"] == 18)
    again = gated.complete([*PROMPT, 1, 2, 3], max_tokens=2)
    assert "hit=18/18; cached=288" in again.headers["x-kvyard-prefill"]


def test_streams_and_conversations(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    body = {
        "messages": [{"role": "user", "content": "Tell me a story of two engines. " * 10}],
        "max_tokens": 12,
        "seed": 1,
    }
    whole = gated.post(CHAT, **body)
    with gated.client.stream("POST", CHAT, json={**body, "stream": True}) as reply:
        assert reply.headers["x-kvyard-prefill"]
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])
    assert text == whole.json()["choices"][0]["message"]["content"]


def test_requests_that_are_not_split(both: tuple[Gated, Served]) -> None:
    """Several answers, and requests that are wrong: a decode engine has the word."""
    gated, _ = both
    several = gated.complete(PROMPT, n=2, temperature=1)
    assert "x-kvyard-prefill" not in several.headers and several.headers["x-mock-worker"].startswith("d")
    refused = gated.complete(PROMPT, 400, max_tokens=-1)
    assert "max_tokens" in refused.json()["error"]["message"]


def test_explain_states_both_stages(both: tuple[Gated, Served]) -> None:
    gated, _ = both
    said = gated.client.post("/explain", json={"body": {"prompt": PROMPT}}).json()
    assert said["handed_over"] is True and said["prefill_worker"].startswith("p") and said["worker"].startswith("d")
    assert said["not_considered"]["p0"] == "it computes prompts for others"
    assert gated.client.post("/explain", json={"body": {"prompt": PROMPT, "n": 2}}).json()["handed_over"] is None


def test_a_client_hangs_up(both: tuple[Gated, Served]) -> None:
    gated, served = both
    with gated.stream(list(range(3000, 3100)), max_tokens=1500, ignore_eos=True) as reply:
        next(reply.iter_raw())
    gated.idle()
    eventually(lambda: not any(served.inside(lambda: [worker.load for worker in served.fleet.workers])))


def test_deciders_and_prefill_workers_that_are_gone() -> None:
    """Short prompts stay; where no prefill worker is left, all do."""
    with split(1, 1, disaggregation={"decider": "uncached", "decider_options": {"tokens": 200}}) as (gated, served):
        assert "x-kvyard-prefill" not in gated.complete(list(range(100))).headers
        assert "x-kvyard-prefill" in gated.complete(PROMPT).headers
        served.post("/admin/kill", worker=0)
        eventually(lambda: not served.fleet.workers[0].alive)
        found = gated.complete(list(range(7000, 7400)), return_token_ids=True)
        assert found.headers["x-mock-worker"] == "d1" and "x-kvyard-prefill" not in found.headers
        assert cached(found) == 0
        metrics = gated.metrics()
        outcomes = {
            outcome: metrics.get(f'{P}handovers_total{{model="mock",outcome="{outcome}"}}', 0)
            for outcome in ("handed-over", "kept", "fell-back")
        }
        assert outcomes["handed-over"] == 1 and outcomes["kept"] + outcomes["fell-back"] == 2
        gated.idle()


@pytest.fixture
def collected() -> Iterator[None]:
    """What a test leaves is collected with it, and not in the next one."""
    yield
    gc.collect()


def test_rooms_between_mock_workers() -> None:
    """SGLang's way, with workers that wait for each other."""
    with split(1, 1, disaggregation={"transfer": "sglang"}) as (gated, served):
        found = gated.complete(PROMPT, max_tokens=6, return_token_ids=True)
        assert cached(found) == 299 and "worker=p0" in found.headers["x-kvyard-prefill"]
        assert ids(found) == served.complete(PROMPT, max_tokens=6, return_token_ids=True)["choices"][0]["token_ids"]
        gated.idle()
        handovers = served.fleet.handovers
        assert handovers is not None
        eventually(lambda: served.inside(lambda: handovers.idle))
        served.check()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # asyncio forgets what it accepts while it closes
@pytest.mark.parametrize("transfer", ["vllm", "sglang"])
@pytest.mark.usefixtures("collected")
def test_nothing_is_left_after_a_bad_time(transfer: str) -> None:
    """Workers of both roles die and come back at random, clients hang up at random, the network is slow: requests that hadn't
    begun are answered, and when all is over no worker holds a block and no book has an entry.
    """
    network = HandoverConfig(nic_bandwidth=(2 * 10**9, 2 * 10**9))
    mock = {"handover": network, "kv_lease_duration": 5.0}
    with split(2, 2, mock, disaggregation={"transfer": transfer}, retries=20) as (gated, served):
        over, lost, outcomes = threading.Event(), [], Counter[str]()

        def client(number: int) -> None:
            chance = random.Random(number)
            with httpx.Client(base_url=gated.url, timeout=PATIENCE, trust_env=False) as own:
                while not over.is_set():
                    prompt = [chance.randrange(1000) for _ in range(chance.randrange(20, 400))]
                    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "stream": True}
                    patience = chance.choice([0.05, 0.2, PATIENCE, PATIENCE])
                    begun, outcome = False, "finished"
                    try:
                        with own.stream("POST", COMPLETIONS, json=body, timeout=patience) as reply:
                            if reply.status_code != 200:
                                lost.append(reply.read())
                            for _ in reply.iter_raw():
                                begun = True
                    except httpx.TimeoutException:
                        outcome = "hung up"
                    except httpx.TransportError as error:
                        outcome = "broken"
                        if not begun:
                            lost.append(error)
                    outcomes[outcome] += 1

        clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for one in clients:
            one.start()
        chance = random.Random(7)
        for turn in range(12):
            gated.ready(4)  # one that is killed while it comes back stays away
            victims = [chance.choice((0, 1)), chance.choice((2, 3))]
            for victim in victims[: 1 + turn % 2]:
                served.inside(lambda victim=victim: served.fleet.do_later(0, served.fleet.kill, victim, 0.3))  # type: ignore[misc]
            wanted = outcomes["finished"] + 15
            eventually(lambda wanted=wanted: outcomes["finished"] >= wanted, lambda: outcomes)  # type: ignore[misc]
        over.set()
        for one in clients:
            one.join(PATIENCE)
        print(f"\n{transfer}: {dict(outcomes)}, deaths {[worker.deaths for worker in served.fleet.workers]}")
        assert not lost, lost[:5]
        assert outcomes["finished"] >= 180 and outcomes["hung up"]
        gated.idle()
        handovers = served.fleet.handovers
        assert handovers is not None
        eventually(lambda: served.inside(lambda: handovers.idle))
        eventually(lambda: all(worker.alive for worker in served.fleet.workers))
        served.check()


# -- to the byte ----------------------------------------------------------------------------------------------------------

CAME_BACK = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "odd": {"x": [1.5, None]},
}
ASKED = {"model": "odd", "prompt": "hello", "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
Script = Callable[[str, bytes], Sequence[bytes]]


def computes(head: str, body: bytes) -> Sequence[bytes]:
    return [answer("200 OK", json.dumps({"id": "x", "kv_transfer_params": CAME_BACK}).encode())]


def answers(head: str, body: bytes) -> Sequence[bytes]:
    return chunked(b'data: {"text":"hi"}\n\n', b"data: [DONE]\n\n")


def fails(head: str, body: bytes) -> Sequence[bytes]:
    return [answer("500 Internal Server Error", b"{}")]


def hangs_up(head: str, body: bytes) -> Sequence[bytes]:
    return []


@contextlib.contextmanager
def scripted(
    prefill: list[Script], decode: list[Script], models: Sequence[bytes] = (), **more: Any
) -> Iterator[tuple[Gated, list[ScriptedEngine]]]:
    """A gateway in front of engines that do as they are told, prefill engines first. ``models``: what each says it serves."""
    with contextlib.ExitStack() as stack:
        scripts = [*prefill, *decode]
        says = models or [MODELS] * len(scripts)
        engines = [stack.enter_context(ScriptedEngine(*one)) for one in zip(scripts, says, strict=True)]
        listed = [
            {"url": one.url, "name": f"e{at}", "role": "prefill" if at < len(prefill) else "decode"}
            for at, one in enumerate(engines)
        ]
        gated = stack.enter_context(Gated(engines=listed, router={"policy": "round-robin"}, **more))
        yield gated.ready(len(engines)), engines
        gated.idle()


def ask(gated: Gated, status: int = 200) -> httpx.Response:
    reply = gated.client.post(COMPLETIONS, json=ASKED, headers={"x-request-id": "r1"})
    assert reply.status_code == status, reply.text
    return reply


def test_an_adapter_is_computed_only_where_it_is_loaded() -> None:
    adapted = b'{"data":[{"id":"odd"},{"id":"poet","parent":"odd"}]}'
    models = [MODELS, adapted, adapted]
    with scripted([computes, computes], [answers], models) as (gated, (bare, loaded, _)):
        for _ in range(2):
            assert gated.client.post(COMPLETIONS, json={**ASKED, "model": "poet"}).status_code == 200
        assert (len(bare.requests), len(loaded.requests)) == (0, 2)
        for _ in range(2):
            ask(gated)
        assert (len(bare.requests), len(loaded.requests)) == (1, 3)  # their base is on both


def test_only_the_gateway_sets_the_prefill_header_of_a_side_car() -> None:
    sidecar = {"transfer": "sidecar"}
    with scripted([computes], [answers], disaggregation=sidecar) as (gated, (_, second)):
        kept = {**ASKED, "n": 2}  # which isn't handed over
        sent = {"x-prefiller-host-port": "169.254.169.254:80"}
        assert gated.client.post(COMPLETIONS, json=kept, headers=sent).status_code == 200
        assert "169.254" not in second.requests[0][0]

    def dies(head: str, body: bytes) -> Any:
        if not told:
            told.append(head)
            gated.client.post("/admin/drain", json={"engine": "e0"})
            return hangs_up(head, body)
        told.append(head)
        return answers(head, body)

    told: list[str] = []
    with scripted([computes], [dies, dies], retries=3, disaggregation=sidecar) as (gated, _):
        assert "x-kvyard-prefill" not in ask(gated).headers
        assert ["x-prefiller-host-port" in head.lower() for head in told] == [True, False]


def test_vllms_words() -> None:
    with scripted([computes], [answers]) as (gated, (first, second)):
        reply = ask(gated)
        assert reply.content == b'data: {"text":"hi"}\n\ndata: [DONE]\n\n'
        ((head, body),) = first.requests
        asked = json.loads(body)
        assert asked["max_tokens"] == 1 and asked["stream"] is False and "stream_options" not in asked
        assert asked["kv_transfer_params"]["do_remote_decode"] is True and asked["prompt"] == "hello"
        ((other, body),) = second.requests
        assert json.loads(body) == {**ASKED, "kv_transfer_params": CAME_BACK}
        assert "x-request-id: r1" in head.lower() and "x-request-id: r1" in other.lower()


def test_a_prompt_that_was_computed_is_paid_for(tmp_path: Path) -> None:
    """Also where there is no decode engine for it any more."""

    def drains(head: str, body: bytes) -> Sequence[bytes]:
        admin = {"authorization": "Bearer sk-admin"}
        assert gated.client.post("/admin/drain", json={"engine": "e1"}, headers=admin).status_code == 200
        return computes(head, body)

    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sk-a"\ntokens_per_minute = 50\n')
    settings = {"keys_file": str(keys), "admin_token": "sk-admin", "tokenizer": "bytes", "queue": 0}
    with scripted([drains], [answers], **settings) as (gated, (first, second)):
        asked = {**ASKED, "prompt": "x" * 40}
        key = {"authorization": "Bearer sk-a"}
        replies = [gated.client.post(COMPLETIONS, json=asked, headers=key) for _ in range(2)]
        assert (len(first.requests), len(second.requests)) == (1, 0)
        assert [one.status_code for one in replies] == [503, 429]


def test_an_engine_that_has_nothing_to_say() -> None:
    """Caches that are shared by other means, as with vLLM's ExampleConnector."""
    with scripted([lambda head, body: [answer("200 OK", b'{"kv_transfer_params":null}')]], [answers]) as (
        gated,
        engines,
    ):
        assert "x-kvyard-prefill" in ask(gated).headers
        assert json.loads(engines[1].requests[0][1]) == ASKED


@pytest.mark.parametrize("how", [fails, hangs_up])
def test_prefill_engines_fail(how: Script) -> None:
    """The next one is tried; where all fail, the decode engine computes the prompt itself."""
    with scripted([how, how], [answers]) as (gated, engines):
        assert "x-kvyard-prefill" not in ask(gated).headers
        assert [len(one.requests) for one in engines] == [1, 1, 1]
        assert json.loads(engines[2].requests[0][1]) == ASKED
        assert gated.metrics()[f'{P}handovers_total{{model="odd",outcome="fell-back"}}'] == 1
        engines[0].script = computes
        eventually(lambda: "x-kvyard-prefill" in ask(gated).headers)


def test_a_decode_engine_fails() -> None:
    """Another one gets it, and the prompt is computed again: the first may have fetched it already."""
    with scripted([computes], [hangs_up, answers], retries=3) as (gated, (first, *others)):
        for _ in range(2):  # in turn: one of them meets the one that fails
            ask(gated)
        failed = len(others[0].requests)
        assert failed >= 1 and len(others[1].requests) == 2 and len(first.requests) == 2 + failed


def test_the_side_car() -> None:
    with scripted([computes], [answers], disaggregation={"transfer": "sidecar"}) as (gated, (first, second)):
        assert "x-kvyard-prefill" in ask(gated).headers
        assert not first.requests
        ((head, body),) = second.requests
        assert f"x-prefiller-host-port: {first.url.removeprefix('http://')}\r\n" in head.lower()
        assert json.loads(body) == ASKED


def test_sglangs_rooms() -> None:
    """Both at once: neither answers before both were asked."""
    meeting = threading.Barrier(2, timeout=30)

    def meet(then: Script) -> Script:
        def script(head: str, body: bytes) -> Sequence[bytes]:
            meeting.wait()
            return then(head, body)

        return script

    with scripted([meet(computes)], [meet(answers)], disaggregation={"transfer": "sglang"}) as (gated, engines):
        assert ask(gated).content.endswith(b"data: [DONE]\n\n")
        first, second = (json.loads(one.requests[0][1]) for one in engines)
        assert second == {
            **ASKED,
            **{name: second[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")},
        }
        assert second["bootstrap_host"] == "127.0.0.1" and second["bootstrap_port"] == 8998
        assert (
            first["bootstrap_room"] == second["bootstrap_room"]
            and first["stream"] is False
            and first["max_tokens"] == 7
        )


def test_sglangs_prefill_engine_fails() -> None:
    """A decode engine waits for one that has failed: it is let go, and asked again with another room."""
    over, rooms, computed = threading.Event(), [], set()

    def room(body: bytes) -> int:
        return int(json.loads(body)["bootstrap_room"])

    def fails_late(head: str, body: bytes) -> Sequence[bytes]:
        eventually(lambda: room(body) in rooms)  # else the decode engine may never see this room
        return fails(head, body)

    def meets(head: str, body: bytes) -> Sequence[bytes]:
        computed.add(room(body))
        return computes(head, body)

    def waits(head: str, body: bytes) -> Sequence[bytes]:
        own = room(body)
        rooms.append(own)
        while own not in computed and not over.wait(0.01):
            pass
        return [] if over.is_set() else answers(head, body)

    with scripted([fails_late, meets], [waits], disaggregation={"transfer": "sglang"}) as (gated, engines):
        for _ in range(2):  # in turn: one of them meets the one that fails
            ask(gated)
        assert len(engines[0].requests) >= 1 and len(engines[1].requests) == 2
        assert len(set(rooms)) == len(rooms) == len(engines[0].requests) + 2
        engines[1].script = fails
        ask(gated, 500)  # its own answer, after all that it may try
        over.set()


def test_bodies() -> None:
    body = b'{"prompt": [1, 2], "max_completion_tokens": 9, "min_tokens": 3, "odd": 1.50, "stream":true}'
    assert json.loads(prefill_body(body)) == {
        "prompt": [1, 2],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "odd": 1.5,
        "stream": False,
        "kv_transfer_params": json.loads(prefill_body(b"{}"))["kv_transfer_params"],
    }
    assert b'"odd":1.50' in decode_body(body, msgspec.Raw(b"{}"))
    first, second = room_bodies(body, "h", 1, 5)
    assert json.loads(first)["bootstrap_room"] == json.loads(second)["bootstrap_room"] == 5
    for path, fields, can in (
        (COMPLETIONS, {"prompt": "x"}, True),
        (COMPLETIONS, {"prompt": [1, 2]}, True),
        (COMPLETIONS, {"prompt": ["x"]}, False),
        (COMPLETIONS, {"prompt": ["x", "y"]}, False),
        (COMPLETIONS, {"prompt": [[1], [2]]}, False),
        (COMPLETIONS, {"prompt": "x", "n": 2}, False),
        (COMPLETIONS, {"prompt": "[1, 2]"}, True),
        (COMPLETIONS, {"prompt": "x", "echo": True}, False),
        (COMPLETIONS, {"prompt": "x", "use_beam_search": True}, False),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1}, False),
        (COMPLETIONS, {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}}, False),
        (CHAT, {"messages": []}, True),
        ("/v1/embeddings", {"input": "x"}, False),
    ):
        assert divisible(path, json.dumps(fields).encode()) is can, fields
    assert not divisible(COMPLETIONS, b"nonsense") and not divisible(COMPLETIONS, b"[1]")


def test_settings() -> None:
    config = convert({"engines": [{"url": "http://a:1", "role": "prefill"}]}, "the test")
    assert config.has_roles and not convert({}, "the test").has_roles
    assert convert({"names": [{"host": "p", "port": 1, "role": "prefill"}]}, "the test").has_roles
    for wrong in (
        {"decider": "sometimes"},
        {"decider": "uncached", "decider_options": {"blocks": 1}},
        {"transfer": "post"},
    ):
        with pytest.raises(KvyardError):
            convert({"disaggregation": wrong}, "the test")
    with pytest.raises(KvyardError, match="role"):
        convert({"engines": [{"url": "http://a:1", "role": "prefil"}]}, "the test")


def test_roles_that_are_incomplete() -> None:
    with (
        ScriptedEngine(answers) as engine,
        Gated(engines=[{"url": engine.url, "name": "e", "role": "prefill"}]) as gated,
    ):
        eventually(lambda: gated.engines()["e"]["state"] == "ready")
        health = gated.client.get("/health")
        assert health.status_code == 503 and "no-decode-engine" in {one["code"] for one in health.json()["reasons"]}
        with ScriptedEngine(answers) as other:
            gated.client.post("/admin/engines", json={"url": other.url, "name": "d", "role": "decode"})
            gated.ready(2)
            assert gated.client.get("/health").status_code == 200
            gated.client.post("/admin/remove", json={"engine": "e"})
            assert "no-prefill-engine" in gated.client.get("/health").text
            assert "x-kvyard-prefill" not in ask(gated).headers


def test_a_prefill_engine_that_drains() -> None:
    with scripted([computes], [answers]) as (gated, _):
        for path, there in (("/admin/drain", False), ("/admin/resume", True)):
            gated.client.post(path, json={"engine": "e0"})
            assert ("x-kvyard-prefill" in ask(gated).headers) is there
