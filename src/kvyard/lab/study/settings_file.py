"""Settings that a study chose, as a TOML file that ``kvyard replay`` and ``kvyard gateway`` both read.

The router has a table of its own, which both read. The fleet is in ``[replay]``, which the gateway ignores, since its engines
exist already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvyard.events.tier import LOWER_TIERS
from kvyard.lab.study.cost import Prices
from kvyard.replay.settings import SETTINGS
from kvyard.router import RouterConfig
from kvyard.settings import settings_of


def as_toml(command: str, sentences: Sequence[str], settings: Mapping[str, object], prices: Prices) -> str:
    """Return the file's text for flat ``settings``, which ``command`` chose; ``sentences`` are its comments."""
    router = settings_of(RouterConfig)
    named = SETTINGS.named(settings)
    own = {router[name].field: value for name, value in named.items() if name in router}
    policy = own.pop("policy", RouterConfig().policy)
    rest = {name: value for name, value in named.items() if name not in router and value is not None}
    kinds = rest.pop("workers", None)
    if not isinstance(kinds, list | tuple) and not rest.keys() & {"prefill", "decode"}:
        rest = {"workers": kinds if kinds is not None else 8, **rest}
    tiers = ", ".join(f"{getattr(prices, tier.label):g} a GiB of {tier.place}" for tier in LOWER_TIERS)
    priced = f"Prices per hour: {prices.card:g} a card, {tiers}"
    lines = [f"# {' '.join(sentence.splitlines())}" for sentence in (*sentences, priced)]
    lines += ["", "[router]", f"policy = {_value(policy)}"]
    lines += [f"{name} = {_value(router_value(name, value))}" for name, value in own.items() if value is not None]
    lines += ["", "[replay]  # kvyard gateway passes over this"]
    lines += [f"{name} = {_value(_typed(name, value))}" for name, value in rest.items()]
    for kind in kinds if isinstance(kinds, list | tuple) else ():
        lines += ["", "[[replay.workers]]", *(f"{name} = {_value(value)}" for name, value in kind.items())]
    lines += ["", f"[prices]  # per hour; kvyard {command} alone reads this"]
    lines += [f"{name} = {_value(getattr(prices, name))}" for name in prices.__struct_fields__]
    return "\n".join(lines) + "\n"


def router_value(field: str, value: object) -> object:
    """Return a router's setting as its configuration has it: text from the command line becomes a value."""
    router = settings_of(RouterConfig)
    return next(setting.parse(name, value) for name, setting in router.items() if setting.field == field)


def _typed(name: str, value: object) -> object:
    """Return text from the command line as the number or truth value that it is; sizes and times stay as people write them."""
    if not isinstance(value, str) or name not in SETTINGS:
        return value
    if name == "workers" and value.isdecimal():
        return int(value)  # in a file it may be tables, too
    parsed = SETTINGS.parse({name: value}).get(name)
    plain = isinstance(parsed, bool) or (isinstance(parsed, int | float) and not value.strip()[-1:].isalpha())
    return parsed if plain else value


def _value(value: object) -> str:
    """Return TOML for a plain value."""
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_key(name)} = {_value(entry)}" for name, entry in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML string, but for DEL, which nobody writes.
    return json.dumps(str(value), ensure_ascii=False)


def _key(name: object) -> str:
    text = str(name)
    return text if text.replace("_", "").replace("-", "").isalnum() and text.isascii() else json.dumps(text)
