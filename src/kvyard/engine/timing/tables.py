"""The kind ``tables``: passes from measured operators, of ``aiconfigurator-core`` or of a profile that LLMServingSim made."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from kvyard.engine.models.fields import Fields
from kvyard.engine.models.layers import mixers
from kvyard.engine.models.weights import mlp_shape
from kvyard.engine.timing.aic import aic_version, compile_aic, find_model, known_models
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.error_range import RunClass, class_of
from kvyard.engine.timing.host import HostTiming
from kvyard.engine.timing.operators import ACTIVATION
from kvyard.engine.timing.pass_table import PassTable
from kvyard.engine.timing.servingsim import Mixture, read_servingsim
from kvyard.engine.timing.table_cache import cached_table, folder_digest
from kvyard.engine.timing.table_model import TableModel
from kvyard.errors import KvyardError


class TablesTiming(HostTiming, frozen=True, kw_only=True, tag="tables"):
    """Passes put together from measured operators."""

    deployment: Deployment
    folder: str | None = None
    """Folder of LLMServingSim's CSV files, of one ``tp`` size; ``None`` for the tables of aiconfigurator-core."""

    def table(self) -> PassTable:
        """Return the table, from disk where it was compiled before. Raises ``KvyardError`` where its source has none."""
        of = self.deployment
        shape = msgspec.json.encode([of.config(), of.split, of.weight_dtype, of.kv_cache_dtype]).decode()
        if self.folder is not None:
            folder = self._folder(self.folder)
            return cached_table(["servingsim", folder_digest(folder), of.gpu, shape], lambda: self._read(folder))
        name = find_model(of.config(), of.weight_dtype)
        if name is None:
            raise KvyardError(
                f"aiconfigurator-core has no model like {of.model} among its {len(known_models())}, such as "
                f"{', '.join(list(known_models())[:3])}; --timing roofline needs no tables"
            )
        parts = ["aic", str(aic_version()), self.engine, name, of.card.name, shape]
        return cached_table(
            parts,
            lambda: compile_aic(
                name,
                of.config(),
                of.card,
                of.operators(),
                of.split,
                backend=self.engine,
                weight_dtype=of.weight_dtype,
                kv_cache_dtype=of.kv_cache_dtype,
            ),
        )

    def model(self, capacity_tokens: int) -> TableModel:
        return TableModel(
            self.table(),
            host=self.host(self.deployment.operators()),
            mixed_decode=self.deployment.card.shares.mixed_decode,
            speedup=self.speedup_ratio,
            decode_speedup=self.decode_speedup_ratio,
        )

    def describe(self) -> str:
        return f"{self.table().source} ({self.deployment}){self.deployment.caveat}"

    def run_class(self, backend: str) -> RunClass | None:
        own = self.folder is not None or self.speedup_ratio * self.decode_speedup_ratio != 1
        return None if own or self.deployment.caveat else class_of(self.deployment, backend)

    @classmethod
    def usage(cls) -> str:
        return "tables or tables:FOLDER (with model and gpu)"

    @classmethod
    def parse(cls, text: str, speedup_ratio: float, deployment: Deployment | None = None) -> Self:
        if deployment is None:
            raise KvyardError("timing tables are of a card and a model: say gpu and model, as in h100, llama-3.1-8b")
        return cls(deployment=deployment, folder=text or None, speedup_ratio=speedup_ratio)

    def _read(self, folder: Path) -> PassTable:
        of = self.deployment
        fields, card, ranks, sources = Fields(of.config()), of.card, of.tensor_parallel_size, of.data_parallel_size
        kinds = mixers(fields)
        shapes = [mlp_shape(fields, index, kind) for index, kind in enumerate(kinds)]
        routed = [shape for shape in shapes if shape is not None and shape.experts]
        width = fields.integer("hidden_size") * ACTIVATION
        link = card.peer_bandwidth / 1e6

        def collective_us(tokens: int) -> float:
            """Return the microseconds of two all-reduces over tensor ranks."""
            return 2 * (card.peer_latency_us + tokens * width * 2 * (ranks - 1) / ranks / link) if ranks > 1 else 0.0

        def exchange_us(tokens: int) -> float:
            """Return the microseconds to gather tokens of all data ranks and scatter their results, as vLLM does by default."""
            return 2 * (card.peer_latency_us + tokens * width * (sources - 1) / sources / link) if sources > 1 else 0.0

        mixture = None
        if routed:
            shared = ranks * sources
            mixture = Mixture(
                layers=len(routed),
                experts=routed[0].experts,
                chosen=routed[0].chosen,
                sources=sources,
                holders=shared if of.enable_expert_parallel else 1,
                slices=1 if of.enable_expert_parallel else shared,
            )
        return read_servingsim(
            folder, len(kinds), mixture=mixture, collective_us=collective_us, exchange_us=exchange_us
        )

    def _folder(self, asked: str) -> Path:
        """Return the folder of the ``tp`` size, if the folder above it was named."""
        folder = Path(asked)
        inner = folder / f"tp{self.deployment.tensor_parallel_size}"
        if (folder / "dense.csv").is_file() or not folder.is_dir():
            return folder
        if inner.is_dir():
            return inner
        sizes = sorted(entry.name for entry in folder.glob("tp*") if entry.is_dir())
        if sizes:
            raise KvyardError(
                f"{folder} has {', '.join(sizes)}, and tensor_parallel_size is {self.deployment.tensor_parallel_size}"
            )
        return folder
