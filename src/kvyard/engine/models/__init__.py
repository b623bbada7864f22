"""From a Hugging Face config and a card's memory to the groups, bytes and blocks that an engine is built with."""

from kvyard.engine.models.fields import find_config, preset, presets, read_config
from kvyard.engine.models.grouping import LayerGroup
from kvyard.engine.models.planning import ModelPlan, plan

__all__ = ["LayerGroup", "ModelPlan", "find_config", "plan", "preset", "presets", "read_config"]
