"""Answers of the mock: generated, and equal for equal prompt, seed and choice.

An answer is generated whole when its request arrives, so that its length is known to the scheduler: where it ends by itself,
where a stop string cuts it, or where ``max_tokens`` does. Its tokens then come at the engine's pace.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import xxhash

from kvyard.server.tokens import Tokenizer

WORDS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()
SPREAD = 0.6
"""Of the logarithm of lengths."""
DEEPEST = 6
MOST_CHARACTERS = 20_000


class AnswerWish(msgspec.Struct, frozen=True, kw_only=True):
    """Requested properties of an answer."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    keeps_stop: bool = False
    """True if the stop string is part of the answer."""
    schema: Any = None
    """The JSON schema that the answer follows, if it isn't words."""
    tool: str | None = None
    """The tool that it calls."""


class MadeAnswer(msgspec.Struct, eq=False):
    """One answer: its ids, and its text as far as it is asked for."""

    ids: Sequence[int]
    finish: str
    """``stop`` or ``length``."""
    pieces: Iterator[str]
    """Text that each token adds."""
    tool: str | None = None
    ended_by: str | int | None = None
    """The stop string or token that did."""
    limit: int | None = None
    """Characters to show, where a stop string ends it."""
    shown: int = 0

    def next_piece(self) -> str:
        """Return the text that the next token adds to the visible answer."""
        text = next(self.pieces)
        self.shown += len(text)
        if self.limit is not None and self.shown > self.limit:
            text = text[: max(0, len(text) - (self.shown - self.limit))]
        return text


def compose(
    prompt: Sequence[int], wish: AnswerWish, tokenizer: Tokenizer, *, mean: int, seed: int, name: str
) -> MadeAnswer:
    """Return the answer to ``prompt``. ``name`` stands for all else that makes it another one: model, adapter, seed, choice."""
    try:
        raw = array("I", prompt).tobytes()
    except OverflowError:
        raw = repr(list(prompt)).encode()
    random = Random(xxhash.xxh3_64_intdigest(raw + name.encode("utf-8", "surrogatepass"), seed))
    if wish.schema is not None:
        ids = tokenizer.encode(json_text(wish.schema, random), special=False) or [32]
        natural = len(ids)
    else:
        natural = max(1, round(random.lognormvariate(log(mean) - SPREAD * SPREAD / 2, SPREAD)))
        natural = max(natural, wish.min_tokens)
        wanted = wish.max_tokens if wish.ignore_eos else min(natural, wish.max_tokens)
        ids = _words(wanted, random, tokenizer)
        if wish.ignore_eos:
            natural = wish.max_tokens + 1
    finish = "stop" if natural <= wish.max_tokens else "length"
    ids = ids[: wish.max_tokens]
    by: str | int | None = None
    for index, token in enumerate(ids[wish.min_tokens :] if wish.stop_token_ids else ()):
        if token in wish.stop_token_ids:
            ids, finish, by = ids[: wish.min_tokens + index + 1], "stop", token
            break
    answer = MadeAnswer(ids, finish, tokenizer.pieces(ids), wish.tool, by)
    return _stopped(answer, wish, tokenizer) if wish.stop else answer


def _words(count: int, random: Random, tokenizer: Tokenizer) -> list[int]:
    """Return at least ``count`` tokens of prose, cut there."""
    ids: list[int] = []
    first = True
    while len(ids) < count:
        words = [random.choice(WORDS) for _ in range(random.randrange(5, 14))]
        text = " ".join(words).capitalize() + "."
        ids += tokenizer.encode(text if first else f" {text}", special=False)
        first = False
    return ids[:count]


def _stopped(answer: MadeAnswer, wish: AnswerWish, tokenizer: Tokenizer) -> MadeAnswer:
    """Return ``answer`` up to the token that completes the first stop string."""
    text = ""
    longest = max(map(len, wish.stop))
    for index, piece in enumerate(tokenizer.pieces(answer.ids)):
        begin = max(0, len(text) - longest + 1)
        text += piece
        if index + 1 <= wish.min_tokens:
            continue
        stops = [(where, stop_text) for stop_text in wish.stop if (where := text.find(stop_text, begin)) >= 0]
        if stops:
            where, stop_text = min(stops)
            ids, limit = answer.ids[: index + 1], where + (len(stop_text) if wish.keeps_stop else 0)
            return MadeAnswer(ids, "stop", tokenizer.pieces(ids), answer.tool, stop_text, limit)
    return answer


# -- JSON -----------------------------------------------------------------------------------------------------------------


def json_text(schema: object, random: Random) -> str:
    """Return a value that follows ``schema``, as far as the mock reads schemas, as JSON."""
    root = schema if isinstance(schema, Mapping) else {}
    text = msgspec.json.encode(_value(root, root, random, 0)).decode()
    return text if len(text) <= MOST_CHARACTERS else "{}"


def _value(schema: object, root: Mapping[str, Any], random: Random, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return None
    if isinstance(schema.get("$ref"), str):
        return _value(_referred(schema["$ref"], root), root, random, depth + 1)
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return random.choice(schema["enum"])
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            return _value(schema[word][0], root, random, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind is None and "properties" in schema:
        kind = "object"
    if kind == "object":
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return {}
        return {
            str(name): _value(subschema, root, random, depth + 1) for name, subschema in list(properties.items())[:32]
        }
    if kind == "array":
        count = min(8, max(1, _whole(schema.get("minItems"), 1)))
        return [_value(schema.get("items", {"type": "string"}), root, random, depth + 1) for _ in range(count)]
    if kind in ("integer", "number"):
        low = _whole(schema.get("minimum"), 0)
        return random.randint(low, max(low, _whole(schema.get("maximum"), low + 100)))
    if kind == "boolean":
        return random.random() < 0.5
    if kind == "null":
        return None
    return " ".join(random.choice(WORDS) for _ in range(3))


def _whole(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < 1 << 53 else default


def _referred(name: str, root: Mapping[str, Any]) -> object:
    schema: object = root
    for part in name.removeprefix("#").strip("/").split("/"):
        if not isinstance(schema, Mapping):
            return None
        schema = schema.get(part)
    return schema
