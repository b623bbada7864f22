"""The parts of a service that need no service: prompts, addresses, and what is made of errors."""

from __future__ import annotations

import socket

import msgspec
import pytest

from kvyard.errors import KvyardError
from kvyard.server import prompt
from kvyard.server.http import Refusal, check_token, decode
from kvyard.server.running import is_loopback, listen, url_of


class TestPrompt:
    @pytest.mark.parametrize("text", ["1,2, 3", "1 2\n3", "[1, 2, 3]", " [1,2,3] "])
    def test_token_ids_in_any_shape(self, text: str) -> None:
        assert prompt.parse_tokens(text, "x") == [1, 2, 3]

    @pytest.mark.parametrize("text", ["1.5", "a", "[1, -2]", "[true]", "[4294967296]", "[1", "[[1]]", '["1"]'])
    def test_what_is_none_is_refused(self, text: str) -> None:
        with pytest.raises(KvyardError, match=r"^x has "):
            prompt.parse_tokens(text, "x")


class TestRunning:
    def test_small_answers_leave_at_once(self) -> None:
        """asyncio turns Nagle's algorithm off only for sockets that say they are TCP; it would cost 40 ms an answer."""
        with listen("127.0.0.1", 0) as bound:
            assert bound.proto == socket.IPPROTO_TCP
            assert url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
            bound.listen()
            with pytest.raises(KvyardError, match=r"can't listen at 127\.0\.0\.1"):
                listen("127.0.0.1", bound.getsockname()[1])

    @pytest.mark.parametrize(
        ("host", "only_here"),
        [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.com", False)],
    )
    def test_loopback(self, host: str, only_here: bool) -> None:
        assert is_loopback(host) is only_here


class Body(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    numbers: list[int] = []


class TestErrors:
    def test_a_body_of_its_type(self) -> None:
        assert decode(Body, b'{"name": "x", "numbers": [1]}') == Body("x", [1])

    @pytest.mark.parametrize(
        ("body", "status", "field", "fix"),
        [
            (b"{}", 422, "name", "add name"),
            (b'{"name": "x", "number": []}', 422, "number", "did you mean numbers?"),
            (b'{"name": "x", "zzz": []}', 422, "zzz", "leave it out; there are name, numbers"),
            (b'{"name": "x", "numbers": [1, "2"]}', 422, "numbers[1]", "send int"),
            (b"{name}", 400, "", "send a JSON object in UTF-8"),
        ],
    )
    def test_the_field_and_the_fix(self, body: bytes, status: int, field: str, fix: str) -> None:
        with pytest.raises(Refusal) as refused:
            decode(Body, body)
        assert refused.value.status == status
        assert (refused.value.problem.field, refused.value.problem.fix) == (field, fix)

    def test_tokens(self) -> None:
        check_token("Bearer abc", "abc")
        check_token("bearer  abc ", "abc")
        for header in ("", "Bearer", "Bearer abcd", "Basic abc", "Bearer äbc"):
            with pytest.raises(Refusal):
                check_token(header, "abc")
