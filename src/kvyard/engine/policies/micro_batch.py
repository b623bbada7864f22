"""The tokens of a pass: which requests that fit into the cache compute how many, as ``PyMicroBatchScheduler`` decides."""

from collections.abc import Sequence

from kvyard.engine.job import Job
from kvyard.engine.policies.settings import TrtllmSettings


class Context:
    """A prompt that fits into the cache."""

    __slots__ = ("begins", "chunk", "cost", "job", "left", "past", "reusable")

    def __init__(self, job: Job, past: int, reusable: int, begins: bool) -> None:
        self.job = job
        self.past = past
        """Tokens that are computed."""
        self.left = job.num_tokens - past
        self.reusable = reusable
        """Tokens that are expected to be cached, if the prompt ``begins``."""
        self.begins = begins
        self.chunk = self.left
        """Tokens of it in the pass, those that are cached included."""
        self.cost = self.price(self.left)
        """Tokens that are computed for that."""

    def price(self, chunk: int) -> int:
        """Return tokens that are computed for a chunk: what is cached moves a chunk, and shortens only the last one."""
        if self.reusable <= 0 or self.reusable + chunk < self.left:
            return chunk
        return max(0, self.left - self.reusable)


class MicroBatch:
    """Deals out the tokens of a pass."""

    def __init__(self, settings: TrtllmSettings, block_size: int, tokens: int, requests: int) -> None:
        """A pass has at most ``tokens`` tokens of ``requests`` requests."""
        self._tokens = tokens
        self._requests = requests
        self._chunked = settings.enable_chunked_prefill
        self._unit = settings.chunk_unit_size or block_size
        self._equal = settings.context_chunking_policy == "equal_progress"

    def form(self, fitting: Sequence[Job | Context]) -> tuple[list[Context], list[Job]]:
        """Return the prompts of the pass with their chunks, and the jobs that decode in it, out of those that fit."""
        contexts: list[Context] = []
        decoding: list[Job] = []
        tokens = 0
        for entry in fitting:
            if isinstance(entry, Job):
                if tokens + 1 > self._tokens:
                    break
                decoding.append(entry)
                tokens += 1
            else:
                if not self._chunked:
                    cost = max(1, entry.cost)
                    if tokens + cost > self._tokens:
                        break
                    tokens += cost
                contexts.append(entry)
            if len(contexts) + len(decoding) >= self._requests:
                break
        if self._chunked and contexts:
            room = self._tokens - tokens
            costs = [context.cost for context in contexts]
            if max(costs) > self._tokens or sum(costs) > room:
                if self._equal:
                    self._advance_equally(contexts, room)
                else:
                    self._advance_in_order(contexts, room)
                for context in contexts:
                    context.cost = context.price(context.chunk)
                contexts = [context for context in contexts if context.chunk > 0]
                # Prompts that go on come first, as things are before what is cached moves a chunk.
                contexts.sort(key=lambda context: context.chunk == context.left)
        return contexts, decoding

    def _advance_in_order(self, contexts: Sequence[Context], room: int) -> None:
        """Give each prompt as many units as it can take, one prompt after the other."""
        for context in contexts:
            chunk = context.left
            if room < context.price(chunk):
                chunk = room
            if context.price(chunk) > self._tokens:
                chunk = min(self._tokens, context.left)
            if chunk < context.left:
                chunk = chunk // self._unit * self._unit
            context.chunk = chunk
            room -= context.price(chunk)

    def _advance_equally(self, contexts: Sequence[Context], room: int) -> None:
        """Give all prompts one unit each, in turn."""
        for context in contexts:
            context.chunk = 0
        spent = 0
        advanced = 1
        while spent < room and advanced:
            advanced = 0
            for context in contexts:
                past = context.chunk
                chunk = min(past + self._unit, context.left)
                cost = context.price(chunk) - context.price(past)
                if spent + cost > room or chunk > self._tokens:
                    continue
                context.chunk = chunk
                spent += cost
                advanced += chunk - past
