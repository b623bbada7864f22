"""Endpoints: the port of a rank, and which side binds. Text in, text out; no socket is touched here.

The rules are vLLM's, so that one configuration serves both: rank r of a data-parallel engine is r ports further, and an
address with a wildcard is bound while any other is connected to. One case vLLM leaves open is decided here: an explicit
port 0 is bound, since it can't be connected to.
"""

import ipaddress

from kvyard.errors import KvyardError

SCHEMES = ("tcp://", "ipc://", "inproc://")
MAX_PORT = 65_535


def at_rank(endpoint: str, rank: int = 0) -> str:
    """Return the address of ``rank``: the port plus the rank, or a suffix for ``inproc``; port 0 stays 0.

    Raises ``KvyardError`` for what isn't an endpoint, for ``ipc`` with a rank above 0, and for ports beyond the last.
    """
    check(endpoint)
    if rank < 0:
        raise KvyardError(f"a rank is 0 or more, got {rank}")
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    if endpoint.startswith("ipc://"):
        raise KvyardError(f"rank {rank} can't use {endpoint}: give each rank above 0 a tcp or inproc endpoint")
    host, port = split_tcp(endpoint)
    if port == 0:
        return endpoint
    if port + rank > MAX_PORT:
        raise KvyardError(f"rank {rank} of {endpoint} would need port {port + rank}: the last one is {MAX_PORT}")
    return f"tcp://{host}:{port + rank}"


def is_bound(endpoint: str) -> bool:
    """Return true if a publisher binds ``endpoint``: wildcards, ``ipc``, ``inproc`` and port 0. It connects to all others."""
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        return True
    return split_tcp(endpoint)[1] == 0


def is_bound_by_subscriber(endpoint: str) -> bool:
    """Return true if a subscriber binds ``endpoint``: only with a wildcard, which means that publishers connect to it."""
    return endpoint.startswith("tcp://") and split_tcp(endpoint)[0] in ("*", "0.0.0.0", "[::]", "::")


def is_ipv6(endpoint: str) -> bool:
    """Return true if the host is an IPv6 address, for which sockets need an option."""
    return endpoint.startswith("tcp://") and ":" in split_tcp(endpoint)[0]


def reachable(endpoint: str) -> str:
    """Return an address at which this machine itself reaches what was bound at ``endpoint``."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, port = split_tcp(endpoint)
    if host in ("*", "0.0.0.0"):
        host = "127.0.0.1"
    elif host in ("[::]", "::"):
        host = "[::1]"
    return f"tcp://{host}:{port}"


def check(endpoint: str) -> str:
    """Return ``endpoint`` itself. Raises ``KvyardError`` if it isn't one, with what one looks like."""
    if not endpoint.startswith(SCHEMES) or len(endpoint) <= endpoint.index("://") + 3:
        raise KvyardError(f"{endpoint!r} is not an endpoint: write tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    if endpoint.startswith("tcp://"):
        split_tcp(endpoint)
    return endpoint


def split_tcp(endpoint: str) -> tuple[str, int]:
    """Return host and port. Raises ``KvyardError`` for a port that isn't a number of the right size."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise KvyardError(f"{endpoint!r} has no port from 0 to {MAX_PORT}: write tcp://HOST:PORT")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host.strip("[]"))
        except ValueError:
            raise KvyardError(f"{host} in {endpoint!r} is not an IPv6 address") from None
    return host, int(port)
