"""Traces written and read again, by us and by vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.peers import peer_python, why_not
from tests.replay.traces.support import CONVERSATION, SAMPLES, jsonl, mooncake, plain

from kvyard.errors import KvyardError
from kvyard.replay.traces import open_trace
from kvyard.replay.traces.generate import Workload, generate
from kvyard.replay.traces.writing import WORDS, block_words, write_trace

VLLM = peer_python("vllm")


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_mooncake_is_written_as_it_was_read(suffix: str, tmp_path: Path) -> None:
    trace = open_trace(CONVERSATION, limit=200)
    written = write_trace(trace, tmp_path / f"a.jsonl{suffix}")
    assert (written.rows, written.notes) == (200, [])
    assert list(open_trace(tmp_path / f"a.jsonl{suffix}")) == list(trace)
    write_trace(trace, tmp_path / f"b.jsonl{suffix}")
    assert (tmp_path / f"a.jsonl{suffix}").read_bytes() == (tmp_path / f"b.jsonl{suffix}").read_bytes()


def test_sessions_survive(tmp_path: Path) -> None:
    trace = generate(Workload(requests=100, turns="geometric:3", arrivals="gamma:3", tree="2x600"))
    write_trace(trace, tmp_path / "t.jsonl")
    assert list(open_trace(tmp_path / "t.jsonl")) == list(trace)


@pytest.mark.parametrize(("name", "size"), [("weka_sessions.jsonl.xz", 64), ("dynamo_request_trace.jsonl.gz", 16)])
def test_agents_survive(name: str, size: int, tmp_path: Path) -> None:
    trace = open_trace(SAMPLES / name)
    written = write_trace(trace, tmp_path / "t.jsonl")
    assert f"an id stands for {size} tokens, as each row says: set that in other readers" in written.notes
    assert any("agentic_mooncake" in note for note in written.notes)
    assert plain(list(open_trace(tmp_path / "t.jsonl"))) == plain(list(trace)), "each row has its block size"


def test_turns_with_their_own_times_lose_their_predecessors_with_a_note(tmp_path: Path) -> None:
    trace = open_trace(SAMPLES / "bailian.jsonl")
    written = write_trace(trace, tmp_path / "t.jsonl")
    assert any("don't wait for those before them" in note for note in written.notes)
    found = list(open_trace(tmp_path / "t.jsonl", trace_block_size=16))
    assert [replace(one, session=None, after=()) for one in trace] == [replace(one, session=None) for one in found]
    assert all(one.delay is None for one in found)


def test_tokens_become_ids(tmp_path: Path) -> None:
    written = write_trace(open_trace(SAMPLES / "sharegpt_tokens.jsonl"), tmp_path / "t.jsonl", token_block=512)
    assert written.notes == ["tokens are left out: ids stand for them"]
    assert [len(one.ids or ()) for one in open_trace(tmp_path / "t.jsonl")] == [1, 1, 1]


def test_nothing_is_invented_for_traces_without_ids(tmp_path: Path) -> None:
    write_trace(open_trace(SAMPLES / "azure_conv.csv"), tmp_path / "t.jsonl")
    assert all("hash_ids" not in json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines())


def test_extras_survive(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", mooncake(0.25, 5, 0, lora="l", salt="s", priority=-2, model="m"))
    written = write_trace(open_trace(path), tmp_path / "b.jsonl")
    assert written.notes == ["lora is read by kvyard only", "salt is read by kvyard only"]
    assert list(open_trace(tmp_path / "b.jsonl")) == list(open_trace(path))


def test_a_custom_dataset(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        mooncake(0, 20, 7, hash_ids=[1, 2]),
        mooncake(500, 24, 0, hash_ids=[1, 3]),
        mooncake(1000, 16, 1),
        mooncake(1500, 16, 1),
    )
    written = write_trace(open_trace(path, trace_block_size=16), tmp_path / "b.jsonl", "vllm-custom")
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    words = [row["prompt"].split() for row in rows]
    assert [len(one) for one in words] == [20, 24, 16, 16]
    assert words[0][:16] == words[1][:16] and words[0][16:] != words[1][16:20]
    assert words[2] != words[3]
    assert [row["output_tokens"] for row in rows] == [7, 1, 1, 1]
    said = "\n".join(written.notes)
    assert "--num-prompts 4 --custom-output-len -1" in said and "--request-rate 2.667" in said
    assert "nothing is known of what prompts share" in said and "times are left out" in said


def test_fields_that_a_custom_dataset_lacks_are_refused(tmp_path: Path) -> None:
    trace = open_trace(SAMPLES / "weka_sessions.jsonl.xz", limit=3)
    with pytest.raises(KvyardError, match="--lossy"):
        write_trace(trace, tmp_path / "t.jsonl", "vllm-custom")
    assert list(tmp_path.iterdir()) == [], "nothing half-written"
    written = write_trace(trace, tmp_path / "t.jsonl", "vllm-custom", lossy=True)
    assert "who waits for whom is left out" in written.notes
    with pytest.raises(KvyardError, match=r"end in \.jsonl only"):
        write_trace(trace, tmp_path / "t.jsonl.gz", "vllm-custom", lossy=True)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    trace = open_trace(SAMPLES / "plain.csv")
    (tmp_path / "there").mkdir()
    with pytest.raises(KvyardError, match="it is a directory"):
        write_trace(trace, tmp_path / "there")
    with pytest.raises(KvyardError, match="can't write"):
        write_trace(trace, tmp_path / "no" / "such" / "directory.jsonl")
    with pytest.raises(KvyardError, match="choose one of mooncake, vllm-custom"):
        write_trace(trace, tmp_path / "t.jsonl", "parquet")


def test_a_trace_that_breaks_leaves_nothing_behind(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", mooncake(0), mooncake(1, -1))
    with pytest.raises(KvyardError, match="line 2"):
        write_trace(open_trace(path), tmp_path / "b.jsonl.gz")
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]


def test_mixed_block_sizes_are_refused(tmp_path: Path) -> None:
    rows = [one for size in (16, 32) for one in generate(Workload(requests=1, block_size=size))]
    from kvyard.replay.traces import Trace

    with pytest.raises(KvyardError, match="stand for 16 tokens and for 32"):
        write_trace(Trace("mix", "made", lambda tally: iter(rows)), tmp_path / "t.jsonl")


def test_words() -> None:
    assert len(WORDS) == len(set(WORDS)) == 64
    first = block_words(5, 40)
    assert first != block_words(6, 40) and len(first.split()) == 40
    block_words.cache_clear()
    assert block_words(5, 40) == first, "remembered or not"


SCRIPT = """
import json, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.benchmarks.datasets.datasets import CustomDataset, TimedTrace

words = json.loads(sys.argv[3])
vocabulary = {word: number for number, word in enumerate([*words, "?"])}
inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
try:
    import pandas
    custom = CustomDataset(dataset_path=sys.argv[1], random_seed=0, disable_shuffle=True)
except ModuleNotFoundError:  # all it is needed for is to make a dictionary of each line
    custom = CustomDataset.__new__(CustomDataset)
    custom.data = [json.loads(line) for line in open(sys.argv[1])]
asked = custom.sample(tokenizer, num_requests=0, output_len=-1, skip_chat_template=True)
labels = {f"timed_trace_label_{name}": name for name in ("timestamp", "input_length", "output_length", "hash_ids")}
timed = TimedTrace(
    dataset_path=sys.argv[2], random_seed=0, timed_trace_chunk_hash_size=512, timed_trace_sec_multiplier=0.001, **labels
)
timed = timed.sample(tokenizer, num_requests=10**6)
print("RESULT" + json.dumps({
    "custom": [(tokenizer(one.prompt).input_ids, one.prompt_len, one.expected_output_len) for one in asked],
    "timed": [(one.prompt, one.timestamp, one.expected_output_len) for one in timed],
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(VLLM is None, reason=why_not("vllm"))
def test_vllm_reads_both(tmp_path: Path) -> None:
    trace = generate(Workload(requests=12, tree="1x512/2x512", input="uniform:100,900", arrivals="constant:4"))
    write_trace(trace, tmp_path / "custom.jsonl", "vllm-custom")
    write_trace(trace, tmp_path / "timed.jsonl")
    run = subprocess.run(
        [VLLM, "-c", SCRIPT, str(tmp_path / "custom.jsonl"), str(tmp_path / "timed.jsonl"), json.dumps(WORDS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.rpartition("RESULT")[2])
    requests = list(trace)
    for one, (tokens, length, answer) in zip(requests, result["custom"], strict=True):
        assert (len(tokens), length, answer) == (one.input_length, one.input_length, one.output_length)
    for one, (tokens, time, answer) in zip(requests, result["timed"], strict=True):
        assert (len(tokens), answer) == (one.input_length, one.output_length)
        assert time == pytest.approx(one.arrival / 1e9)
    for kind in ("custom", "timed"):
        prompts = [row[0] for row in result[kind]]
        for a, left in zip(requests, prompts, strict=False):
            for b, right in zip(requests, prompts, strict=False):
                assert a.ids is not None and b.ids is not None
                shared = sum(1 for i, j in zip(a.ids, b.ids, strict=False) if i == j) * 512
                shared = min(shared, a.input_length)
                assert left[:shared] == right[:shared]
                if a is not b:
                    assert left[shared : shared + 40] != right[shared : shared + 40]
