"""The scripts in ``lua/`` that run inside the server. Each is atomic, and each begins by asking whether it may run at all.

What is kept, by key (``docs/how-to/redis-index.md`` says why):

- ``kvyard:<namespace>``, a hash: the server's run, the epoch, the identity of the index, and epochs that are void.
- ``kvy:<epoch>r<key, 8 bytes>``, a string: a row, one bit per slot.
- ``kvy:<epoch>:p<slot>``, a set: the keys that a slot holds. ``:dir``, a hash from slot to owner and place; ``:own:<owner>``
  the other way round. ``:free`` and ``:retired``, sets of slots; ``:next`` the first that was never used.
- ``kvy:<epoch>:lease:<owner>``, a string with a time to live: the replica that writes. ``:fence``, a hash from owner to the
  token of the last who got the lease; ``:token`` the last token. ``:say:<owner>``, a hash of what the writer says of streams.
- ``kvy:<epoch>:version`` counts whatever changes the meaning of a row; ``:rows`` counts rows.

Only integers below 2^53 and byte strings occur, since Lua's numbers are floats.
"""

import hashlib
from importlib.resources import files


class Script:
    """Lua, and the digest the server knows it by."""

    __slots__ = ("digest", "name", "source")

    def __init__(self, name: str, *before: str, package: str = "kvyard.index.redis") -> None:
        """The file ``lua/<name>.lua`` of ``package``, with those named in ``before`` in front of it."""
        folder = files(package) / "lua"
        self.name = name
        self.source = "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in (*before, name))
        self.digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


BEGIN = Script("begin")
ACQUIRE = Script("acquire", "epoch", "tidy")
RENEW = Script("renew", "epoch")
RELEASE = Script("release", "epoch")
DROP = Script("drop", "epoch", "tidy")
WRITE = Script("write", "epoch", "tidy")
STATE = Script("state", "epoch", "read_state")
LOOKUP = Script("lookup", "epoch", "read_state")
SWEEP = Script("sweep", "epoch", "tidy")
ALL = (BEGIN, ACQUIRE, RENEW, RELEASE, DROP, WRITE, LOOKUP, STATE, SWEEP)
