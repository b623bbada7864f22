"""Media: the one place where an engine's word for where a copy lives becomes a tier, and back.

Engines never agreed on the words: vLLM says GPU, CPU and STORAGE, its Mooncake store ``cpu``, SGLang CPU_PINNED, DISK and
EXTERNAL, llm-d's connectors SHARED_STORAGE and OBJECT_STORE. Case and punctuation carry no meaning.
"""

from kvyard.events.types import Tier

NAMES = {Tier.G1: "GPU", Tier.G2: "CPU", Tier.G3: "STORAGE", Tier.G4: "REMOTE"}
"""The word we write for each tier: vLLM's, as far as it has one."""

ALIASES: dict[str, Tier] = {
    **dict.fromkeys(("gpu", "g1", "device", "hbm", "cuda", "vram", "npu", "xpu", "tpu"), Tier.G1),
    **dict.fromkeys(("cpu", "g2", "host", "dram", "ram", "cpu_pinned", "host_pinned", "pinned", "cpu_tier1"), Tier.G2),
    **dict.fromkeys(
        (
            "storage", "g3", "disk", "fs", "file", "nvme", "ssd", "obj", "object", "object_store", "external",
            "shared_storage", "cpu_tier2",
        ),
        Tier.G3,
    ),
    **dict.fromkeys(("remote", "g4"), Tier.G4),
}  # fmt: skip
"""Every spelling seen in the wild, in lower case with underscores."""

_seen: dict[str, Tier] = {}


def tier_of(medium: str | None) -> Tier | None:
    """The tier that ``medium`` names; no medium is the device, as in engines from before they said. ``None``: unknown word.

    An unknown word must not be guessed at: a copy credited to the wrong tier is worse than one not known.
    """
    if medium is None:
        return Tier.G1
    tier = _seen.get(medium)
    if tier is None:
        tier = ALIASES.get(medium.strip().lower().replace("-", "_").replace(" ", "_"))
        if tier is not None and len(_seen) < 1024:
            _seen[medium] = tier
    return tier
