"""The gateway before real engines: what it says is cached is what the engine finds, to the token."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.real.engine import DENSE, HYBRID, NAME, ROOT, Engines, RealEngine
from tests.real.promises import EVICTED, ON_THE_WAY, Asker
from tests.real.watching import EventWatch
from tests.server.gateway.support import Gated, eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = (ROOT / "LICENSE").read_text().split()
THREADS = 4
LEAST = 0.97
"""The share of promises that have to be exact."""


@contextlib.contextmanager
def gate(engines: list[RealEngine], **settings: Any) -> Iterator[tuple[Gated, Asker]]:
    """A gateway before ``engines``, ready, with watchers of their events."""
    size = engines[0].settings.block_size
    listed = [
        {
            "url": engine.url,
            "name": f"e{number}",
            "events": engine.endpoint,
            "replay": engine.replay_endpoint,
            "block_size": size,
        }
        for number, engine in enumerate(engines)
    ]
    with contextlib.ExitStack() as stack:
        watches = {f"e{number}": stack.enter_context(EventWatch(one.endpoint)) for number, one in enumerate(engines)}
        gated = stack.enter_context(Gated(engines=listed, tokenizer="engine", **settings))
        # A stream that nothing came from yet is as good as known: the engine has nothing cached, or says so when asked.
        for engine in engines:
            engine.complete([1] * (size + 1), max_tokens=1)
        gated.ready(len(engines), len(engines))
        asker = Asker(gated.url, size, watches)
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
    assert tally["exact"] >= LEAST * tally["requests"], odd
    assert not [one for one in odd if one.promised > one.delivered and one.why not in (EVICTED, ON_THE_WAY)], odd
    assert not tally["under"], odd


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
