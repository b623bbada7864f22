"""Files of settings: what the command line gave as text is a number where it is one, and means the same."""

import tomllib
from pathlib import Path

from kvyard.lab.study.cost import Prices
from kvyard.lab.study.settings_file import as_toml
from kvyard.replay.settings import SETTINGS, make_config


def test_text_of_the_command_line_becomes_what_it_means(tmp_path: Path) -> None:
    given = {
        "workers": "4",
        "num_gpu_blocks": "4096",
        "speedup": "1.5",
        "heed_hints": "true",
        "host_bytes": "200GiB",
        "event_lag": "50ms",
        "router": "kv",
        "temperature": "0.2",
    }
    path = tmp_path / "tune.toml"
    path.write_text(as_toml("tune", ["why"], given, Prices()))
    read = tomllib.loads(path.read_text())
    assert read["router"] == {"policy": "kv", "temperature": 0.2}
    assert read["replay"] == {
        "workers": 4,
        "num_gpu_blocks": 4096,
        "speedup": 1.5,
        "heed_hints": True,
        "host_bytes": "200GiB",
        "event_lag": "50ms",
    }
    assert make_config(SETTINGS.merge(path, {})) == make_config(given)
