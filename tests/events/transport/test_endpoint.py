"""Endpoints: ports by rank, who binds, and clear refusals."""

import pytest

from kvyard.errors import KvyardError
from kvyard.events.transport.endpoint import at_rank, check, is_bound, is_bound_by_subscriber, is_ipv6, reachable


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://host:5557", 1, "tcp://host:5558"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:0", 7, "tcp://*:0"),
        ("inproc://events", 2, "inproc://events_dp2"),
        ("inproc://events", 0, "inproc://events"),
        ("ipc:///tmp/x", 0, "ipc:///tmp/x"),
    ],
)
def test_ranks(endpoint, rank, expected):
    assert at_rank(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "rank", "message"),
    [
        ("ipc:///tmp/x", 1, "rank 1 can't use ipc:///tmp/x"),
        ("tcp://*:65535", 1, "would need port 65536"),
        ("tcp://*:5557", -1, "a rank is 0 or more"),
        ("localhost:5557", 0, "is not an endpoint"),
        ("tcp://", 0, "is not an endpoint"),
        ("tcp://host", 0, "has no port"),
        ("tcp://host:99999", 0, "has no port from 0 to 65535"),
        ("tcp://host:http", 0, "has no port"),
        ("tcp://[nonsense]:1", 0, "is not an IPv6 address"),
    ],
)
def test_refusals(endpoint, rank, message):
    with pytest.raises(KvyardError, match=r"^[^\n]+$") as error:
        at_rank(endpoint, rank)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("endpoint", "publisher", "subscriber"),
    [
        ("tcp://*:5557", True, True),
        ("tcp://[::]:5557", True, True),
        ("tcp://0.0.0.0:5557", False, True),  # as in vLLM, only the star is a wildcard to a publisher
        ("tcp://localhost:5557", False, False),
        ("tcp://127.0.0.1:0", True, False),
        ("ipc:///tmp/x", True, False),
        ("inproc://x", True, False),
    ],
)
def test_the_side_that_binds(endpoint, publisher, subscriber):
    assert is_bound(endpoint) is publisher
    assert is_bound_by_subscriber(endpoint) is subscriber


def test_reaching_what_is_bound_here():
    assert reachable("tcp://*:1") == reachable("tcp://0.0.0.0:1") == "tcp://127.0.0.1:1"
    assert reachable("tcp://[::]:1") == "tcp://[::1]:1"
    assert reachable("tcp://host:1") == "tcp://host:1" and reachable("inproc://a") == "inproc://a"
    assert is_ipv6("tcp://[::1]:1") and not is_ipv6("tcp://a:1") and check("ipc://x") == "ipc://x"
