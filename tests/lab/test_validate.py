"""A run beside its replay: a replay's own times, in any format, are met exactly; real runs are met to a few percent."""

from __future__ import annotations

import json
import lzma
import math
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.replay.traces.support import SHARED, jsonl

from kvyard.clock import VirtualClock
from kvyard.errors import KvyardError
from kvyard.lab.validate.compare import validate
from kvyard.lab.validate.reading import MeasuredRun, read_run
from kvyard.lab.validate.show import summary, validation_page
from kvyard.replay.record import Record
from kvyard.replay.run import replay
from kvyard.replay.traces import TraceRequest, open_trace
from kvyard.replay.traces.writing import write_trace
from kvyard.server.gateway.recording import ArrivedRequest, TrafficRecorder

MS = 1_000_000
ENGINE = {"block_size": 16, "num_gpu_blocks": 400, "max_num_seqs": 8, "timing": "fixed:18,6"}
SHARED_IDS = [list(range(8 * at, 8 * at + 8)) for at in range(6)]
"""Of six prompts that come again and again."""


def workload(count: int = 60) -> list[TraceRequest]:
    return [
        TraceRequest(f"r{at}", at * 25 * MS, 128, 1 + at % 9, ids=SHARED_IDS[at % 6], id_block_size=16)
        for at in range(count)
    ]


def records(shared: bool = False) -> list[Record]:
    """Return its records in an engine of ``ENGINE``: the run to be met."""
    plain = [TraceRequest(one.id, one.arrival, one.input_length, one.output_length) for one in workload()]
    return replay(workload() if shared else plain, workers=1, **ENGINE).records


def serving_sim(path: Path, found: list[Record]) -> Path:
    rows = [
        {
            "request_id": one.id,
            "input_toks": one.input,
            "output_toks": one.output,
            "queued_ts": 5000 + one.arrival / 1e9,
            "first_token_ts": 5000 + one.first_token / 1e9,
            "last_token_ts": 5000 + one.ended / 1e9,
        }
        for one in found
    ]
    return jsonl(path / "requests.jsonl", *rows)


def engine_log(path: Path, found: list[Record]) -> Path:
    rows = [
        {
            "i": at,
            "at": one.arrival,
            "first": one.first_token,
            "end": one.ended,
            "inp": one.input,
            "out": one.output,
            "cached": one.cached,
        }
        for at, one in enumerate(found)
    ]
    packed = path / "run.json.xz"
    packed.write_bytes(lzma.compress(json.dumps({"requests": rows, "passes": [], "max_seqs": 8}).encode()))
    return packed


def vllm_bench(path: Path, found: list[Record], **change: Any) -> Path:
    result = {
        "request_throughput": 1.0,
        "request_rate": "inf",
        "max_concurrency": None,
        "input_lens": [one.input for one in found],
        "output_lens": [one.output for one in found],
        "ttfts": [one.ttft / 1e9 for one in found],
        "itls": [[(one.ended - one.first_token) / 1e9 / max(1, one.output - 1)] * (one.output - 1) for one in found],
        "start_times": [77.5 + one.arrival / 1e9 for one in found],
        "errors": [""] * len(found),
    }
    made = path / "result.json"
    made.write_text(json.dumps({name: value for name, value in (result | change).items() if value is not ...}))
    return made


def aiperf(path: Path, found: list[Record]) -> Path:
    rows = [
        {
            "metadata": {"x_request_id": one.id, "request_start_ns": 10**18 + one.arrival},
            "metrics": {
                "input_sequence_length": {"value": one.input, "unit": "tokens"},
                "output_sequence_length": {"value": one.output, "unit": "tokens"},
                "time_to_first_token": {"value": one.ttft / MS, "unit": "ms"},
                "request_latency": {"value": (one.ended - one.arrival) / MS, "unit": "ms"},
            },
            "error": None,
        }
        for one in found
    ]
    return jsonl(path / "profile_export.jsonl", *rows)


def recording(path: Path, found: list[Record]) -> Path:
    rows = [
        {
            "timestamp": one.arrival / MS,
            "input_length": one.input,
            "output_length": one.output,
            "hash_ids": SHARED_IDS[at % 6],
            "block_size": 16,
            "e2e": (one.ended - one.arrival) / MS,
            "ttft": one.ttft / MS,
            "cached": one.cached,
            "session_id": f"s{at % 6}",
            "delay": 1,
        }
        for at, one in enumerate(found)
    ]
    return jsonl(path / "traffic.jsonl", *rows)


@pytest.mark.parametrize("write", [serving_sim, engine_log, vllm_bench, aiperf, recording])
def test_a_replay_s_own_times_are_met(write: Callable[[Path, list[Record]], Path], tmp_path: Path) -> None:
    run = read_run(write(tmp_path, records(shared=write is recording)))
    found = validate(run, ENGINE)
    assert found.requests == 60 and found.complete
    assert {"ttft", "tpot", "e2e"} <= set(found.latency)
    for name in ("ttft", "tpot", "e2e"):
        one = found.latency[name]
        assert max(map(abs, one.error.values())) < 1e-5 and one.scatter is not None and one.scatter.max < 1e-4
    assert all(abs(rate.error) < 1e-6 for rate in found.throughput.values())
    if write is vllm_bench:
        assert abs(found.latency["itl"].error["mean"]) < 1e-4
    else:
        assert "itl" not in found.latency
    if write is recording:
        assert found.hit_share is not None and found.hit_share.replayed == found.hit_share.measured > 0.5


def test_an_error_is_a_share_of_what_was_measured(tmp_path: Path) -> None:
    alone = [TraceRequest(str(at), at * 1000 * MS, 100, 11) for at in range(5)]
    done = replay(alone, workers=1, **ENGINE).records
    found = validate(read_run(serving_sim(tmp_path, done)), ENGINE | {"timing": "fixed:36,3"})
    assert found.latency["ttft"].measured.mean == pytest.approx(18) and found.latency["ttft"].replayed.mean == 36
    assert found.latency["ttft"].error == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99"), 1.0))
    assert found.latency["tpot"].error["p50"] == pytest.approx(-0.5)
    scatter = found.latency["tpot"].scatter
    assert scatter is not None and scatter.mean == pytest.approx(0.5)
    assert found.worst == pytest.approx(1.0)
    assert summary(found).endswith("at most 100.00% off (TTFT mean), single requests 100.0% (TTFT mean)")
    assert found.timing.startswith("fixed, 36 ms for prompts") and found.timing_error is None
    assert [pair.ttft for pair in found.pairs] == [pytest.approx((18, 36))] * 5


def test_settings_of_the_run_hold_unless_overridden(tmp_path: Path) -> None:
    serving_sim(tmp_path, records())
    meta = {
        "engine_kwargs": {"max_num_seqs": 4, "tensor_parallel_size": 2, "max_model_len": None},
        "kv_cache": {"num_gpu_blocks": 401, "block_size": 32},
    }
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    found = validate(read_run(tmp_path), {"timing": "fixed:18,6", "block_size": "16"})
    assert found.settings == {"max_num_seqs": 4, "num_gpu_blocks": 400}
    (engine,) = (kind["engine"] for kind in found.config["workers"])
    assert (engine["max_num_seqs"], engine["num_gpu_blocks"], engine["block_size"]) == (4, 400, 16)
    assert [kind["count"] for kind in found.config["workers"]] == [1]


def test_a_workload_says_what_prompts_share(tmp_path: Path) -> None:
    log = engine_log(tmp_path, records(shared=True))

    def driven_with(requests: list[TraceRequest]) -> MeasuredRun:
        trace = tmp_path / "trace.jsonl"
        trace.unlink(missing_ok=True)
        write_trace(requests, trace)
        return read_run(log, open_trace(trace, trace_block_size=16))

    without = validate(read_run(log), ENGINE)
    assert without.hit_share is not None and without.hit_share.replayed == without.hit_share.measured > 0.5
    assert any("--workload" in note for note in without.notes)
    within = validate(driven_with(workload()), ENGINE)
    assert within.notes == [] and within.hit_share is not None and within.hit_share.error == 0
    with pytest.raises(KvyardError, match=r"has 60 requests, and .* more"):
        driven_with(workload(61))
    with pytest.raises(KvyardError, match=r"has 60 requests, and .* 59"):
        driven_with(workload(59))
    with pytest.raises(KvyardError, match=r"request 0 of .* has 128 prompt tokens, and 100 in"):
        driven_with([TraceRequest(one.id, one.arrival, 100, 5) for one in workload()])


def test_requests_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    errors = ["", "timeout"] + [""] * 58
    run = read_run(vllm_bench(tmp_path, records(), errors=errors))
    assert len(run.requests) == 59 and run.notes == ["1 of 60 requests have no times or no answer, and are left out."]


def test_answers_in_one_piece_count_in_e2e_alone(tmp_path: Path) -> None:
    path = recording(tmp_path, records(shared=True))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::2]:
        del row["ttft"]
    found = validate(read_run(jsonl(path, *rows)), ENGINE)
    assert found.latency["e2e"].measured.count == 60 and found.latency["ttft"].measured.count == 30
    assert found.notes == ["30 answers came in one piece: they count in E2E alone."]
    assert validation_page(found).startswith("<!doctype html>")
    for row in rows:
        row.pop("ttft", None)
    assert set(validate(read_run(jsonl(path, *rows)), ENGINE).latency) == {"e2e"}


def test_a_closed_loop_without_start_times_is_driven_again(tmp_path: Path) -> None:
    plain = [TraceRequest(one.id, 0, one.input_length, one.output_length) for one in workload()]
    done = replay(plain, workers=1, concurrency=4, **ENGINE).records
    took = max(one.ended for one in done) / 1e9
    run = read_run(vllm_bench(tmp_path, done, start_times=..., max_concurrency=4, duration=took))
    assert run.settings == {"concurrency": 4}
    found = validate(run, ENGINE)
    assert found.latency["e2e"].error["mean"] == pytest.approx(0, abs=1e-6)
    assert found.throughput["requests_per_s"].error == pytest.approx(0, abs=1e-6)
    assert validation_page(found).count('class="chart"') == 8


def closed_loop_times(tmp_path: Path) -> Path:
    """A log of four requests in flight and 7 ms between an answer and the next one."""
    plain = [TraceRequest(one.id, 0, one.input_length, one.output_length) for one in workload()]
    return engine_log(tmp_path, replay(plain, workers=1, concurrency=4, turnaround="7ms", **ENGINE).records)


def test_a_client_that_never_had_more_in_flight_is_driven_as_a_closed_loop(tmp_path: Path) -> None:
    run = read_run(closed_loop_times(tmp_path))
    found = validate(run, ENGINE)
    assert found.settings["concurrency"] == 4 and found.settings["turnaround"] == "7000000ns"
    assert any("Never more than 4 requests were in flight" in note for note in found.notes)
    assert abs(found.latency["ttft"].error["mean"]) < 1e-6
    # An engine that is half as fast: at the recorded times, requests would queue for ever longer.
    slower = ENGINE | {"timing": "fixed:36,12"}
    assert 0.5 < validate(run, slower).latency["ttft"].error["mean"] < 1.1
    assert validate(run, slower | {"concurrency": 2}).settings.get("concurrency") is None


def test_arrivals_of_their_own_are_no_closed_loop(tmp_path: Path) -> None:
    assert "concurrency" not in validate(read_run(engine_log(tmp_path, records())), ENGINE).settings


def test_missing_measurements_may_be_nan(tmp_path: Path) -> None:
    path = vllm_bench(tmp_path, records(), mean_tpot_ms=math.nan, ttfts=[math.nan] + [0.1] * 59)
    assert "NaN" in path.read_text() and len(read_run(path).requests) == 59
    path.write_text(json.dumps({"requests": [{"inp": 4, "out": 2, "at": 5, "first": 6, "end": math.nan}]}))
    with pytest.raises(KvyardError, match="can't be read as a log of requests"):
        read_run(path)


def test_requests_that_no_worker_takes_are_named(tmp_path: Path) -> None:
    plain = [TraceRequest("small", 0, 64, 3), TraceRequest("large", 50 * MS, 3000, 3)]
    run = read_run(serving_sim(tmp_path, replay(plain, workers=1, **ENGINE).records))
    found = validate(run, ENGINE | {"num_gpu_blocks": 20})
    assert found.requests == 1
    assert "1 requests got no answer in the replay and are left out, the first, large, because" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests in it: it is empty"),
        ('{"requests": []}', "has no requests in it"),
        ("not json", "is neither JSON nor lines of JSON"),
        ('{"a": 1}', "is no run that kvyard knows; there are LLMServingSim's requests.jsonl; a result of vllm bench"),
        ("[1, 2]", "is no run that kvyard knows"),
        ('{"input_toks": 5, "output_toks": 5}\n{"input_toks": 5, "output_toks": 5}', "none of the 2 requests of"),
        ('{"input_toks": "five", "output_toks": 5}', "can't be read as LLMServingSim's requests.jsonl: Expected `int`"),
        ('{"request_throughput": 3.5, "mean_ttft_ms": 10}', "run vllm bench serve with --save-result --save-detailed"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "is a trace without ttft and e2e in its rows"),
        ('{"requests": [{"inp": 4, "out": 2, "at": 5, "first": 4, "end": 9}]}', "request 0 of .* times that go back"),
        ('{"requests": [{"inp": 0, "out": 2, "at": 1, "first": 4, "end": 9}]}', "has a prompt of 0 tokens"),
        (
            '{"requests": [{"i": 1, "inp": 1, "out": 1, "at": 1, "first": 4, "end": 4}, '
            '{"i": 1, "inp": 1, "out": 1, "at": 1, "first": 4, "end": 4}]}',
            "two requests of the name 1",
        ),
    ],
)
def test_files_that_are_no_run_are_refused_in_a_sentence(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(KvyardError, match=says):
        read_run(path)


def test_more_refusals(tmp_path: Path) -> None:
    with pytest.raises(KvyardError, match=r"has none of requests\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(KvyardError, match="no such file"):
        read_run(tmp_path / "no.json")
    with pytest.raises(KvyardError, match="has 60 input_lens and 2 ttfts: there must be as many"):
        read_run(vllm_bench(tmp_path, records(), ttfts=[0.1, 0.2]))
    with pytest.raises(KvyardError, match="has no start_times"):
        read_run(vllm_bench(tmp_path, records(), start_times=...))
    with pytest.raises(KvyardError, match="speedup changes when requests come"):
        validate(read_run(serving_sim(tmp_path, records())), ENGINE | {"speedup": "2"})
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(KvyardError, match=r"meta.json can't be read"):
        read_run(tmp_path)


def test_the_page_needs_no_network_and_escapes_names(tmp_path: Path) -> None:
    run = read_run(vllm_bench(tmp_path, records()))
    run.name = "</script><script>alert(1)</script>"
    text = validation_page(validate(run, ENGINE))
    assert "<script>alert" not in text and "https://" not in text and text.count('class="chart"') == 8


# -- folders of LLMServingSim's, however an engine was split --------------------------------------------------------------

CONFIGS = {
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 512},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "local experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
SPLITS: list[dict[str, object]] = [
    {},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    {"data_parallel_size": 2},
    {"data_parallel_size": 2, "enable_expert_parallel": True},
    {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    {"pipeline_parallel_size": 2, "kv_cache_dtype": "fp8", "dtype": "bfloat16", "seed": 42, "max_model_len": None},
]


def profile_folder(folder: Path, experts: bool) -> Path:
    """Tables as the profiler writes them: expert tables for one card alone, no skew."""
    dense = "".join(
        f"{name},{at},{us * (1 + at / 100):.3f}\n"
        for name, us in (("embedding", 2), ("layernorm", 2), ("qkv_proj", 9), ("o_proj", 7), ("final_layernorm", 2))
        for at in (1, 64, 2048)
    )
    attention = "".join(
        f"{new},0,{batch},{context},{3 + new / 50 + batch * context / 2000:.3f}\n"
        for new in (0, 16, 2048)
        for batch, context in ((0, 0), (1, 16), (1, 4096), (64, 16), (64, 4096))
        if new or batch
    )
    for size in (1, 2):
        one = folder / f"tp{size}"
        one.mkdir(parents=True)
        (one / "dense.csv").write_text("layer,tokens,time_us\n" + dense)
        (one / "per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,50\nsampler,1,9\n")
        (one / "attention.csv").write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n" + attention)
    if experts:
        rows = "".join(f"{at},{called},{10 * called + at}\n" for at in (1, 64, 2048) for called in (2, 4, 8))
        (folder / "tp1" / "moe.csv").write_text("tokens,activated_experts,time_us\n" + rows)
    return folder


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "+".join(split) or "plain")
@pytest.mark.parametrize("kind", CONFIGS)
def test_runs_of_every_split_are_replayed_as_they_say(kind: str, split: dict[str, object], tmp_path: Path) -> None:
    """Names that no preset has, and a ``meta.json`` that says how the engine was split."""
    config = tmp_path / "some-org" / "Odd_Name-7B.v2.json"
    config.parent.mkdir()
    config.write_text(json.dumps(SHAPE | CONFIGS[kind]))
    tables = profile_folder(tmp_path / "bf16", kind != "dense")
    run = tmp_path / "bench"
    (run / "vllm").mkdir(parents=True)
    serving_sim(run / "vllm", records())
    ranks = split.get("data_parallel_size", 1)
    meta = {
        "vllm_version": "0.19.0",
        "model": "some-org/Odd_Name-7B.v2",
        "engine_kwargs": {"max_num_seqs": 8, "max_num_batched_tokens": 2048} | split,
        "kv_cache": {"num_gpu_blocks": 401 * ranks, "block_size": 16},
        "resolved_config": {"scheduler_config": {"async_scheduling": True, "policy": "fcfs"}},
    }
    (run / "vllm" / "meta.json").write_text(json.dumps(meta))
    found = validate(read_run(run), {"gpu": "rtxpro6000", "model": str(config), "timing": f"tables:{tables}"})
    assert found.requests == 60
    assert found.settings["num_gpu_blocks"] == 400 and found.settings["async_scheduling"] is True
    (engine,) = found.config["workers"]
    assert engine.get("dp_size", 1) * engine["count"] == ranks
    assert (engine.get("dp_size", 1) == ranks) == (kind != "dense" or ranks == 1), (
        "ranks are in step if they share experts"
    )
    deployment = engine["engine"]["timing"]["deployment"]
    for name, value in split.items():
        if (
            name in deployment
            and name != "data_parallel_size"
            and (name != "enable_expert_parallel" or kind != "dense")
        ):
            assert deployment[name] == value


def test_a_split_that_was_not_measured_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    serving_sim(tmp_path / "vllm", records())
    (tmp_path / "vllm" / "meta.json").write_text(json.dumps({"engine_kwargs": {"tensor_parallel_size": 4}}))
    tables = profile_folder(tmp_path / "bf16", False)
    with pytest.raises(KvyardError, match="bf16 has tp1, tp2, and tensor_parallel_size is 4"):
        validate(read_run(tmp_path), {"gpu": "h100", "model": "llama-3.1-8b", "timing": f"tables:{tables}"})


# -- real runs ----------------------------------------------------------------------------------------------------------

ARCHIVE = SHARED / "llmservingsim" / "validation.tar.xz"
SHAREGPT = SHARED / "sharegpt" / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
TRUTH = SHARED.parent / "truth" / "engine"
REAL = {
    "RTX4090/Llama-3.1-8B": {"gpu": "rtx4090", "model": "llama-3.1-8b"},
    "RTXPRO6000/Qwen3-32B": {"gpu": "rtxpro6000", "model": "qwen3-32b"},
}
TABLES = {
    "RTX4090/Llama-3.1-8B": "RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1",
    "RTXPRO6000/Qwen3-32B": "RTXPRO6000/Qwen/Qwen3-32B/bf16/tp2",
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llmservingsim")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def real_run(unpacked: Path, name: str) -> MeasuredRun:
    qwen = unpacked / "workloads" / "sharegpt-qwen3-32b-300-sps10.jsonl"
    return read_run(unpacked / "bench" / "examples" / name, open_trace(qwen if "Qwen" in name else SHAREGPT))


@pytest.mark.skipif(not ARCHIVE.exists(), reason="real vLLM runs are in ../shared, which isn't here")
@pytest.mark.parametrize("name", REAL)
def test_real_vllm_runs_are_met_within_5_percent(name: str, unpacked: Path) -> None:
    timing = f"tables:{unpacked / 'profiler' / 'perf' / TABLES[name]}"
    found = validate(real_run(unpacked, name), REAL[name] | {"timing": timing})
    assert found.requests == 300 and set(found.latency) == {"ttft", "tpot", "e2e"}
    errors = {f"{key} {at}": error for key, one in found.latency.items() for at, error in one.error.items()}
    assert len(errors) == 12 and max(map(abs, errors.values())) < 0.05, errors
    assert all(abs(rate.error) < 0.05 for rate in found.throughput.values())
    assert math.isclose(found.worst, max(map(abs, errors.values())))


@pytest.mark.skipif(not TRUTH.exists(), reason="runs on an H200 are in ../shared, which isn't here")
def test_an_engine_s_own_log_is_met_in_hits_too() -> None:
    settings = {"timing": "profile:h200-llama3-8b-graphs", "block_size": 16}
    found = validate(read_run(TRUTH / "runA.json.xz", open_trace(SHAREGPT)), settings)
    assert found.hit_share is not None and found.hit_share.measured == found.hit_share.replayed > 0.07
    assert abs(found.latency["tpot"].error["mean"]) < 0.05 and abs(found.latency["e2e"].error["mean"]) < 0.05


def test_an_engine_s_own_recording_has_no_client_in_its_times(tmp_path: Path) -> None:
    """Both are written by one recorder, and only the rows say who took the times."""
    for engine_times in (False, True):
        path, clock = tmp_path / f"{engine_times}.jsonl", VirtualClock()
        recorder = TrafficRecorder(path, clock=clock, engine_times=engine_times)
        recorder.arrived(ArrivedRequest(id="a", keys=[7], num_tokens=16, key_tokens=16))
        clock.sleep_until(5 * MS)
        recorder.ended("a", 3, first_token=2 * MS, cached=0)
        recorder.close()
        run = read_run(path)
        assert run.client is not engine_times
        assert ("engine" in run.format) is engine_times
        assert [one.first_token for one in run.requests] == [2 * MS]
        assert [row.input_length for row in open_trace(path)] == [16]


def test_clients_wait_for_more_than_the_engine(tmp_path: Path) -> None:
    """A profile knows what HTTP takes: it is added where clients took the times, and nowhere else."""
    import msgspec

    from kvyard.engine.timing.profile import load_profile

    path = tmp_path / "mine.json"
    plain = load_profile(name="h200-llama3-8b")
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(plain, request_ms=7.0)))
    engine = ENGINE | {"timing": f"profile:{path}"}
    found = replay([TraceRequest(f"r{at}", at * 25 * MS, 128, 5) for at in range(60)], workers=1, **engine).records
    seen, logged = (
        validate(read_run(vllm_bench(tmp_path, found)), engine),
        validate(read_run(engine_log(tmp_path, found)), engine),
    )
    for name in ("ttft", "e2e"):
        assert seen.latency[name].replayed.mean - seen.latency[name].measured.mean == pytest.approx(7.0, abs=0.01)
        assert logged.latency[name].replayed.mean == pytest.approx(logged.latency[name].measured.mean)
    assert seen.latency["tpot"].error["mean"] == pytest.approx(0, abs=1e-6)
    assert any("7.0 ms a request are added" in note for note in seen.notes)
