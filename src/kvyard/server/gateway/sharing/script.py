"""The script by which gateways share their requests. One call is one beat: renew, tell, hear.

What is kept, by key:

- ``kvyard:share1:<namespace>``, a hash: how these gateways name blocks (``identity``), and the last number given to a member.
- ``…:who``, a hash: each member's number, new each time it joins. ``…:until``, a sorted set: when each is given up, in the
  server's milliseconds.
- ``…:log``, a stream: what members told, for twice the time of a lease.

All of it goes by itself when no gateway beats. Nothing here needs to survive: members tell everything to each that joins.
"""

from __future__ import annotations

from kvyard.index.redis.scripts import Script

BEAT = Script("beat", package="kvyard.server.gateway.sharing")
