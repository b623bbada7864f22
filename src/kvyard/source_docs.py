"""Documentation of compiled classes, from the source beside them: mypyc drops docstrings, and nothing keeps those of fields."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast


class SourceDoc:
    """A ``__doc__`` that names the fields and methods of its class. The source is read when somebody asks for it."""

    def __get__(self, instance: object, owner: type) -> str:
        import ast

        file = Path(sys.modules[owner.__module__].__file__ or "")
        source = file.with_name(f"{file.name.partition('.')[0]}.py")
        tree = ast.parse(source.read_bytes() if source.is_file() else b"")
        nodes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__]
        return _text(nodes[0]) if nodes else ""


def _text(node: ast.ClassDef) -> str:
    """Return the docstring of a class with its public fields and methods."""
    import ast

    fields, methods = _fields(node.body, ""), []
    for part in node.body:
        if not isinstance(part, ast.FunctionDef):
            continue
        if part.name == "__init__":
            fields += _fields(part.body, "self.")
        elif not part.name.startswith("_"):
            summary = " ".join((ast.get_docstring(part) or "").split())
            if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in part.decorator_list):
                fields.append(f"{part.name}: {summary}")
            else:
                names = ", ".join(argument.arg for argument in part.args.args[1:])
                methods.append(f"{part.name}({names}): {summary}")
    text = ast.get_docstring(node) or ""
    for title, lines in (("Fields", fields), ("Methods", methods)):
        if lines:
            text += f"\n\n{title}:\n" + "\n".join(f"    {line}" for line in lines)
    return text


def _fields(body: list[ast.stmt], before: str) -> list[str]:
    """Return the fields that ``body`` assigns, each with the string below it; ``before`` is how their names begin."""
    import ast

    lines = []
    for index, part in enumerate(body):
        if not isinstance(part, ast.Assign | ast.AnnAssign):
            continue
        target = part.targets[0] if isinstance(part, ast.Assign) else part.target
        name = ast.unparse(target)
        if not name.startswith(before) or name.removeprefix(before).startswith("_"):
            continue
        below = body[index + 1] if index + 1 < len(body) else None
        summary = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            summary = ": " + " ".join(below.value.value.split())
        lines.append(f"{name.removeprefix(before)}{summary}")
    return lines
