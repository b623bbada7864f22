"""``uncached``: a prompt is handed over if the decode worker would have to compute ``tokens`` of it or more.

llm-d's ``prefix-based-pd-decider`` with its ``nonCachedTokens``, 512 in its example.
"""

from typing import ClassVar

from kvyard.registry import Option, Options
from kvyard.router.deciders import Decider, SplitInput


class Uncached(Decider):
    OPTIONS: ClassVar[Options] = {
        "tokens": Option(512, "Tokens to compute from which on a prompt is handed over."),
    }

    def splits(self, split: SplitInput | None) -> bool:
        assert split is not None
        return split.decode.uncached >= self.options["tokens"]
