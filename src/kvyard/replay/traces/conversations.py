"""Conversations: which requests of a trace belong together, for traces that say so and for those that don't.

Where requests have sessions, those are the conversations. Elsewhere the prompts tell: a turn's prompt begins with all that was
said before. Many conversations begin with the same text, though, a system prompt or a document. So what prompts share up to
the last block from which they go on in many ways is taken as common, and all prompts with the same block behind it are one
conversation.
"""

from collections.abc import Iterable, Sequence

from kvyard.replay.traces.identity import TOKEN_BLOCK, prefix_ids
from kvyard.replay.traces.request import TraceRequest

WAYS = 16
"""Number of continuations from which on a block is common to conversations. Within one, answers that are asked for again
and turns that end inside a block make a few: 11 at most in Mooncake's conversation trace, where the common block has 7,373."""


def conversations(requests: Iterable[TraceRequest], token_block: int = TOKEN_BLOCK) -> list[str]:
    """Return the name of each request's conversation, in the trace's order. Iterates twice.

    A request of which nothing is known, or whose prompt is common to the end, is a conversation of its own.
    """
    followers: dict[int, set[int]] = {}
    for request in requests:
        if request.hints.session or request.session is not None:
            continue
        ids = prefix_ids(request, token_block)[0] or ()
        for index in range(len(ids) - 1):
            after = followers.setdefault(ids[index], set())
            if len(after) < WAYS:
                after.add(ids[index + 1])
    common = {id_ for id_, after in followers.items() if len(after) >= WAYS}
    names: list[str] = []
    for request in requests:
        name = request.hints.session or request.session
        names.append(_name(request, common, token_block) if name is None else name)
    return names


def _name(request: TraceRequest, common: set[int], token_block: int) -> str:
    ids: Sequence[int] = prefix_ids(request, token_block)[0] or ()
    index = next((index for index in range(len(ids) - 1, -1, -1) if ids[index] in common), -1) + 1 if common else 0
    return f"prefix {ids[index]}" if index < len(ids) else f"request {request.id}"
