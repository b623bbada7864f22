"""``uncached``: a prompt is handed over if the decode worker would have to compute ``tokens`` of it or more.

llm-d's ``prefix-based-pd-decider`` with its ``nonCachedTokens``, 512 in its example.
"""

from collections.abc import Mapping
from typing import ClassVar

from kvyard.router.deciders import Decider, SplitInput


class Uncached(Decider):
    OPTIONS: ClassVar[Mapping[str, float]] = {"tokens": 512}

    def splits(self, at: SplitInput | None) -> bool:
        assert at is not None
        return at.decode.uncached >= self.options["tokens"]
