"""Destination and size of an engine's recording. Knows nothing of vLLM but the place of its settings.

Set by the environment (``KVYARD_RECORD``, a folder, and ``KVYARD_RECORD_LIMIT``, bytes per file) or by vLLM's
``--additional-config '{"kvyard_record": {"folder": "...", "limit": ...}}'``, which wins.
"""

import os
from pathlib import Path
from typing import Any

from kvyard.errors import KvyardError
from kvyard.vllm.recorder import LIMIT

KEYS = ("folder", "limit")


def recording_settings(vllm_config: Any) -> tuple[Path, int] | None:
    """Return the folder to record to and the limit per file; ``None`` if none is set. Raises ``KvyardError`` for a bad
    value.
    """
    extra = vllm_config.additional_config
    given = extra.get("kvyard_record") if isinstance(extra, dict) else None
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise KvyardError(f'kvyard_record must be a table such as {{"folder": "/var/tmp/recordings"}}, not {given!r}')
    for name in given:
        if name not in KEYS:
            raise KvyardError(f"kvyard_record has no {name!r}; there are {' and '.join(KEYS)}")
    folder, limit = (
        given[name] if given.get(name) is not None else os.environ.get(variable) or usual
        for name, variable, usual in (("folder", "KVYARD_RECORD", None), ("limit", "KVYARD_RECORD_LIMIT", LIMIT))
    )
    if folder is None:
        return None
    if not isinstance(folder, str) or not folder:
        raise KvyardError(f"a recording's folder must be the path of a folder, not {folder!r}")
    return Path(folder), _bytes(limit)


def _bytes(limit: object) -> int:
    if isinstance(limit, int | str) and not isinstance(limit, bool):
        try:
            number = int(limit)
        except ValueError:
            number = 0
        if number > 0:
            return number
    raise KvyardError(f"a recording's limit is a number of bytes, at least 1, not {limit!r}")
