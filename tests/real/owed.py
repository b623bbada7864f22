"""Traffic for a real engine whose hits are compared with those that ``kvyard.lab.expect`` says it owes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random

import msgspec

from kvyard.lab.expect import Expectation, expect
from kvyard.lab.expect.counted import Counted
from kvyard.lab.expect.traffic import Traffic
from kvyard.replay.traces import TraceRequest

VOCABULARY = range(10, 250)


class Planned(msgspec.Struct):
    """A request that is to be sent."""

    prompt: list[int]
    tokens: int
    salt: str | None = None
    abort: bool = False
    """Hang up after the first token."""


class Answered(msgspec.Struct):
    """Token ids of an answer, and the prompt tokens that the engine found."""

    tokens: list[int]
    cached: int | None


Send = Callable[[Planned], Answered]


def planned(
    count: int, block: int, longest: int, seed: int, *, salts: bool = True, aborts: bool = True
) -> Iterator[Planned]:
    """Chats that go on with the engine's answers, documents that come again, salts and clients that hang up.

    Send each before asking for the next: ``answered`` of a chat is in the prompt of its next turn.
    """
    random = Random(seed)

    def text(length: int) -> list[int]:
        return [random.choice(VOCABULARY) for _ in range(length)]

    systems = [text(5 * block // 2), text(block - 3), text(3 * block)]
    documents = [text(random.randrange(2 * block, 6 * block)) for _ in range(12)]
    chats: list[list[int]] = []
    for _ in range(count):
        salt = random.choice(["tenant-a", "tenant-b"]) if salts and random.random() < 0.15 else None
        kind = random.random()
        if kind < 0.45 and chats:
            chat = random.choice(chats[-8:])
            chat += text(random.randrange(3, 2 * block))
            if len(chat) > longest:
                chats.remove(chat)
                chat = list(random.choice(systems))
            yield Planned(chat, random.randrange(1, 12), salt)
        elif kind < 0.6:
            chats.append(random.choice(systems) + text(random.randrange(1, block)))
            yield Planned(chats[-1], random.randrange(1, 12), salt)
        elif kind < 0.9 or not aborts:
            yield Planned(random.choice(documents) + text(random.randrange(1, 2 * block)), random.randrange(1, 6), salt)
        else:
            # Its answer stays within the prompt's last block, however much of it is made before the engine notices.
            prompt = random.choice(documents) + text(random.randrange(1, 2 * block))
            prompt += text(1 + (-len(prompt)) % block)
            yield Planned(prompt, block // 2, salt, abort=True)


def compare(
    send: Send, plan: Iterator[Planned], settings: Mapping[str, object], page: Callable[[], Counted]
) -> tuple[Expectation, Expectation]:
    """Send ``plan`` request by request, and return what is expected beside counts by request and beside counters."""
    rows: list[TraceRequest] = []
    cached: dict[str, int] = {}
    before = page()
    for number, request in enumerate(plan):
        prompt = list(request.prompt)
        answer = send(request)
        name = f"r{number}"
        tokens = answer.tokens or [0]
        rows.append(
            TraceRequest(name, number, len(prompt), len(tokens), tokens=prompt, output_tokens=tokens, salt=request.salt)
        )
        if answer.cached is not None:
            cached[name] = answer.cached
        if not request.abort:
            request.prompt += answer.tokens  # of a chat: its next turn begins with it
    after = page().since(before)
    traffic = Traffic(name="real", requests=rows, cached={}, media={}, texts={}, notes=[])
    alone = {"concurrency": 1, "timing": "polynomial", **settings}
    by_request = expect(traffic, alone, Counted(source="answers", by_request=cached), tolerance=0.0)
    return by_request, expect(traffic, alone, after, tolerance=0.0)
