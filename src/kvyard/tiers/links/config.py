"""The configuration of a link: what it can carry, checked once, with every refusal naming the key and what would do."""

from collections.abc import Mapping

import msgspec

from kvyard.blocks.spec import ConfigError
from kvyard.errors import suggest


class LaneConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of a link. Checked when it becomes part of a ``LinkConfig``."""

    bandwidth: int | None = None
    """Bytes per second of all transfers of this direction together; ``None`` sets no limit, and 0 is refused."""
    client_bandwidth: int | None = None
    """Bytes per second of all transfers of any one client in this direction; ``None`` sets no limit."""
    first_byte_ns: int = 0
    """From submission to the first byte. It passes without using the link."""
    piece_overhead: int = 0
    """Cost of each separate copy on top of its payload, as bytes that pass at the same speed."""


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both directions of a medium. Raises ``ConfigError`` for values that no link can have.

    With no bandwidth at all a transfer lands as soon as its first byte could move.
    """

    discipline: str = "fair"
    """A name of ``DISCIPLINES``: ``fair`` shares bandwidth, ``fifo`` serves one transfer per direction at a time."""
    outward: LaneConfig = LaneConfig()
    inward: LaneConfig = LaneConfig()
    duplex_bandwidth: int | None = None
    """Bytes per second of both directions together; ``None`` if they don't slow each other."""

    def __post_init__(self) -> None:
        if type(self.discipline) is not str:
            raise ConfigError(f"discipline must be a name such as 'fair', got {self.discipline!r}")
        _check_bandwidth("duplex_bandwidth", self.duplex_bandwidth)
        for name, lane in (("outward", self.outward), ("inward", self.inward)):
            if not isinstance(lane, LaneConfig):
                raise ConfigError(f"{name} must be a LaneConfig, got {lane!r}")
            _check_bandwidth(f"{name}.bandwidth", lane.bandwidth)
            _check_bandwidth(f"{name}.client_bandwidth", lane.client_bandwidth)
            _check_amount(f"{name}.first_byte_ns", lane.first_byte_ns, "nanoseconds")
            _check_amount(f"{name}.piece_overhead", lane.piece_overhead, "bytes")
            limits = (lane.bandwidth, lane.client_bandwidth, self.duplex_bandwidth)
            if lane.piece_overhead and all(limit is None for limit in limits):
                raise ConfigError(
                    f"{name}.piece_overhead has no effect on a direction without any bandwidth limit: "
                    f"set {name}.bandwidth, or leave it out"
                )

    @property
    def lanes(self) -> tuple[LaneConfig, LaneConfig]:
        """By ``Direction``."""
        return (self.outward, self.inward)


def _check_bandwidth(key: str, value: object) -> None:
    if value is not None and (type(value) is not int or value <= 0):
        raise ConfigError(
            f"{key} must be a whole, positive number of bytes per second, or null for no limit; got {value!r}"
        )


def _check_amount(key: str, value: object, unit: str) -> None:
    if type(value) is not int or value < 0:
        raise ConfigError(f"{key} must be a whole number of {unit}, 0 or more; got {value!r}")


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
"""Links that were measured, by name; how, and how well the constants fit, is in benchmarks/RESULTS-accuracy.md.

``h200``: an H200 on PCIe 5, blocks copied one by one as the host gets to them. ``h200-queued``: the same kind of card when the
copies are queued ahead of it, so that the host isn't what holds the two directions back.
"""


def parse_link_config(raw: Mapping[str, object] | str) -> LinkConfig:
    """Return the configuration that a file or a command line describes: the name of a preset, or the keys of ``LinkConfig``.

    With a key ``preset`` the others change that preset; keys of ``outward`` and ``inward`` one by one. Raises
    ``ConfigError`` for an unknown preset or key, or for a value that can't be.
    """
    if isinstance(raw, str):
        return _preset(raw)
    keys = dict(raw)
    if (name := keys.pop("preset", None)) is not None:
        base = msgspec.to_builtins(_preset(name))
        for lane in ("outward", "inward"):
            if isinstance(changes := keys.get(lane), Mapping):
                keys[lane] = base[lane] | dict(changes)
        keys = base | keys
    try:
        return msgspec.convert(keys, LinkConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not a link: {error}") from None


def _preset(name: object) -> LinkConfig:
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise ConfigError(f"unknown link preset {name!r}: {suggest(name, sorted(PRESETS))}")
    return preset
