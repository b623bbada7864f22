"""Our engine decides what SGLang's scheduler decided, batch by batch, and admits what its prefill adder admits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvyard.cli.app import main
from kvyard.engine.policies.sglang import NO_TOKENS, Budget, KnownEnds
from kvyard.lab.conform import LogError
from kvyard.lab.conform.scheduler import Record, read_lines
from kvyard.lab.conform.sglang import conform, is_sglang_log

TESTS = Path(__file__).resolve().parents[2]
GOLDEN = TESTS / "golden" / "sglang"
LOGS = sorted(path for path in GOLDEN.glob("*.xz") if "@" in path.name)
CLIP = 4096


def load_families() -> ModuleType:
    """``scripts/sglang_families.py``, which makes states from their numbers."""
    spec = importlib.util.spec_from_file_location("sglang_families", TESTS.parent / "scripts" / "sglang_families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.removesuffix(".jsonl.xz"))
def test_our_engine_decides_what_sglang_decided(path: Path) -> None:
    """One pass at a time and with plans."""
    verdict = conform(path)
    assert verdict.difference is None, verdict.difference
    assert verdict.operations == sum("step" in line for line in read_lines(path))


def admitted(state: dict[str, Any]) -> list[list[Any]]:
    """What our budget answers to the prompts of a state, in the words of SGLang's adder."""
    page, off, eos = state["page"], state["disable_radix_cache"], not state["ignore_eos"]
    left = [min(answer - output, CLIP) for _, output, answer in state["running"]]
    aside = 0.0
    for tokens in left:
        aside += tokens * (state["ratio"] if eos else 1.0)
    pages = state["free"] + state["evictable"]
    mixed = len(state["running"]) if state["mixed"] else 0
    budget = Budget(pages * page, page, aside, state["inputs"], state["chunk"], mixed)
    answers: list[list[Any]] = []
    ends: list[tuple[float, int]] = [(answer - out, prompt + out) for prompt, out, answer in state["running"]]
    if state["chunked"] is not None:
        prompt, past, answer = state["chunked"]
        room = budget.continued()
        whole = prompt - past <= room
        budget.charge(min(prompt - past, room), min(answer, CLIP) if whole else 0)
        answers.append([min(prompt - past, room), "LAST" if whole else "CONTINUED"])
        ends.append((answer, prompt))
    known = KnownEnds(ends) if not eos and off else None
    for prompt, output, answer, cached in state["waiting"]:
        if budget.spent:
            break
        length = prompt + output
        if known is not None:
            new = budget.price_known(length, answer - output, length, known)
        else:
            new = budget.price(length - cached, min(answer - output, CLIP), cached // page, first=not answers)
        if new <= 0:
            answers.append([0, "NO_TOKEN" if new == NO_TOKENS else "OTHER"])
            break
        budget.free -= cached
        budget.charge(new, min(answer, CLIP) if new == length - cached else 0)
        answers.append([new, "CONTINUE" if budget.open else "OTHER" if budget.spent else "NO_TOKEN"])
        if not budget.open:
            break
    return answers


def test_our_budget_admits_what_the_prefill_adder_admits() -> None:
    families = load_families()
    lines = read_lines(GOLDEN / "admission.jsonl.xz")[1:]
    differing = [
        line["state"] for line in lines if admitted(families.admission_state(line["state"])) != line["answers"]
    ]
    assert len(lines) == 8000
    assert differing == []


def changed(tmp_path: Path, kind: str, number: int, **fields: object) -> Path:
    """A log with one of its lines of a kind changed."""
    lines = read_lines(LOGS[0])
    of_kind: list[Record] = [line for line in lines if kind in line]
    of_kind[number].update(fields)
    path = tmp_path / "changed@1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("step", {"free": 1}, "free"),
        ("step", {"evictable": 1}, "evictable"),
        ("step", {"ratio": 0.5}, "ratio"),
        ("step", {"events": [["removed", "device", [[0, 1]]]]}, "events"),
        ("end", {"cached": -1}, "cached of r3"),
    ],
)
def test_a_difference_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, fields: dict[str, object], field: str
) -> None:
    path = changed(tmp_path, kind, 3, **fields)
    with pytest.raises(SystemExit) as exit_:
        main(["conform", str(path)])
    assert exit_.value.code == 1
    assert f"in {field}\n" in capsys.readouterr().out


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = TESTS / "golden" / "scheduler" / "light@1.jsonl.xz"
    assert not is_sglang_log(other)
    assert not is_sglang_log(tmp_path / "absent")
    with pytest.raises(LogError, match="is of format 'scheduler-log/1', not 'sglang-log/1'"):
        conform(other)
    with pytest.raises(LogError, match="is no log of SGLang's scheduler"):
        conform(changed(tmp_path, "format", 0, config={}))
