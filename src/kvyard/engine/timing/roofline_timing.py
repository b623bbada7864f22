"""The kind ``roofline``: what people write to have passes computed from a card and a model, and two measured numbers if any."""

from __future__ import annotations

import re
from typing import Self

import msgspec

from kvyard.engine.cards import Shares
from kvyard.engine.models.fields import Fields
from kvyard.engine.models.layers import mixers
from kvyard.engine.timing.deployment import Deployment
from kvyard.engine.timing.error_range import RunClass, class_of
from kvyard.engine.timing.host import NO_HOST, HostTiming
from kvyard.engine.timing.roofline import RooflineModel
from kvyard.errors import KvyardError

UNCHECKED = {"mla": "latent attention", "mamba": "states", "mamba1": "states", "both": "states", "delta": "states"}
"""By kind of layer: what no measured run had."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two times measured on the engine: of one prompt alone, and of a decode step of a batch."""

    ttft_ms: float | None = None
    prompt_tokens: int = 0
    itl_ms: float | None = None
    batch: int = 0
    context: int = 1024
    """Tokens that each request of the batch had."""


class RooflineTiming(HostTiming, frozen=True, kw_only=True, tag="roofline"):
    """Passes from a card's data sheet and a model's config."""

    deployment: Deployment
    calibration: Calibration | None = None
    shares: Shares | None = None
    """Shares of the peak that stand in for the card's own."""

    def check(self) -> None:
        super().check()
        if self.shares is not None:
            self.shares.check("timing: shares")

    def model(self, capacity_tokens: int) -> RooflineModel:
        operators, card = self.deployment.operators(), self.deployment.card
        host = self.host(operators)
        plain = RooflineModel(operators, card, self.shares, engine=self.engine, host=NO_HOST)
        prefill = decode = 1.0
        wanted = self.calibration
        if wanted is not None and wanted.ttft_ms is not None:
            kernels = plain.pass_ns([(wanted.prompt_tokens, 0)], 0, 0, 0)
            prefill = _scale(kernels, wanted.ttft_ms, host.alone_us(1), "ttft")
            measured = wanted.ttft_ms * 1e3 - host.alone_us(1)
            host = msgspec.structs.replace(host, launch_us=min(host.launch_us, measured))
        if wanted is not None and wanted.itl_ms is not None:
            kernels = plain.pass_ns((), wanted.batch, wanted.batch * wanted.context, wanted.context)
            decode = _scale(kernels, wanted.itl_ms, host.alone_us(wanted.batch), "itl")
        return RooflineModel(
            operators,
            card,
            self.shares,
            engine=self.engine,
            host=host,
            prefill=prefill,
            decode=decode,
            speedup=self.speedup_ratio,
            decode_speedup=self.decode_speedup_ratio,
        )

    def describe(self) -> str:
        based = "scaled to your measurements" if self.calibration is not None else "no measurement"
        text, card = f"roofline of {self.deployment}, {based}", self.deployment.card
        used = self.deployment.operators().dtype
        if used in ("fp8", "fp4") and used not in card.flops:
            text += f", computed in bf16 ({card.name} has no {used})"
        unchecked = self._unchecked()
        if unchecked:
            text += f", not checked on models with {unchecked}"
        return text + self.deployment.caveat

    def run_class(self, backend: str) -> RunClass | None:
        own = (
            self.calibration is not None
            or self.shares is not None
            or self.speedup_ratio * self.decode_speedup_ratio != 1
        )
        return None if own or self.deployment.caveat else class_of(self.deployment, backend)

    def _unchecked(self) -> str:
        kinds = dict.fromkeys(mixers(Fields(self.deployment.config())))
        return next((UNCHECKED[kind] for kind in kinds if kind in UNCHECKED), "")

    @classmethod
    def usage(cls) -> str:
        return "roofline (with model and gpu)"

    @classmethod
    def parse(cls, text: str, speedup_ratio: float, deployment: Deployment | None = None) -> Self:
        if deployment is None:
            raise KvyardError(
                "timing roofline is made from a card and a model: say gpu and model, as in h100, llama-3.1-8b"
            )
        return cls(
            deployment=deployment,
            calibration=parse_calibration(text) if text else None,
            speedup_ratio=speedup_ratio,
        )


def parse_calibration(text: str) -> Calibration:
    """Parse ``ttft=120@2048,itl=14@32``: milliseconds of a prompt of this many tokens, and of a step of this many requests.

    Either may be left out. Raises ``KvyardError`` for anything else.
    """
    values: dict[str, float | int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|itl)=([0-9.]+)(?:ms)?@([0-9]+)", part.strip())
        if match is None or float(match[2]) <= 0 or int(match[3]) < 1:
            raise KvyardError(
                f"calibrate is {text!r}: write ttft=MS@TOKENS, itl=MS@BATCH or both, as in ttft=120@2048,itl=14@32"
            )
        name, amount, size = match.groups()
        values |= {f"{name}_ms": float(amount), "prompt_tokens" if name == "ttft" else "batch": int(size)}
    return msgspec.convert(values, Calibration)


def _scale(kernels_ns: int, wanted_ms: float, host_us: float, name: str) -> float:
    """By what the card's part is multiplied, so that a pass takes ``wanted_ms``."""
    part = wanted_ms * 1e3 - host_us
    if part <= 0:
        raise KvyardError(f"calibrate: {name} of {wanted_ms:g} ms is less than the {host_us / 1e3:g} ms the host takes")
    return part / (kernels_ns / 1e3)
