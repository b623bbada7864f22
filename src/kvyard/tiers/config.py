"""Configuration of lower tiers: capacities, links, the offload policy. Checked once, each refusal in one sentence.

Values only: whether a block manager can honour them is checked when the two meet (``kvyard.tiers.offload``).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, ClassVar

import msgspec

from kvyard.blocks.eviction import ORDERS
from kvyard.blocks.eviction.learning import learning_order
from kvyard.blocks.quotas import Quotas
from kvyard.blocks.spec import ConfigError
from kvyard.errors import suggest
from kvyard.events.tier import LOWER_TIERS, Tier
from kvyard.settings import Setting, figures
from kvyard.tiers.links.config import LinkConfig, parse_link_config
from kvyard.tiers.load_policy import LOADS
from kvyard.tiers.policy import AHEAD, POLICIES, SPILLS

MOST_BLOCKS = 1 << 40
"""Blocks that no tier goes beyond, as on the device."""
MOST_BYTES = {"private": (1 << 50, "1 PiB"), "shared": (1 << 60, "1 EiB")}
"""Bytes that no tier of one worker and no shared tier goes beyond."""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier: how much it holds, and the link that leads to it. Raises ``ConfigError``."""

    num_blocks: int | None = None
    """Capacity in blocks of the device's size. Give this or ``bytes``."""
    bytes: int | None = None
    """Capacity in bytes; what doesn't fill a block is not used."""
    link: LinkConfig = LinkConfig()
    scope: str = "private"
    """``private`` to one worker, or ``shared`` by all that join a ``Timeline``."""
    eviction: str = "lru"
    eviction_options: dict[str, float] = {}
    """Figures that only this order has."""
    quotas: Quotas | None = None
    """Quotas of tenants; an engine's own, if it has any."""

    def __post_init__(self) -> None:
        if (self.num_blocks is None) == (self.bytes is None):
            raise ConfigError("a tier's capacity is num_blocks or bytes: give one of the two")
        for key, value in (("num_blocks", self.num_blocks), ("bytes", self.bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{key} of a tier must be a whole number of 1 or more, got {value!r}")
        _one_of("scope", self.scope, tuple(MOST_BYTES))
        if self.num_blocks is not None and self.num_blocks > MOST_BLOCKS:
            raise ConfigError(f"num_blocks of a tier must be at most {MOST_BLOCKS:,}, got {self.num_blocks:,}")
        most, shown = MOST_BYTES[self.scope]
        if self.bytes is not None and self.bytes > most:
            raise ConfigError(f"bytes of a {self.scope} tier must be at most {most:,} ({shown}), got {self.bytes:,}")
        ORDERS.check(self.eviction, self.eviction_options)
        order = learning_order(self.eviction)
        if order is not None and order.reads_queue:
            raise ConfigError(
                f"eviction {self.eviction} protects what the queue of one engine waits for, so it is for the device: "
                "choose another order for a lower tier"
            )

    def capacity(self, block_bytes: int) -> int:
        """Return the number of blocks of ``block_bytes`` that fit. Raises ``ConfigError`` if none does."""
        if self.num_blocks is not None:
            return self.num_blocks
        assert self.bytes is not None
        if self.bytes < block_bytes:
            raise ConfigError(f"a tier of {self.bytes} bytes doesn't hold a single block of {block_bytes} bytes")
        return self.bytes // block_bytes


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiers below the device and how they are used. Raises ``ConfigError`` for what contradicts itself."""

    heading: ClassVar[str] = "Memory below the device"
    tiers: tuple[TierConfig, ...]
    """From G2 on, closest to the device first. Each is filled from the one before it and read through it."""
    policy: Annotated[
        str,
        Setting(
            "Offload policy, which decides what is copied to lower tiers and when: {choices}.",
            name="offload_policy",
            flag=True,
            choices=POLICIES.keys,
        ),
    ] = "write_through"
    min_uses: Annotated[int | None, Setting("For after_hits: uses of a block before it is stored.")] = None
    """The request that computes it is the first."""
    offload_ahead: Annotated[
        int | None, Setting("For on_eviction, lazy and exclusive: blocks next to evict that are copied ahead.")
    ] = None
    on_unclean: Annotated[
        str | None,
        Setting(
            "For on_eviction, lazy and exclusive: wait for the copy of an evicted block, or drop it: wait or drop."
        ),
    ] = None
    """``wait`` for the copy (the default, but for ``lazy``) or ``drop`` the content."""
    spill: Annotated[
        str, Setting("When a lower tier copies on to the next: on_landing, or on_eviction (write-back).")
    ] = "on_landing"
    """Pages that land there, at once, or those that it evicts next."""
    blocks_per_chunk: Annotated[int, Setting("Blocks that are stored, named and evicted together.")] = 1
    offload_batch_size: Annotated[int | None, Setting("Blocks per transfer of a store.")] = None
    """Its batches go one after the other. ``None``: all in one."""
    wait_for_save: Annotated[bool, Setting("End a pass only when its stores have left the device.")] = False
    """As vLLM's ``wait_for_save`` asks of connectors, and LMCache's in the engine's own process does. Others, as vLLM's
    ``OffloadingConnector``, copy while later passes compute."""
    last_block: Annotated[
        str, Setting("Last block of a prompt that is cached whole: skip, recompute-token or recompute-block.")
    ] = "skip"
    """Handling of the last block of a prompt that ends with it, part of which is computed again in any case: leave it out
    of the load, or load it and go on with ``recompute-token`` (vLLM's connector) or ``recompute-block`` (Dynamo's mocker).
    Only for models with full attention alone; others skip it."""
    load_policy: Annotated[
        str,
        Setting(
            "Load policy, which decides if prefixes in lower tiers are loaded or computed: {choices}.",
            flag=True,
            choices=LOADS.names,
        ),
    ] = "always"
    load_options: Annotated[
        dict[str, float],
        Setting("Options of that load policy, as NAME=VALUE,... .", parse=figures, options=LOADS),
    ] = msgspec.field(default_factory=dict)
    """``docs/explain/tiers.md`` names each policy's."""
    events: str = "self-describing"
    """Form of lower tiers' events: with everything a reader needs, or ``legacy``, hashes only."""

    def __post_init__(self) -> None:
        _one_of("offload policy", self.policy, tuple(POLICIES))
        LOADS.check(self.load_policy, self.load_options)
        _one_of("events", self.events, ("self-describing", "legacy"))
        _one_of("last_block", self.last_block, ("skip", "recompute-token", "recompute-block"))
        _one_of("on_unclean", self.on_unclean or "wait", ("wait", "drop"))
        _one_of("spill", self.spill, SPILLS)
        for key in ("blocks_per_chunk", "offload_batch_size", "offload_ahead"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{key} must be a whole number of 1 or more, got {value!r}")
        if self.min_uses is not None and self.policy != "after_hits":
            raise ConfigError(f"min_uses is for the policy after_hits, not for {self.policy}: leave it out")
        for key in ("offload_ahead", "on_unclean"):
            if getattr(self, key) is not None and self.policy not in AHEAD:
                raise ConfigError(
                    f"{key} is for the policy on_eviction, lazy or exclusive, not for {self.policy}: leave it out"
                )
        if self.spill != "on_landing" and len(self.tiers) < 2:
            raise ConfigError(f"spill {self.spill} is for a tier with another below it: add one, or leave spill out")
        if self.spill != "on_landing" and any(tier.eviction != "lru" for tier in self.tiers[:-1]):
            raise ConfigError(
                f"spill {self.spill} copies what a tier evicts next by lru: leave out its eviction, or spill"
            )
        if self.wait_for_save and self.policy == "write_through_generated":
            raise ConfigError("wait_for_save is modelled for stores of prompts: choose write_through, or leave it out")
        if self.wait_for_save and self.tiers[0].scope == "shared":
            raise ConfigError("wait_for_save is of a worker's own link to its host: make the host private")
        if self.policy == "exclusive" and self.tiers[0].scope == "shared":
            raise ConfigError("exclusive takes what is loaded out of the host, which others share: make it private")
        if self.min_uses is not None and (type(self.min_uses) is not int or self.min_uses < 2):
            raise ConfigError(f"min_uses must be 2 or more (1 is write_through), got {self.min_uses!r}")
        if self.policy in AHEAD and self.blocks_per_chunk != 1:
            raise ConfigError(
                f"{self.policy} copies single blocks as they near the head of the line: leave out blocks_per_chunk"
            )
        if self.offload_batch_size is not None and self.offload_batch_size % self.blocks_per_chunk:
            raise ConfigError(
                f"offload_batch_size {self.offload_batch_size} must be a multiple of blocks_per_chunk {self.blocks_per_chunk}"
            )
        if not 1 <= len(self.tiers) <= len(LOWER_TIERS):
            raise ConfigError(
                f"tiers must be 1 to {len(LOWER_TIERS)}, closest to the device first; got {len(self.tiers)}"
            )
        for (closer, above), (tier, below) in pairwise(self.levels):
            if above.scope == "shared" and below.scope == "private":
                raise ConfigError(
                    f"a private {tier.label} tier can't stand behind a shared {closer.label} tier: make both shared"
                )

    @property
    def levels(self) -> list[tuple[Tier, TierConfig]]:
        """The tiers with their names, closest first."""
        return list(zip(LOWER_TIERS, self.tiers, strict=False))

    @property
    def shared(self) -> bool:
        """Return true if any tier is shared, so that workers need a common ``Timeline``."""
        return any(tier.scope == "shared" for tier in self.tiers)


def parse_offload_config(raw: Mapping[str, object]) -> OffloadConfig:
    """Return the configuration that a file describes: the keys of ``OffloadConfig``, links as presets or keys of their own.

    Raises ``ConfigError`` for an unknown key or a value that can't be.
    """
    keys = dict(raw)
    tiers = keys.get("tiers")
    if isinstance(tiers, Sequence):
        keys["tiers"] = [_with_link(tier) for tier in tiers]
    try:
        return msgspec.convert(keys, OffloadConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not an offload configuration: {error}") from None


def _with_link(tier: object) -> object:
    """Return a tier's keys, its link written out."""
    if not isinstance(tier, Mapping) or not isinstance(link := tier.get("link"), str | Mapping):
        return tier
    return {**tier, "link": msgspec.to_builtins(parse_link_config(link))}


def _one_of(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"unknown {key} {value!r}: {suggest(value, choices)}")
