"""Cases that a hunt of SGLang tries, and what its driver notices, without SGLang."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvyard.sglang.hunt import case as cases
from kvyard.sglang.hunt.driver import Memory, Texts


def test_cases_are_such_as_sglang_takes() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        case = cases.draw(rng)
        for _ in range(3):
            settings = case["settings"]
            assert settings["num_tokens"] % settings["page_size"] == 0
            names = [request["request"] for request in case["requests"]]
            assert len({len(name) for name in names}) == 1 and len(set(names)) == len(names)
            for request in case["requests"]:
                length = sum(count for _, count in request["prompt"])
                assert 0 < length + request["output"][1] <= max(2, cases.capacity(settings))
                assert request["output"][1] > 0
            case = cases.change(case, rng)


def test_simpler_cases_come_to_an_end() -> None:
    case = cases.draw(random.Random(3))
    for _ in range(500):
        simpler = next(cases.smaller(case), None)
        if simpler is None:
            break
        assert simpler != case
        case = simpler
    else:
        pytest.fail("making a case simpler didn't end")
    assert len(case["requests"]) == 1 and cases.features(case) <= {"chunks"}


def request(name: str, prompt: list[list[int]], **more: Any) -> dict[str, Any]:
    return {"request": name, "prompt": prompt, "output": [500, 2], **more}


def test_a_slot_that_holds_another_text_is_noticed() -> None:
    case = {"requests": [request("a", [[1, 4]]), request("b", [[1, 3], [90, 1]]), request("c", [[1, 4]], salt="x")]}
    texts = Texts(case).of
    assert texts["a"][:3] == texts["b"][:3] and texts["a"][3] != texts["b"][3]
    assert not set(texts["a"]) & set(texts["c"]), "a salt is part of every text"
    memory = Memory(None, None)
    memory.write([7, 8, 9, 10], texts["a"][:4])
    assert memory.read([7, 8, 9], texts["b"]) is None
    assert memory.read([7, 8, 9, 10], texts["b"]) == "token 3: slot 10 holds another text"
    assert memory.read([7, 8, 11], texts["a"]) == "token 2: slot 11 holds another text"


def test_a_token_that_left_the_window_pool_is_noticed() -> None:
    class Allocator:
        class full_to_swa_index_mapping:
            def __class_getitem__(cls, slots: list[int]) -> list[int]:
                return [0 if slot < 8 else slot for slot in slots]

    texts = Texts({"requests": [request("a", [[1, 6]])]}).of["a"]
    memory = Memory(Allocator(), 4)
    memory.write([5, 6, 7, 8, 9, 10], texts[:6])
    assert memory.read([5, 6, 7, 8, 9, 10], texts) is None, "the window has the last three and the next"
    assert memory.read([5, 6, 7, 8], texts) == "token 1: it has left the window pool"
