"""Tables of aiconfigurator-core. What doesn't need the package runs always; the rest where it is installed, and in the slow
suite, which installs it into a folder of its own: with scipy and pandas 340 MB, too much for every set-up.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvyard.engine.cards import find_card
from kvyard.engine.timing import aic
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.tables import TablesTiming
from kvyard.errors import KvyardError
from kvyard.replay.settings import make_config

VERSION = "0.12.0"
HERE = Path(__file__).resolve()
installed = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core isn't installed; -m slow does"
)
LLAMA = Deployment(model="llama-3.1-8b", gpu="h100")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVYARD_CACHE", str(tmp_path_factory.getbasetemp() / "aic"))


def test_quantisation_in_a_word() -> None:
    stored = aic._stored
    assert stored({}) == ""
    assert stored({"quantization_config": {"quant_method": "fp8"}}) == "fp8"
    assert stored({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}) == "fp8_block"
    assert stored({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}) == "modelopt_nvfp4"
    assert stored({"hf_quant_config": {"quantization": {"quant_algo": "FP8"}}}) == "modelopt_fp8"


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is not None, reason="it is installed")
def test_without_the_package_one_sentence_says_what_to_install() -> None:
    with pytest.raises(KvyardError, match=r"pip install 'kvyard\[aic\]'"):
        TablesTiming(deployment=LLAMA).table()


@installed
class TestInstalled:
    def test_the_version_is_the_one_whose_figures_are_in_the_docs(self) -> None:
        assert aic.aic_version() == VERSION

    def test_models_are_found_by_shape_and_quantisation(self) -> None:
        known = aic.known_models()
        plain = known["Qwen/Qwen3-32B"]
        assert aic.find_model(plain) == "Qwen/Qwen3-32B"
        assert aic.find_model(known["Qwen/Qwen3-32B-FP8"]) == "Qwen/Qwen3-32B-FP8"
        assert aic.find_model(known["Qwen/Qwen3-32B-FP8"], "bf16") == "Qwen/Qwen3-32B"
        assert aic.find_model(LLAMA.config()) == "meta-llama/Meta-Llama-3.1-8B"
        assert aic.find_model({**plain, "num_hidden_layers": 63}) is None

    def test_a_table_is_compiled_with_versions_and_coverage_and_kept(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("KVYARD_CACHE", str(tmp_path))
        timing = TablesTiming(deployment=LLAMA)
        table = timing.table()
        assert "aiconfigurator-core 0.12.0, vllm 0.24.0, h100_sxm" in table.source
        assert "measured: " in table.coverage and "qkv_gemm" in table.coverage.split("; estimated")[0]
        monkeypatch.setattr(aic, "_Handle", None)  # nothing is asked of the package again
        assert timing.table() == table
        model = timing.model(1)
        # 8 billion weights in 16 bits are read from 3.35 TB/s in 4.8 ms, and nothing is quicker than that.
        assert 4.8 < model.pass_ns((), 1, 512, 512) / 1e6 < 8
        assert 2 * 8e9 * 4096 / 989e12 < model.pass_ns([(4096, 0)], 0, 0, 0) / 1e9 < 0.2

    def test_types_and_ranks_change_the_table(self) -> None:
        def step(**options: object) -> int:
            deployment = Deployment(model="llama-3.1-8b", gpu="h100", **options)
            return TablesTiming(deployment=deployment).model(1).pass_ns((), 16, 16 * 1024, 1024)

        assert step(weight_dtype="fp8") < step() and step(tensor_parallel_size=4) < step()
        assert step(weight_dtype="bf16") == step()

    @pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
    def test_every_engine_has_its_own(self, engine: str) -> None:
        assert f", {engine} " in TablesTiming(deployment=LLAMA, engine=engine).table().source

    def test_times_that_no_card_reaches_are_raised_to_its_peak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A doctored table: prompts of 2,048 and more after 8,192 and more are answered a hundred times too fast."""
        honest = aic._Handle.prompt

        def doctored(self: aic._Handle, new: int, past: int) -> float:
            return honest(self, new, past) / (100 if new >= 2048 and past >= 8192 else 1)

        card, of = find_card("h100"), LLAMA.operators()
        plain = aic.compile_aic("meta-llama/Meta-Llama-3.1-8B", LLAMA.config(), card, of, LLAMA.split)
        monkeypatch.setattr(aic._Handle, "prompt", doctored)
        table = aic.compile_aic("meta-llama/Meta-Llama-3.1-8B", LLAMA.config(), card, of, LLAMA.split)
        touched = sum(new >= 2048 for new in aic.NEW) * sum(past >= 8192 for past in aic.PAST)
        assert f"{touched} impossible values raised to the card's peak" in table.coverage
        assert "impossible" not in plain.coverage
        new, past = 4096, 16384
        least = 32 * 4 * 32 * 128 * (new * past + new * new / 2) / 989e12 * 1e6
        assert table.prompt.value(new, past) == pytest.approx(least) and table.prompt.value(
            512, 0
        ) == plain.prompt.value(512, 0)

    def test_experts_shared_by_data_ranks_are_a_curve_of_their_own(self) -> None:
        deployment = Deployment(model="qwen3-30b-a3b", gpu="h200", data_parallel_size=2, enable_expert_parallel=True)
        timing = TablesTiming(deployment=deployment)
        table = timing.table()
        assert table.experts is not None and table.experts.at[0] == 2
        assert timing.model(1).uneven_ns(2048, [2048, 16]) < 0 == timing.model(1).uneven_ns(2048, [2048, 2048])

    @pytest.mark.parametrize(
        ("deployment", "engine", "says"),
        [
            (
                Deployment(model="llama-3.1-8b", gpu="mi300x"),
                "vllm",
                r"no tables of vllm for AMD Instinct MI300X.*it has a100, h100",
            ),
            (Deployment(model="llama-3.1-8b", gpu="l4"), "vllm", "no tables of vllm for NVIDIA L4"),
            (Deployment(model="gemma-3-27b", gpu="h100"), "vllm", "has no model like gemma-3-27b among its 89"),
            (
                Deployment(model="llama-3.1-8b", gpu="h100", weight_dtype="fp4"),
                "vllm",
                r"nvfp4: .*; for that card it has sglang 0.5.14 0.5.6.post2, trtllm 1.3.0rc20, vllm 0.24.0",
            ),
        ],
    )
    def test_missing_tables_are_refused_with_the_available_ones(
        self, deployment: Deployment, engine: str, says: str
    ) -> None:
        with pytest.raises(KvyardError, match=says):
            TablesTiming(deployment=deployment, engine=engine).table()

    def test_installing_the_package_changes_no_default(self) -> None:
        (worker,) = make_config({"workers": 1, "model": "llama-3.1-8b", "gpu": "h100"}).workers
        assert worker.engine.timing.describe().startswith("roofline")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_the_package_installed(tmp_path: Path) -> None:
    """Installs it into a folder, once (``build/aic``), and runs the tests above with it."""
    root = HERE.parents[3]
    folder = root / "build" / f"aic-{VERSION}"
    if not (folder / "aiconfigurator_core").is_dir():
        made = tmp_path / "aic"
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--target",
            str(made),
            f"aiconfigurator-core=={VERSION}",
        ]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        folder.parent.mkdir(exist_ok=True)
        made.rename(folder)
    paths = os.pathsep.join([str(root / "src"), str(root), str(folder)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE), "-m", "not slow"],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "skipped" in done.stdout, done.stdout[-3000:]


def test_a_report_names_weight_types_that_differ_from_the_package_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, fp8 = {}, {"quantization_config": {"quant_method": "fp8"}}
    monkeypatch.setattr(aic, "known_models", lambda: {"org/m": plain})
    assert aic._modes("org/m", plain, None, "auto") == {}
    linear, routed = aic.STORED["fp8"]
    assert aic._modes("org/m", fp8, None, "auto") == {"gemm_quant_mode": linear, "moe_quant_mode": routed}
    with pytest.raises(KvyardError, match="no org/m quantised as odd: say weight_dtype"):
        aic._modes("org/m", {"quantization_config": {"quant_method": "odd"}}, None, "auto")
