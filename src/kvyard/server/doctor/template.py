"""A model's chat template, applied here, to see whether an engine applies the same one. Needs Jinja2.

Templates come as Hugging Face writes them: a file of Jinja, or a ``tokenizer_config.json`` that has one in it. They are other
people's programs, so they run in Jinja's sandbox.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvyard.clock import SECOND, WallClock
from kvyard.errors import KvyardError


def rendered(path: Path, messages: Sequence[dict[str, Any]]) -> str:
    """Return ``messages`` as the text that a model sees, with the beginning of its answer. Raises ``KvyardError`` where the
    template can't be read or refuses them.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise KvyardError(
            "applying a chat template needs Jinja2: pip install jinja2, or leave --template out"
        ) from None
    source, names = _read(path)
    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    world.filters["tojson"] = _tojson
    world.globals["raise_exception"] = _refuse
    world.globals["strftime_now"] = _now
    try:
        text = world.from_string(source).render(messages=messages, add_generation_prompt=True, **names)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise KvyardError(f"the chat template {path} can't be applied: {str(error)[:200]}") from None
    return text


def _read(path: Path) -> tuple[str, dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise KvyardError(f"can't read the chat template {path}: {why}") from None
    if path.suffix != ".json":
        return text, {}
    try:
        config = json.loads(text)
        template = config["chat_template"]
        if isinstance(template, list):
            template = next(entry["template"] for entry in template if entry["name"] == "default")
    except (ValueError, LookupError, TypeError, StopIteration):
        raise KvyardError(
            f"{path} has no chat_template: give a tokenizer_config.json that has, or a .jinja file"
        ) from None
    names = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[name] = value
    return str(template), names


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """JSON as templates expect it: Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(why: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(why)


def _now(form: str) -> str:
    return datetime.fromtimestamp(WallClock.since_epoch().now() / SECOND, UTC).strftime(form)
