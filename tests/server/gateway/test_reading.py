"""Prompts read from where their beginnings are known: the same names and tokens as if they were read whole."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from kvyard import openai
from kvyard.hashing import PLAIN, Namespace
from kvyard.index import Identity
from kvyard.server.gateway import prefixes, reading
from kvyard.server.gateway.prefixes import OVERHEAD, KnownPrefixes, KnownRun
from kvyard.server.gateway.prompting import Prompting, read_body
from kvyard.server.gateway.reading import PromptReader, ReadPrompt
from kvyard.server.indexer.names import LocalNames
from kvyard.server.tokens import ByteTokenizer, FileTokenizer, Tokenizer, render

IDENTITY = Identity(4, LocalNames())
README = Path(__file__).parents[3] / "README.md"
LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


async def nobody(body: dict[str, Any]) -> list[int] | None:
    raise AssertionError("no engine is asked")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes tokenizers as models have them, trained on the README, with a rule for words and special tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")

    def make(rule: str | None = LLAMA, **how: Any) -> str:
        pre, models = tokenizers.pre_tokenizers, tokenizers.models
        made = tokenizers.Tokenizer(models.BPE())
        if rule is None:
            made.pre_tokenizer = pre.Metaspace()
        elif rule == "gpt2":
            made.pre_tokenizer = pre.ByteLevel(add_prefix_space=how.get("prefix_space", False))
        else:
            split = pre.Split(tokenizers.Regex(rule), "isolated")
            made.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
        special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=700, special_tokens=special, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
        )
        made.train([str(README)], trainer)
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", made.token_to_id("<|begin|>"))]
        )
        if how.get("rstrip"):
            made.add_special_tokens([tokenizers.AddedToken("<|odd|>", rstrip=True)])
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        made.save(str(path))
        return str(path)

    return make


def text(rng: random.Random, length: int) -> str:
    """Return text that tokenizers stumble over: runs of spaces and lines, digits, contractions, marks, letters of all kinds."""
    words = [
        "the",
        "cache",
        "it's",
        "don't",
        "12345",
        "x1",
        "é",
        "日本語",
        "🙂",
        "a\u0301",
        "...",
        "--",
        "<|im_end|>",
        "{}",
        "\\n",
    ]
    joints = [" ", " ", " ", " ", "  ", "\n", "\n\n", " \n ", "\t", "", "   \n\n  ", "\u00a0"]
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        parts += [rng.choice(words), rng.choice(joints)]
    return "".join(parts)


def slow(tokens: list[int], namespace: Namespace = PLAIN) -> tuple[list[int], int, list[int]]:
    """The plain way: all tokens, all names."""
    keys = IDENTITY.keys(tokens, namespace)
    return keys, len(tokens), tokens[len(keys) * IDENTITY.block_size :]


def seen(found: ReadPrompt) -> tuple[list[int], int, list[int]]:
    return list(found.keys), found.tokens, list(found.tail or ())


def read(reader: PromptReader, path: str, namespace: Namespace = PLAIN, **body: Any) -> ReadPrompt:
    async def scenario() -> ReadPrompt:
        asked = read_body(path, json.dumps(body).encode())
        found = await reader.read(asked, namespace, lambda tokens: tokens > 100_000)
        await asyncio.gather(*reader._checking)
        return found

    return asyncio.run(scenario())


@pytest.fixture(params=[(16, 32_768), (20, 50), (300, 500)], ids=str, autouse=True)
def short_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of which some end inside a block, and names of one or of several runs at once."""
    run, turn = request.param
    for module in (prefixes, reading):
        monkeypatch.setattr(module, "RUN_BYTES", run)
    monkeypatch.setattr(reading, "TURN", turn)


def growing(rng: random.Random, count: int) -> list[str]:
    """Texts that go on from earlier ones, or leave them somewhere."""
    texts = [text(rng, 100)]
    for _ in range(count):
        base = rng.choice(texts)
        kept = rng.randrange(len(base) + 1) if rng.random() < 0.5 else len(base)
        texts.append(base[:kept] + text(rng, rng.randrange(20, 300)))
    return texts


@pytest.mark.parametrize("limit", [0, 6000, 64 << 20])
def test_bytes(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if prefixes.RUN_BYTES == 20:
        monkeypatch.setattr(reading, "RUN_BYTES", 21)  # they may be cut anywhere
    rng = random.Random(limit)
    reader = PromptReader(Prompting("bytes", nobody), IDENTITY, limit)
    for number, one in enumerate(growing(rng, 30)):
        space = [Namespace(), Namespace(salt="s"), Namespace(lora_name="a"), Namespace(salt="a")][number % 4]
        tokens = ByteTokenizer().encode(one)
        assert seen(read(reader, openai.COMPLETIONS, space, prompt=one)) == slow(tokens, space)
        messages = [{"role": "user", "content": one}]
        chat = ByteTokenizer().encode(render(messages))
        assert seen(read(reader, openai.CHAT, space, messages=messages)) == slow(chat, space)
        assert reader.known.held <= limit
    assert (reader.known.found > 0) == (limit > 6000) or limit == 6000


@pytest.mark.parametrize("spaced", [False, True])
def test_token_ids(spaced: bool) -> None:
    """As JSON they are cut at commas, and as an engine's /tokenize gives them at every so many."""
    rng = random.Random(spaced)

    async def engine(body: dict[str, Any]) -> list[int] | None:
        return [ord(one) for one in body["prompt"]]

    reader = PromptReader(Prompting("engine", engine), IDENTITY, 1 << 20)
    prompts = [[rng.randrange(1 << 17) for _ in range(300)]]
    for _ in range(40):
        base = rng.choice(prompts)
        prompts.append(base[: rng.randrange(1, 300)] + [rng.randrange(1 << 17) for _ in range(rng.randrange(200))])
    for one in prompts:
        separators = (", ", ": ") if spaced else (",", ":")
        body = json.dumps({"prompt": one}, separators=separators).encode()
        found = asyncio.run(reader.read(read_body(openai.COMPLETIONS, body), Namespace(), lambda _: False))
        assert seen(found) == slow(one)
        letters = "".join(chr(97 + token % 26) for token in one)
        assert seen(read(reader, openai.COMPLETIONS, prompt=letters)) == slow([ord(letter) for letter in letters])
    assert reader.known.found > 0
    for odd in ([1, "a"], [1, [2]], [-1, 2], [1 << 40], [1.5], [True]):
        found = read(reader, openai.COMPLETIONS, prompt=odd)
        assert not found.keys


@pytest.mark.parametrize("rule", ["gpt2", LLAMA])
def test_a_tokenizer_of_words(byte_level: Any, rule: str) -> None:
    rng = random.Random(7)
    path = byte_level(rule)
    tokenizer = FileTokenizer(path)
    reader = PromptReader(Prompting(path, nobody), IDENTITY, 1 << 20)
    for one in growing(rng, 60):
        for special in (True, False):
            expected = slow(tokenizer.encode(one, special))
            assert seen(read(reader, openai.COMPLETIONS, prompt=one, add_special_tokens=special)) == expected
    assert reader.known.found > 1000 and reader.differed == 0


def test_tokenizers_that_look_further_read_whole_texts(byte_level: Any) -> None:
    for path in (
        byte_level(None),
        byte_level("gpt2", prefix_space=True),
        byte_level(rstrip=True),
        byte_level(r"[\s\S]+"),
    ):
        tokenizer = FileTokenizer(path)
        reader = PromptReader(Prompting(path, nobody), IDENTITY, 1 << 20)
        assert not reading.by_words(tokenizer)
        for one in growing(random.Random(1), 5):
            assert seen(read(reader, openai.COMPLETIONS, prompt=one)) == slow(tokenizer.encode(one))


class Surprising:
    """Says a word more where a text is long: no rule tells."""

    size = 300

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._inner.encode(text, special) + ([7] if len(text) > 500 else [])


def test_a_tokenizer_that_differs_is_found_out(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reading, "FIRST", 1000)
    path = byte_level()
    prompting = Prompting(path, nobody)
    reader = PromptReader(prompting, IDENTITY, 1 << 20)
    prompting.local = Surprising(prompting.local)  # type: ignore[arg-type]
    one = text(random.Random(2), 900)
    with caplog.at_level(logging.WARNING):
        read(reader, openai.COMPLETIONS, prompt=one)
    assert reader.differed == 1 and "tokenized whole from now on" in caplog.text
    assert seen(read(reader, openai.COMPLETIONS, prompt=one)) == slow(prompting.local.encode(one))


def test_prompts_that_match_nothing_have_no_keys() -> None:
    reader = PromptReader(Prompting("bytes", nobody), IDENTITY, 1 << 20)
    assert seen(read(reader, openai.COMPLETIONS, prompt="abcdef", prompt_logprobs=1)) == ([], 6, [])
    long = read(reader, openai.COMPLETIONS, prompt="x" * 100_001)
    assert not long.keys and long.tokens == 100_001
    assert seen(read(reader, openai.COMPLETIONS, prompt="abcdefgh", truncate_prompt_tokens=5)) == slow([*b"defgh"])
    several = read(reader, openai.COMPLETIONS, prompt=["abcd", "ef"])
    assert list(several.keys) == slow([*b"abcd"])[0] and several.tokens == 6 and not several.single


@pytest.mark.usefixtures("only_new_objects")
def test_what_is_held_of_a_long_prompt_is_nothing_to_search_for_garbage() -> None:
    """Of a list each number is looked at, which takes 5 ms for a million."""
    length = 12_001
    calls = itertools.count()

    async def engine(body: dict[str, Any]) -> list[int] | None:
        return list(range(length))

    def too_long(tokens: int) -> bool:
        if next(calls) % 100 == 0:  # a look passes over every object there is
            assert not [held for held in gc.get_objects() if type(held) in (list, tuple) and len(held) == length]
        return False

    reader = PromptReader(Prompting("engine", engine), IDENTITY, 1 << 20)
    body = read_body(openai.CHAT, b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}')
    found = asyncio.run(reader.read(body, PLAIN, too_long))
    assert list(found.keys) == IDENTITY.keys(range(length)) and list(found.tail or ()) == [length - 1]


def test_later_runs_are_evicted_first() -> None:
    known = KnownPrefixes(3 * OVERHEAD + 3 * 8)
    digests = known.digests(b"", [b"a", b"b", b"c"])
    known.add(digests, [KnownRun(b"12345678", at, ()) for at in range(3)])
    other = known.digests(b"other", [b"a", b"b", b"c"])
    assert not set(other) & set(digests)
    assert len(known.path(digests)) == 3
    known.add(other[:1], [KnownRun(b"12345678", 0, ())])
    assert len(known.path(digests)) == 2 and len(known.path(other)) == 1
    known.clear()
    assert known.held == 0 and not known.path(digests)


@pytest.mark.parametrize(
    "prompt", [[1, -1], [1, 2**40], [1, 2, 3, 4, 5, -1], [1, "a"], [1, None], [1, 1.5], [1, 2, 3, 4, {}]]
)
@pytest.mark.parametrize("whole", [False, True])
def test_what_are_no_token_ids_is_no_tail_to_be_recorded(prompt: list[Any], whole: bool) -> None:
    """The engine refuses it, and a recording, which names what is behind the last block, must not fail before."""

    async def scenario() -> ReadPrompt:
        reader = PromptReader(Prompting("bytes", nobody), IDENTITY, 1 << 20)
        return await reader.read(
            read_body(openai.COMPLETIONS, json.dumps({"prompt": prompt}).encode()), PLAIN, bool, whole
        )

    found = asyncio.run(scenario())
    assert (list(found.keys), found.tail) == ([], None)
