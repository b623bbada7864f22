"""Cards: found however they are spelled, refused by name, each number with its source."""

from __future__ import annotations

import re

import pytest

from kvyard.engine.cards import CARDS, GENERIC, Shares, find_card
from kvyard.errors import KvyardError


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("h100", "h100"),
        ("H100-SXM", "h100"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA RTX PRO 6000", "rtxpro6000"),
        ("AMD MI300X", "mi300x"),
    ],
)
def test_a_card_is_found_however_it_is_spelled(spelled: str, name: str) -> None:
    assert find_card(spelled).name == name


def test_an_unknown_card_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        KvyardError, match=r"unknown card 'h1000': did you mean h100 or h200 or a100\? Choose one of a100"
    ):
        find_card("h1000")


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_every_card_can_be_computed_with_and_says_where_its_numbers_come_from(card) -> None:
    assert "datasheet" in card.source or "white paper" in card.source
    assert (card.shares == GENERIC) == (not card.shares_source)
    card.shares.check(card.name)
    assert card.memory > 20 * 2**30 and card.bandwidth > 1e11
    assert card.rate("fp8") >= card.rate("bf16") > 1e14 and card.rate("fp4") >= card.rate("bf16")


def test_a_card_without_a_type_computes_in_16_bits() -> None:
    a100, h100 = find_card("a100"), find_card("h100")
    assert a100.rate("fp8") == a100.rate("bf16") == 312e12
    assert h100.rate("fp4") == h100.rate("bf16") < h100.rate("fp8")


def test_shares_beyond_the_peak_are_refused() -> None:
    with pytest.raises(KvyardError, match="mem is a share of the card's peak, got 2"):
        Shares(mem=2).check("here")


PFLOPS = re.compile(r"([\d.,]+(?:/[\d.,]+)+) ([PT])FLOPS dense")


def test_rates_are_those_of_the_datasheet_that_is_named() -> None:
    checked = 0
    for card in CARDS.values():
        if found := PFLOPS.search(card.source):
            unit = {"P": 1e15, "T": 1e12}[found[2]]
            assert list(card.flops.values()) == [float(one.replace(",", "")) * unit for one in found[1].split("/")], (
                card.name
            )
            checked += 1
    assert checked >= 8
