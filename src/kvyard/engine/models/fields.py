"""A Hugging Face ``config.json`` read by name: one field has many names, and a missing one must be reported.

It knows spellings and types, and nothing of what the numbers mean.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError, suggest

NESTED = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal configs keep the language model."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "head_dim": ("attention_head_dim",),
    "intermediate_size": ("ffn_hidden_size", "n_inner"),
    "max_position_embeddings": ("n_positions", "model_max_length", "max_sequence_length"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("top_k_experts",),
    "moe_intermediate_size": ("expert_intermediate_size",),
    "mamba_heads": ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"),
    "mamba_head_dim": ("mamba_d_head", "mamba_headdim"),
    "mamba_state": ("ssm_state_size", "mamba_d_state"),
    "mamba_groups": ("n_groups", "mamba_n_groups", "mamba_ngroups"),
    "mamba_conv": ("conv_kernel", "mamba_d_conv"),
    "mamba_expand": ("expand",),
    "torch_dtype": ("dtype",),
}


class Fields:
    """The fields of the language model in a config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.outer = config
        self._values = dict(config)
        self._found: dict[str, Any] = {}
        """Values by the name that they were asked for under: each layer asks for the same."""
        for name in NESTED:
            if isinstance(config.get(name), Mapping):
                self._values |= {key: value for key, value in config[name].items() if value is not None}
                break
        architectures = config.get("architectures")
        self.architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown"
        self.model_type = str(self._values.get("model_type", ""))

    def get(self, name: str) -> Any:
        """Return the value under ``name`` or another spelling of it; None if it isn't there."""
        if name not in self._found:
            spellings = map(self._values.get, (name, *ALIASES.get(name, ())))
            self._found[name] = next((value for value in spellings if value is not None), None)
        return self._found[name]

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 0. Raises ``KvyardError`` if it is something else, or missing without a default."""
        value = self.get(name)
        if value is None:
            if default is None:
                raise KvyardError(self._lacks([name]))
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise KvyardError(f"{self.architecture}: {name} must be a whole number, got {value!r}")
        return value

    def require(self, *names: str) -> None:
        """Raise ``KvyardError`` naming all of ``names`` that are missing."""
        missing = [name for name in names if self.get(name) is None]
        if missing:
            raise KvyardError(self._lacks(missing))

    def _lacks(self, names: list[str]) -> str:
        spelled = [" or ".join((name, *ALIASES.get(name, ()))) for name in names]
        return f"{self.architecture}: the config lacks {', '.join(spelled)}; give a config.json that has them"


def read_config(path: str | Path) -> dict[str, Any]:
    """Return a config file. Raises ``KvyardError`` if it can't be read or isn't a JSON object."""
    try:
        value = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise KvyardError(f"{path}: can't be read: {error.strerror or error}") from None
    except DECODE_ERRORS as error:
        raise KvyardError(f"{path}: not JSON: {error}; a model's config.json is needed") from None
    if not isinstance(value, dict):
        raise KvyardError(f"{path}: not a JSON object; a model's config.json is needed")
    return value


@cache
def _presets() -> list[str]:
    folder = files("kvyard.engine.models") / "configs"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def presets() -> list[str]:
    """The names of the configs that ship with kvyard; each names the source of its numbers."""
    return _presets().copy()


def hub_names() -> dict[str, str]:
    """Return presets by the names under which models are published, such as ``Qwen/Qwen3-32B``."""
    return {hub: name for name in presets() for hub in preset(name)["hub"]}


def hub_preset(name: str) -> str | None:
    """Return the preset of a published model, whatever the case of its name; ``None`` if it has none."""
    return next((preset for hub, preset in hub_names().items() if hub.lower() == name.lower()), None)


def preset(name: str) -> dict[str, Any]:
    """Return the config of a preset. Raises ``KvyardError`` for an unknown name."""
    if name not in _presets():
        raise KvyardError(f"unknown preset {name!r}: {suggest(name, presets(), otherwise='give a config.json')}")
    text = (files("kvyard.engine.models") / "configs" / f"{name}.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Any])


def find_config(name: str) -> dict[str, Any]:
    """Return the config of a file, of a folder with a config.json, of a preset, or of a published model that is a preset.

    Case doesn't matter to the last two. Raises ``KvyardError``.
    """
    if Path(name).is_dir():
        name = str(Path(name) / "config.json")
    if Path(name).is_file():
        return read_config(name)
    if name.lower() in presets():
        return preset(name.lower())
    if "/" not in name and not name.endswith(".json"):
        return preset(name)
    published = hub_names()
    for hub, preset_name in published.items():
        if hub.lower() == name.lower():
            return preset(preset_name)
    known = [*published, *presets()]
    near = suggest(name, known, listed="kvyard model --list names them") if "/" in name else ""
    raise KvyardError(
        f"{name}: there is no such file or folder, and no model hub is asked. Give a model's config.json or folder, "
        f"or a preset: {near or suggest(Path(name).name, presets())}"
    )
