"""kvyard inside vLLM: what vLLM loads by name when a flag says so.

``--scheduler-cls kvyard.vllm.Scheduler`` (``AsyncScheduler`` where asynchronous scheduling is on) is vLLM's scheduler over
kvyard's block manager.

vLLM is imported when one of these names is asked for, after its version has been checked; importing this package alone doesn't.
"""

from importlib import import_module

from kvyard.vllm.version import check_version

_SCHEDULERS = {
    "Scheduler": "kvyard.vllm.scheduler",
    "AsyncScheduler": "kvyard.vllm.scheduler",
}


def __getattr__(name: str) -> object:
    """The scheduler class called ``name``. Raises ``VersionError`` for a vLLM that it isn't written for."""
    module = _SCHEDULERS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    found: object = getattr(import_module(module), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *_SCHEDULERS]
