"""One request of a trace, whatever file it came from. It knows no engine and no clock."""

from collections.abc import Sequence

import msgspec

from kvyard.blocks import NO_HINTS, Hints


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request.

    Its predecessors are the request before it in its ``session``, in the trace's order, and those named in ``after``. One
    without predecessors starts at its ``arrival``. One with a ``delay`` starts that long after the last of them ended, whatever
    its arrival. One with predecessors and no delay starts at its arrival, or when they have ended if that is later.

    A trace gives predecessors before those who wait for them, and requests without a delay in order of arrival.
    """

    id: str
    """Unique in the trace and the same each time it is read."""
    arrival: int
    """Nanoseconds since the trace began. For a request with a delay: when it came in the recording, 0 if unknown."""
    input_length: int
    """Tokens of the prompt, at least 1."""
    output_length: int
    """Tokens that were generated. 0 in a few recordings; an engine makes at least one."""
    ids: Sequence[int] | None = None
    """Shared prefixes of the prompt: one id per ``id_block_size`` tokens, the last block perhaps partial. Each names the
    prompt up to and including its block, so equal ids mean equal prefixes. None if unknown: share nothing."""
    id_block_size: int = 0
    tokens: Sequence[int] | None = None
    """The prompt's real tokens, where the trace has them. They say what is shared as ``ids`` do."""
    output_tokens: Sequence[int] | None = None
    """The generated tokens, likewise."""
    session: str | None = None
    delay: int | None = None
    """Nanoseconds of think time after the predecessors."""
    after: tuple[str, ...] = ()
    """Ids of further requests that must have ended: an agent waits for its sub-agents, a sub-agent for who called it."""
    priority: int = 0
    lora: str | None = None
    salt: str | None = None
    model: str | None = None
    root: str | None = None
    """Top session of those that called a sub-agent. None if ``session`` is the top itself."""
    tool_call: bool = False
    """True if its answer ended in a call of a tool, so that its session waits for that and not for a person."""
    tenant: str | None = None
    """Tenant, if the trace has it."""
    hints: Hints = NO_HINTS
    """Hints about the later use of its blocks, for engines that heed hints or evict by priority."""
    prefetch: bool = False
    """True if it repeats an earlier prompt so that its blocks are on the device when the next turn comes. Not counted."""
