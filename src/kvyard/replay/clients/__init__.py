"""Clients: how load generators send the requests of a trace.

Each is one file and one entry of ``CLIENTS``, with the figures of its own source as options. An installed package adds its own
by an entry point of the group ``kvyard.clients``, a program by ``CLIENTS.register``.
"""

from collections.abc import Callable, Mapping

from kvyard.registry import Registry
from kvyard.replay.clients.client import Client

_HERE = "kvyard.replay.clients"
CLIENTS: Registry[Callable[[Mapping[str, float]], Client]] = Registry(
    "client",
    "kvyard.clients",
    {
        "vllm-bench": f"{_HERE}.vllm_bench:VllmBench",
        "aiperf": f"{_HERE}.aiperf:Aiperf",
        "inferencemax": f"{_HERE}.inferencemax:InferenceMax",
        "inference-perf": f"{_HERE}.inference_perf:InferencePerf",
        "multi-round-qa": f"{_HERE}.multi_round_qa:MultiRoundQa",
    },
)


def make_client(name: str | None, options: Mapping[str, float] | None = None) -> Client:
    """Return the client called ``name``, or a plain one. Raises ``KvyardError`` for names and options that there aren't."""
    if name is None:
        return Client({})
    return CLIENTS.get(name)(CLIENTS.resolve(name, options or {}))
