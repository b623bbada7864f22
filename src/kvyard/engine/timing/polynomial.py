"""``polynomial``: the default timing of NVIDIA Dynamo's mocker, exact to the nanosecond."""

from kvyard.engine.timing.polynomial_model import PolynomialModel
from kvyard.engine.timing.registry import TimingConfig


class PolynomialTiming(TimingConfig, frozen=True, kw_only=True, tag="polynomial"):
    """Prefill by new tokens, decode by how full the cache is. Has no options."""

    def describe(self) -> str:
        return "Dynamo's default polynomial, not your card: the same for every model"

    def model(self, capacity_tokens: int) -> PolynomialModel:
        return PolynomialModel(capacity_tokens, self.speedup_ratio, self.speedup_ratio * self.decode_speedup_ratio)
