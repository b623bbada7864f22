"""Configurations: what is refused, in which words, and what a file may say."""

from __future__ import annotations

import msgspec
import pytest

from kvyard.errors import KvyardError
from kvyard.tiers.links import DISCIPLINES, PRESETS, LaneConfig, LinkConfig, make_link, parse_link_config

GB = 10**9


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"outward": LaneConfig(bandwidth=0)},
            r"outward\.bandwidth must be .* positive .* or null for no limit; got 0",
        ),
        ({"inward": LaneConfig(bandwidth=-5)}, r"inward\.bandwidth must be .* got -5"),
        ({"inward": LaneConfig(bandwidth=5.5)}, r"inward\.bandwidth must be a whole, .* got 5\.5"),
        ({"inward": LaneConfig(bandwidth=True)}, r"inward\.bandwidth must be .* got True"),
        ({"outward": LaneConfig(client_bandwidth=0)}, r"outward\.client_bandwidth must be"),
        ({"duplex_bandwidth": 0}, r"duplex_bandwidth must be"),
        ({"outward": LaneConfig(first_byte_ns=-1)}, r"outward\.first_byte_ns must be a whole number of nanoseconds"),
        ({"outward": LaneConfig(piece_overhead=0.5)}, r"outward\.piece_overhead must be a whole number of bytes"),
        ({"outward": LaneConfig(piece_overhead=5)}, r"outward\.piece_overhead has no effect .* set outward\.bandwidth"),
        ({"outward": {"bandwidth": 5}}, r"outward must be a LaneConfig"),
        ({"discipline": None}, r"discipline must be a name"),
    ],
)
def test_values_that_no_link_can_have(keys: dict[str, object], message: str) -> None:
    with pytest.raises(KvyardError, match=message):
        LinkConfig(**keys)  # type: ignore[arg-type]


def test_an_unknown_discipline() -> None:
    with pytest.raises(KvyardError, match=r"unknown discipline 'lifo': did you mean fifo\? Choose one of fair, fifo"):
        make_link(LinkConfig(discipline="lifo"))


def test_fifo_refuses_what_it_cannot_honour() -> None:
    with pytest.raises(KvyardError, match=r"duplex_bandwidth: .* set discipline to fair"):
        make_link(LinkConfig(discipline="fifo", duplex_bandwidth=5 * GB))
    with pytest.raises(KvyardError, match=r"inward\.client_bandwidth: .* set discipline to fair"):
        make_link(LinkConfig(discipline="fifo", inward=LaneConfig(client_bandwidth=5 * GB)))


def test_every_discipline_and_preset_makes_a_link() -> None:
    assert set(DISCIPLINES) == {"fair", "fifo"}
    for config in PRESETS.values():
        assert make_link(config).config is config
    assert make_link(LinkConfig(discipline="fifo")).earliest() is None


def test_reading_a_preset_by_name() -> None:
    assert parse_link_config("h200") is PRESETS["h200"]
    with pytest.raises(
        KvyardError, match=r"unknown link preset 'h100': did you mean h200\? Choose one of h200, h200-queued"
    ):
        parse_link_config("h100")
    with pytest.raises(KvyardError, match="unknown link preset 5"):
        parse_link_config({"preset": 5})


def test_reading_keys() -> None:
    config = parse_link_config({"discipline": "fifo", "outward": {"bandwidth": 5 * GB}, "inward": {"first_byte_ns": 3}})
    assert config == LinkConfig(
        discipline="fifo", outward=LaneConfig(bandwidth=5 * GB), inward=LaneConfig(first_byte_ns=3)
    )
    assert msgspec.convert(msgspec.to_builtins(config), LinkConfig) == config


def test_keys_change_a_preset_one_by_one() -> None:
    h200 = PRESETS["h200"]
    config = parse_link_config({"preset": "h200", "duplex_bandwidth": None, "inward": {"client_bandwidth": GB}})
    assert config.outward == h200.outward
    assert config.inward == msgspec.structs.replace(h200.inward, client_bandwidth=GB)
    assert config.duplex_bandwidth is None
    assert parse_link_config({"preset": "h200"}) == h200


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"outward": {"bandwith": 5}}, r"not a link: .*bandwith.*outward"),
        ({"speed": 5}, r"not a link: .*speed"),
        ({"outward": {"bandwidth": "fast"}}, r"not a link: .*outward\.bandwidth"),
        ({"outward": {"bandwidth": 0}}, r"not a link: outward\.bandwidth must be"),
        ({"preset": "h200", "outward": 5}, r"not a link: .*outward"),
    ],
)
def test_keys_that_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(KvyardError, match=message):
        parse_link_config(keys)
