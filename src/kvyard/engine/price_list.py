"""Prices of cards, from a file that people edit."""

from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.cards import find_card
from kvyard.errors import KvyardError


class PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of cards per hour."""

    currency: str
    date: str
    """Date of the prices."""
    cards: dict[str, float]
    """By the card's name."""

    def card(self, name: str) -> float | None:
        """Return the price of a card; ``None`` if the list doesn't have it. Raises ``KvyardError`` for an unknown card."""
        return self.cards.get(find_card(name).name)


@cache
def default_prices() -> PriceList:
    """Return the list that comes with kvyard."""
    text = files("kvyard.engine").joinpath("prices.toml").read_bytes()
    return msgspec.toml.decode(text, type=PriceList)


def read_prices(path: Path) -> PriceList:
    """Return the price list of a TOML file. Raises ``KvyardError``, naming the place."""
    form = "it has currency, date and a table [cards], such as h100 = 2.35"
    try:
        prices_read = msgspec.toml.decode(path.read_bytes(), type=PriceList)
    except OSError as error:
        raise KvyardError(f"--prices {path} can't be read: {error.strerror}") from None
    except DECODE_ERRORS as error:
        raise KvyardError(f"--prices {path}: {error}; {form}") from None
    prices = {}
    for name, price in prices_read.cards.items():
        try:
            card = find_card(name)
        except KvyardError as error:
            raise KvyardError(f"--prices {path}: {error}") from None
        if not 0 < price < float("inf"):
            raise KvyardError(f"--prices {path}: {name} costs {price}: a price is a number above 0")
        prices[card.name] = price
    return msgspec.structs.replace(prices_read, cards=prices)
