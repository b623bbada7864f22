"""A KV connector for vLLM that does what a log's requests say, in virtual time: for ``record_scheduler.py``.

A request says how many of its tokens there are elsewhere and how long they take to come (``load``), and how long its blocks are
read after its end (``send``). Nothing is copied; there is no worker's side.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.now = 0
        self.started: dict[str, int] = {}
        """Loads in the background that began since this was last looked at, and their tokens."""
        self._requests: dict[str, dict[str, Any]] = {}
        self._loads: dict[str, int] = {}
        """When each load that is under way is done, in the order in which they began."""
        self._sends: dict[str, int] = {}

    def tell(self, request: dict[str, Any]) -> None:
        """A request of a log, before it arrives."""
        self._requests[request["request"]] = request

    def next_end(self) -> int | None:
        """When the next load or send is done."""
        return min([*self._loads.values(), *self._sends.values()], default=None)

    def take_ended(self, now: int) -> KVConnectorOutput:
        """What workers report at ``now``. In order where vLLM has sets, whose order differs from process to process."""
        loaded = _due(self._loads, now)
        sent = _due(self._sends, now)
        return KVConnectorOutput(finished_recving=loaded, finished_sending=sent)  # type: ignore[arg-type]

    # -- asked and told by the scheduler ----------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        load = self._requests[request.request_id]["load"]
        if load is None:
            return 0, False
        tokens, ns = load
        matched = max(0, tokens - num_computed_tokens)
        return matched, ns is not None and matched > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            _, ns = self._requests[request.request_id]["load"]
            if ns is not None:
                self._loads[request.request_id] = self.now + ns
                self.started[request.request_id] = num_external_tokens

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        ns = self._requests[request.request_id]["send"]
        if ns is None or request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        self._sends[request.request_id] = self.now + ns
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    # -- a worker's side has these ----------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def _due(transfers: dict[str, int], now: int) -> list[str]:
    """Take out those that are done by ``now``, the first to be done first."""
    names = sorted([name for name, end in transfers.items() if end <= now], key=transfers.__getitem__)
    for name in names:
        del transfers[name]
    return names
