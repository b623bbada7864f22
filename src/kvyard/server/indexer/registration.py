"""Registrations: whether one makes sense, what its streams are called, and which of them a request is about. Pure functions."""

from __future__ import annotations

import msgspec

from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import at_rank, check
from kvyard.server.http import Refusal
from kvyard.server.indexer.schemas import Register, Unregister


def stream_name(told: Register, rank: int) -> str:
    """A stream's name: equal registrations have equal names, on every replica."""
    who = f"pool {told.pool}" if told.pool is not None else f"{told.instance_id}@{rank}"
    return f"{told.model_name}/{told.tenant}/{who}/{told.stream}"


def check_registration(told: Register) -> None:
    """Raise ``Refusal``, naming the field, for what can't be listened to."""
    if (told.instance_id is None) == (told.pool is None):
        raise Refusal(
            422,
            "a stream speaks for one instance_id or for one pool",
            field="instance_id",
            fix="add instance_id" if told.pool is None else "leave out instance_id or pool",
        )
    if isinstance(told.instance_id, int) and told.instance_id >= 1 << 64:
        raise Refusal(422, "instance_id has more than 64 bits", field="instance_id", fix="send it as text")
    if told.pool is None and told.members:
        raise Refusal(422, "only a pool has members", field="members", fix="add pool, or leave members out")
    if told.pool is not None and told.dp_size > 1:
        raise Refusal(422, "a pool has no ranks", field="dp_size", fix="leave it out")
    if told.additional_salt:
        raise Refusal(
            422,
            "additional_salt has no effect on any engine's events, so it can't be honoured",
            field="additional_salt",
            fix="leave it out; workers that must not meet go to different routing groups",
        )
    if told.alignment is not None and told.groups is None:
        raise Refusal(422, "alignment belongs to groups", field="alignment", fix="add groups, or leave it out")
    for field in ("endpoint", "replay_endpoint"):
        value = getattr(told, field)
        if value is None:
            continue
        try:
            check(value)
            if value.startswith("inproc://"):
                raise KvyardError(f"{value!r} is inside another process: use tcp or ipc")
            at_rank(value, told.dp_size - 1)
        except KvyardError as error:
            raise Refusal(400, str(error), field=field, fix="write tcp://HOST:PORT") from None


def for_rank(told: Register, rank: int, offset: int) -> Register:
    """The registration of one rank, with its own ports."""
    replay = None if told.replay_endpoint is None else at_rank(told.replay_endpoint, offset)
    return msgspec.structs.replace(
        told, endpoint=at_rank(told.endpoint, offset), replay_endpoint=replay, dp_rank=rank, dp_size=1
    )


def matches(have: Register, told: Unregister) -> bool:
    """Whether ``told`` is about the stream that was registered as ``have``."""
    if told.pool is not None:
        who = have.pool == told.pool
    else:
        assert told.instance_id is not None
        who = have.instance_id is not None and str(have.instance_id) == str(told.instance_id)
    return who and told.dp_rank in (None, have.dp_rank) and told.stream in (None, have.stream)


def called(told: Register | Unregister) -> str:
    """Who is meant, for messages."""
    return f"pool {told.pool!r}" if told.pool is not None else f"instance {told.instance_id}"
