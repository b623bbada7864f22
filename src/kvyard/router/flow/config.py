"""Configuration of flow control."""

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from kvyard.errors import KvyardError
from kvyard.settings import Setting, figures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvyard.registry import Registry
    from kvyard.router.flow.policy import FlowPolicy


def _flows() -> list[str]:
    return _registry().names()


def _registry() -> "Registry[Callable[[FlowConfig, Mapping[str, float]], FlowPolicy]]":
    from kvyard.router.flow.policy import FLOWS  # policies are made from a configuration, so they import this module

    return FLOWS


class FlowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flow policy and its figures; ``docs/reference/flow.md`` explains each. Raises ``KvyardError`` for what can't be."""

    heading: ClassVar[str] = "Flow control"
    policy: Annotated[
        str,
        Setting(
            "Flow policy, which orders requests that wait before the router: {choices}.",
            "flow",
            flag=True,
            choices=_flows,
        ),
    ] = "fifo"
    options: Annotated[
        dict[str, float],
        Setting(
            "Options of that flow policy, as NAME=VALUE,... .",
            "flow_options",
            parse=figures,
            options=_registry,
        ),
    ] = msgspec.field(default_factory=dict)
    weights: Annotated[
        dict[str, float],
        Setting("Shares of tenants under fair, as NAME=VALUE,...; 1 for all others.", "tenant_weights", parse=figures),
    ] = msgspec.field(default_factory=dict)
    tenant_requests: Annotated[
        int,
        Setting("Requests that a tenant has at workers at a time; its others wait. 0: no limit.", "tenant_requests"),
    ] = 0
    greedy_requests: Annotated[
        int,
        Setting(
            "Requests for each worker that a tenant has at a time once it has had more than its share; 0: no limit.",
            "greedy_requests",
        ),
    ] = 0
    patience_s: Annotated[
        float,
        Setting("Requests that wait longer go first whatever the policy, in seconds; 0: none.", "flow_patience_s"),
    ] = 0.0
    shed: Annotated[
        bool, Setting("Refuse requests of priority above 0 by chance, the likelier the more wait.", "flow_shed")
    ] = False
    shed_depth: Annotated[
        float, Setting("Waiting requests per worker that count as saturation 1.", "flow_shed_depth")
    ] = 5.0
    shed_power: Annotated[float, Setting("How steeply the chance rises with saturation.", "flow_shed_power")] = 5.0
    shed_k: Annotated[float, Setting("The chance at saturation 1, cut off at 1.", "flow_shed_k")] = 300.0

    def __post_init__(self) -> None:
        _registry().check(self.policy, self.options)
        for name, weight in self.weights.items():
            if not 0 < weight < float("inf"):
                raise KvyardError(f"the weight of tenant {name} is {weight}: it must be above 0")
        for key in ("tenant_requests", "greedy_requests"):
            if getattr(self, key) < 0:
                raise KvyardError(f"{key} is {getattr(self, key)}: it must be 0 or more")
        for key in ("patience_s", "shed_depth", "shed_power", "shed_k"):
            value = getattr(self, key)
            least = 0.0 if key == "patience_s" else 1e-9
            if not least <= value < float("inf"):
                raise KvyardError(
                    f"{key} of flow control is {value:g}: it must be {'0 or more' if not least else 'above 0'}"
                )

    @property
    def limits_tenants(self) -> bool:
        """True if a tenant's requests at workers are counted."""
        return self.tenant_requests > 0 or self.greedy_requests > 0
