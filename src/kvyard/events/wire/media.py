"""Media: the one place where an engine's word for where a copy lives becomes a tier, and back.

Engines never agreed on the words: vLLM says GPU, CPU and STORAGE, its Mooncake store ``cpu``, SGLang CPU_PINNED, DISK and
EXTERNAL, llm-d's connectors SHARED_STORAGE and OBJECT_STORE. Case and punctuation carry no meaning.
"""

from kvyard.events.types import Tier

NAMES = {tier: tier.entry.medium for tier in Tier}
"""The word we write for each tier."""
ALIASES = {medium: tier for tier in Tier for medium in tier.entry.media}
"""Every spelling seen in the wild, in lower case with underscores."""

_seen: dict[str, Tier] = {}


def tier_of(medium: str | None) -> Tier | None:
    """Return the tier that ``medium`` names; no medium is the device, as in engines that predate the field. ``None`` for an
    unknown word.

    An unknown word isn't guessed: a copy credited to the wrong tier is worse than an unknown copy.
    """
    if medium is None:
        return Tier.G1
    tier = _seen.get(medium)
    if tier is None:
        tier = ALIASES.get(medium.strip().lower().replace("-", "_").replace(" ", "_"))
        if tier is not None and len(_seen) < 1024:
            _seen[medium] = tier
    return tier
