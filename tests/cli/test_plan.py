"""``kvyard plan`` from the command line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.cli.support import exit_code
from tests.replay.traces.support import CONVERSATION

from kvyard.cli.plan import _per_hour

SMALL = [CONVERSATION, "--limit", 40, "--model", "llama-3.1-8b", "--max-num-seqs", 64, "--no-split", "-tp", 1]
FIXED = ["--router", "kv", "--kv-cache-dtype", "auto", "--host-bytes", 0]


run = partial(exit_code, "plan")


def test_an_answer_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SMALL, *FIXED, "--gpu", "h100,L40S", "--slo", "ttft_p90<5s", "-o", tmp_path / "out", "--max-tokens", 65536]
    assert run(*argv) == 0
    out, err = capsys.readouterr()
    said = " ".join(out.split())
    assert "Route with kv, no prefill/decode split; a worker has room for" in said
    assert "The traffic: 39 of the first 40 requests (--limit), 3.25 a second" in said
    assert "mostly 3 s apart" in said and "plan with --jitter 3s" in said
    assert "and no host memory." in said
    assert "Left out as longer than --max-tokens: 1." in said and "# start 4 engines with" in said
    assert "Take " in out and "vllm serve meta-llama/Llama-3.1-8B" in out
    command = next(line for line in out.splitlines() if line.startswith("vllm serve"))
    assert "--max-num-seqs 64" in command and command.endswith("'"), "one line, so that it can be pasted"
    assert "plan.toml" in err
    assert run(*argv, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["met"] is True and found["currency"] == "USD" and found["answer"]["slo_met"] is True
    assert run(*argv, "-q") == 0
    assert capsys.readouterr() == ("", "")


def test_spread_arrivals_do_not_count_as_equal_stamps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, *FIXED, "--gpu", "h100", "--slo", "ttft_p90<5s", "--jitter", "3s", "-o", tmp_path) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The traffic: the first 40 requests (--limit), " in said and "stamps" not in said


@pytest.mark.parametrize(
    ("text", "hourly"), [("60", 60), ("60/h", 60), ("60 USD/hour", 60), ("1440/day", 60), ("730usd/month", 1)]
)
def test_a_budget_is_a_price_for_some_time(text: str, hourly: float) -> None:
    assert _per_hour(text, "USD") == hourly


def test_no_fleet_within_the_budget_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, *FIXED, "--gpu", "h100", "--slo", "ttft_p90<5s", "--budget", "1/h", "-o", tmp_path, "-q") == 1
    assert "Take " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--slo", "ttft_p99<2s"], "Say --gpu h100"),
        (["--gpu", "h1000", "--slo", "ttft_p99<2s"], "unknown card 'h1000'"),
        (["--gpu", "h20", "--slo", "ttft_p99<2s"], "the price list has no h20: say --price-card"),
        (["--gpu", "h100"], "what must hold"),
        (["--gpu", "h100", "--slo", "ttft_p99<2s", "-tp", "x"], "tensor_parallel_size is 'x'"),
        (["--gpu", "h100", "--slo", "ttft_p99<2s", "--speedup", "0"], "speedup must be a number above 0"),
        (["--gpu", "h100", "--slo", "ttft_p99<2s", "-j", "99999999999"], "--jobs 99999999999: at most 1,024"),
        (["--gpu", "h100", "--slo", "reuse>200%"], "reuse is a share, at most 1 or 100%"),
        (["--gpu", "h100", "--slo", "ttft_p99<2s", "--model", "qwen"], "unknown preset 'qwen'"),
        (["--gpu", "h100", "--slo", "ttft_p99<2s", "--budget", "cheap"], "--budget 'cheap'"),
        (["--gpu", "h100", "--slo", "ttft_p99<2s", "--budget", "60 EUR/h"], "the prices are in USD: convert it"),
        (["--gpu", "h100", "--slo", "ttft_p99<2s", "--budget", "60/week"], "such as 60/h, 1440/day or 43800/month"),
        (["--gpu", "h100", "--slo", "p99_ttft<2s"], "did you mean ttft_p99?"),
        (["--gpu", "h100", "--slo", "ttft_p99.9<2s"], "did you mean ttft_p99?"),
        (["--gpu", "h100", "--slo", "ttft_p99<2s;itl_p99<50ms"], "has commas between its limits"),
        (["--gpu", "h100", "--slo", "ttft<2s"], "of which requests"),
        (["--gpu", "h100", "--slo", "ttft<2"], "a time without a unit is in milliseconds"),
        (
            ["--gpu", "h100", "--slo", "ttft_p99<2s", "--router", "least-tme"],
            "Error: unknown routing policy 'least-tme'",
        ),
        (["--gpu", "h100", "--slo", "ttft_p99<2s", "--host-bytes", "lots"], "Error: host_bytes is 'lots'"),
        (
            ["--gpu", "h100", "--slo", "ttft_p99<2s", "--prices", "/nowhere.toml"],
            "--prices /nowhere.toml can't be read",
        ),
    ],
)
def test_refusals_are_one_sentence(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SMALL, *flags, "-o", tmp_path) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("currency = 3", "--prices"),
        ('currency = "EUR"\ndate = "x"\n[cards]\nh100 = -1', "h100 costs -1"),
        ('currency = "EUR"\ndate = "x"\n[cards]\nh999 = 1', "unknown card 'h999'"),
        ("[[", "it has currency, date and a table"),
    ],
)
def test_a_price_list_that_is_wrong_is_named(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(text)
    assert run(*SMALL, "--gpu", "h100", "--slo", "ttft_p99<2s", "--prices", prices, "-o", tmp_path / "out") == 2
    assert said in capsys.readouterr().err


def test_help_begins_with_the_question_and_leaves_out_what_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    words = capsys.readouterr().out
    assert words.index("--slo") < words.index("--speedup")
    assert "--workers" not in words and "--autoscale" not in words
    assert run(*SMALL, "--gpu", "h100", "--slo", "ttft_p99<2s", "--workers", 4) == 2
    assert "workers is what kvyard plan varies" in capsys.readouterr().err


def test_help_names_what_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("[default: searched]") == 4 and "every layer. [default: searched]" in said
