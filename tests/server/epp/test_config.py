"""The picker's settings."""

from __future__ import annotations

import pytest

from kvyard.errors import KvyardError
from kvyard.server.epp.config import FLAGS, convert
from kvyard.server.gateway.config import convert as gateway_config
from kvyard.server.gateway.config import own_part


def test_one_file_serves_a_gateway_and_a_picker() -> None:
    file = {
        "tokenizer": "bytes",
        "router": {"policy": "kv"},
        "gateway": {"retries": 1, "port": 8081},
        "epp": {"fallbacks": 2, "port": 9005},
        "replay": {"workers": 4},
    }
    made = convert(own_part(file, "the file", "epp"), "the file")
    assert (made.port, made.fallbacks, made.router.policy, made.tokenizer) == (9005, 2, "kv", "bytes")
    assert gateway_config(own_part(file, "the file"), "the file").port == 8081


def test_defaults_are_those_of_the_field() -> None:
    made = convert({}, "the test")
    assert (made.host, made.port, made.http_port, made.body_mode) == ("127.0.0.1", 9002, 9090, "streamed")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"retries": 1}, "retries isn't a setting of an endpoint picker: the data plane tries again"),
        ({"token_file": "x"}, "token_file isn't a setting of an endpoint picker: clients talk to the data plane"),
        ({"keys_file": "x"}, "keys_file isn't a setting of an endpoint picker"),
        ({"cors_origins": ["*"]}, "cors_origins isn't a setting of an endpoint picker"),
        ({"engines": [{"url": "http://a:1", "role": "prefill"}]}, "engines with roles are for a gateway"),
        ({"body_mode": "half"}, "body_mode"),
        ({"fallbacks": 99}, "fallbacks"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_impossible_settings_are_refused_by_name(given: dict[str, object], said: str) -> None:
    with pytest.raises(KvyardError, match=said):
        convert(given, "the test")


def test_settings_given_twice_are_refused() -> None:
    with pytest.raises(KvyardError, match=r"port is given twice, once in \[epp\]"):
        own_part({"port": 1, "epp": {"port": 2}}, "the file", "epp")
    with pytest.raises(KvyardError, match="epp must be a table"):
        own_part({"epp": 3}, "the file", "epp")


def test_flags_have_nothing_that_is_refused() -> None:
    assert "token_file" not in FLAGS
    assert {"http_port", "body_mode", "fallbacks", "router"} <= FLAGS.keys()
