"""Sessions of a gateway: which one a request belongs to, what is counted of it, and that all of it is bounded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="needs kvyard[server]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")

from tests.server.gateway.support import Gated, front

from kvyard.clock import MS, SECOND
from kvyard.server.gateway.sessions import (
    IDLE,
    LOOK_BACK,
    MOST_TENANTS,
    OTHERS,
    EndedTurn,
    PrefixSessions,
    SessionTally,
    session_name,
)


def turn(session: str | None = "s", tenant: str = "t", **more: Any) -> EndedTurn:
    usual = dict(
        has_key=False, finished=True, prompt=100, cached=60, output=10, waited=MS, engine="e0", engine_ns=SECOND
    )
    return EndedTurn(session=session, tenant=tenant, **(usual | more))


# -- recognised by their prompts -----------------------------------------------------------------------------------------


def test_a_prompt_that_goes_on_from_an_earlier_one_belongs_to_its_session() -> None:
    known = PrefixSessions()
    first = known.find([1, 2, 3], 50, "", 0)
    assert known.find([1, 2, 3, 4, 5], 90, "", 1) == first
    assert known.find([1, 2, 3, 4, 5, 6], 110, "", 2) == first
    other = known.find([1, 2, 9], 50, "", 3)
    assert other not in (None, first), "it shares a start, and not all of an earlier prompt"
    assert known.find([1, 2, 3, 4], 70, "", 4) not in (first, other), "the session has moved on: this is another branch"
    assert known.find([], 7, "", 5) is None, "no block, nothing to go by"


def test_a_prompt_that_is_sent_again_or_belongs_to_another_key_starts_a_session_of_its_own() -> None:
    known = PrefixSessions()
    first = known.find([1, 2, 3], 50, "a", 0)
    assert known.find([1, 2, 3], 50, "a", 1) != first
    held = known.find([7, 8], 40, "a", 2)
    assert known.find([7, 8, 9], 60, "b", 3) != held, "keys have sessions of their own"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 12), st.sampled_from("aab")), max_size=30)
)
def test_the_latest_end_of_an_earlier_prompt_within_a_prompt_decides(drawn: list[tuple[int, int, int, str]]) -> None:
    """Prompts begin with some of an earlier one; compared with a look at each of their blocks."""
    known = PrefixSessions()
    prompts: list[list[int]] = [[]]
    ends: dict[int, tuple[str, str, int]] = {}
    for now, (before, kept, fresh, scope) in enumerate(drawn):
        keys = prompts[-1 - before % len(prompts)][:kept] + [1000 * (now + 1) + block for block in range(fresh)]
        prompts.append(keys)
        name = known.find(keys, len(keys), scope, now)
        end = next((key for key in reversed(keys) if key in ends), None)
        goes_on = end is not None and ends[end][1] == scope and ends[end][2] < len(keys)
        if goes_on:
            assert name == ends.pop(end)[0]
        elif keys:
            assert name is not None and name not in [session for session, _, _ in ends.values()]
            ends.pop(keys[-1], None)
        if keys:
            ends[keys[-1]] = (name, scope, len(keys))
    assert len(known) == len(ends) == sum(known._anchors.values())


def test_recognised_sessions_are_bounded_expire_and_take_little_time() -> None:
    known = PrefixSessions(most=100)
    for number in range(10_000):
        known.find([number], 20, "", number)
    assert len(known) == 100
    known.find([1 << 40], 20, "", 10_000 + IDLE)
    assert len(known) == 1
    long = list(range(100_000))
    found = known.find(long, 1_600_000, "", 1 + IDLE)
    looked: list[int] = []

    class Counted(list[int]):
        def __getitem__(self, at: Any) -> Any:
            looked.append(at)
            return super().__getitem__(at)

    assert known.find(Counted([*long, *range(-LOOK_BACK, 0)]), 1_700_000, "", 2 + IDLE) != found
    assert len(looked) <= LOOK_BACK + 3, "only the end of a prompt is looked at"


# -- counts --------------------------------------------------------------------------------------------------------------


def test_a_million_sessions_and_a_session_of_a_million_turns() -> None:
    tally = SessionTally(most=1000)
    for number in range(200_000):
        tally.ended(turn(f"s{number}"), number)
    assert len(tally) == 1000
    assert (tally.started, tally.forgotten) == (200_000, 199_000)
    for number in range(200_000):
        tally.ended(turn("one", engine=f"e{number % 2}"), 200_000 + number)
    [view, *_] = tally.session_views(400_000)
    assert (view.name, view.turns, view.moves, view.prompt_tokens) == ("one", 200_000, 199_999, 20_000_000)
    assert len(tally) == 1000
    tally.ended(turn("later"), 400_000 + 2 * IDLE)
    assert len(tally) == 1, "the others were quiet for an hour"
    assert len(tally.session_views(0)) == 1


def test_tenants_that_clients_invent_are_counted_together_and_keys_by_name() -> None:
    tally = SessionTally()
    for number in range(10_000):
        tally.ended(turn(None, f"x{number}"), 0)
    tally.ended(turn(None, "gold", has_key=True, finished=False, prompt=0), 0)
    views = {view.name: view for view in tally.tenant_views()}
    assert len(views) == MOST_TENANTS + 2
    assert views[OTHERS].requests == 10_000 - MOST_TENANTS
    assert (views["gold"].requests, views["gold"].failed) == (1, 1)
    assert next(iter(views)) == OTHERS, "the most tokens first"


def test_long_and_odd_names_are_kept_short() -> None:
    assert session_name(None) is None and session_name("x" * 127) == "x" * 127
    digest = session_name("x" * (1 << 20))
    assert digest is not None and len(digest) == 32 and digest != session_name("x" * ((1 << 20) + 1))
    assert session_name("\udc80" * 200) is not None, "bytes that are no text are a name all the same"
    assert sys.getsizeof(digest) < 100


# -- through a gateway -----------------------------------------------------------------------------------------------------


def ask(gate: Gated, prompt: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"model": "mock", "prompt": prompt, "max_tokens": 2, **more}
    reply = httpx.post(f"{gate.url}/v1/completions", json=body, headers=headers or {}, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply


KEYS = """
[[keys]]
name = "ada"
key = "sk-ada"

[[keys]]
name = "bob"
key = "sk-bob"
"""


def test_sessions_by_header_user_and_prompt_and_nobody_takes_another_s(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    with front(keys_file=str(keys), admin_token="root") as (gate, _):
        ada, bob = {"authorization": "Bearer sk-ada"}, {"authorization": "Bearer sk-bob"}
        said = {"x-session-id": "mine"}
        story = "once upon a time " * 20
        for _ in range(2):
            ask(gate, "hello", {**ada, **said, "x-gateway-inference-fairness-id": "bob"})
        ask(gate, "hello", {**bob, **said})
        ask(gate, "hello", bob, user="u7")
        for end in ("", "and then ", "and then he went home and slept "):
            ask(gate, story + end, ada)
        ask(gate, story + "and then he went home and slept well ever after", bob)
        root = {"authorization": "Bearer root"}
        view = httpx.get(f"{gate.url}/dashboard/view", headers=root, timeout=30).json()
        found = sorted((one["tenant"], one["name"].rstrip("0123456789"), one["turns"]) for one in view["sessions"])
        assert found == [
            ("ada", "mine", 2),
            ("ada", "recognised ", 3),
            ("bob", "mine", 1),
            ("bob", "recognised ", 1),
            ("bob", "user u", 1),
        ]
        tenants = {one["name"]: one["requests"] for one in view["tenants"]}
        assert tenants == {"ada": 5, "bob": 3}
        assert all(one["prompt_tokens"] and one["engine_s"] for one in view["tenants"])
        text = httpx.get(f"{gate.url}/metrics", headers=root, timeout=30).text
        assert "\nkvyard_gateway_sessions 5" in text and "\nkvyard_gateway_sessions_forgotten_total 0" in text
        assert 'kvyard_gateway_tenant_token_seconds_total{tenant="ada"} ' in text


def test_a_session_goes_on_from_a_response_and_without_prefixes_a_bare_request_has_none() -> None:
    with front(session_prefixes=False) as (gate, _):

        def respond(said: str, **more: Any) -> str:
            body = {"model": "mock", "input": said, "max_output_tokens": 2, **more}
            reply = gate.client.post("/v1/responses", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            return str(reply.json()["id"])

        headers = {"x-session-id": "talk"}
        first = respond("hello")
        headers = {}
        second = respond("and now", previous_response_id=first)
        respond("and then", previous_response_id=second)
        respond("nothing before " * 40)
        sessions = gate.client.get("/dashboard/view").json()["sessions"]
        assert [(one["name"], one["turns"]) for one in sessions] == [("talk", 3)]
