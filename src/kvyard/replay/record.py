"""The record of one request in a replay: times, tokens and outcome. Plain values, integer nanoseconds and tokens."""

import msgspec

from kvyard.replay.traces.request import TraceRequest

MISSES = ("none", "partial_block", "never_seen", "evicted", "left", "other_worker", "unknown")
"""Why a prefix found at admission ended where it did:

- ``none``: all of the prompt that could be cached was.
- ``partial_block``: the rest is less than a block, or the block that is always computed again.
- ``never_seen``: no worker of the fleet had computed the next block before.
- ``evicted``: this worker had it and has lost it.
- ``left``: a lower tier has it, and the load policy left it there.
- ``other_worker``: another worker has computed it, this one never.
- ``unknown``: the trace doesn't say what prompts share.
"""


class Stages(msgspec.Struct, gc=False, kw_only=True):
    """The way of a request from a prefill worker to a decode worker. Times as in ``Record``, in their order."""

    prefill_worker: str = ""
    held: int = -1
    """Time at which its prompt is computed; the blocks stay until they are elsewhere."""
    reserved: int = -1
    """The decode worker has room for them."""
    activated: int = -1
    """Time of their arrival."""
    entered: int = -1
    """The pass started that first decodes it."""
    released: int = -1
    """The prefill worker may evict them."""
    sent: int = 0
    """Bytes."""
    queued: int = 0
    """Nanoseconds that other transfers cost it."""


class Record(msgspec.Struct, gc=False, kw_only=True):
    """One request. Times are nanoseconds of the replay's clock, -1 where it never came to that."""

    request: TraceRequest
    """The request itself; of a record that was read back, as far as a row has it."""
    worker: str = ""
    arrival: int
    due: int = -1
    """Recorded time of a session's request that comes at one. Earlier requests of the session may delay it."""
    output: int = 0
    """Output tokens it got."""
    admitted: int = -1
    """Start of the pass that first computed something of it."""
    first_token: int = -1
    ended: int = -1
    status: str = ""
    """``finished``, ``rejected``, ``cancelled`` or ``failed``; empty while in flight."""
    reason: str = ""
    cached: int = 0
    """Prompt tokens found on the device at first admission."""
    loaded: tuple[int, ...] = ()
    """Prompt tokens loaded from lower tiers before it, closest to the device first."""
    pulled: int = 0
    """Tokens of those that another worker had."""
    miss: str = ""
    """Why the prefix ended that was found at first admission, in any tier; one of ``MISSES``."""
    lost: int = 0
    """Prompt tokens behind it that this worker had computed before, and has lost."""
    left: int = 0
    """Prompt tokens behind it that a lower tier has, and that were computed all the same."""
    elsewhere: int = 0
    """Prompt tokens behind those that only other workers had computed."""
    own: int = 0
    """Prompt tokens that earlier requests of its session had; -1 if that isn't known."""
    gone: int = 0
    """Prompt tokens of those, and of what this worker lost, that only workers had which were switched off since."""
    preemptions: int = 0
    loading: int = 0
    """Nanoseconds it waited for loads."""
    waited: int = 0
    """Nanoseconds that flow control held it back, before it was routed."""
    overlap: int = 0
    """Blocks of its prompt that the router believed the chosen worker to have."""
    best_overlap: int = 0
    """Blocks of its prompt that the router believed any worker to have, at most."""
    retries: int = 0
    """Number of times that it was routed again because its worker failed."""
    stages: Stages | None = None
    """Stages, if another worker computed its prompt."""

    def start_over(self) -> None:
        """Reset it: its worker failed, it is routed again, and none of its tokens count."""
        self.retries += 1
        self.admitted = self.first_token = -1
        self.stages = None

    @property
    def id(self) -> str:
        """Id of the request, unique in its trace."""
        return self.request.id

    @property
    def input(self) -> int:
        """Prompt tokens."""
        return self.request.input_length

    @property
    def wanted(self) -> int:
        """Output tokens the trace asks for."""
        return self.request.output_length

    @property
    def tenant(self) -> str:
        """Tenant; empty if the trace has none."""
        return self.request.tenant or self.request.salt or ""

    @property
    def prefilled_by(self) -> str:
        """The worker that computed its prompt, which may be another than the one that answered."""
        return self.worker if self.stages is None else self.stages.prefill_worker

    @property
    def ttft(self) -> int:
        """Nanoseconds to the first token, -1 if there was none."""
        return self.first_token - self.arrival if self.first_token >= 0 else -1
