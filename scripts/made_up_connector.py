"""A KV connector for vLLM that has everything, loads nothing, and writes down what it is told: for ``compare_managers.py``.

Which tokens of a prompt it claims to have, whether they come at once or in the background, which loads fail, and whether the
blocks of an ended request are held for a while follow from the request's name alone. So two schedulers that decide alike
meet the same loads.
"""

from __future__ import annotations

import random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput


class MadeUpConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side; there is no other."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.told: list[str] = []
        sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._size = max(sizes)
        self._groups = len(sizes)
        self._loading: dict[str, int] = {}
        """Requests whose load is under way, and for how many steps still."""
        self._sending: dict[str, int] = {}
        self._failing: dict[str, int] = {}
        """Of loads that will fail, a block that isn't there."""
        self._failed: set[str] = set()
        """Requests one of whose loads was made to fail: the next one doesn't."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        draw = random.Random(request.request_id)
        share, later = draw.choice([0.0, 0.0, 0.4, 0.8, 1.0]), draw.random() < 0.5
        there = int((request.num_prompt_tokens - 1) * share) // self._size * self._size
        matched = max(0, there - num_computed_tokens)
        return matched, later and matched > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        unhashed = blocks.get_unhashed_block_ids_all_groups()
        self.told.append(
            f"allocated {request.request_id} {num_external_tokens} {blocks.get_block_ids()} new {unhashed} "
            f"null {[[block.is_null for block in group] for group in blocks.blocks]}"
        )
        later = self.get_num_new_matched_tokens(request, 0)[1]
        # Called again, with nothing to load, when what was loaded is let in.
        if num_external_tokens and later:
            draw = random.Random(f"{request.request_id} loads")
            self._loading[request.request_id] = draw.randint(0, 6)
            if draw.random() < 0.25 and self._groups == 1 and request.request_id not in self._failed:
                self._failed.add(request.request_id)
                self._failing[request.request_id] = draw.choice(unhashed[0][: num_external_tokens // self._size])

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self.told.append(f"finished {request.request_id} {block_ids}")
        held = random.Random(f"{request.request_id} sends").random() < 0.3 and any(block_ids)
        if held and request.request_id not in self._loading:
            self._sending[request.request_id] = 3
            return True, None
        return False, None

    def step(self) -> KVConnectorOutput:
        """What the workers would report after a step."""
        over = {name for name, left in self._loading.items() if not left}
        sent = {name for name, left in self._sending.items() if not left}
        invalid = {self._failing.pop(name) for name in over if name in self._failing}
        self._loading = {name: left - 1 for name, left in self._loading.items() if left}
        self._sending = {name: left - 1 for name, left in self._sending.items() if left}
        return KVConnectorOutput(finished_recving=over, finished_sending=sent, invalid_block_ids=invalid)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
