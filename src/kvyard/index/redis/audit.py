"""The audit: whether what is on the server agrees with itself and with the mirror. Reads every key of the epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.index.places import bits
from kvyard.index.redis.outbox import unpack

if TYPE_CHECKING:
    from kvyard.index.redis.rows import RedisIndex


def audit(index: RedisIndex) -> None:
    """Raise ``AssertionError``, saying what is wrong, unless rows, sets, slots and mirror agree. One that is away agrees."""
    if not index.flush():
        return
    session, directory = index.session, index.directory
    session.look(now=True)
    prefix = f"kvy:{session.epoch}".encode()
    rows: dict[bytes, bytes] = {}
    sets: dict[int, set[bytes]] = {}
    keys = [key for key in _keys(index, prefix) if key[len(prefix) :].startswith((b"r", b":p"))]
    commands = [("GET" if key[len(prefix) :].startswith(b"r") else "SMEMBERS", key) for key in keys]
    for key, found in zip(keys, index.server.commands(commands) if commands else (), strict=True):
        rest = key[len(prefix) :]
        if rest.startswith(b"r"):
            rows[rest[1:]] = found
        else:
            sets[int(rest[2:])] = set(found)
    slots = {int(slot) for slot in session.command("HKEYS", "dir")}
    retired = {int(slot) for slot in session.command("SMEMBERS", "retired")}
    free = {int(slot) for slot in session.command("SMEMBERS", "free")}
    used = int(session.command("GET", "next") or 0)
    assert not slots & retired and not (slots | retired) & free, "a slot is given out and free"
    assert slots | retired | free == set(range(used)), "a slot is lost"
    assert sets.keys() <= slots | retired, "a free slot holds something"
    for key, row in rows.items():
        assert row.strip(b"\0"), "a row that nobody holds"
        last = len(row) * 8 - 1
        held = {last - bit for bit in bits(int.from_bytes(row, "big"))}
        assert held == {slot for slot, keys in sets.items() if key in keys}, f"row {unpack(key)} and the sets differ"
    counted = int(session.command("GET", "rows") or 0)
    assert counted == len(rows), f"{counted} rows are counted but {len(rows)} are there"
    assert set().union(*sets.values()) == rows.keys(), "a set has a key without a row"
    here: dict[tuple[str, bytes], set[int]] = {}
    for place in index.mirror.holding():
        here[directory.name(place)] = {key for run in index.mirror.held(place) for key in run}
    there = {known: {unpack(key) for key in sets.get(slot, ())} for slot, known in directory.slots.items()}
    for known in here.keys() | there.keys():
        if known[0] in session.tokens:
            mine, its = here.get(known, set()), there.get(known, set())
            assert mine == its, f"{known}: the server has {len(its)} keys, the mirror {len(mine)}"


def _keys(index: RedisIndex, prefix: bytes) -> set[bytes]:
    found: set[bytes] = set()
    cursor = b"0"
    while True:
        ((cursor, keys),) = index.server.commands([("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", 1000)])
        found.update(keys)
        if cursor == b"0":
            return found
