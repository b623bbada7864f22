"""What a live run leaves behind for virtual time to repeat: arrival stamps by engine, the router's journal, what was asked.

These are inputs. What was decided, the live log, is beside them only to be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvyard.engine.job import Job
from kvyard.router.entries import AnyEntry
from kvyard.server.gateway.config import GatewayConfig
from kvyard.server.mock.config import MockConfig
from kvyard.server.rehearsal.log import Log, request_of


class EngineAction(msgspec.Struct, frozen=True, gc=False):
    """Something that was asked of an engine, with the stamp it got on receipt."""

    stamp: int
    what: str
    """``submit`` or ``cancel``."""
    job: str
    request: str
    rank: int
    max_tokens: int
    priority: int

    @classmethod
    def of(cls, stamp: int, what: str, job: Job, rank: int) -> EngineAction:
        """That of a mock's journal."""
        return cls(stamp, what, job.id, request_of(job), rank, job.max_tokens, job.priority)


class RecordedPrompt(msgspec.Struct, frozen=True, gc=False):
    """What a request asked, and who for."""

    tokens: Sequence[int]
    salt: str | None = None
    session: str | None = None


class LiveRecording(msgspec.Struct, kw_only=True):
    """One live run."""

    fleet: MockConfig
    gateway: GatewayConfig
    entries: list[AnyEntry]
    """The router's journal."""
    actions: list[list[EngineAction]]
    """By worker, in the order in which they were carried out."""
    answers: dict[str, list[int]]
    """What each job produced, by its id: a mock's words are an input too."""
    log: Log
    first: dict[str, int]
    """When each request's first token was out, by the engine's clock."""
    last: dict[str, int]
    """And its last."""
