"""Links that were measured. How the constants were found, and how well they fit, is in docs/links.md."""

from __future__ import annotations

from kvyard.tiers.links.config import LaneConfig, LinkConfig

_GB = 10**9

PRESETS: dict[str, LinkConfig] = {
    "h200": LinkConfig(
        outward=LaneConfig(bandwidth=553 * _GB // 10, first_byte_ns=35_000, piece_overhead=130_000),
        inward=LaneConfig(bandwidth=553 * _GB // 10, first_byte_ns=42_000, piece_overhead=158_000),
        duplex_bandwidth=70 * _GB,
    ),
    "h200-queued": LinkConfig(
        outward=LaneConfig(bandwidth=553 * _GB // 10, first_byte_ns=6_500, piece_overhead=116_000),
        inward=LaneConfig(bandwidth=553 * _GB // 10, first_byte_ns=5_000, piece_overhead=144_000),
        duplex_bandwidth=1005 * _GB // 10,
    ),
}
"""Configurations by name.

``h200``: an H200 on PCIe 5, blocks copied one by one as the host gets to them. ``h200-queued``: the same kind of card when the
copies are queued ahead of it, so that the host isn't what holds the two directions back.
"""
