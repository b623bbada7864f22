"""Makes the page *Python API* of the documentation, from what packages export and from their docstrings. A hook of mkdocs.

``python scripts/api_reference.py`` prints it.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = (
    "kvyard",
    "kvyard.replay",
    "kvyard.replay.report",
    "kvyard.lab.study",
    "kvyard.replay.traces",
    "kvyard.testing",
    "kvyard.hashing",
    "kvyard.events",
    "kvyard.events.transport",
    "kvyard.events.wire",
    "kvyard.blocks",
    "kvyard.tiers",
    "kvyard.engine",
    "kvyard.engine.models",
    "kvyard.index",
    "kvyard.router",
)
HEAD = """# Python API

What packages export, generated from the source; anything else may change without notice. See
[architecture](../explain/architecture.md) and
[extending](../how-to/extending.md).
"""


def page() -> str:
    """The page, as Markdown."""
    return "\n".join([HEAD, *(line for name in PACKAGES for line in _package(name))])


def _package(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    exported = [one for one in getattr(module, "__all__", ()) if not one.startswith("_")]
    if not exported:
        return
    yield f"\n## {name}\n"
    yield _prose(module)
    for one in exported:
        yield from _entry(one, getattr(module, one))


def _entry(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value) or inspect.isfunction(value):
        yield f"\n### `{name}`\n"
        yield f"```python\n{name}{_signature(value)}\n```\n"
        yield _prose(value)
    if inspect.isclass(value):
        for method, member in vars(value).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if method.startswith("_") or not (inspect.isfunction(function) or isinstance(member, property)):
                continue
            doc = inspect.getdoc(member) or ""
            arguments = "" if isinstance(member, property) else _signature(function)
            yield f"- `{method}{arguments}`" + (f": {doc.splitlines()[0]}" if doc else "")


def _signature(value: Any) -> str:
    try:
        signature = str(inspect.signature(value)).replace("self, ", "").replace("(self)", "()")
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r"(?:\b[a-z_]\w*\.)+(?=\w)", "", signature)


def _prose(value: Any) -> str:
    """The docstring, with its literals as Markdown has them and its examples as code."""
    return (inspect.getdoc(value) or "").replace("``", "`") + "\n"


def on_files(files: Any, config: Any) -> Any:
    """mkdocs asks which files there are: this one is made."""
    from mkdocs.structure.files import File

    source = str(Path(__file__).parent.parent / "src")
    if source not in sys.path:
        sys.path.insert(0, source)
    files.append(File.generated(config, "reference/api.md", content=page()))
    return files


if __name__ == "__main__":
    print(page())
