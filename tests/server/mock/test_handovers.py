"""Mock workers with roles: prompts are computed by one, travel, and are answered by another, in vLLM's words and SGLang's."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import msgspec
import pytest
from tests.server.mock.support import PATIENCE, Process, Served
from tests.waiting import eventually

from kvyard.engine.timing import FixedTiming
from kvyard.errors import KvyardError
from kvyard.replay.config import HandoverConfig
from kvyard.server.mock.config import MockConfig, make_config

KIB = 1024
BLOCK = 16
ENGINE: dict[str, Any] = {"bytes_per_block": 128 * KIB * BLOCK}
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = list(range(1000, 1100))


def split(prefill: int = 1, decode: int = 1, **more: Any) -> Served:
    return Served(
        prefill=prefill, decode=decode, **{"speed": 5.0, **more, "engine": {**ENGINE, **more.get("engine", {})}}
    )


def post(url: str, prompt: Any = PROMPT, **body: Any) -> Any:
    asked = {"prompt": prompt, "max_tokens": 4, "return_token_ids": True, **body}
    reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def prefill(url: str, prompt: Any = PROMPT) -> Any:
    return post(url, prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE)["kv_transfer_params"]


def held(served: Served) -> float:
    """The share of the first worker's blocks that is in use."""
    return float(served.inside(lambda: served.fleet.workers[0].cores[0].scheduler.manager.usage))


def test_a_prompt_is_handed_over() -> None:
    with split() as served:
        source, target = served.urls
        alone = post(source, list(range(5000, 5100)))
        assert alone["kv_transfer_params"] is None
        params = prefill(source)
        end = served.fleet.workers[0].handovers
        assert end is not None
        assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
        assert params["remote_engine_id"] == end.engine_id and params["remote_num_tokens"] == len(PROMPT)
        assert len(params["remote_block_ids"][0]) == 7  # 100 tokens, 16 a block
        assert held(served) == pytest.approx(7 / 512)
        found = post(target, kv_transfer_params=params)
        # All but the last token came from elsewhere, and that one is computed again.
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
        assert found["choices"][0]["token_ids"] == post(source)["choices"][0]["token_ids"]
        eventually(lambda: held(served) == 0)
        # What is there is not sent again, and the source lets go of it all the same.
        before = served.fleet.handovers
        assert before is not None
        params = prefill(source)
        assert post(target, kv_transfer_params=params)["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
        eventually(lambda: served.inside(lambda: before.idle))
        # One that is refused lets go of it too, as in vLLM.
        params = prefill(source)
        body = {"prompt": PROMPT, "max_tokens": -1, "kv_transfer_params": params}
        assert httpx.post(f"{target}/v1/completions", json=body, timeout=PATIENCE, trust_env=False).status_code == 400
        eventually(lambda: served.inside(lambda: before.idle))
        served.check()


@pytest.mark.slow
def test_a_hand_over_takes_the_time_of_the_network() -> None:
    """A transfer of 7 blocks of 2 MiB over 1 MB/s, in nominal time: the metrics' first token comes 14.68 s later."""
    network = HandoverConfig(nic_bandwidth=(10**6, 10**6), nic_latency=0)
    with split(handover=network, speed=50.0) as served:
        params = prefill(served.urls[0])
        post(served.urls[1], kv_transfer_params=params)
        text = httpx.get(f"{served.urls[1]}/metrics", trust_env=False).text
        total = next(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("vllm:time_to_first_token_seconds_sum")
        )
        assert total >= 7 * 2 * KIB * KIB / 1e6
        served.check()


@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.slow)])
def test_prompts_that_are_not_there(policy: str) -> None:
    with split(kv_load_failure_policy=policy) as served:
        source, target = served.urls
        params = prefill(source)
        for wrong in ({"remote_request_id": "nothing"}, {"remote_engine_id": "another"}, {"remote_port": 1}):
            body = {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": {**params, **wrong}}
            reply = httpx.post(f"{target}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
            assert reply.status_code == (200 if policy == "recompute" else 500), reply.text
        # Where something is missing, there is nothing to transfer, as in vLLM.
        assert post(target, list(range(7)), kv_transfer_params={"do_remote_prefill": True})["usage"][
            "completion_tokens"
        ]
        post(target, kv_transfer_params=params)
        served.check()


def test_unfetched_prompts_are_released() -> None:
    with split(kv_lease_duration=1.0, speed=10.0) as served:
        params = prefill(served.urls[0])
        eventually(lambda: held(served) == 0)
        end = served.fleet.workers[0].handovers
        assert end is not None and end.expired == 1
        # And a decode worker that comes too late computes it.
        assert post(served.urls[1], kv_transfer_params=params)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        served.check()


@pytest.mark.slow
def test_a_lease_is_renewed_while_the_prompt_waits() -> None:
    """The decode worker has no room for longer than a lease lasts."""
    slow = FixedTiming(prefill_ms=2, decode_ms=50)
    with split(kv_lease_duration=10.0, speed=10.0, engine={"max_num_seqs": 1, "timing": slow}) as served:
        source, target = served.urls
        long = threading.Thread(
            target=post, args=(target, list(range(50))), kwargs={"max_tokens": 300, "ignore_eos": True}
        )
        long.start()  # fifteen nominal seconds
        eventually(lambda: served.inside(lambda: served.fleet.workers[1].load))
        params = prefill(source)
        found = post(target, kv_transfer_params=params)
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
        long.join(PATIENCE)
        end = served.fleet.workers[0].handovers
        assert end is not None and end.expired == 0
        served.check()


@pytest.mark.parametrize("dies", ["source", pytest.param("target", marks=pytest.mark.slow)])
def test_a_worker_dies_over_a_transfer(dies: str) -> None:
    network = HandoverConfig(nic_bandwidth=(10**4, 10**4))  # 1,470 nominal seconds
    with split(handover=network, kv_lease_duration=20.0 if dies == "target" else 600.0, speed=10.0) as served:
        source, target = served.urls
        params = prefill(source)
        found: list[Any] = []

        def decode() -> None:
            try:
                found.append(post(target, kv_transfer_params=params))
            except httpx.TransportError as error:
                found.append(error)

        asking = threading.Thread(target=decode)
        asking.start()
        handovers = served.fleet.handovers
        assert handovers is not None
        eventually(lambda: served.inside(lambda: not handovers.network.idle))
        served.post("/admin/kill", worker=0 if dies == "source" else 1)
        asking.join(PATIENCE)
        if dies == "source":
            assert found[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert found[0]["usage"]["completion_tokens"] == 4
        else:
            assert isinstance(found[0], httpx.TransportError)
        eventually(lambda: served.inside(lambda: handovers.idle))
        served.check()


@pytest.mark.slow
def test_a_client_that_hangs_up() -> None:
    """Over the transfer, and before there is room for it: nothing stays on either side."""
    network = HandoverConfig(nic_bandwidth=(3 * 10**6, 3 * 10**6))  # five nominal seconds; the client gives up first
    with split(handover=network, engine={"max_num_seqs": 1}, speed=3.0) as served:
        source, target = served.urls
        for _ in range(2):
            params = prefill(source)
            with pytest.raises(httpx.TimeoutException):
                body = {"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params}
                httpx.post(f"{target}/v1/completions", json=body, timeout=0.2, trust_env=False)
        handovers = served.fleet.handovers
        assert handovers is not None
        eventually(lambda: served.inside(lambda: handovers.idle))
        served.check()


def test_rooms_as_in_sglang() -> None:
    """Both parts at once, and the one that decodes first."""
    with split() as served:
        source, target = served.urls
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": httpx.URL(source).port, "bootstrap_room": 123456789}
        found: list[Any] = []
        decoding = threading.Thread(target=lambda: found.append(post(target, **room)))
        decoding.start()
        first = post(source, **room)
        decoding.join(PATIENCE)
        assert found[0]["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        assert found[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
        # A room that is used twice has the second prompt; the first isn't held for ever.
        for _ in range(2):
            post(source, **room)
        post(target, **room)
        served.check()


@pytest.mark.slow
def test_between_processes() -> None:
    """A mock for each role; the decode worker asks the other over HTTP. A source that is killed is as good as none."""
    with Process("--prefill", "1", "--speed", "5") as one, Process("--decode", "1", "--speed", "5") as other:
        (source,), (target,) = one.urls(), other.urls()
        found = post(target, kv_transfer_params=prefill(source))
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 99

        def usage() -> float:
            text = httpx.get(f"{source}/metrics", trust_env=False).text
            return next(
                float(line.rpartition(" ")[2])
                for line in text.splitlines()
                if line.startswith("vllm:kv_cache_usage_perc")
            )

        eventually(lambda: usage() == 0)
        params = prefill(source, list(range(300)))
        one.process.kill()
        one.process.wait(PATIENCE)
        assert (
            post(target, list(range(300)), kv_transfer_params=params)["usage"]["prompt_tokens_details"]["cached_tokens"]
            == 0
        )


def test_settings() -> None:
    config = make_config({"prefill": 2, "decode": 3, "nic": "nvlink"})
    assert config.roles == ["prefill"] * 2 + ["decode"] * 3 and config.workers == 5
    assert config.handover.bandwidth[0] == 450 * 10**9
    for settings, words in (
        ({"prefill": 1, "workers": 2}, "leave one of the two out"),
        ({"nic": "cx7"}, "nic is for mocks with prefill and decode workers"),
        ({"prefill": 1, "decider": "always"}, "decider"),
    ):
        with pytest.raises(KvyardError, match=words):
            make_config(settings)
    for engine, more, words in (
        ({"role": "prefill"}, {}, "say --prefill"),
        ({"async_scheduling": True}, {"prefill": 1}, "async_scheduling"),
        ({}, {"prefill": -1, "decode": 2}, "can't be negative"),
        ({}, {"prefill": 1, "kv_lease_duration": 0}, "kv_lease_duration"),
    ):
        made = make_config({}).engine
        with pytest.raises(KvyardError, match=words):
            MockConfig(engine=msgspec.structs.replace(made, **engine), **more).check()
