"""A finding as a script that needs nothing but the engine: the case on top, the driver below it."""

from __future__ import annotations

import inspect
import pprint
from types import ModuleType

from kvyard.lab.hunt.engine import Case, Finding, HuntedEngine


def reproducer(hunted: HuntedEngine, engine: str, finding: Finding, case: Case) -> str:
    """The script's text; ``engine`` is its name and version. It exits with 1 where the finding is met again."""
    head = f'''"""{engine}: {finding["kind"]}.

{finding["detail"]}

Found by kvyard hunt. Needs {engine.split(maxsplit=1)[0]} only, no GPU and no model.
{hunted.legend}
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
    return head + "\n\n".join(_body(module) for module in hunted.sources) + tail


def _body(module: ModuleType) -> str:
    """The source of ``module`` without its docstring and what it imports of the others."""
    _, _, source = inspect.getsource(module).partition("from __future__ import annotations\n")
    return "".join(line for line in source.splitlines(keepends=True) if not line.startswith("from kvyard."))


def _plain(case: Case) -> Case:
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
