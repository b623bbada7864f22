"""``kvyard model``: the table, the JSON, and what is refused."""

from __future__ import annotations

import json
from functools import partial

import msgspec
import pytest
from tests.cli.support import exit_code

from kvyard.engine.config import EngineConfig
from kvyard.engine.models import plan, preset, presets

run = partial(exit_code, "model")


def test_a_preset(capsys):
    assert run("llama-3.1-8b", "--gpu-memory", "80GiB") == 0
    out = capsys.readouterr().out
    made = plan(preset("llama-3.1-8b"), 80 * 2**30)
    assert "LlamaForCausalLM, 8.03 B parameters" in out
    assert f"{made.num_blocks:,}" in out
    assert "128.00 KiB" in out
    assert "14.96 GiB" in out


def test_a_config_file_with_options(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(preset("gemma-3-27b")))
    options = "--tensor-parallel-size 2 --kv-cache-dtype fp8 --max-model-len 32768 --block-size 32 --reserve 2GiB"
    assert (
        run(
            str(path),
            "--gpu-memory",
            "48GB",
            "--gpu-memory-utilization",
            "0.9",
            "--json",
            "--weights",
            "26GiB",
            *options.split(),
        )
        == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert made["bytes_per_token"] == 10 * 8 * 2 * 128
    assert made["cache_bytes"] == int(48e9 * 0.9) - 28 * 2**30
    assert [group["spec"]["block_size"] for group in made["layer_groups"]] == [32] * 7
    engine = msgspec.convert(made["engine"], EngineConfig)
    engine.check()
    assert engine.num_gpu_blocks == made["num_blocks"] - 1
    assert engine.max_model_len == 32768
    assert engine.groups[0].window == 1024


def test_equal_groups_are_shown_once(capsys):
    assert run("gemma-3-27b", "--gpu-memory", "80GiB") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if "sliding_window" in line or " full " in line]
    assert [(row[0], row[-4]) for row in rows] == [("0-3", "9"), ("4-5", "8"), ("6", "10")]
    assert rows[0][1:3] == ["sliding_window", "1024"]


def test_states_are_no_bytes_a_token(capsys):
    assert run("bamba-9b-v2", "--gpu-memory", "80GiB", "--no-prefix-caching") == 0
    out = capsys.readouterr().out
    assert "(a state)" in out
    assert "262144" in out  # without caching one block spans the longest request


def test_a_request_that_does_not_fit_is_reported(capsys):
    assert run("qwen3-32b", "--gpu-memory", "80GB") == 0
    longest = plan(preset("qwen3-32b"), 80 * 10**9).longest
    assert f"A request of 40960 tokens does not fit: say --max-model-len {longest} or less." in capsys.readouterr().err
    assert run("qwen3-32b", "--gpu-memory", "80GB", "--max-model-len", str(longest)) == 0
    assert "does not fit" not in capsys.readouterr().err


def test_list(capsys):
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == presets()
    assert "meta-llama/Llama-3.1-70B" in next(line for line in lines if line.startswith("llama-3.1-70b"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "which model?"),
        (("nope",), "unknown preset 'nope': choose one of bamba"),
        (("llama-3.1-8b",), "Say --gpu h100 or --gpu-memory 80GiB, one of the two"),
        (("llama-3.1-8b", "--gpu-memory", "80gigs"), "'80gigs' is not a size in bytes; write it like 80GiB"),
        (
            ("llama-3.1-8b", "--gpu-memory", "80GiB", "--weights", "lots"),
            "weights is 'lots': it must be a size in bytes",
        ),
        (
            ("llama-3.1-8b", "--gpu-memory", "16GiB"),
            "doesn't fit: a card needs 17.48 GiB, 14.96 GiB of them for weights",
        ),
        (("llama-3.1-8b", "--gpu-memory", "80GiB", "--tensor-parallel-size", "5"), "can't be split over 5 ranks"),
        (("llama-3.1-8b", "--gpu-memory", "80GiB", "--kv-cache-dtype", "int1"), "unknown data type 'int1'"),
        (("gpt-9", "--gpu-memory", "80GiB"), "unknown preset 'gpt-9': choose one of"),
        (
            ("none/config.json", "--gpu-memory", "80GiB"),
            "none/config.json: there is no such file or folder, and no model hub is asked",
        ),
    ],
)
def test_refusals(capsys, argv, words):
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("Error: ")
    assert words in err


def test_files_that_are_no_config(capsys, tmp_path):
    path = tmp_path / "config.json"
    for text, words in (
        ("weights", "not JSON"),
        ("3", "not a JSON object"),
        ("{}", "the config lacks num_hidden_layers"),
    ):
        path.write_text(text)
        assert run(str(path), "--gpu-memory", "80GiB") == 2
        assert words in capsys.readouterr().err
