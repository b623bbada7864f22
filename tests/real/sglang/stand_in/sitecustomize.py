"""Stands in for what SGLang imports and has no CPU build: ``torchvision``, and of ``vllm`` the rotary kernel.

On PYTHONPATH of a real SGLang (``tests/real/sglang``), so that its worker processes have it too. Images aren't served, so
nothing of torchvision is ever called; the rotation is a real one, in torch.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class Nothing(type):
    """A class of which every attribute is the class itself, and calls too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *arguments, **named):
        return arguments[0] if arguments and callable(arguments[0]) else cls


class Placeholder(metaclass=Nothing):
    """Anything of torchvision."""


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Rotate ``query`` and ``key`` in place, as vLLM's kernel of this name does."""
    import torch

    cos, sin = cos_sin_cache[positions.flatten()].to(query.dtype).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1]
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(positions.numel(), -1, head_size)
        turned = heads[..., : 2 * half]
        if is_neox:
            first, second = turned[..., :half], turned[..., half:]
            turned.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        else:
            first, second = turned[..., ::2], turned[..., 1::2]
            turned.copy_(torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of torchvision, and the two of vLLM that are needed; others of vLLM stay missing."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision" or name in ("vllm", "vllm._custom_ops"):
            return importlib.machinery.ModuleSpec(name, self, is_package=name != "vllm._custom_ops")
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        if spec.name == "vllm._custom_ops":
            module.rotary_embedding = rotary_embedding
        elif spec.name != "vllm":
            module.__version__ = "0.28.0"
            module.__getattr__ = Placeholder.__getattr__
        return module

    def exec_module(self, module):
        """Nothing to run."""


sys.meta_path.append(Finder())
