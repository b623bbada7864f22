"""Run by vLLM's Python: prompts one after the other through the scheduler of the installed vLLM, and the hits of each.

reports_in_vllm.py CASES     JSON: [{"settings": ..., "prompts": [[token, ...], ...]}, ...]; prints a list of hits for each
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from scheduler_under_test import MODEL, SchedulerUnderTest, import_vllm


def hits(settings: dict[str, Any], prompts: list[list[int]], folder: str) -> list[int]:
    """Cached tokens of each prompt, sent when the one before it has ended."""
    scheduler = SchedulerUnderTest(settings, folder)
    found = []
    for at, prompt in enumerate(prompts):
        name = f"r{at}"
        request = {"request": name, "prompt": [[token, 1] for token in prompt], "output": [0, 1], "arrival": at}
        scheduler.add({**request, "priority": 0})
        sent = scheduler.of_vllm.requests[name]
        cached = None
        while scheduler.has_requests():
            output = scheduler.schedule()
            if cached is None:
                (new,) = output.scheduled_new_reqs
                cached = new.num_computed_tokens
            ends = sent.num_computed_tokens >= len(prompt)
            scheduler.update(output, {each: [1_000_000 + at] if ends else [] for each in output.num_scheduled_tokens})
        found.append(cached)
    return found


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    import_vllm()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        print(json.dumps([hits(case["settings"], case["prompts"], folder) for case in cases]))


if __name__ == "__main__":
    main()
