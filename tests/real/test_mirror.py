"""The stream of a real vLLM: thousands of requests, its events over ZeroMQ, and an index that is then equal to vLLM's own block
pool, copy by copy; at quiet points on the way too.

``KVYARD_MIRROR_SEED`` is another seed, ``KVYARD_MIRROR_REQUESTS`` another number for each model.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_ports
from tests.server.mirror import FollowedRank, Listening, Place, differences
from tests.waiting import eventually

from kvyard.events.types import Tier
from kvyard.index import Holder

SEED = int(os.environ.get("KVYARD_MIRROR_SEED", "17"))
REQUESTS = int(os.environ.get("KVYARD_MIRROR_REQUESTS", "10000"))
BLOCK_SIZE = 32
ENGINE = Holder("vllm", 0)


def unlike(listening: Listening, pool: dict[Place, Counter[int]]) -> list[str]:
    with listening.lock:
        listening.indexer.check_integrity()
        return differences(listening.indexer, ENGINE, pool)


@pytest.mark.timeout(7200)  # 10,000 requests take ten minutes, and an hour on a busy machine
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_the_index_is_equal_to_vllms_pool(
    vllm_python: Path, tmp_path: Path, model: str, figures: Callable[[str, Any], None]
) -> None:
    first = free_ports(2)
    script = Path(__file__).with_name("vllm_pool.py")
    arguments = [str(one) for one in (vllm_python, script, model, first, first + 1, REQUESTS, SEED)]
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "CI"}}
    pipe = subprocess.PIPE
    with (
        (tmp_path / "vllm.log").open("w+") as log,
        subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=log, text=True, env=kept) as vllm,
    ):
        assert vllm.stdin is not None and vllm.stdout is not None

        def said() -> dict[str, Any]:
            assert vllm.stdout is not None
            for line in vllm.stdout:
                if line.startswith("POOL "):
                    return dict(json.loads(line.removeprefix("POOL ")))
            log.seek(0)
            raise AssertionError(f"vLLM ended:\n{log.read()[-4000:]}")

        try:
            assert said() == {"ready": True}
            rank = FollowedRank(ENGINE, f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + 1}")
            with Listening(BLOCK_SIZE, [rank]) as listening:
                compared, found = 0, {"served": 0, "given_up": 0}
                while found["served"] + found["given_up"] < REQUESTS:
                    print("go on", file=vllm.stdin, flush=True)
                    found = said()
                    pool: dict[Place, Counter[int]] = {
                        (Tier.G1, int(group)): Counter(hashes) for group, hashes in found.pop("held").items()
                    }

                    wrong = partial(unlike, listening, pool)
                    eventually(lambda wrong=wrong: not wrong(), wrong)
                    compared += sum(held.total() for held in pool.values())
                    print(f"{model}: {found}, {compared} copies compared so far", flush=True)
                counters = [feed.counters for _, feed in listening.indexer.feeds()]
        finally:
            vllm.kill()
    figures(f"mirror, {model}", {**found, "compared": compared})
    print(f"\n{model}: {found}, {compared} copies compared, none different; {counters}")
    assert found["given_up"] > 0 and compared > 0
