"""The index: for a prompt, the workers that hold a usable prefix, its length, its tier, and the trust in it.

``Indexer`` joins the parts; ``docs/explain/indexing.md`` explains the design.
"""

from kvyard.index.backend import IndexBackend, Rows
from kvyard.index.dedup import DedupFilter
from kvyard.index.identity import Identity, IdentityError
from kvyard.index.indexer import Indexer
from kvyard.index.memory import MemoryIndex
from kvyard.index.places import Holder, Place, Places
from kvyard.index.roster import Roster
from kvyard.index.scorer import DEFAULT_WEIGHTS, Scores, Trust, WorkerMatch
from kvyard.index.stream import BatchSequencer, Source

__all__ = [
    "DEFAULT_WEIGHTS",
    "BatchSequencer",
    "DedupFilter",
    "Holder",
    "Identity",
    "IdentityError",
    "IndexBackend",
    "Indexer",
    "MemoryIndex",
    "Place",
    "Places",
    "Roster",
    "Rows",
    "Scores",
    "Source",
    "Trust",
    "WorkerMatch",
]
