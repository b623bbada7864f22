"""From a config to the network between a fleet's workers."""

from kvyard.replay.config import NetworkConfig
from kvyard.tiers.fabric import Fabric
from kvyard.tiers.network import Network


def make_fabric(config: NetworkConfig) -> Fabric:
    """A network that no worker has joined yet. Raises ``ConfigError`` for a latency that can't be."""
    network = Network(config.latency, shared=config.contention)
    return Fabric(network, config.bandwidth, config.node_bandwidth, config.workers_per_node, config.bus_bandwidth)
