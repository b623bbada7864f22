"""Quotas of cache in a mock engine: tenants are told by their salts."""

from __future__ import annotations

from tests.server.mock.support import Served


def test_a_salt_that_floods_a_mock_leaves_others_their_share() -> None:
    engine = {"num_gpu_blocks": 64, "block_size": 16, "cache_quota": "hard", "tenant_quotas": {"*": 0.5}}
    with Served(engine=engine) as served:

        def ask(prompt: list[int], salt: str) -> int:
            body = {"model": "mock", "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
            reply = served.client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        mine = list(range(320))
        assert ask(mine, "quiet") == 0
        for at in range(20):
            assert ask([1000 + at] * 320, "flood") == 0
        assert ask(mine, "quiet") == 304, "all but the last block, which is computed for its last token"
        [worker] = served.fleet.workers
        ledger = worker.cores[0].scheduler.manager.pool.ledger
        assert ledger is not None
        used = dict(zip(ledger.names, ledger.used, strict=True))
        assert used["flood"] <= 32 and used["quiet"] >= 20 and ledger.lost[ledger.account("quiet")] == 0
