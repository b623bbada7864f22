"""Settings of a gateway mean the same as flags, after ``--set`` and ``--router-set``, and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httptools", reason="needs kvyard[server]")

from kvyard.cli.engines import EngineFlags, gathered
from kvyard.errors import KvyardError
from kvyard.server.gateway.config import FLAGS, GatewayConfig


def made(**given: Any) -> GatewayConfig:
    settings = given.pop("settings", {})
    return gathered(GatewayConfig, FLAGS, "gateway", settings, EngineFlags(**given))


def test_units_in_flags_and_in_files(tmp_path: Path) -> None:
    flags = made(
        set_=["held-bytes=2GiB", "queue_seconds=1.5s", "queue=2k", "pass_unknown=yes", "retries=1", "token_file=null"],
        router_set=["session_ttl_s=10min", "temperature=0.5", "options=stickiness=0.5,renewal_s=60"],
        engine=["http://h:1,block_size=16,role=decode,dp-size=2"],
        dns=["vllm:8000,events_port=5557,interval_s=500ms"],
    )
    file = tmp_path / "gateway.toml"
    file.write_text(
        'held_bytes = "2GiB"\nqueue_seconds = "1500ms"\nqueue = "2k"\npass_unknown = "on"\nretries = 1\n'
        '[router]\nsession_ttl_s = "10min"\ntemperature = 0.5\noptions = {stickiness = 0.5, renewal_s = 60}\n'
        '[[engines]]\nurl = "http://h:1"\nblock_size = "16"\nrole = "decode"\ndp_size = 2\n'
        '[[names]]\nhost = "vllm"\nport = 8000\nevents_port = 5557\ninterval_s = 0.5\n'
    )
    assert made(config=file) == flags
    assert (flags.held_bytes, flags.queue_seconds, flags.queue, flags.pass_unknown) == (2 << 30, 1.5, 2000, True)
    assert flags.router.session_ttl_s == 600 and flags.router.options == {"stickiness": 0.5, "renewal_s": 60}
    assert flags.engines[0].block_size == 16 and flags.names[0].interval_s == 0.5


def test_tables_and_lists_as_json() -> None:
    made_ = made(set_=['limits={"body_bytes": "1MiB"}', 'cors_origins=["https://a"]', 'tokenizers={"m": "x"}'])
    assert made_.limits.body_bytes == 1 << 20 and made_.cors_origins == ["https://a"] and made_.tokenizers == {"m": "x"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"set_": ["held_byte=1"]}, "unknown setting 'held_byte' after --set: did you mean held_bytes?"),
        ({"set_": ["held_bytes=much"]}, "held_bytes after --set is 'much': it must be a size in bytes such as 200GiB"),
        ({"set_": ["queue=x"]}, "queue after --set is 'x': it must be a whole number such as 500, 20k or 1.5m"),
        ({"set_": ["queue_seconds=1parsec"]}, "it must be a length of time with its unit, such as 50ms, 2.5s or 10min"),
        ({"set_": ["pass_unknown=maybe"]}, "pass_unknown after --set is 'maybe': it must be true or false"),
        ({"set_": ["limits={"]}, "limits after --set is '{': it must be JSON"),
        ({"set_": ["queue=1", "queue=2"]}, "queue is set twice"),
        ({"set_": ["queue"]}, "--set queue: write NAME=VALUE"),
        (
            {"router_set": ["temprature=1"]},
            "unknown setting 'temprature' after --router-set: did you mean temperature?",
        ),
        ({"router_set": ["options=alpha=x"]}, "it must be a number"),
        ({"engine": ["http://h:1,blocksize=1"]}, "--engine http://h:1,blocksize=1: unknown setting 'blocksize'"),
        ({"dns": ["h:1,events_port=x"]}, "events_port is 'x': it must be a whole number"),
    ],
)
def test_refused_in_the_same_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KvyardError) as refusal:
        made(**given)
    assert words in str(refusal.value)
