"""Hashing: tokens or trace ids in, chained block hashes and runs of them out.

``algorithm`` picks how blocks are named, ``Namespace`` says what sets a prompt apart besides its tokens, a chain
(``TokenChain``, ``TraceChain``) holds the names of one growing sequence, and a ``Run`` is a range of its blocks.
"""

from kvyard.hashing.algorithms import ALGORITHMS, Algorithm, HashingError, Key, algorithm, wire_hash
from kvyard.hashing.chain import Chain, PairChain, Run, TokenChain, TraceChain
from kvyard.hashing.digest_keys import DigestKeys
from kvyard.hashing.keys import Keys
from kvyard.hashing.namespace import PLAIN, Embeds, ExtraKeys, Media, Namespace, NamespaceError

__all__ = [
    "ALGORITHMS",
    "PLAIN",
    "Algorithm",
    "Chain",
    "DigestKeys",
    "Embeds",
    "ExtraKeys",
    "HashingError",
    "Key",
    "Keys",
    "Media",
    "Namespace",
    "NamespaceError",
    "PairChain",
    "Run",
    "TokenChain",
    "TraceChain",
    "algorithm",
    "wire_hash",
]
