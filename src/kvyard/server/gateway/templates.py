"""Chat templates: a conversation as one text, by the Jinja template in a model's folder, as vLLM and transformers write it.

What the folder alone doesn't determine (a template that the request brings, a last message that is to go on) is left to the
engine. Whether text comes out as the engine's does is checked against its ``/tokenize`` by ``PromptReader``.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from kvyard.clock import written_now
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError

_LOOPS_OVER_PARTS = re.compile(r"for\s+\w+\s+in\s+\w+(?:\.content\b|\[\s*['\"]content['\"]\s*\])")
"""By which vLLM recognises templates that want contents as lists of parts."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateFailed(Exception):
    """A conversation that a template refuses, or can't be given."""


class ChatTemplate:
    """The templates of one model."""

    def __init__(self, texts: dict[str, str], variables: dict[str, Any]) -> None:
        """``texts`` by name, of which ``default`` has to be one. Raises ``KvyardError`` for what is no template."""
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise KvyardError("chat templates need Jinja: pip install 'kvyard[tokenizers]'") from None
        self._refusals: tuple[type[Exception], ...] = (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
        )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = written_now
        self._variables = variables
        try:
            self._made = {name: environment.from_string(text) for name, text in texts.items()}
        except TemplateError as error:
            raise KvyardError(f"a chat template can't be read: {str(error)[:200]}") from None
        self._by_parts = {name: _LOOPS_OVER_PARTS.search(text) is not None for name, text in texts.items()}

    @classmethod
    def of(cls, folder: Path) -> "ChatTemplate | None":
        """Return the chat template of the model in ``folder``; ``None`` if it has none. Raises ``KvyardError`` if it can't be
        read.
        """
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            config = {}
        except (OSError, ValueError) as error:
            raise KvyardError(f"{folder / 'tokenizer_config.json'} can't be read: {error}") from None
        given = config.get("chat_template")
        texts: dict[str, str] = {}
        if isinstance(given, str):
            texts["default"] = given
        elif isinstance(given, list):
            texts = {template["name"]: template["template"] for template in given}
        file = folder / "chat_template.jinja"
        if file.is_file():
            texts["default"] = file.read_text(encoding="utf-8")
        if "default" not in texts:
            return None
        tokens = {name: config[name] for name in SPECIAL if config.get(name) is not None}
        return cls(
            texts, {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}
        )

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, ask: bool, more: dict[str, Any]) -> str:
        """Return a conversation as one text; ``ask``: with the beginning of the answer; ``more`` are variables of the request's
        own. Raises ``TemplateFailed``.
        """
        name = "tool_use" if tools and "tool_use" in self._made else "default"
        try:
            shaped = [_message(message, self._by_parts[name]) for message in messages]
            given = {**self._variables, "messages": shaped, "tools": tools, "add_generation_prompt": ask, **more}
            return self._made[name].render(given)
        except self._refusals as error:
            raise TemplateFailed(str(error)[:200]) from None


def _message(message: dict[str, Any], by_parts: bool) -> dict[str, Any]:
    """Return a message as vLLM passes it to a template."""
    shown = dict(message)
    content = shown.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) < len(content):
            raise TypeError("a part isn't text")
        content = [{"type": "text", "text": text} for text in texts] if by_parts else "\n".join(texts)
    elif isinstance(content, str) and by_parts:
        content = [{"type": "text", "text": content}]
    shown["content"] = content
    if calls := shown.get("tool_calls"):
        shown["tool_calls"] = [_call(call) for call in calls]
    return shown


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = msgspec.json.decode(function["arguments"] or "{}")
        except DECODE_ERRORS:
            raise ValueError("arguments that are no JSON") from None
    return {**call, "function": function}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> None:
    raise ValueError(message)
