"""Pass tables: exact where measured, linear in between, the same in plans; their sources; and real runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvyard.engine.timing import tables
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.host import Host
from kvyard.engine.timing.pass_table import Curve, PassTable, Plane
from kvyard.engine.timing.roofline import padded
from kvyard.engine.timing.servingsim import Mixture, read_servingsim
from kvyard.engine.timing.table_cache import cached_table
from kvyard.engine.timing.table_model import TableModel
from kvyard.errors import KvyardError

TABLE = PassTable(
    source="made up",
    tokens=Curve((1, 8, 512, 4096), (1000.0, 1100.0, 3000.0, 20000.0)),
    sequences=Curve((1, 256), (50.0, 90.0)),
    prompt=Plane((1, 512, 4096), (0, 8192), ((1.0, 20.0), (300.0, 2000.0), (9000.0, 30000.0))),
    decode=Plane((1, 64), (1, 1000, 10000), ((10.0, 30.0, 200.0), (50.0, 900.0, 9000.0))),
    skew=Curve((1,), (0.1,)),
)
MODEL = TableModel(TABLE, host=Host(step_us=100.0))


def test_a_curve_is_exact_at_its_points_and_linear_between_and_beyond() -> None:
    curve = Curve((10, 20), (1.0, 3.0))
    assert [curve.value(x) for x in (5, 10, 15, 20, 30)] == [1.0, 1.0, 2.0, 3.0, 5.0]


def test_a_pass_is_the_sum_of_its_parts() -> None:
    assert MODEL.pass_ns((), 1, 1000, 1000) == round((1000 + 50 + 30 + 100) * 1e3)
    assert MODEL.pass_ns([(512, 0)], 0, 0, 0) == round((3000 + 50 + 300 + 100) * 1e3)


def test_the_longest_context_counts_for_its_share() -> None:
    even, skewed = MODEL.pass_ns((), 64, 64_000, 1000), MODEL.pass_ns((), 64, 64_000, 10_000)
    assert skewed - even == round(0.1 * (9000 - 900) * 1e3)


def test_decode_steps_in_mixed_passes_cost_the_documented_time() -> None:
    slow = TableModel(TABLE, host=Host(step_us=100.0), mixed_decode=2.0)
    assert slow.pass_ns([(512, 0)], 64, 64_000, 1000) - MODEL.pass_ns([(512, 0)], 64, 64_000, 1000) == 900_000


EVEN = msgspec.structs.replace(TABLE, skew=Curve((1,), (0.0,)))
OVERLAP = Host(step_us=1400.0, sequence_us=20.0, exposed_us=200.0, exposed_sequence_us=12.0, overlap=True)
MODELS = (MODEL, TableModel(EVEN, speedup=0.7, decode_speedup=1.3), TableModel(TABLE, host=OVERLAP))


@given(st.sampled_from(MODELS), st.integers(1, 200), st.integers(1, 200_000), st.integers(0, 40), st.integers(0, 5000))
def test_a_planned_pass_takes_what_a_single_one_takes(
    model: TableModel, batch: int, context: int, passes: int, longest: int
) -> None:
    planned = model.decode_ns(batch, context, passes, longest).tolist()
    assert planned == [model.pass_ns((), batch, context + at * batch, longest + at) for at in range(passes)]


@given(st.integers(1, 200), st.integers(1, 200_000), st.integers(0, 20_000))
def test_a_step_is_the_sum_of_what_the_table_says(batch: int, context: int, longest: int) -> None:
    row, mean = TABLE.decode.row(batch), context / batch
    attention = row.value(mean)
    if longest > mean:
        attention += 0.1 * max(0.0, row.value(longest) - attention)
    base = TABLE.tokens.value(padded(batch)) + TABLE.sequences.value(batch)
    card = base + attention + OVERLAP.exposed_us + OVERLAP.exposed_sequence_us * batch
    us = max(card, OVERLAP.step_us + OVERLAP.sequence_us * batch)
    assert abs(MODELS[2].pass_ns((), batch, context, longest) - us * 1e3) <= 0.51


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": Curve((2, 1), (1.0, 2.0))}, "the axis of tokens must rise"),
        ({"tokens": Curve((), ())}, "the axis of tokens must rise"),
        ({"sequences": Curve((1, 2), (1.0,))}, "sequences has 1 values for an axis of 2"),
        ({"decode": Plane((1,), (1,), ((float("nan"),),))}, "decode has a value that is no time"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(change: dict, says: str) -> None:
    with pytest.raises(KvyardError, match=says):
        msgspec.structs.replace(TABLE, **change).check()


class TestCache:
    def test_a_table_is_made_once_and_found_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVYARD_CACHE", str(tmp_path))
        made = []

        def make() -> PassTable:
            made.append(1)
            return TABLE

        assert cached_table(["a"], make) == cached_table(["a"], make) == TABLE
        assert len(made) == 1
        cached_table(["b"], make)
        assert len(made) == 2

    def test_a_file_that_is_damaged_is_made_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVYARD_CACHE", str(tmp_path))
        cached_table(["a"], lambda: TABLE)
        (file,) = (tmp_path / "timing").iterdir()
        file.write_bytes(b"\x00nonsense")
        assert cached_table(["a"], lambda: TABLE) == TABLE
        assert file.read_bytes() != b"\x00nonsense"

    def test_a_folder_that_can_not_be_written_is_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("KVYARD_CACHE", str(tmp_path / "file"))
        assert cached_table(["a"], lambda: TABLE) == TABLE


class TestServingsim:
    def write(self, folder: Path, **files: str) -> Path:
        plain = {
            "dense": "layer,tokens,time_us\nqkv,1,10\nqkv,100,20\nlayernorm,1,2\nembedding,1,5\n",
            "per_sequence": "layer,sequences,time_us\nlm_head,1,50\nsampler,1,7\n",
            "attention": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,0,0,3\n"
            "0,0,1,16,4\n0,0,1,32,6\n16,0,1,16,9\n",
        }
        for name, text in (plain | files).items():
            if text:
                (folder / f"{name}.csv").write_text(text)
        return folder

    def test_layers_are_summed(self, tmp_path: Path) -> None:
        table = read_servingsim(self.write(tmp_path), 10)
        assert table.tokens.value(1) == 10 * (10 + 2 * 2) + 5
        assert table.sequences.value(1) == 57
        assert table.decode.value(1, 24) == 50 and table.prompt.value(16, 0) == 30
        assert table.together == ((16, 0, Plane((1,), (16,), ((90.0,),))),)

    def test_collectives_are_added_to_each_layer(self, tmp_path: Path) -> None:
        table = read_servingsim(self.write(tmp_path), 10, collective_us=lambda tokens: 3.0)
        assert table.tokens.value(1) == 10 * (10 + 2 * 2 + 3) + 5

    @pytest.mark.parametrize(
        ("files", "says"),
        [
            ({"attention": ""}, "no attention.csv; LLMServingSim's profile has dense.csv"),
            ({"dense": "layer,tokens,time_us\nqkv,one,3\n"}, "dense.csv, line 2: needs numbers in tokens, time_us"),
            (
                {"attention": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,0,0,3\n"},
                "has no decode steps by themselves",
            ),
        ],
    )
    def test_a_folder_that_lacks_something_is_refused(self, files: dict[str, str], says: str, tmp_path: Path) -> None:
        with pytest.raises(KvyardError, match=says):
            read_servingsim(self.write(tmp_path, **files), 10)

    def test_experts_need_their_table(self, tmp_path: Path) -> None:
        with pytest.raises(KvyardError, match=r"no moe.csv, and the model has 128 experts"):
            read_servingsim(self.write(tmp_path), 10, mixture=Mixture(layers=10, experts=128, chosen=8))

    MOE = "tokens,activated_experts,time_us\n1,4,100\n1,8,200\n1000,4,100\n1000,8,200\n"

    def test_experts_take_the_weights_of_those_called_on_this_rank(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path, moe=self.MOE)
        plain = read_servingsim(folder, 10).tokens.value(100)
        whole = read_servingsim(folder, 10, mixture=Mixture(layers=10, experts=8, chosen=2))
        assert whole.tokens.value(100) - plain == pytest.approx(10 * 200) and whole.experts is None
        spread = read_servingsim(folder, 10, mixture=Mixture(layers=10, experts=8, chosen=2, holders=2))
        assert spread.tokens.value(100) - plain == pytest.approx(10 * 100)
        cut = read_servingsim(folder, 10, mixture=Mixture(layers=10, experts=8, chosen=2, slices=4))
        assert cut.tokens.value(100) - plain == pytest.approx(10 * 50)

    def test_data_ranks_that_share_experts_exchange_their_tokens(self, tmp_path: Path) -> None:
        mixture = Mixture(layers=10, experts=8, chosen=2, sources=2, holders=2)
        folder = self.write(tmp_path, moe=self.MOE)
        table = read_servingsim(folder, 10, mixture=mixture, exchange_us=lambda tokens: 1.0 * tokens)
        plain = read_servingsim(folder, 10).tokens.value(100)
        assert table.experts is not None
        assert table.tokens.value(100) - plain == pytest.approx(table.experts.value(200)) == pytest.approx(10 * 300)

    def test_layers_without_experts_have_their_own_mlp(self, tmp_path: Path) -> None:
        dense = "layer,tokens,time_us\nqkv_proj,1,10\ngate_up_proj,1,7\n"
        folder = self.write(tmp_path, dense=dense, moe=self.MOE)
        table = read_servingsim(folder, 10, mixture=Mixture(layers=8, experts=8, chosen=8))
        assert table.tokens.value(1) == 10 * 10 + 2 * 7 + 8 * 200

    @pytest.mark.parametrize(
        ("files", "says"),
        [
            ({"dense": "layer,tokens,time_us\n"}, "dense.csv has no rows"),
            ({"dense": "name,tokens,time_us\nqkv,1,3\n"}, "no column layer; it has name, tokens, time_us"),
            ({"per_sequence": "layer,sequences,time_us\nhead,1,3\n"}, "has none of lm_head, sampler; it has head"),
            ({"moe": "tokens,activated_experts,time_us\n"}, "moe.csv has no rows"),
        ],
    )
    def test_rows_that_are_needed_are_named(self, files: dict[str, str], says: str, tmp_path: Path) -> None:
        with pytest.raises(KvyardError, match=says):
            read_servingsim(
                self.write(tmp_path, **{"moe": self.MOE, **files}), 10, mixture=Mixture(layers=10, experts=8, chosen=2)
            )


def test_uneven_ranks_take_what_the_experts_take_for_all_of_them() -> None:
    shared = msgspec.structs.replace(TABLE, experts=Curve((1, 10_000), (1.0, 10_000.0)))
    model = TableModel(shared)
    assert MODEL.uneven_ns(64, [64, 2048]) == 0, "nothing is shared"
    assert model.uneven_ns(2048, [2048, 2048]) == 0
    assert model.uneven_ns(2048, [2048, 64]) == (2048 + 64 - 2 * 2048) * 1000
    assert model.uneven_ns(61, [61, 0]) == 0, "as CUDA graphs both have the larger one's size"
    assert model.uneven_ns(8, [64, 8]) == (2 * 64 - 2 * 8) * 1000


def test_the_host_takes_its_time_for_a_pass_and_for_each_sequence() -> None:
    model = TableModel(TABLE, host=Host(step_us=100.0, sequence_us=10.0))
    assert model.pass_ns((), 64, 64_000, 1000) - MODEL.pass_ns((), 64, 64_000, 1000) == 64 * 10_000
    planned = model.decode_ns(64, 64_000, 3, 1000).tolist()
    assert planned == [model.pass_ns((), 64, 64_000 + 64 * at, 1000 + at) for at in range(3)]


def test_a_report_names_the_tables_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of aiconfigurator-core, which isn't installed here: what asks it is replaced."""
    monkeypatch.setenv("KVYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "aic_version", lambda: "0.12")
    monkeypatch.setattr(tables, "find_model", lambda *_: "meta-llama/Llama")
    monkeypatch.setattr(tables, "compile_aic", lambda *_, **__: TABLE)
    assert tables.TablesTiming(deployment=Deployment(model="llama-3.1-8b", gpu="h100")).run_class("vllm") is not None
    staged = tables.TablesTiming(deployment=Deployment(model="llama-3.1-8b", gpu="h100", pipeline_parallel_size=2))
    assert staged.run_class("vllm") is None
    assert staged.describe().endswith("PP2), pipeline stages one after the other")


@given(st.floats(0, 6000), st.floats(0, 12000))
def test_a_point_of_a_plane_is_the_one_of_its_row(x: float, y: float) -> None:
    assert TABLE.prompt.value(x, y) == TABLE.prompt.row(x).value(y)
    assert TABLE.decode.value(x, y) == TABLE.decode.row(x).value(y)
