"""A finding as a script that needs nothing but the engine: the case on top, the driver below it."""

from __future__ import annotations

import inspect
import pprint
from typing import Any

from kvyard.vllm.hunt import driver


def reproducer(engine: str, finding: dict[str, Any], case: dict[str, Any]) -> str:
    """The script's text. It exits with 1 where the finding is met again."""
    _, _, source = inspect.getsource(driver).partition("from __future__ import annotations\n")
    head = f'''"""{engine}: {finding["kind"]}.

{finding["detail"]}

Found by kvyard hunt. Needs {engine.split(maxsplit=1)[0]} only, no GPU and no model. Times are engine steps. A prompt is
made of [first token id, count]. "load" is what a connector has of it and in how many steps it comes (None: within
the step): "once" as from a prefill worker, else as from a store, which is asked again; "fails" of its loads fail.
Everything below CASE drives the scheduler and isn't particular to this case.
"""

from __future__ import annotations

CASE = {pprint.pformat(_plain(case), width=118, compact=True, sort_dicts=False)}

# -- the driver ---------------------------------------------------------------------------------------------------------
'''
    tail = """

if __name__ == "__main__":
    import sys

    print(import_engine())
    found, _ = run(CASE)
    print(found or "nothing went wrong")
    sys.exit(found is not None)
"""
    return head + source + tail


def _plain(case: dict[str, Any]) -> dict[str, Any]:
    """The case without what says nothing: settings that are off, faults that a load doesn't have."""
    kept = {name: value for name, value in case.items() if name != "resets" or value}
    kept["requests"] = [
        {
            name: {key: each for key, each in value.items() if each or key == "steps"} if name == "load" else value
            for name, value in request.items()
        }
        for request in case["requests"]
    ]
    return kept
