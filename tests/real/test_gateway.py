"""The gateway before real engines: what it says is cached is what the engine finds, to the token."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.real.engine import DENSE, HYBRID, NAME, ROOT, Engines, RealEngine
from tests.real.promises import ANNOUNCED, AT_ONCE, EVICTED, ON_THE_WAY, PROMPT_FIRST, Asker
from tests.real.watching import EventWatch
from tests.server.gateway.support import Gated
from tests.waiting import eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = (ROOT / "LICENSE").read_text().split()
THREADS = 4
LEAST = 0.97
"""The share of promises that have to be exact."""


@contextlib.contextmanager
def gate(engines: Sequence[RealEngine], asks: type[Asker] = Asker, **settings: Any) -> Iterator[tuple[Gated, Asker]]:
    """A gateway before ``engines``, ready, with watchers of their events; ``asks`` sends requests through it."""
    size = engines[0].settings.block_size
    listed = [
        {
            "url": engine.url,
            "name": f"e{number}",
            "events": engine.endpoint,
            "replay": engine.replay_endpoint,
            "block_size": size,
            **engine.facts(),
        }
        for number, engine in enumerate(engines)
    ]
    with contextlib.ExitStack() as stack:
        watches = {f"e{number}": stack.enter_context(EventWatch(one.endpoint)) for number, one in enumerate(engines)}
        gated = stack.enter_context(Gated(engines=listed, **{"tokenizer": "engine", **settings}))
        # A stream that nothing came from yet is as good as known: the engine has nothing cached, or says so when asked.
        for engine in engines:
            engine.complete([1] * (size + 1), max_tokens=1)
        gated.ready(len(engines), len(engines))
        asker = asks(gated.url, size, watches)
        try:
            yield gated, asker
        finally:
            asker.client.close()


def text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


class Load:
    """Sessions of all kinds, each with its own seed, so that a run can be repeated."""

    def __init__(self, asker: Asker, loras: tuple[str, ...] = ()) -> None:
        self.asker, self.loras = asker, loras
        self.systems = [text(random.Random(number), 150) for number in range(5)]
        self.documents = [[random.Random(100 + number).randrange(3, 1000) for _ in range(400)] for number in range(4)]

    def conversation(self, seed: int, **more: Any) -> None:
        """Four turns that share a beginning with other sessions."""
        chance = random.Random(seed)
        kind = "chat, streamed" if more.get("stream") else "chat"
        kind += ", salt" if "cache_salt" in more else ", LoRA" if "model" in more else ""
        messages = [{"role": "system", "content": self.systems[seed % 5]}]
        for _ in range(4):
            messages.append({"role": "user", "content": text(chance, chance.randint(10, 60))})
            answer = self.asker.ask(kind, CHAT, messages=messages, **more)
            said = answer["choices"][0]["message"]["content"] if answer["choices"] else text(chance, 8)
            messages.append({"role": "assistant", "content": said or "so"})

    def streamed(self, seed: int) -> None:
        self.conversation(seed, stream=True)

    def salted(self, seed: int) -> None:
        self.conversation(seed, cache_salt=f"tenant {seed % 3}")

    def adapted(self, seed: int) -> None:
        self.conversation(seed, model=self.loras[seed % len(self.loras)] if self.loras else NAME)

    def texts(self, seed: int) -> None:
        """Plain text that grows."""
        chance = random.Random(seed)
        prompt = self.systems[seed % 5]
        for _ in range(4):
            prompt += " " + text(chance, chance.randint(5, 60))
            self.asker.ask("text", COMPLETIONS, prompt=prompt, add_special_tokens=bool(seed % 2))

    def ids(self, seed: int) -> None:
        """Token ids, alone and in lists; of several prompts the engine reports the last one's hit."""
        chance = random.Random(seed)
        document = self.documents[seed % 4]
        ask = self.asker.ask
        prompt = document + [chance.randrange(3, 1000) for _ in range(chance.randint(1, 100))]
        ask("ids", COMPLETIONS, prompt=prompt)
        ask("ids", COMPLETIONS, prompt=prompt + [5] * chance.randint(1, 80))
        ask("list of one", COMPLETIONS, prompt=[document + [7] * chance.randint(1, 10)])
        both = [document + [chance.randrange(3, 1000) for _ in range(10)] for _ in range(2)]
        ask("list of two", COMPLETIONS, prompt=both)

    def several(self, seed: int) -> None:
        """``n`` answers to a prompt that is there: to one that isn't, the engine reports what the first answer left."""
        document = self.documents[seed % 4]
        self.asker.ask("ids", COMPLETIONS, prompt=document)
        self.asker.ask("n", COMPLETIONS, prompt=document, n=3, temperature=0.7)

    def left(self, seed: int) -> None:
        """A stream that is cancelled, and its prompt again."""
        chance = random.Random(seed)
        prompt = [chance.randrange(3, 1000) for _ in range(chance.randint(150, 400))]
        self.asker.cancel(COMPLETIONS, chance.randint(1, 6), prompt=prompt)
        self.asker.ask("after a cancel", COMPLETIONS, prompt=prompt)

    def refused(self, seed: int) -> None:
        """A prompt that the engine refuses, and then takes."""
        chance = random.Random(seed)
        prompt = [chance.randrange(3, 1000) for _ in range(chance.randint(100, 300))]
        self.asker.refuse(COMPLETIONS, prompt=prompt)
        self.asker.ask("after a refusal", COMPLETIONS, prompt=prompt)

    def run(self, rounds: int) -> None:
        """``rounds`` of all kinds, some at a time."""
        kinds: list[Callable[[int], None]] = [
            *(self.conversation, self.ids, self.streamed, self.texts, self.salted),
            *(self.left, self.refused, self.several),
            *([self.adapted] if self.loras else []),
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = [pool.submit(kinds[number % len(kinds)], number) for number in range(rounds * len(kinds))]
            for job in jobs:
                job.result()


def judge(asker: Asker, keep: Callable[[str, Any], None], name: str) -> None:
    """Hold what came of it against what must."""
    tally = asker.tally()
    keep(name, tally)
    odd = [one for one in asker.promises if not one.exact]
    # What an engine has announced and no reader has read yet, on a busy machine, can't be known here: those aren't counted.
    under_way = [one for one in odd if one.why in (ON_THE_WAY, ANNOUNCED)]
    assert tally["exact"] >= LEAST * (tally["requests"] - len(under_way)), odd
    assert len(under_way) < 0.2 * tally["requests"], odd
    assert not [one for one in odd if one.promised > one.delivered and one.why not in (EVICTED, ON_THE_WAY, AT_ONCE)], (
        odd
    )
    assert not [one for one in odd if one.promised < one.delivered and one.why not in (ANNOUNCED, PROMPT_FIRST)], odd


@pytest.mark.parametrize("settings", [DENSE, HYBRID], ids=["llama", "gemma3"])
def test_what_is_promised_is_delivered(
    engines: Engines, figures: Callable[[str, Any], None], settings: dict[str, Any]
) -> None:
    """Two engines whose hashes differ."""
    pair = [engines.get(**settings), engines.get(hash_algorithm="sha256", **settings)]
    with gate(pair) as (gated, asker):
        Load(asker, settings.get("lora", ())).run(20)
        gated.idle()
        judge(asker, figures, f"gateway, {settings['model']}")
        assert all(watch.removed for watch in asker.watches.values()), "they had room for everything"


def test_conversations_that_are_written_here(engines: Engines, figures: Callable[[str, Any], None]) -> None:
    """By the template and the tokenizer of the model's folder, of which engines are asked now and then."""
    pair = [engines.get(**DENSE), engines.get(hash_algorithm="sha256", **DENSE)]
    with gate(pair, tokenizer=str(pair[0].tokenizer.parent)) as (gated, asker):
        Load(asker, DENSE.get("lora", ())).run(8)
        gated.idle()
        judge(asker, figures, "gateway, by the model's folder")
        reader = next(iter(gated.gateway.members.pools.values())).reader
        assert reader.differed == 0 and reader.prompting.template is not None and reader.known.found > 0


def test_an_engine_that_is_killed_and_comes_back_empty(engines: Engines, figures: Callable[[str, Any], None]) -> None:
    """Its events start again at 0: what it had is forgotten, and promises are kept as before."""
    engine = engines.get(**DENSE)
    with gate([engine], queue_seconds=600.0) as (gated, asker):
        Load(asker, DENSE["lora"]).run(1)
        before = len(asker.promises)
        engine.kill()
        eventually(lambda: gated.engines()["e0"]["state"] == "down")
        engine.start()
        eventually(lambda: gated.engines()["e0"]["state"] == "ready")
        Load(asker, DENSE["lora"]).run(3)
        gated.idle()
        judge(asker, figures, "gateway, killed with -9")
        first = asker.promises[before]
        assert (first.promised, first.delivered) == (0, 0)


TEMPLATE = """{{ documents | tojson if documents else '' }} {{ 'effort ' + reasoning_effort if reasoning_effort else '' }}
{{ 'think ' * 30 if enable_thinking else 'do not ' * 30 }}
{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}
{{ 'assistant: ' if add_generation_prompt else '' }}"""


def test_unusual_requests_are_promised_what_they_get(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, figures: Callable[[str, Any], None]
) -> None:
    """What a template is given, what reads no cache, what is cut off; and an engine that is known by its URL alone."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    engine = engines.get(flags=("--chat-template", str(template)))
    size = engine.settings.block_size
    chance = random.Random(77)
    with (
        EventWatch(engine.endpoint) as watch,
        Gated(engines=[{"url": engine.url, "name": "e0"}], tokenizer="engine", block_size=size) as gated,
    ):
        engine.complete([1] * (size + 1), max_tokens=1)
        gated.ready(1, 1)  # its stream was found by asking the engine
        asker = Asker(gated.url, size, {"e0": watch})
        chats: dict[str, dict[str, Any]] = {
            "plain chat": {},
            "reasoning_effort": {"reasoning_effort": "high"},
            "no reasoning": {"reasoning_effort": "none"},
            "enable_thinking": {"chat_template_kwargs": {"enable_thinking": True}},
            "documents": {"documents": [{"title": "a", "text": text(chance, 60)}]},
            "add_special_tokens": {"add_special_tokens": True},
            "prompt_logprobs": {"prompt_logprobs": 1},
            "truncated chat": {"truncate_prompt_tokens": 200},
        }
        prompts: dict[str, dict[str, Any]] = {
            "echo with logprobs": {"echo": True, "logprobs": 1},
            "echo": {"echo": True},
            "truncated": {"truncate_prompt_tokens": 150},
            "truncated on the right": {"truncate_prompt_tokens": 150, "truncation_side": "right"},
        }
        for turn in range(3):
            for kind, more in chats.items():
                said = [{"role": "user", "content": f"{kind}: " + text(random.Random(kind), 150)}]
                asker.ask(kind, CHAT, messages=said, **more)
            for kind, more in prompts.items():
                ids = [random.Random(f"{kind} {at}").randrange(3, 1000) for at in range(400)]
                asker.ask(kind, COMPLETIONS, prompt=ids, **more)
            if not turn:
                eventually(lambda: all(not pool.router.loads.active for pool in gated.gateway.members.pools.values()))
        tally = asker.tally()
        asker.client.close()
    figures("unusual requests", tally)
    reused = {one.kind for one in asker.promises if one.delivered}
    assert reused >= {*chats, *prompts} - {"prompt_logprobs", "echo with logprobs"}, reused
    assert tally["exact"] >= LEAST * tally["requests"], tally["odd"]
