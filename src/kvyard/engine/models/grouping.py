"""Grouping of layers that share block tables, by vLLM's rules.

All blocks of a pool have the same size in bytes, whichever group they serve. So layers are first given pages of one size
(small ones hold more tokens, or are padded), then bucketed by what they keep, and buckets are cut into groups of as many
layers as the smallest bucket has. Nothing here reads configs, weights or memory sizes.
"""

from collections.abc import Sequence

import msgspec

from kvyard.blocks.spec import GroupSpec
from kvyard.engine.models.layers import CacheLayer
from kvyard.errors import KvyardError
from kvyard.integers import ceil_div


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with one block table."""

    spec: GroupSpec
    layers: int
    used_bytes: int
    """Bytes of one block, of all its layers, without padding."""
    page_bytes: int
    """Bytes of one block, of all its layers, with padding."""


class _LayerPage(msgspec.Struct, frozen=True):
    """Contents of one layer in one block."""

    spec: GroupSpec
    used: int
    size: int


def group_layers(
    layers: Sequence[CacheLayer], *, block_size: int, state_mode: str, state_block: int, stages: Sequence[range] = ()
) -> list[list[LayerGroup]]:
    """Return the groups as each pipeline stage has them; ``stages`` is one stage with all layers by default.

    Groups are formed over the whole model, in the order of their first layers; a stage may have no layer of a group.
    ``block_size`` is the minimum number of tokens of an attention block.

    A state's block holds one state and spans ``state_block`` tokens, or, in mode ``align`` next to attention, an attention
    block's. Raises ``KvyardError`` for layers whose pages can't be made equal.
    """
    pages = _pages(layers, block_size, state_mode, state_block)
    groups = _grouped(layers, pages)
    return [
        [_group(members, [entry for entry in members if layers[entry[0]].number in stage]) for members in groups]
        for stage in stages or [range(1 + max(layer.number for layer in layers))]
    ]


_Numbered = tuple[int, _LayerPage]
"""Position of a layer among those given, and its page."""


def _grouped(layers: Sequence[CacheLayer], pages: Sequence[_LayerPage]) -> list[list[_Numbered]]:
    if len({_kind(layer) for layer in layers}) == 1:
        # Layers of one kind share a table even if some keep more per token than others.
        return [list(enumerate(pages))]
    buckets: dict[_LayerPage, list[_Numbered]] = {}
    for position, page in enumerate(_equal(pages)):
        buckets.setdefault(page, []).append((position, page))
    smallest, largest = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = largest if largest < 1.5 * smallest else smallest
    groups = []
    for bucket in buckets.values():
        number = ceil_div(len(bucket), size)
        # Layers at equal distances, so that pipeline stages have about as many layers of each group.
        groups += [bucket[index::number] for index in range(number)]
    return groups


def bytes_per_block(groups: Sequence[LayerGroup]) -> int:
    """Return the bytes of a block of the pool: those of its largest user."""
    return max(group.page_bytes for group in groups)


def _pages(layers: Sequence[CacheLayer], block_size: int, state_mode: str, state_block: int) -> list[_LayerPage]:
    state = max((layer.state_bytes for layer in layers), default=0)
    token = max((layer.token_bytes for layer in layers), default=0)
    if state and token:
        # An attention page must not be smaller than a state: its block grows by whole steps until it isn't.
        step = max(block_size, 128) if any(layer.kind == "mla" for layer in layers) else block_size
        block_size = max(block_size, step * ceil_div(state, step * token))
        if state_mode == "align":
            state_block = block_size
    pages = []
    for layer in layers:
        if layer.kind == "mamba":
            spec = GroupSpec(kind="mamba", block_size=state_block, mode=state_mode)
            pages.append(_LayerPage(spec, layer.state_bytes, max(layer.state_bytes, block_size * token)))
        else:
            spec = GroupSpec(kind=layer.kind, block_size=block_size, window=layer.window, chunk=layer.chunk)
            pages.append(_LayerPage(spec, block_size * layer.token_bytes, block_size * layer.token_bytes))
    return pages


def _equal(pages: Sequence[_LayerPage]) -> list[_LayerPage]:
    """Return the pages at one size: more tokens to a block where that fits, else padding."""
    largest = max(page.size for page in pages)
    equal = []
    for page in pages:
        times, rest = divmod(largest, page.size)
        if page.size == largest:
            equal.append(page)
        elif page.spec.is_state:
            equal.append(_LayerPage(page.spec, page.used, largest))
        elif not rest:
            spec = msgspec.structs.replace(page.spec, block_size=page.spec.block_size * times)
            equal.append(_LayerPage(spec, page.used * times, largest))
        elif page.spec.kind == "mla":
            raise KvyardError(f"MLA pages of {page.size} bytes don't divide the largest page of {largest} bytes")
        else:
            equal.append(_LayerPage(page.spec, page.used, largest))
    return equal


def _group(whole: Sequence[_Numbered], here: Sequence[_Numbered]) -> LayerGroup:
    return LayerGroup(
        spec=whole[0][1].spec,
        layers=len(here),
        used_bytes=sum(page.used for _, page in here),
        page_bytes=sum(page.size for _, page in here),
    )


def _kind(layer: CacheLayer) -> tuple[str, int | None, int | None]:
    return layer.kind, layer.window, layer.chunk
