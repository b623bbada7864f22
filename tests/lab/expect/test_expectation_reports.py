"""Public reports of missing hits: the cause that is named for each. ``reports.toml`` has them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.lab.expect.support import counts, traffic

from kvyard.lab.expect import expect
from kvyard.lab.expect.counted import Counted
from kvyard.replay.traces import TraceRequest

REPORTS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("reports.toml").read_text())["report"]


def prompts(parts: list[dict[str, Any]]) -> list[TraceRequest]:
    rows: list[TraceRequest] = []
    time = 0.0
    for part in parts:
        random = Random(part.get("text", "a"))
        text = [random.randrange(50_000) for _ in range(part["shared"])]
        own = Random(len(rows))
        answer = part.get("answer", 1)
        for number in range(part.get("turns", part.get("count", 1))):
            unique = [own.randrange(50_000, 100_000) for _ in range(part["unique"])]
            said = [own.randrange(50_000, 100_000) for _ in range(answer)]
            tokens = [*text, *unique]
            if "date_at" in part:
                tokens[part["date_at"] : part["date_at"] + 6] = [200_000 + number] * 6
            name = f"r{len(rows)}"
            rows.append(TraceRequest(name, round(time * 1e9), len(tokens), answer, tokens=tokens, output_tokens=said))
            time += part.get("apart", 10.0)
            if "turns" in part:
                text = [*tokens, *said]
    return rows


def counted(report: dict[str, Any], rows: list[TraceRequest]) -> Counted | None:
    settings = report["settings"]
    if "routed" in report:
        return counts(rows, {**settings, "router": report["routed"]})
    if report.get("without_answers"):
        plain = [
            TraceRequest(one.id, one.arrival, one.input_length, one.output_length, tokens=one.tokens) for one in rows
        ]
        return counts(plain, settings)
    if "counted" not in report:
        return None
    facts = {name: str(value) for name, value in report["counted"].items() if name not in ("queries", "hits")}
    return Counted(
        source="report", queries=report["counted"].get("queries"), hits=report["counted"]["hits"], facts=facts
    )


@pytest.mark.parametrize(
    "report", REPORTS, ids=[report["link"].removeprefix("https://github.com/") for report in REPORTS]
)
def test_the_cause_is_named(report: dict[str, Any]) -> None:
    rows = prompts(report["traffic"])
    found = expect(traffic(rows), report["settings"], counted(report, rows))
    assert found.cause == report["cause"], (found.cause, found.sentence, found.steps, found.owed)
    if "owed" in report:
        assert found.owed == report["owed"]
