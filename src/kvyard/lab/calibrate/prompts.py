"""Random prompts that no cache has seen: token ids if the engine accepts them, else text."""

import random

HIGH = (1000, 32_000)
"""Ids that are ordinary tokens of about every model."""
LOW = (100, 1000)
"""Ids that small vocabularies have too."""


class FreshPrompts:
    """Makes prompts in one way. Two are equal by accident only."""

    def __init__(self, ids: tuple[int, int] | None, seed: int) -> None:
        """``ids`` are the lowest and the one after the highest; ``None`` makes text."""
        self.ids = ids
        self._random = random.Random(seed)
        self._per_word = 3.0

    def make(self, length: int) -> list[int] | str:
        """Return a prompt of ``length`` tokens; as text, of about as many."""
        if self.ids is not None:
            return self._random.choices(range(*self.ids), k=length)
        words = max(1, round(length / self._per_word))
        return " ".join(f"{self._random.getrandbits(24):06x}" for _ in range(words))

    def learn(self, text: str, tokens: int) -> None:
        """Learn that ``text`` has ``tokens``."""
        self._per_word = max(1.0, tokens / (text.count(" ") + 1))
