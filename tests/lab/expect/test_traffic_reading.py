"""Inputs of an expectation: command lines, pages of metrics, counts per request, recordings; and the command itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.lab.expect.support import ONE, conversations, counts
from tests.replay.traces.support import jsonl

from kvyard.cli.app import main
from kvyard.errors import KvyardError
from kvyard.lab.expect.command_line import read_serve_line
from kvyard.lab.expect.counted import UNCHECKED, read_answers, read_page
from kvyard.lab.expect.engine_visit import settings_of
from kvyard.lab.expect.traffic import read_traffic, repeated_tokens, shared_tokens
from kvyard.replay.live.facts import EngineFacts
from kvyard.replay.settings import make_config
from kvyard.replay.traces import TraceRequest, open_trace

# -- command lines --------------------------------------------------------------------------------------------------------


def test_vllm_serve() -> None:
    line = read_serve_line(
        "PYTHONHASHSEED=0 vllm serve Qwen/Qwen3-8B --block-size=32 -tp 2 --no-enable-prefix-caching --max-model-len 4096 "
        '--port 8000 --kv-offloading-size 20 --speculative-config \'{"method": "eagle3", "num_speculative_tokens": 3}\''
    )
    assert line.engine == "vllm" and line.ignored == ["port"]
    engine = make_config({**line.settings, "gpu": "h100", "enable_prefix_caching": True}).workers[0].engine
    assert (engine.block_size or engine.specs[0].block_size) == 32
    assert engine.max_model_len == 4096 and engine.speculative is not None and engine.speculative.eagle
    assert engine.tiers is not None and line.settings["enable_prefix_caching"] is False


def test_sglang_and_trtllm() -> None:
    line = read_serve_line(
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --page-size 64 --max-total-tokens 6400 "
        "--disable-radix-cache --chunked-prefill-size 4096 --schedule-policy fcfs --host 0.0.0.0"
    )
    assert line.settings == {
        "backend": "sglang",
        "model": "qwen3-8b",
        "block_size": "64",
        "enable_prefix_caching": False,
        "sglang": {"chunked_prefill_size": 4096, "schedule_policy": "fifo"},
        "num_gpu_blocks": 100,
    }
    trtllm = read_serve_line("trtllm-serve nvidia/Other --max_batch_size 8 --kv_cache_free_gpu_memory_fraction 0.8")
    assert trtllm.engine == "trtllm" and trtllm.settings["max_num_seqs"] == "8" and trtllm.settings["block_size"] == 32
    assert read_serve_line("sglang serve Qwen/Qwen3-8B").settings["block_size"] == 1, "its page, if no flag names one"


LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    "command",
    [
        f"/opt/venv/bin/vllm serve {LLAMA} --block_size=32",
        f"env CUDA_VISIBLE_DEVICES=0,1 nohup vllm serve {LLAMA} --block-size 32 > log 2>&1 &",
        f"docker run --gpus all -e A=b vllm/vllm-openai:v0.32.0 --model {LLAMA} --block-size 32",
        f"python3 -m vllm.entrypoints.cli.main serve {LLAMA} --block-size 32",
        f"vllm serve {LLAMA} --served-model-name a b c --block-size 32 --lora-modules x=/x y=/y",
        f"vllm serve --enable-auto-tool-choice {LLAMA} --max-model-len auto --block-size 32",
        f"vllm serve {LLAMA} --block-size 32 --max-model-len -1 --enable-log-requests false",
    ],
)
def test_spellings_of_one_command(command: str) -> None:
    line = read_serve_line(command)
    assert line.settings == {"model": "llama-3.1-8b", "block_size": "32"} and not line.unmodelled


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--enable-prefix-caching=False -ep", {"enable_prefix_caching": False, "enable_expert_parallel": True}),
        ("--max-model-len 32K --max-num-batched-tokens 8k", {"max_model_len": "32768", "max_num_batched_tokens": "8k"}),
        ("-sc.method=eagle3 --speculative-config.num_speculative_tokens 3", {"num_speculative_tokens": 3}),
        ("--spec-method mtp --spec-tokens 1", {"num_speculative_tokens": 1}),
        ('-sc \'{"method": "draft_model", "model": "x", "num_speculative_tokens": 3}\'', {}),
        ('-sc \'{"method": "mtp", "num_speculative_tokens": 3, "disable_eagle_block_drop": true}\'', {}),
        ("-dp 2", {"dp_size": "2", "router": "least-loaded"}),
        (
            '--kv-transfer-config \'{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": '
            '{"cpu_bytes_to_use": 1000}}\'',
            {"host_bytes": 1000},
        ),
    ],
)
def test_flags_of_vllm(flags: str, settings: dict[str, object]) -> None:
    line = read_serve_line(f"vllm serve {LLAMA} {flags}")
    assert line.settings == {"model": "llama-3.1-8b", **settings} and not line.unmodelled


def test_flags_of_sglang() -> None:
    start = f"python -m sglang.launch_server --model-path {LLAMA} "
    line = read_serve_line(f"{start} --page-size 64 --max-total-tokens 6400 --enable-hierarchical-cache --dp 2")
    assert (line.settings["host_blocks"], line.settings["workers"], line.settings["router"]) == (
        200,
        "2",
        "round-robin",
    )
    drafts = read_serve_line(
        f"{start} --speculative-algo EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 8 --swa-full-tokens-ratio 0.5 --enable-mixed-chunk"
    )
    assert drafts.settings["num_speculative_tokens"] == 3
    assert drafts.settings["sglang"] == {
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
        "swa_full_tokens_ratio": 0.5,
        "enable_mixed_chunk": True,
    }


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("vllm serve X --kv-transfer-config.kv_connector LMCacheConnectorV1", "kv_transfer_config"),
        ("vllm serve X --mamba-block-size 128", "mamba_block_size"),
        ("vllm serve X --dtype float32", "dtype"),
        ("vllm serve X -dcp 2", "decode_context_parallel_size"),
        ("vllm serve X --config serve.yaml", "config"),
        ("sglang serve X --speculative-algorithm EAGLE", "speculative_algorithm"),
        ("trtllm-serve X --extra_llm_api_options x.yaml", "extra_llm_api_options"),
    ],
)
def test_flags_that_hits_depend_on_are_named_apart(command: str, flag: str) -> None:
    line = read_serve_line(command)
    assert any(name.startswith(flag) for name in line.unmodelled) and flag not in line.ignored


@pytest.mark.parametrize(
    "text",
    [
        *("ollama serve", "vllm serve X --speculative-config {", "vllm serve 'X", "vllm bench serve", ""),
        *("vllm serve X --num-gpu-blocks-override many", "vllm serve X --kv-offloading-size lots"),
        *("vllm serve X --block-size", "vllm serve X --block-size sixteen", "sglang serve X --max-total-tokens x"),
        *("sglang serve X --page-size big", "sglang serve X --schedule-policy best"),
    ],
)
def test_other_command_lines_are_refused(text: str) -> None:
    with pytest.raises(KvyardError):
        read_serve_line(text)


def test_settings_of_a_running_engine() -> None:
    facts = EngineFacts(model="chat", root="openai/gpt-oss-20b", block_size=16, num_gpu_blocks=900, engines=2)
    found = settings_of(facts)
    assert found == {
        "model": "gpt-oss-20b",
        "block_size": 16,
        "num_gpu_blocks": 900,
        "dp_size": 2,
        "router": "least-loaded",
    }
    assert "model" not in settings_of(EngineFacts(model="chat", root="/models/chat"))


# -- counters -------------------------------------------------------------------------------------------------------------

PAGE = """# HELP vllm:prefix_cache_queries_total x
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 500.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 300.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 30.0
vllm:external_prefix_cache_queries_total{engine="0"} 700.0
vllm:external_prefix_cache_hits_total{engine="0"} 64.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",enable_prefix_caching="True",user="None"} 1.0
"""


def test_vllm_page() -> None:
    found = read_page(PAGE)
    assert (found.queries, found.hits, found.external_hits, found.total) == (1500, 330, 64, 394)
    assert found.facts == {"block_size": "16", "num_gpu_blocks": "100", "enable_prefix_caching": "True"}
    assert not found.asleep and read_page(PAGE.replace('"awake"} 1.0', '"awake"} 0.0')).asleep
    since = found.since(read_page(PAGE.replace(" 300.0", " 200.0")))
    assert (since.queries, since.hits, since.external_hits) == (0, 100, 0)
    with pytest.raises(KvyardError, match="restarted"):
        read_page(PAGE.replace(" 300.0", " 200.0")).since(found)


def test_other_pages() -> None:
    found = read_page('sglang:prompt_tokens_total{x="y"} 90\nsglang:cached_tokens_total{cache_source="device"} 32\n')
    assert (found.queries, found.hits) == (90, 32)
    stats = {"kvCacheStats": {"tokensPerBlock": 32, "reusedBlocks": 3, "missedBlocks": 5, "maxNumBlocks": 99}}
    blocks = read_page(json.dumps([{}, stats]))
    assert (blocks.queries, blocks.hits, blocks.notes) == (256, 96, [UNCHECKED])
    empty = {"kvCacheStats": {"tokensPerBlock": 0, "reusedBlocks": 3, "missedBlocks": 5}}
    below = "vllm:prefix_cache_queries_total 5\nvllm:prefix_cache_hits_total -7\n"
    for text in ("", "up 1\n", "[]", "{}", json.dumps([empty]), below, 'vllm:gpu_prefix_cache_hit_rate{x="y"} 0.3\n'):
        with pytest.raises(KvyardError):
            read_page(text)


def test_counts_by_request(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    rows = [{"request_id": 0, "cached": 5}, {"cached_tokens": 6}, {"id": "c", "usage": usage}]
    assert read_answers(jsonl(tmp_path / "a.jsonl", *rows)) == {"0": 5, "2": 6, "c": 7}
    for bad in ({"usage": {}}, {"cached": -5}):
        with pytest.raises(KvyardError, match="line 1"):
            read_answers(jsonl(tmp_path / "b.jsonl", bad))


# -- traffic --------------------------------------------------------------------------------------------------------------


def row(at: int, tokens: list[int], **more: object) -> dict[str, object]:
    found = {"arrival_time_ns": at * 10**9, "input_toks": len(tokens), "output_toks": 1, "input_tok_ids": tokens}
    return {**found, "output_tok_ids": [5], **more}


def test_columns_of_a_trace(tmp_path: Path) -> None:
    text = list(range(100, 140))
    path = jsonl(
        tmp_path / "t.jsonl",
        row(0, text, cached=0, salt="s"),
        row(1, text, n=3, lora="l"),
        row(2, text, images=[{"at": 8, "length": 4, "hash": "cat"}]),
        row(3, text, images=[{"at": 8, "length": 4, "hash": "cat"}]),
        row(4, text, images=[{"at": 8, "length": 4, "hash": "dog"}]),
    )
    found = read_traffic(open_trace(path))
    assert [one.id for one in found.requests] == ["1", "2", "2#choice2", "2#choice3", "3", "4", "5"]
    assert found.cached == {"1": 0} and found.choices == 2
    assert shared_tokens(found.requests).tolist() == [0, 0, 40, 40, 0, 40, 8]
    assert shared_tokens(found.requests, adapters=False, salts=False).tolist() == [0, 40, 40, 40, 8, 40, 8]


def test_images_need_tokens(tmp_path: Path) -> None:
    mooncake = {"timestamp": 0, "input_length": 9, "output_length": 1, "images": [{"at": 1}]}
    with pytest.raises(KvyardError, match="tokens"):
        read_traffic(open_trace(jsonl(tmp_path / "t.jsonl", mooncake)))


def test_text_that_moved_is_recognised() -> None:
    text = list(range(1000, 1600))
    rows = [TraceRequest(str(at), at, 600 + at, 1, tokens=[*range(at), *text] if at else text) for at in range(3)]
    assert shared_tokens(rows).tolist() == [0, 0, 1]
    repeated = repeated_tokens(rows).tokens
    assert repeated[0] == 0 and min(repeated[1:]) > 550


# -- the command ----------------------------------------------------------------------------------------------------------


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = conversations()
    theirs = counts(rows, ONE).by_request
    trace = jsonl(
        tmp_path / "trace.jsonl",
        *(
            {
                "arrival_time_ns": one.arrival,
                "input_toks": one.input_length,
                "output_toks": one.output_length,
                "input_tok_ids": one.tokens,
                "output_tok_ids": one.output_tokens,
            }
            for one in rows
        ),
    )
    flags = ["--block-size", 16, "--num-gpu-blocks", 8192, "--max-num-seqs", 16]
    answers = jsonl(tmp_path / "answers.jsonl", *({"cached": count} for count in theirs.values()))
    out = tmp_path / "rows.jsonl"
    assert run("expect", trace, *flags, "--answers", answers, "--per-request", out) == 0
    assert f"{len(rows)} of {len(rows)} requests were counted to the token" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == len(rows)
    page = tmp_path / "metrics"
    page.write_text(f"vllm:prefix_cache_queries_total {sum(one.input_length for one in rows)}\n")
    assert run("expect", trace, *flags, "--metrics", page, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["cause"] == "caching-off" and found["flagged"] and found["fault"] and found["counted"] == 0
    assert run("expect", trace, "--serve", "ollama serve") == 2
    assert run("expect", trace, *flags, "--metrics-before", page) == 2
    assert run("expect", trace, "--answers", answers) == 2, "no engine"
    assert "which engine?" in capsys.readouterr().err
    strangers = jsonl(tmp_path / "strangers.jsonl", {"id": "cmpl-1", "cached": 5})
    assert run("expect", trace, *flags, "--answers", strangers) == 2
    assert "has the id of a request" in capsys.readouterr().err
    page.write_text("")
    assert run("expect", trace, *flags, "--metrics", page) == 2
    assert run("expect", trace, *flags, "--tolerance", "nan") == 2
    assert run("expect", trace, *flags, "--events", trace) == 2
    assert "has no KV events" in capsys.readouterr().err
