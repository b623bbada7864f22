"""The host's part of a pass and of a request: scheduling, preparing inputs, sending tokens; HTTP and tokenizing."""

from __future__ import annotations

import msgspec

from kvyard.engine.timing.model import Times
from kvyard.engine.timing.operators import Operators
from kvyard.engine.timing.registry import TimingConfig
from kvyard.errors import KvyardError


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Host work in microseconds. With ``overlap`` the host works on the next pass while the card computes this one."""

    step_us: float
    """Time of a pass, whatever is in it."""
    sequence_us: float = 0.0
    """Time per sequence of a pass."""
    exposed_us: float = 0.0
    """With ``overlap``: what the card waits for between two passes even so,"""
    exposed_sequence_us: float = 0.0
    """and for each sequence of a pass."""
    overlap: bool = False
    launch_us: float = 0.0
    """Least time of a pass that computes prompts: its kernels are launched one by one, without CUDA graphs."""
    front_end_us: float = 8000.0
    """Time of a request: HTTP, the chat template, sending tokens,"""
    front_end_token_us: float = 1.3
    """and tokenizing, of each token of its prompt."""

    def alone_us(self, sequences: int) -> float:
        """Return the time of a pass beyond its kernels, if those take long enough to hide what can be hidden."""
        if self.overlap:
            return self.exposed_us + self.exposed_sequence_us * sequences
        return self.step_us + self.sequence_us * sequences

    def joined(self, sequences: int, card_us: float) -> float:
        """Return microseconds of a pass of ``sequences`` whose kernels take ``card_us``."""
        host = self.step_us + self.sequence_us * sequences
        if not self.overlap:
            return host + card_us
        busy = card_us + self.exposed_us + self.exposed_sequence_us * sequences
        return busy if busy > host else host

    def joined_prompts(self, sequences: int, card_us: float) -> float:
        """Like ``joined`` for a pass that computes prompts."""
        return self.joined(sequences, card_us if card_us > self.launch_us else self.launch_us)

    def joined_many(self, sequences: int, card_us: Times) -> Times:
        """Like ``joined`` for passes of as many sequences each."""
        host = self.step_us + self.sequence_us * sequences
        if not self.overlap:
            return host + card_us
        exposed = self.exposed_us + self.exposed_sequence_us * sequences
        busy: Times = (card_us + exposed).clip(min=host)
        return busy


NO_HOST = Host(step_us=0.0)
HOSTS = {
    "vllm": Host(step_us=1050.0, sequence_us=34.0, exposed_us=200.0, exposed_sequence_us=8.0),
    "sglang": Host(step_us=1400.0, sequence_us=20.0, exposed_us=200.0, exposed_sequence_us=12.0),
    "trtllm": Host(step_us=1400.0, sequence_us=20.0, exposed_us=200.0, exposed_sequence_us=12.0),
}
"""By engine. vLLM's first two come from runs of Qwen3-32B under vLLM 0.12, which didn't overlap; SGLang's and TensorRT-LLM's
last two from runs of that model under SGLang 0.5.1 and TensorRT-LLM 1.0 (aiconfigurator-core's silicon rows). vLLM's last two
are SGLang's at small batches, since it overlaps the same way, and what is seen at 128 running, 1 to 1.5 ms. The front end:
prompts of 21,073 tokens that were cached took 50 ms to their first token (AIBrix's plain stack), of which a pass is 15."""
LAUNCH_US = {"sglang": (270.0, 1140.0)}
"""By engine without CUDA graphs for prompts: launching a layer, and one with experts. SGLang without graphs: 8.2 and 9.3 ms for
the 32 layers of Llama 3 8B (its pull request 1401), about 25 ms for the 27 of DeepSeek-Coder-V2-Lite (the same), 82.6 ms for
the 61 of DeepSeek-V3 (pull request 12160)."""


class HostTiming(TimingConfig, frozen=True, kw_only=True):
    """Host of an engine, for timing that knows kernels alone. ``None`` stands for that engine's default."""

    engine: str = "vllm"
    """Engine of the kernels and host: vllm, sglang or trtllm."""
    host_us: float | None = None
    """Host work of a pass."""
    host_sequence_us: float | None = None
    """Host work of each sequence in a pass."""
    front_end_us: float | None = None
    """Time of a request, outside of passes,"""
    front_end_token_us: float | None = None
    """and of each token of its prompt."""
    launch_us: float | None = None
    """Least time of a pass that computes prompts."""
    overlap: bool = False
    """True if the host decides on a pass while the one before it runs."""

    def check(self) -> None:
        super().check()
        for name in ("host_us", "host_sequence_us", "front_end_us", "front_end_token_us", "launch_us"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e9:
                part = "a request" if name.startswith("front") else "a pass"
                raise KvyardError(f"timing: {name} is the host's part of {part} in microseconds, got {value}")

    def front_end_ns(self, tokens: int) -> int:
        known = HOSTS.get(self.engine, HOSTS["vllm"])
        base = known.front_end_us if self.front_end_us is None else self.front_end_us
        each = known.front_end_token_us if self.front_end_token_us is None else self.front_end_token_us
        return round((base + each * tokens) * 1e3)

    def host(self, operators: Operators) -> Host:
        """Return the host's constants for passes of ``operators``. A ``host_us`` of one's own is what passes take beyond their
        kernels, overlap or not.
        """
        known = HOSTS.get(self.engine, HOSTS["vllm"])
        launch = self.launch_us
        if launch is None:
            layer, experts = LAUNCH_US.get(self.engine, (0.0, 0.0))
            mixtures = sum(kind.count for kind in operators.experts)
            launch = layer * (operators.layers - mixtures) + experts * mixtures
        if self.host_us is not None or self.host_sequence_us is not None:
            return Host(step_us=self.host_us or 0.0, sequence_us=self.host_sequence_us or 0.0, launch_us=launch)
        return msgspec.structs.replace(known, overlap=self.overlap, launch_us=launch)
