"""A finding as a script that needs nothing but the engine: the case in the first 20 lines or so, the driver below it."""

from __future__ import annotations

import inspect
import pprint
from types import ModuleType

from kvyard.lab.hunt.engine import Case, Finding, HuntedEngine


def reproducer(hunted: HuntedEngine, engine: str, finding: Finding, case: Case) -> str:
    """Return the script's text; ``engine`` is its name and version. It exits with 1 where the finding is met again."""
    head = f'''"""{engine}: {finding["kind"]}.

{finding["detail"]}

Found by kvyard hunt. Needs {engine.split(maxsplit=1)[0]} only, no GPU and no model.
{hunted.legend}
Settings that CASE leaves out are those of PLAIN. All below CASE drives the scheduler and isn't particular to this case.
"""

from __future__ import annotations

CASE = {_literal(_plain(case, hunted.plain))}

# -- the driver ---------------------------------------------------------------------------------------------------------

PLAIN = {_literal(hunted.plain)}
'''
    tail = """

if __name__ == "__main__":
    import sys

    print(import_engine())
    case = {key: {**PLAIN[key], **value} if isinstance(value, dict) else value for key, value in CASE.items()}
    found, _ = run({**PLAIN, **case})
    print(found or "nothing went wrong")
    sys.exit(found is not None)
"""
    return head + "\n\n".join(_body(module) for module in hunted.sources) + tail


def _body(module: ModuleType) -> str:
    """Return the source of ``module`` without its docstring and what it imports of the others."""
    _, _, source = inspect.getsource(module).partition("from __future__ import annotations\n")
    return "".join(line for line in source.splitlines(keepends=True) if not line.startswith("from kvyard."))


def _literal(value: object) -> str:
    return pprint.pformat(value, width=118, compact=True, sort_dicts=False)


def _plain(case: Case, plain: Case) -> Case:
    """Return the case without plain settings and without faults that a load doesn't have."""
    kept: Case = {}
    for name, value in case.items():
        if isinstance(value, dict):
            kept[name] = _plain(value, plain[name])
        elif name not in plain or plain[name] != value:
            kept[name] = value
    if "requests" not in case:
        return kept
    kept["requests"] = [
        {
            name: {key: each for key, each in value.items() if each or key == "steps"} if name == "load" else value
            for name, value in request.items()
        }
        for request in case["requests"]
    ]
    return kept
