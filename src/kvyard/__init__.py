"""kvyard: the KV-cache plane of an LLM serving fleet.

Importing this package loads nothing but this file, so that ``import kvyard`` and ``kvyard --help`` stay quick. Import the
part you need by its package: ``kvyard.hashing``, ``kvyard.events``, ``kvyard.blocks``. ``kvyard.replay(...)`` works at once.
"""

__version__ = "0.1.0"
"""The version, and its one source: the build reads it from here."""


def __getattr__(name: str) -> object:
    if name == "replay":  # a package that can be called, loaded when it is called
        from importlib import import_module

        return import_module("kvyard.replay")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
