"""Flow control: which of the requests that wait before the router goes next, and which are refused.

The replay and the gateway hold requests back in the same ``FlowQueue``. Each flow policy is an entry of ``FLOWS``; an installed
package adds its own by an entry point of the group ``kvyard.flows``, a program by ``FLOWS.register``.
"""

from kvyard.router.flow.config import FlowConfig
from kvyard.router.flow.policy import FLOWS, FlowPolicy
from kvyard.router.flow.queue import FlowQueue, FlowRefusal, FlowWait, Waiting
from kvyard.router.flow.request import FlowRequest

__all__ = [
    "FLOWS",
    "FlowConfig",
    "FlowPolicy",
    "FlowQueue",
    "FlowRefusal",
    "FlowRequest",
    "FlowWait",
    "Waiting",
]
