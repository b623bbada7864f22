"""kvyard inside vLLM: what vLLM loads by name when a flag says so.

- ``--scheduler-cls kvyard.vllm.Scheduler``: vLLM's scheduler over kvyard's block manager.
- ``--scheduler-cls kvyard.vllm.RecordingScheduler``: vLLM's own, with a recorder. The first one has it too.

With asynchronous scheduling they are called ``AsyncScheduler`` and ``AsyncRecordingScheduler``.

vLLM is imported when one of these names is asked for, after its version has been checked; importing this package alone doesn't.
"""

from importlib import import_module

from kvyard.vllm.version import check_version

_SCHEDULERS = {
    "Scheduler": "KvyardScheduler",
    "AsyncScheduler": "KvyardAsyncScheduler",
    "RecordingScheduler": "RecordingScheduler",
    "AsyncRecordingScheduler": "AsyncRecordingScheduler",
}
"""Values of ``--scheduler-cls``, and the class in ``kvyard.vllm.scheduler``."""


def __getattr__(name: str) -> object:
    """Return the scheduler class called ``name``. Raises ``VersionError`` for a vLLM that it isn't written for."""
    if name not in _SCHEDULERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    scheduler: object = getattr(import_module("kvyard.vllm.scheduler"), _SCHEDULERS[name])
    return scheduler


def __dir__() -> list[str]:
    return [*globals(), *_SCHEDULERS]
