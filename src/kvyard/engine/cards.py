"""Cards by name, from their data sheets. Numbers only; nothing is computed here.

Peak rates are dense (without sparsity) and per card, links per card and direction. What share of them kernels reach is in
``kvyard.engine.timing.kernels`` for cards with operator tables, and in ``shares`` for others; ``GENERIC`` stands for cards
that weren't measured.
"""

from __future__ import annotations

import msgspec

from kvyard.errors import KvyardError, suggest

GB = 10**9
GIB = 2**30
TERA = 10**12


class Shares(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share of its peak that a card reaches inside a whole model."""

    mem: float = 0.80
    """Share of the memory's bandwidth, reading weights."""
    arith: float = 0.70
    """Share of the arithmetic, in large matrix products."""
    decode_mem: float = 0.75
    """Share of the memory's bandwidth, reading the cache in decode attention."""
    prefill_arith: float = 0.45
    """Share of the arithmetic, in prompt attention."""
    mixed_decode: float = 1.0
    """Factor by which decode attention takes longer in a pass that also computes prompts."""

    def check(self, where: str) -> None:
        """Raise ``KvyardError``, naming ``where``, for a share that can't be."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value <= (10 if name == "mixed_decode" else 1.5):
                raise KvyardError(f"{where}: {name} is a share of the card's peak, got {value}")


GENERIC = Shares()


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One card. Rates in bytes and operations a second."""

    name: str
    title: str
    memory: int
    """Bytes of the device as CUDA reports them to a program, if that was seen (H100, H200); else as nvidia-smi shows them,
    half a percent more."""
    bandwidth: float
    flops: dict[str, float]
    """Operations a second by the type of what is multiplied: ``bf16``, and ``fp8`` and ``fp4`` where the card has them."""
    peer_bandwidth: float
    """To the other cards of its node, as collectives of activations reach it: 40 % of NVLink's peak, half of PCIe 4's."""
    peer_latency_us: float
    """Time of a collective over them before any byte moves."""
    host_bandwidth: float
    """To the host's memory (PCIe or C2C)."""
    source: str
    shares: Shares = GENERIC
    shares_source: str = ""
    """Origin of the measured ``shares``; empty for ``GENERIC``."""

    @property
    def limits(self) -> dict[str, int]:
        """Limits of a pass that a vLLM server has by default on this card."""
        if self.memory >= 160 * GIB:
            return {"max_num_batched_tokens": 16384, "max_num_seqs": 1024}
        if self.memory >= 70 * GIB and self.name != "a100":
            return {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
        return {"max_num_batched_tokens": 2048, "max_num_seqs": 256}

    @property
    def chunk(self) -> int:
        """Tokens that an SGLang server cuts prompts into by default on this card (``_handle_gpu_memory_settings`` of 0.5)."""
        if self.memory >= 160 * GIB:
            return 16384
        if self.memory >= 60 * GIB:
            return 8192
        return 4096 if self.memory >= 35 * GIB else 2048

    def rate(self, dtype: str) -> float:
        """Return the operations a second for operands of ``dtype``. If the card lacks that arithmetic, weights are widened
        to 16 bits and multiplied there, as engines do.
        """
        return self.flops.get(dtype, self.flops["bf16"])


NVLINK_US = 8.0
PCIE_US = 25.0

_CARDS = (
    Card(
        name="a100",
        title="NVIDIA A100 SXM 80 GB",
        memory=81920 * 2**20,
        bandwidth=2039 * GB,
        flops={"bf16": 312 * TERA},
        peer_bandwidth=120 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=32 * GB,
        source="NVIDIA A100 datasheet: 2,039 GB/s, 312 TFLOPS bf16, NVLink 600 GB/s both ways, PCIe 4.0 x16",
    ),
    Card(
        name="h100",
        title="NVIDIA H100 SXM 80 GB",
        memory=int(79.19 * 2**30),
        bandwidth=3350 * GB,
        flops={"bf16": 989 * TERA, "fp8": 1979 * TERA},
        peer_bandwidth=180 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=64 * GB,
        source="NVIDIA H100 datasheet: 3.35 TB/s, 989/1,979 TFLOPS dense, NVLink 900 GB/s both ways, PCIe 5.0 x16",
    ),
    Card(
        name="h200",
        title="NVIDIA H200 SXM 141 GB",
        memory=150_109_880_320,
        bandwidth=4800 * GB,
        flops={"bf16": 989 * TERA, "fp8": 1979 * TERA},
        peer_bandwidth=180 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=64 * GB,
        source="NVIDIA H200 datasheet: 4.8 TB/s, 989/1,979 TFLOPS dense, NVLink 900 GB/s both ways, PCIe 5.0 x16",
    ),
    Card(
        name="h20",
        title="NVIDIA H20 96 GB",
        memory=97871 * 2**20,
        bandwidth=4000 * GB,
        flops={"bf16": 148 * TERA, "fp8": 296 * TERA},
        peer_bandwidth=180 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=64 * GB,
        source="NVIDIA H20 datasheet (of servers): 4.0 TB/s, 148/296 TFLOPS dense, NVLink 900 GB/s both ways, PCIe 5.0",
        shares=Shares(arith=1.0, prefill_arith=0.94),
        shares_source="prompts of 21,073 tokens of Llama-3.1-8B in AIBrix's plain stack (2.97 s)",
    ),
    Card(
        name="b200",
        title="NVIDIA B200 SXM 180 GB",
        memory=183359 * 2**20,
        bandwidth=7700 * GB,
        flops={"bf16": 2250 * TERA, "fp8": 4500 * TERA, "fp4": 9000 * TERA},
        peer_bandwidth=360 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=64 * GB,
        source="NVIDIA HGX B200 datasheet: 62 TB/s over 8, 2.25/4.5/9 PFLOPS dense, NVLink 1.8 TB/s both ways, PCIe 5.0 x16",
    ),
    Card(
        name="b300",
        title="NVIDIA B300 SXM 288 GB",
        memory=275040 * 2**20,
        bandwidth=7750 * GB,
        flops={"bf16": 2250 * TERA, "fp8": 4500 * TERA, "fp4": 14000 * TERA},
        peer_bandwidth=360 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=128 * GB,
        source="NVIDIA HGX B300 datasheet: 62 TB/s over 8, 2.25/4.5/14 PFLOPS dense, NVLink 1.8 TB/s both ways, PCIe 6.0 x16",
    ),
    Card(
        name="gb200",
        title="NVIDIA GB200 (one GPU of a superchip)",
        memory=189471 * 2**20,
        bandwidth=8000 * GB,
        flops={"bf16": 2500 * TERA, "fp8": 5000 * TERA, "fp4": 10000 * TERA},
        peer_bandwidth=360 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=225 * GB,
        source="NVIDIA GB200 NVL72 datasheet: 8 TB/s, 2.5/5/10 PFLOPS dense, NVLink 1.8 TB/s, C2C 450 GB/s both ways",
    ),
    Card(
        name="gb300",
        title="NVIDIA GB300 (one GPU of a superchip)",
        memory=284208 * 2**20,
        bandwidth=8000 * GB,
        flops={"bf16": 2500 * TERA, "fp8": 5000 * TERA, "fp4": 15000 * TERA},
        peer_bandwidth=360 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=225 * GB,
        source="NVIDIA Blackwell Ultra datasheet: 8 TB/s, 2.5/5/15 PFLOPS dense, NVLink 1.8 TB/s, C2C 450 GB/s both ways",
    ),
    Card(
        name="l4",
        title="NVIDIA L4 24 GB",
        memory=23034 * 2**20,
        bandwidth=300 * GB,
        flops={"bf16": 121 * TERA, "fp8": 242 * TERA},
        peer_bandwidth=16 * GB,
        peer_latency_us=PCIE_US,
        host_bandwidth=32 * GB,
        source="NVIDIA L4 datasheet: 300 GB/s, 242/485 TFLOPS with sparsity, PCIe 4.0 x16",
        shares=Shares(mixed_decode=1.8),
        shares_source="FlashAttention 2 on Ada (mixed passes only)",
    ),
    Card(
        name="l40s",
        title="NVIDIA L40S 48 GB",
        memory=46068 * 2**20,
        bandwidth=864 * GB,
        flops={"bf16": 362 * TERA, "fp8": 733 * TERA},
        peer_bandwidth=16 * GB,
        peer_latency_us=PCIE_US,
        host_bandwidth=32 * GB,
        source="NVIDIA L40S datasheet: 864 GB/s, 362/733 TFLOPS dense, PCIe 4.0 x16",
        shares=Shares(mixed_decode=1.8),
        shares_source="FlashAttention 2 on Ada (mixed passes only)",
    ),
    Card(
        name="rtx4090",
        title="NVIDIA GeForce RTX 4090 24 GB",
        memory=24081 * 2**20,
        bandwidth=1008 * GB,
        flops={"bf16": 165.2 * TERA, "fp8": 330.3 * TERA},
        peer_bandwidth=16 * GB,
        peer_latency_us=PCIE_US,
        host_bandwidth=32 * GB,
        source="NVIDIA Ada architecture white paper: 1,008 GB/s, 165.2/330.3 TFLOPS with 32-bit accumulation, PCIe 4.0 x16",
        shares=Shares(mem=0.92, arith=0.90, mixed_decode=1.9),
        shares_source="per-layer tables of LLMServingSim",
    ),
    Card(
        name="rtxpro6000",
        title="NVIDIA RTX PRO 6000 Blackwell Server 96 GB",
        memory=97887 * 2**20,
        bandwidth=1597 * GB,
        flops={"bf16": 467.8 * TERA, "fp8": 935.6 * TERA, "fp4": 1871.2 * TERA},
        peer_bandwidth=16 * GB,
        peer_latency_us=PCIE_US,
        host_bandwidth=64 * GB,
        source="NVIDIA RTX PRO 6000 Blackwell Server datasheet: 1,597 GB/s, dense rates at 2,430 MHz, PCIe 5.0 x16",
        shares=Shares(mixed_decode=1.9),
        shares_source="per-layer tables of LLMServingSim (mixed passes only)",
    ),
    Card(
        name="mi300x",
        title="AMD Instinct MI300X 192 GB",
        memory=192 * 2**30,
        bandwidth=5300 * GB,
        flops={"bf16": 1307.4 * TERA, "fp8": 2614.9 * TERA},
        peer_bandwidth=150 * GB,
        peer_latency_us=NVLINK_US,
        host_bandwidth=64 * GB,
        source="AMD MI300X datasheet: 5.3 TB/s, 1,307.4/2,614.9 TFLOPS dense, 7 links of 64 GB/s each way, PCIe 5.0 x16",
    ),
)
CARDS = {card.name: card for card in _CARDS}
_SPELLINGS = str.maketrans("", "", " -_")


def find_card(name: str) -> Card:
    """Return the card called ``name``, however it is spelled (``RTX-4090``). Raises ``KvyardError`` for an unknown one."""
    plain = name.lower().translate(_SPELLINGS).removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")
    card = CARDS.get(plain) or CARDS.get(plain.removesuffix("sxm"))
    if card is None:
        raise KvyardError(f"unknown card {name!r}: {suggest(plain, CARDS)}")
    return card
