"""Workloads for logs of SGLang's scheduler: families of settings and requests, each a function of a seed."""

from sglang_families import any_settings, drafts, host, pressure, scheduling, states, storage, windows
from sglang_families.admission import admission_state
from sglang_families.plan import FAMILIES, workload

__all__ = [
    "FAMILIES",
    "admission_state",
    "any_settings",
    "drafts",
    "host",
    "pressure",
    "scheduling",
    "states",
    "storage",
    "windows",
    "workload",
]
