"""The search of ``kvyard hunt`` over a made-up engine: what it keeps, makes smaller and goes on with."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvyard.lab.hunt.hunter import Hunter
from kvyard.vllm.hunt import ENGINE as VLLM
from kvyard.vllm.hunt import case as cases
from kvyard.vllm.hunt.driver import Memory, Requests


def hangs_on_two_loads(case: dict[str, Any]) -> tuple[dict[str, Any] | None, float]:
    """An engine that stops where two requests load in the background under the policy of priorities."""
    loads = [each for each in case["requests"] if each.get("load") and each["load"]["steps"]]
    if case["policy"] == "priority" and len(loads) >= 2:
        return {"kind": "stuck", "detail": f"{len(loads)} loads"}, 1.0
    return None, float(len(loads))


def hunter(folder: Path, seed: int = 0) -> Hunter:
    return Hunter(replace(VLLM, run=hangs_on_two_loads), "vllm 0", folder, seed)


def test_a_finding_is_made_as_small_as_it_goes(tmp_path: Path) -> None:
    search = hunter(tmp_path)
    search.search(3.0, lambda text: None)
    (found,) = search.findings
    assert len(found["case"]["requests"]) == 2
    assert all(each["load"]["steps"] == 1 and each["output"] == 1 for each in found["case"]["requests"])
    assert found["case"]["policy"] == "priority"
    assert not found["case"]["async_scheduling"]


def test_a_reproducer_is_a_script_with_the_case(tmp_path: Path) -> None:
    search = hunter(tmp_path)
    search.search(3.0, lambda text: None)
    text = (tmp_path / search.findings[0]["script"]).read_text()
    tree = ast.parse(text)
    (literal,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "CASE"]  # type: ignore[attr-defined]
    case = ast.literal_eval(literal)
    assert len(case["requests"]) == 2 and case.keys().isdisjoint(cases.PLAIN.keys() - {"policy"}), case
    assert text.partition("# -- the driver")[0].count("\n") <= 26, "the case on top, the driver below"
    assert "kvyard" not in {
        name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert "vllm 0: stuck" in text


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = hunter(tmp_path)
    first.search(0.5, lambda text: None)
    second = hunter(tmp_path)
    assert (second.tried, second.findings) == (first.tried, json.loads(json.dumps(first.findings)))
    second.search(0.5, lambda text: None)
    assert second.tried > first.tried
    assert len(second.findings) == len(first.findings) == 1


def test_the_state_of_another_search_is_left_alone(tmp_path: Path) -> None:
    hunter(tmp_path, seed=1).search(0.2, lambda text: None)
    with pytest.raises(ValueError, match="belongs to a hunt of vllm 0 with seed 1"):
        hunter(tmp_path, seed=2)
    (tmp_path / "hunt.json").write_text("{")
    with pytest.raises(ValueError, match="isn't the state of a hunt"):
        hunter(tmp_path)


def test_cases_are_such_as_vllm_starts_with() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        case = cases.draw(rng)
        for _ in range(3):
            blocks = sum(-(-case["max_model_len"] // group["block_size"]) for group in case["groups"])
            assert case["num_blocks"] > blocks
            for request in case["requests"]:
                length = sum(count for _, count in request["prompt"])
                assert 0 < length < case["max_model_len"]
                assert 0 < request["output"] <= case["max_model_len"] - length
            case = cases.change(case, rng)


def test_simpler_cases_keep_to_the_same_rules_and_come_to_an_end() -> None:
    case = cases.draw(random.Random(7))
    for _ in range(500):
        simpler = next(cases.smaller(case), None)
        if simpler is None:
            break
        assert simpler != case
        case = simpler
    else:
        pytest.fail("making a case simpler didn't end")
    assert len(case["requests"]) == 1


def test_a_block_that_holds_another_text_is_noticed() -> None:
    groups = [{"type": "full", "block_size": 4}, {"type": "sliding_window", "block_size": 4, "window": 4}]
    case = {"requests": [{"prompt": [[100, 8]], "output": 1}, {"prompt": [[100, 7], [500, 1]], "output": 1}]}
    texts = Requests(case).texts
    memory = Memory(groups)
    memory.write([[1, 2], [3, 4]], range(8), texts["r0"])
    assert memory.wrong([[1, 2], [3, 4]], 8, texts["r0"], 0) is None
    assert memory.wrong([[1, 2], [3, 4]], 8, texts["r1"], 0) == "group 0, token 7: block 2 holds another text"
    assert memory.wrong([[1, 5], [3, 4]], 8, texts["r0"], 0) == "group 0, token 4: block 5 holds another text"
    assert memory.wrong([[1, 2], [0, 4]], 7, texts["r0"], 0) is None
    assert memory.wrong([[1, 2], [0, 4]], 6, texts["r0"], 0) == "group 1, token 3: its table has no block there"


def test_a_case_without_an_end_is_not_made_smaller_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of such a case takes long: after a while it is small enough."""

    def never_ends(case: dict[str, Any]) -> tuple[dict[str, Any] | None, float]:
        return {"kind": "endless", "detail": ""}, 1.0

    for seconds, smallest in ((0.0, False), (60.0, True)):
        monkeypatch.setattr("kvyard.lab.hunt.hunter.SHRINK_S", seconds)
        search = Hunter(replace(VLLM, run=never_ends), "vllm 0", tmp_path / str(seconds), 0)
        search.search(0.5, lambda text: None)
        assert (next(cases.smaller(search.findings[0]["case"]), None) is None) == smallest
