"""Stand-in for torchvision, which has no build for this torch on PyPI: whatever is imported from it exists and does nothing.

vLLM's vision models import it when their configuration is read; tests of the scheduler process no image.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

__version__ = "0.28.0"


class _Empty(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


sys.meta_path.append(_Submodules())
