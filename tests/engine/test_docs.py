"""docs/reference/engine-settings.md names every setting."""

from __future__ import annotations

import re
from pathlib import Path

from kvyard.engine.config import EngineConfig
from kvyard.engine.policies.settings import SglangSettings, TrtllmSettings

DOCS = Path(__file__).parents[2] / "docs"


def test_every_setting_is_in_the_table():
    table = (DOCS / "reference" / "engine-settings.md").read_text()
    named = set(re.findall(r"`([a-z_.]+)`", table))
    wanted = set(EngineConfig.__struct_fields__) - {"sglang", "trtllm"}
    wanted |= {f"sglang.{name}" for name in SglangSettings.__struct_fields__}
    wanted |= {f"trtllm.{name}" for name in TrtllmSettings.__struct_fields__}
    assert wanted <= named, wanted - named
