"""The index: for this prompt, which workers hold how long a usable prefix, on which tier, and how sure are we?

``Indexer`` joins the parts; ``docs/indexing.md`` says why they are what they are.
"""

from kvyard.index.backend import BACKENDS, IndexBackend, Rows, Usage, backend
from kvyard.index.catalog import Catalog, GroupLayout
from kvyard.index.dedup import DedupFilter
from kvyard.index.identity import Identity, IdentityError
from kvyard.index.indexer import Indexer
from kvyard.index.memory import MemoryIndex
from kvyard.index.places import Holder, Place, Places
from kvyard.index.roster import Roster
from kvyard.index.scorer import DEFAULT_WEIGHTS, Scorer, Scores, TierMatch, Trust, WorkerMatch
from kvyard.index.sequencer import BatchSequencer
from kvyard.index.stream import FollowedStream, Source

__all__ = [
    "BACKENDS",
    "DEFAULT_WEIGHTS",
    "BatchSequencer",
    "Catalog",
    "DedupFilter",
    "FollowedStream",
    "GroupLayout",
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
    "Scorer",
    "Scores",
    "Source",
    "TierMatch",
    "Trust",
    "Usage",
    "WorkerMatch",
    "backend",
]
