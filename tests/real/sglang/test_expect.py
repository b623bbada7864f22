"""Hits that kvyard says a real SGLang owes, and hits it counted: equal to the token, by request and in its metrics."""

from __future__ import annotations

from tests.real.owed import Answered, Planned, compare, planned
from tests.real.sglang.conftest import PAGES, SIZE
from tests.real.sglang.engine import SglangEngine
from tests.waiting import eventually

from kvyard.lab.expect.counted import Counted, read_page

REQUESTS = 1200
"""More than 1,000 of them aren't aborted, and have an answer with a count."""


def test_owed_is_counted(pair: list[SglangEngine]) -> None:
    engine = pair[0]
    engine.flush()

    def idle() -> bool:
        loads = engine.client.get("/v1/loads").json()["loads"]
        return all(load["num_running_reqs"] + load["num_waiting_reqs"] == 0 for load in loads)

    def send(request: Planned) -> Answered:
        if request.abort:
            tokens = engine.hang_up(request.prompt, request.tokens, request.salt)
            eventually(idle)  # it notices some batches later
            return Answered(tokens, None)
        answer = engine.generate(request.prompt, request.tokens, request.salt)
        return Answered(answer["output_ids"], answer["meta_info"]["cached_tokens"])

    def page() -> Counted:
        text = engine.client.get("/metrics").text
        # It counts nothing before its first answer.
        return read_page(text) if "sglang:prompt_tokens_total" in text else Counted(source="", queries=0)

    settings = {"backend": "sglang", "block_size": SIZE, "num_gpu_blocks": PAGES, "max_model_len": 4096}
    by_request, counters = compare(send, planned(REQUESTS, SIZE, 700, seed=3), settings, page)
    print(
        by_request.requests,
        by_request.compared,
        by_request.equal,
        counters.prompt_tokens,
        counters.owed,
        counters.counted,
    )
    assert by_request.requests == REQUESTS and by_request.compared is not None
    assert by_request.equal == by_request.compared >= 1000, by_request.different
    assert counters.counted == counters.owed > 0 and not counters.fault, counters.sentence
