"""Plans of a real trace: the cheapest of a grid, refusals in words, loads, and going on after an interrupt."""

from __future__ import annotations

import tomllib
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.replay.traces.support import CONVERSATION

from kvyard.engine.cards import find_card
from kvyard.engine.models import find_config
from kvyard.engine.models import plan as memory_plan
from kvyard.engine.price_list import default_prices
from kvyard.errors import KvyardError
from kvyard.lab.jobs import LocalExecutor, Task
from kvyard.lab.plan import Planned, plan
from kvyard.lab.plan.view import UNSURE, WHAT_IF, describe, paragraph, view
from kvyard.lab.study.cost import Prices
from kvyard.replay import replay
from kvyard.replay.report.slo import Limit, parse_limits
from kvyard.server.gateway.config import convert, own_part

BASE: dict[str, Any] = {
    "limit": 60,
    "model": "llama-3.1-8b",
    "router": "kv",
    "kv_cache_dtype": "auto",
    "host_bytes": "0",
}
PRICES = {"h100": Prices(card=2.35), "l40s": Prices(card=0.7)}


def planned(folder: Path, slo: str, gpus: tuple[str, ...] = ("h100", "l40s"), **more: Any) -> Planned:
    options: dict[str, Any] = {"split": False, "prices": PRICES, "price_list": default_prices(), **BASE, **more}
    return plan(CONVERSATION, gpus, parse_limits(slo), folder=folder, **options)


def test_the_answer_is_the_cheapest_of_a_grid(tmp_path: Path) -> None:
    done = planned(tmp_path, "ttft_p90<3s", tensor_parallel_size=1)
    answer = done.answer
    assert answer is not None and done.met
    costs = {}
    for gpu, workers in [*product(("h100",), range(1, 4)), *product(("l40s",), range(7, 11))]:
        report = replay(CONVERSATION, **BASE, gpu=gpu, tensor_parallel_size=1, workers=workers).report
        if report.latency["ttft"].p90 <= 3000:
            costs[gpu, workers] = workers * PRICES[gpu].card
    assert answer.cost == pytest.approx(min(costs.values()))
    assert len(done.search.fleets) <= 12
    said = " ".join(paragraph(done))
    assert said.startswith(f"Take {answer.cards} {answer.shape.gpu.upper()} as") and "USD an hour" in said
    own = answer.values["ttft_p90"] or 0
    better = [fleet for fleet in done.search.fleets if fleet.met and (fleet.values["ttft_p90"] or own) < own]
    assert better, "the search ends with the fewest workers, so that it has replayed more of them"
    nearest = min(better, key=lambda fleet: fleet.cost)
    assert f"Next better, the cheapest with a better TTFT p90, is {describe(nearest)}, {nearest.cost:,.2f} USD" in said
    assert "on the edge" not in said
    assert answer.report is not None
    name, stated = next(iter(answer.report.ranges.items()))
    for value, verdict in ((stated.high * 1.01, ""), ((stated.low + stated.high) / 2, UNSURE)):
        done.limits = [Limit(name, value)]
        assert view(done).verdict == verdict
    done.limits = [Limit("ttft_p90", own * 1.01)]
    said = " ".join(paragraph(done))
    assert "It is on the edge: TTFT p90 is within 2% of its limit" in said and "may miss it. Next better" in said
    done.search.fleets = [answer]
    assert "may miss it. No fleet that was replayed has more room." in " ".join(paragraph(done))
    assert done.loads and all(fleet.met for times, fleet in done.loads.items() if times < max(done.loads))


def test_host_memory_that_a_replay_does_not_read_is_ruled_out(tmp_path: Path) -> None:
    done = planned(tmp_path, "ttft_p90<3s", gpus=("h100",), tensor_parallel_size=1, host_bytes=None)
    unread = [fleet for fleet in done.search.fleets if fleet.host_unread]
    assert unread and all(fleet.report is not None and fleet.report.reuse["host"].value == 0 for fleet in unread)
    assert done.answer is not None and not done.answer.shape.host_gib
    assert "GiB of host memory" not in " ".join(paragraph(done))
    facts = view(done).facts["ruled_out"]
    assert [ruled["shape"] for ruled in facts] == [str(fleet.shape) for fleet in unread]


def test_cards_of_ranks_and_stages_are_paid_for(tmp_path: Path) -> None:
    done = planned(tmp_path, "ttft_p90<3s", gpus=("h100",), tensor_parallel_size=1, dp_size=2)
    answer = done.answer
    assert answer is not None and answer.cards == 2 * answer.workers
    assert answer.cost == pytest.approx(answer.cards * 2.35)
    said = " ".join(paragraph(done))
    assert f"as {answer.workers} worker" in said and "of 2 (TP1 DP2)" in said and "a rank has room for" in said
    assert "--data-parallel-size 2" in view(done).commands[1]
    done = planned(tmp_path, "ttft_p90<3s", gpus=("h100",), tensor_parallel_size=1, pipeline_parallel_size=2)
    answer = done.answer
    assert answer is not None and answer.cost == pytest.approx(2 * answer.workers * 2.35)
    assert "of 2 (TP1 PP2)" in " ".join(paragraph(done))


def test_host_memory_that_was_set_is_paid_for(tmp_path: Path) -> None:
    done = planned(tmp_path, "ttft_p90<3s", gpus=("h100",), tensor_parallel_size=1, host_bytes="100GiB")
    answer = done.answer
    assert answer is not None
    assert answer.cost == pytest.approx(answer.workers * (2.35 + 100 * PRICES["h100"].host))
    assert "(2.35 a card, 2026-03)" in paragraph(done)[0]
    done.prices = {"h100": Prices(card=1.9)}
    assert "(1.9 a card, your price)" in paragraph(done)[0]


def test_an_engine_is_started_with_the_length_that_its_cache_holds(tmp_path: Path) -> None:
    model = {"model": "Qwen/Qwen3-32B", "max_tokens": 20000}
    done = planned(tmp_path, "ttft_p90<30s", gpus=("h100",), tensor_parallel_size=1, **model)
    answer = done.answer
    assert answer is not None and answer.max_model_len is not None
    assert 30000 < answer.max_model_len < 40960, "vLLM wants room for one request of the model's length"
    assert f"--max-model-len {answer.max_model_len}" in view(done).commands[1]
    assert f"its longest request is {answer.max_model_len:,} tokens" in " ".join(paragraph(done))
    with pytest.raises(KvyardError, match=r"vLLM doesn't start with --max-model-len 40960"):
        planned(tmp_path, "ttft_p90<30s", gpus=("h100",), tensor_parallel_size=1, max_model_len=40960, **model)
    with pytest.raises(KvyardError, match=r"holds a request of 9,\d+ tokens at most, and \d+.\d% of the prompts"):
        planned(
            tmp_path, "ttft_p90<30s", gpus=("h100",), tensor_parallel_size=2, model="llama-3.1-70b", max_tokens=20000
        )


def test_more_blocks_than_the_card_holds_are_a_what_if(tmp_path: Path) -> None:
    more: dict[str, Any] = {"gpus": ("h100",), "tensor_parallel_size": 1}
    done = planned(tmp_path / "met", "ttft_p90<3s", num_gpu_blocks=90_000, **more)
    assert paragraph(done)[1].startswith(
        "A what-if: 90,000 blocks on each device, and the card (h100) has room for 30,"
    )
    assert view(done).verdict == WHAT_IF
    missed = planned(tmp_path / "missed", "ttft_p90<3s,reuse>99%", num_gpu_blocks=90_000, **more)
    assert missed.answer is None and paragraph(missed)[1].startswith("A what-if: 90,000 blocks")
    fits = planned(tmp_path / "fits", "ttft_p90<3s", num_gpu_blocks=20_000, **more)
    assert "what-if" not in " ".join(paragraph(fits)) and view(fits).verdict != WHAT_IF


@pytest.mark.parametrize(("model", "degree"), [("gpt-oss-120b", 2), ("gemma-3-27b", 2), ("llama-3.1-8b", 1)])
def test_the_room_of_a_worker_is_what_kvyard_model_says(model: str, degree: int, tmp_path: Path) -> None:
    more: dict[str, Any] = {"limit": 20, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
    done = planned(tmp_path, "ttft_p90<60s", gpus=("h100",), tensor_parallel_size=degree, **more, model=model)
    of = memory_plan(
        find_config(model),
        find_card("h100").memory,
        tensor_parallel_size=degree,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
    )
    assert f"a worker has room for {of.max_tokens:,} KV tokens" in " ".join(paragraph(done))


def test_an_answer_with_an_fp8_cache_names_the_cheapest_fleet_without(tmp_path: Path) -> None:
    more: dict[str, Any] = {"model": "Qwen/Qwen3-32B", "kv_cache_dtype": None, "max_tokens": 16_000}
    done = planned(tmp_path, "ttft_p90<8s", gpus=("h100",), tensor_parallel_size=1, **more)
    assert done.answer is not None and done.answer.shape.kv_cache_dtype == "fp8"
    own = [fleet for fleet in done.search.fleets if fleet.met and fleet.shape.kv_cache_dtype == "auto"]
    cheapest = min(own, key=lambda fleet: fleet.cost)
    price = f"{cheapest.cost:,.2f} USD an hour"
    assert f"without it the cheapest is {describe(cheapest)}, {price}" in " ".join(paragraph(done))


def test_a_worker_that_spans_nodes_says_so(tmp_path: Path) -> None:
    more: dict[str, Any] = {"gpus": ("h200",), "prices": {"h200": Prices(card=3)}, "limit": 20, "model": "kimi-k2"}
    wide = " ".join(paragraph(planned(tmp_path / "16", "ttft_p90<30s", tensor_parallel_size=16, **more)))
    assert "of 16 (TP16)" in wide and "A worker spans nodes of 8 cards" in wide
    more["model"] = "llama-3.1-8b"
    assert "spans" not in " ".join(paragraph(planned(tmp_path / "8", "ttft_p90<30s", tensor_parallel_size=8, **more)))


def test_a_table_has_one_column_of_rejected_requests(tmp_path: Path) -> None:
    more: dict[str, Any] = {"gpus": ("h100",), "tensor_parallel_size": 1, "max_tokens": None, "max_model_len": 100_000}
    done = planned(tmp_path, "ttft_p90<30s", limit=120, **more)
    assert any(fleet.values["rejected"] for fleet in done.search.fleets), "one prompt is longer than 100,000 tokens"
    table = view(done).tables[0]
    for page in (False, True):
        assert [metric.heading for metric in table.metrics(page)].count("rejected") == 1


def test_a_large_trace_is_planned_for_by_its_busiest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("kvyard.lab.plan.plan")  # the package has a function of that name
    for name, value in {"MOST_REQUESTS": 200, "PART_REQUESTS": 40, "REQUESTS_PER_SECOND": 1}.items():
        monkeypatch.setattr(module, name, value)
    said: list[str] = []
    more: dict[str, Any] = {"gpus": ("h100",), "tensor_parallel_size": 1, "say": said.append}
    done = planned(tmp_path, "ttft_p90<5s", limit=None, max_tokens=65536, **more)
    assert done.traffic.requests == 40 and done.part.skip > 0
    assert len(said) == 1 and "planning for the busiest 40 requests in a row of " in said[0]
    assert done.whole.rate < done.traffic.rate
    text = " ".join(paragraph(done))
    assert f"The traffic: the busiest 40 requests in a row of {done.whole.requests:,}, from request" in text
    assert f"no proof for the whole: all requests come at {done.whole.rate:,.2f} a second" in text
    lines = view(done).commands
    assert lines[-1].startswith("kvyard replay ") and "--slo 'ttft_p90<5000' --max-tokens 65536" in lines[-1]
    view(done).save(tmp_path)
    assert f"--skip {done.part.skip} --first 40 --max-tokens 65536" in (tmp_path / "plan.toml").read_text()
    said.clear()
    assert planned(tmp_path, "ttft_p90<5s", limit=201, **more).traffic.requests == 201
    assert len(said) == 1 and "a smaller --limit is quicker" in said[0]


def test_prompts_that_do_not_fit_are_refused_or_left_out(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=r"prompts \(\d+.\d%\) don't fit into the 4,096 tokens .*--max-tokens 4096"):
        planned(tmp_path, "ttft_p99<2s", max_model_len=4096)
    done = planned(tmp_path, "ttft_p99<30s", max_model_len=4096, max_tokens=4096, gpus=("h100",))
    assert done.answer is not None and done.traffic.inputs.max() < 4096
    assert done.answer.values["rejected_share"] == 0


def test_an_impossible_slo_is_refused_before_any_replay(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=r"no number of cards keeps this SLO: .* More workers don't help"):
        planned(tmp_path, "ttft_p99<20ms")
    with pytest.raises(KvyardError, match=r"no prompt takes less than 1 ms, even alone.* without a unit"):
        planned(tmp_path, "ttft_p99=1")
    assert not list((tmp_path / "points").glob("*.json"))
    with pytest.raises(KvyardError, match=r"itl_mean is at least .* more workers don't"):
        planned(tmp_path, "itl_mean<0.1ms")
    with pytest.raises(KvyardError, match=r"can't be served so: H100 TP8: .* tensor_parallel_size 16 would do"):
        planned(tmp_path, "ttft_p99<2s", model="kimi-k2", gpus=("h100", "l40s"))
    with pytest.raises(KvyardError, match="can't be served so: L40S TP1: "):
        planned(tmp_path, "ttft_p99<2s", gpus=("l40s",), model="llama-3.1-405b", tensor_parallel_size=1)


def test_a_closed_loop_that_is_never_full_says_so(tmp_path: Path) -> None:
    more: dict[str, Any] = {"gpus": ("h100",), "tensor_parallel_size": 1, "limit": 20}
    full = planned(tmp_path, "ttft_p90<9s", concurrency=4, **more)
    assert "requests a second were served." in paragraph(full)[-1] and "fewer than" not in paragraph(full)[-1]
    never = planned(tmp_path, "ttft_p90<9s", concurrency=32, **more)
    assert "20 sessions are fewer than --concurrency 32: take more of the trace" in paragraph(never)[-1]


@pytest.mark.parametrize("metric", ["goodput>99%", "session_p99<60s"])
def test_a_limit_that_every_fleet_would_keep_is_refused(metric: str, tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=r"a replay of this trace has no (goodput|session_p99): limit what it has"):
        planned(tmp_path, metric, gpus=("h100",), tensor_parallel_size=1)


def test_a_card_without_a_price_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match="the price of h100 is 0"):
        planned(tmp_path, "ttft_p99<2s", gpus=("h100",), prices={"h100": Prices(card=0)})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"workers": 4}, "workers is what kvyard plan varies"),
        ({"model": None}, "which model"),
        ({"limits": []}, "what must hold"),
    ],
)
def test_senseless_settings_are_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    limits = wrong.pop("limits", parse_limits("ttft_p99<2s"))
    settings = {**BASE, **wrong}
    with pytest.raises(KvyardError, match=said):
        plan(CONVERSATION, ["h100"], limits, folder=tmp_path, prices=PRICES, price_list=default_prices(), **settings)


def test_more_traffic_than_any_fleet_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=r"no fleet could be replayed: .* a fleet has at most 100,000 ranks"):
        planned(tmp_path, "ttft_p99<2s", speedup=1e15)


def test_an_interrupt_before_the_first_replay_leaves_no_page(tmp_path: Path) -> None:
    class AtOnce(LocalExecutor):
        def run(self, tasks: Any, ended: Any, told: Any = None) -> None:
            raise KeyboardInterrupt

    done = planned(tmp_path, "ttft_p90<3s", tensor_parallel_size=1, executor=AtOnce())
    assert done.interrupted and "Nothing was replayed yet." in paragraph(done)
    assert {path.name for path in view(done).save(tmp_path)} == {"plan.csv", "plan.json"}


def test_a_budget_below_the_cheapest_fleet_is_reported(tmp_path: Path) -> None:
    done = planned(tmp_path, "ttft_p90<3s", tensor_parallel_size=1, budget=1.0)
    assert done.answer is not None and not done.met
    assert "over the budget of 1.00 USD an hour" in " ".join(paragraph(done))
    assert view(done).verdict == "SLO met, but over the budget"


class Interrupted(LocalExecutor):
    """Ctrl-C after two replays."""

    runs = 0

    def run(self, tasks: Any, ended: Any, told: Any = None) -> None:
        self.runs += 1
        if self.runs > 2:
            raise KeyboardInterrupt
        super().run(tasks, ended, told)


def test_an_interrupt_keeps_what_was_found(tmp_path: Path) -> None:
    early = planned(tmp_path, "ttft_p90<3s", tensor_parallel_size=1, executor=Interrupted())
    assert early.interrupted and len(early.search.fleets) == 2
    assert any("interrupted" in sentence for sentence in paragraph(early))
    replayed: list[Task] = []

    class Counting(LocalExecutor):
        def run(self, tasks: Any, ended: Any, told: Any = None) -> None:
            replayed.extend(tasks)
            super().run(tasks, ended, told)

    later = planned(tmp_path, "ttft_p90<3s", tensor_parallel_size=1, executor=Counting())
    assert not later.interrupted and len(replayed) == len(later.search.fleets) - 2 + len(later.loads)


def test_a_page_and_settings(tmp_path: Path) -> None:
    done = planned(tmp_path, "ttft_p90<3s,itl_p99<200ms", gpus=("h100",), tensor_parallel_size=1)
    result = view(done)
    paths = {path.name for path in result.save(tmp_path)}
    assert paths == {"plan.csv", "plan.json", "plan.html", "plan.toml"}
    page = (tmp_path / "plan.html").read_text()
    assert "TTFT p90 and cost" in page and "TTFT p90 and cards" in page
    assert "USD an hour" in page and "vllm serve meta-llama/" in page
    assert replay(CONVERSATION, config=tmp_path / "plan.toml", limit=60).report.latency["ttft"].p90 <= 3000
    assert "# #" not in (tmp_path / "plan.toml").read_text()
    taken = convert(own_part(tomllib.loads((tmp_path / "plan.toml").read_text()), "plan.toml"), "plan.toml")
    assert done.answer is not None and taken.router.policy == done.settings(done.answer)["router"]
