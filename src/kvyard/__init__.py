"""kvyard: the KV-cache plane of an LLM serving fleet.

Importing this package loads nothing but this file, so that ``import kvyard`` and ``kvyard --help`` stay quick. Import the
part you need by its package: ``kvyard.hashing``, ``kvyard.events``, ``kvyard.blocks``.
"""

__version__ = "0.1.0"
"""The version, and its one source: the build reads it from here."""
