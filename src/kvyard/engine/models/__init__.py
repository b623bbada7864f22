"""From a Hugging Face config and a card's memory to the groups, bytes and blocks that an engine is built with."""

from kvyard.engine.models.fields import read_config
from kvyard.engine.models.grouping import LayerGroup
from kvyard.engine.models.planning import ModelPlan, plan
from kvyard.engine.models.shipped import preset, presets

__all__ = ["LayerGroup", "ModelPlan", "plan", "preset", "presets", "read_config"]
