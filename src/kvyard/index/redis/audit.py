"""The audit: whether what is on the server agrees with itself and with the mirror. Reads every key of the epoch."""

from __future__ import annotations

from typing import Any

from kvyard.index.memory import MemoryIndex
from kvyard.index.places import bits
from kvyard.index.redis.pending import unpack
from kvyard.index.redis.session import ReplicaSession


def audit(session: ReplicaSession, mirror: MemoryIndex) -> None:
    """Raise ``AssertionError``, saying what is wrong, unless rows, sets, slots and mirror agree; ``Unavailable``."""
    directory = session.directory
    session.look(now=True)
    prefix = f"kvy:{session.epoch}".encode()
    found = {kind: _values(session, prefix + kind, command) for kind, command in ((b"r", "GET"), (b":p", "SMEMBERS"))}
    rows: dict[bytes, bytes] = found[b"r"]
    sets = {int(slot): set(keys) for slot, keys in found[b":p"].items()}
    slots = {int(slot) for slot in session.command("HKEYS", "dir")}
    retired = {int(slot) for slot in session.command("SMEMBERS", "retired")}
    free = {int(slot) for slot in session.command("SMEMBERS", "free")}
    used = int(session.command("GET", "next") or 0)
    assert not slots & retired and not (slots | retired) & free, "a slot is given out and free"
    assert slots | retired | free == set(range(used)), "a slot is lost"
    assert sets.keys() <= slots | retired, "a free slot holds something"
    for key, row in rows.items():
        assert row.strip(b"\0"), "a row of no slot"
        last = len(row) * 8 - 1
        held = {last - bit for bit in bits(int.from_bytes(row, "big"))}
        assert held == {slot for slot, keys in sets.items() if key in keys}, f"row {unpack(key)} and the sets differ"
    counted = int(session.command("GET", "rows") or 0)
    assert counted == len(rows), f"{counted} rows are counted but {len(rows)} are there"
    assert set().union(*sets.values()) == rows.keys(), "a set has a key without a row"
    here = {directory.name(place): {key for run in mirror.held(place) for key in run} for place in mirror.holding()}
    there = {known: {unpack(key) for key in sets.get(slot, ())} for slot, known in directory.slots.items()}
    for known in here.keys() | there.keys():
        if known[0] in session.tokens:
            mine, its = here.get(known, set()), there.get(known, set())
            assert mine == its, f"{known}: the server has {len(its)} keys, the mirror {len(mine)}"


def _values(session: ReplicaSession, prefix: bytes, command: str) -> dict[bytes, Any]:
    """The values of all keys that begin with ``prefix``, by the rest of their names."""
    keys: set[bytes] = set()
    cursor = b"0"
    while True:
        ((cursor, some),) = session.server.commands([("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", 1000)])
        keys.update(key for key in some if key.startswith(prefix))
        if cursor == b"0":
            break
    names = sorted(keys)
    values = session.server.commands([(command, name) for name in names]) if names else []
    return {name[len(prefix) :]: value for name, value in zip(names, values, strict=True)}
