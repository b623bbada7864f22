"""A request as flow control knows it. Plain values."""

import msgspec


class FlowRequest(msgspec.Struct, frozen=True, gc=False):
    """A request before it is routed."""

    id: object
    arrival: int
    """Nanoseconds of the caller's clock."""
    tokens: int = 0
    """Tokens of its prompt; 0 if the prompt wasn't read."""
    output: int | None = None
    """Tokens of its answer, if that is known beforehand."""
    session: str | None = None
    """The conversation, or the agent with its sub-agents."""
    tenant: str = ""
    """Tenant; empty if unknown."""
    priority: int = 0
    """Priority as in vLLM: smaller ones go first."""
    deadline: int | None = None
    """Deadline of its first token, if its client gives one; nanoseconds."""
