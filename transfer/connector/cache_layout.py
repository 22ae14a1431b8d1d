"""Turns the registered caches of a rank, torch tensors of any strides, into the regions and boxes of its shard.

A region is a range of memory that NIXL registers. A box says which part of a layer's KV lies where in a region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from transfer.connector.config import GroupConfig, WorkerConfig, share
from transfer.errors import InvalidEngineError, MetadataError
from transfer.plan.boxes import KV, Box, Group, ShardLayout, check
from transfer.plan.shapes import from_tensor
from transfer.pull.rank import ShardMemory

Cache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A layer's tensor, or several tensors: K and V separately, or the parts of a state."""


def tensors_of(cache: Cache) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a layer."""
    return (cache,) if isinstance(cache, torch.Tensor) else tuple(cache)


class _Storages:
    """The torch storages behind the registered tensors. Each storage becomes one region.

    Several layers and groups may share a storage.
    """

    def __init__(self) -> None:
        self.regions: dict[int, int] = {}  # by the address of a storage, in order
        self.sizes: list[int] = []

    def locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns the region of a tensor and its offset in that region, in bytes."""
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        if base not in self.regions:
            self.regions[base] = len(self.sizes)
            self.sizes.append(storage.nbytes())
        return self.regions[base], tensor.data_ptr() - base


def cache_layout(config: WorkerConfig, caches: Mapping[str, Cache], cross_layer: Sequence[str] = ()) -> ShardMemory:
    """Returns the memory of a rank's caches as regions and boxes.

    Raises `InvalidEngineError` if the caches do not match the config.
    """
    where = f"engine {config.engine_id!r} rank {config.rank}"
    tensors = {name: tensors_of(cache) for name, cache in caches.items()}
    devices = {tensor.device for found in tensors.values() for tensor in found}
    if not devices:
        raise InvalidEngineError(f"{where}: register_kv_caches got no caches")
    if len(devices) != 1:
        raise InvalidEngineError(f"{where}: caches are on {sorted(map(str, devices))}; one device is expected")
    given = {*caches, *cross_layer}
    unknown = set(caches) - {name for group in config.groups for name in group.layers}
    if unknown:
        raise InvalidEngineError(
            f"{where}: layer {min(unknown)!r} is in none of the {len(config.groups)} groups of the configuration"
        )
    storages = _Storages()
    groups = tuple(
        _group(f"{where}: group {number}", config, group, tensors, storages, cross_layer)
        for number, group in enumerate(config.groups)
    )
    try:
        layout = check(ShardLayout(groups, tuple(storages.sizes)))
    except MetadataError as error:
        raise InvalidEngineError(f"{where}: {error}") from error
    if config.pp_size == 1 and (missing := {name for group in config.groups for name in group.layers} - given):
        raise InvalidEngineError(
            f"{where}: {len(missing)} of its layers have no cache ({min(missing)!r} is the first): with pp_size 1 "
            "a rank needs the caches of all layers"
        )
    named = {f"layer {name!r}, tensor {at}": one for name, found in tensors.items() for at, one in enumerate(found)}
    return ShardMemory(layout, tuple(storages.regions), devices.pop(), named)


def _group(
    where: str,
    config: WorkerConfig,
    group: GroupConfig,
    tensors: Mapping[str, tuple[torch.Tensor, ...]],
    storages: _Storages,
    cross_layer: Sequence[str],
) -> Group:
    boxes: list[Box] = []
    sizes: set[int] = set()
    for name in group.layers:
        if name not in tensors:
            continue
        label = f"{where}, layer {name!r}"
        first, count = _layer_run(label, group, cross_layer) if cross_layer else (group.layers[name], 1)
        layer = _Layer(label, config, group, first, count, storages)
        boxes += (layer.state if group.is_state else layer.attention)(tensors[name], sizes)
        if len(sizes) != 1:
            raise InvalidEngineError(f"{label}: its tensors have {sorted(sizes)} pages; all must have the same number")
    num_pages = sizes.pop() if sizes else 1
    if num_pages % group.block_pages and boxes:
        raise InvalidEngineError(
            f"{where}: {num_pages} pages are not a multiple of the {group.block_pages} pages of a block"
        )
    return Group(group.page_size, num_pages, tuple(boxes), group.window, group.is_state, group.block_pages)


def _layer_run(label: str, group: GroupConfig, names: Sequence[str]) -> tuple[int, int]:
    """Returns the index of the first layer in a cross-layer tensor, and the number of layers that the tensor holds."""
    if strange := [name for name in names if name not in group.layers]:
        raise InvalidEngineError(f"{label}: layer {strange[0]!r} is not in its group")
    numbers = [group.layers[name] for name in names]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise InvalidEngineError(f"{label}: the layers of one tensor are {numbers[:16]}; they must be consecutive")
    return numbers[0], len(numbers)


@dataclass(frozen=True)
class _Layer:
    """Computes the boxes of one layer, or of several layers that share a tensor.

    Both methods also add the number of pages of each tensor to the set `sizes`.
    """

    label: str
    config: WorkerConfig
    group: GroupConfig
    first: int
    count: int
    storages: _Storages

    def attention(self, tensors: tuple[torch.Tensor, ...], sizes: set[int]) -> list[Box]:
        """Returns the boxes of keys and values, or of a latent."""
        group = self.group
        names, sides = group.axes.split(","), 1 if group.kind == "mla" else 2
        if len(tensors) not in {1, sides}:
            raise InvalidEngineError(f"{self.label}: got {len(tensors)} tensors; 1 to {sides} are expected")
        if len(tensors) > 1:
            names = [name for name in names if name != "side"]
        heads = share(group.num_kv_heads, self.config.tp_size, self.config.tp_rank)
        expected = {
            "layer": self.count,
            "side": sides // len(tensors),
            "head": len(heads),
            "token": group.page_size,
            "dim": group.head_dim,
        }
        boxes: list[Box] = []
        for side, tensor in enumerate(tensors):
            shape, strides = _split_sides(tensor, names)
            self._check(names, shape, expected, _name(tensor.dtype))
            sizes.add(shape[names.index("page")])
            boxes.append(self._box(tensor, shape, strides, names, first=(self.first, side, heads.start, 0)))
        return boxes

    def state(self, tensors: tuple[torch.Tensor, ...], sizes: set[int]) -> list[Box]:
        """Returns the boxes of a recurrent state.

        If several parts lie in one tensor, the channels of each part follow the channels of the previous part.
        """
        boxes: list[Box] = []
        taken, channels = [0] * len(tensors), [0] * len(tensors)
        for part in self.group.state:
            if part.tensor >= len(tensors):
                raise InvalidEngineError(
                    f"{self.label}: {part.kind!r} is said to be in tensor {part.tensor}, but there are {len(tensors)} "
                    "tensors"
                )
            units = share(part.units, self.config.tp_size, self.config.tp_rank)
            tensor, skipped, held = tensors[part.tensor], taken[part.tensor], len(units) * part.width
            names, label = part.axes.split(","), f"{self.label}, {part.kind!r}"
            shape, strides = _merge_last(label, tensor, len(names))
            if len(shape) != len(names) or not {"page", "head"} <= set(names) <= {"page", "head", "dim"}:
                raise InvalidEngineError(
                    f"{label} has shape {list(tensor.shape)}, which does not fit the axes {part.axes!r}"
                )
            at = names.index("head")
            if skipped + held > shape[at] or _name(tensor.dtype) != part.dtype:
                raise InvalidEngineError(
                    f"{label} takes channels {skipped} to {skipped + held} of {part.dtype}, but tensor {part.tensor} "
                    f"has {shape[at]} of {_name(tensor.dtype)}"
                )
            taken[part.tensor], channels[part.tensor] = skipped + held, shape[at]
            sizes.add(shape[names.index("page")])
            shape[at] = held
            first = (self.first, 0, units.start * part.width, 0)
            boxes.append(self._box(tensor, shape, strides, names, first, part.kind, skipped * strides[at]))
        if taken != channels or not all(channels):
            raise InvalidEngineError(f"{self.label}: its tensors have {channels} channels, but the state takes {taken}")
        return boxes

    def _box(
        self,
        tensor: torch.Tensor,
        shape: list[int],
        strides: list[int],
        names: list[str],
        first: tuple[int, int, int, int],
        kind: str = KV,
        skipped: int = 0,
    ) -> Box:
        region, offset = self.storages.locate(tensor)
        return from_tensor(
            shape,
            strides,
            ",".join(names),
            dtype=_name(tensor.dtype),
            itemsize=tensor.element_size(),
            region=region,
            offset=offset + skipped,
            kind=kind,
            first=first,
        )

    def _check(self, names: list[str], shape: list[int], expected: Mapping[str, int], dtype: str) -> None:
        if len(names) != len(shape) or "page" not in names:
            raise InvalidEngineError(f"{self.label}: shape {shape} does not fit the axes {','.join(names)!r}")
        wrong = [
            f"{axis} {size}, {expected[axis]} expected{self._share(axis)}"
            for axis, size in zip(names, shape, strict=True)
            if axis != "page" and size != expected[axis]
        ]
        left_out = [axis for axis, size in expected.items() if axis not in names and size > 1]
        wrong += [f"no axis {axis} for {expected[axis]} elements" for axis in left_out]
        if dtype != self.group.dtype:
            wrong.append(f"its elements are {dtype}, but {self.group.dtype} is expected")
        if wrong:
            raise InvalidEngineError(f"{self.label}: {'; '.join(wrong)}")

    def _share(self, axis: str) -> str:
        config = self.config
        of_rank = f" ({self.group.num_kv_heads} heads over tp_size {config.tp_size}, tp_rank {config.tp_rank})"
        return of_rank if axis == "head" else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> list[int]:
    return [step * tensor.element_size() for step in tensor.stride()]


def _split_sides(tensor: torch.Tensor, names: list[str]) -> tuple[list[int], list[int]]:
    """Returns the size of each dimension, and its stride in bytes.

    If K and V share the last dimension, it is split into two.
    """
    shape, strides = list(tensor.shape), _bytes(tensor)
    if names[-2:] == ["side", "dim"] and len(shape) == len(names) - 1 and shape[-1] % 2 == 0:
        shape[-1:] = [2, shape[-1] // 2]
        strides[-1:] = [strides[-1] * shape[-1], strides[-1]]
    return shape, strides


def _merge_last(label: str, tensor: torch.Tensor, dimensions: int) -> tuple[list[int], list[int]]:
    """Returns the size of each dimension, and its stride in bytes.

    The dimension with index `dimensions - 1` and all later dimensions are merged into one.
    """
    shape, strides = list(tensor.shape), _bytes(tensor)
    for axis in range(len(shape) - 1, dimensions - 1, -1):
        if strides[axis - 1] != strides[axis] * shape[axis] and shape[axis - 1] > 1:
            raise InvalidEngineError(
                f"{label}: dimensions {axis - 1} and {axis} of {list(tensor.shape)} have a gap between them"
            )
        shape[axis - 1 :] = [math.prod(shape[axis - 1 :])]
        strides[axis - 1 :] = [strides[axis]]
    return shape, strides


RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For each number of bytes of an element, the type as which its bits are copied. torch cannot index every type."""


class LayerView:
    """Reads and writes one attention layer of a rank through its boxes.

    Args:
        memory: the regions and boxes of the rank.
        caches: the tensors from which the boxes were computed.
        group: index of the layer's group.
        layer: index of the layer in the model.

    Attributes:
        num_pages: number of pages of the layer.
        page_size: tokens per page.
        heads: number of heads that this rank has for a token.
        content: number of elements that a head keeps for a token: keys and values, or a latent.
        itemsize: bytes per element.
    """

    def __init__(self, memory: ShardMemory, caches: Mapping[str, Cache], group: int, layer: int) -> None:
        held = memory.layout.groups[group]
        tensors = [tensor for cache in caches.values() for tensor in tensors_of(cache)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        boxes = [box for box in held.boxes if box.first[0] == layer]
        self.num_pages, self.page_size = held.num_pages, held.page_size
        self.itemsize, self.heads = boxes[0].itemsize, boxes[0].extent[2]
        self.content = sum(box.extent[1] * box.extent[4] for box in boxes)
        # For each box: the index of its first element among the `content` elements that a head keeps for a token, and
        # its elements as integers `[pages, sides, heads, tokens, dims]`.
        self._boxes: list[tuple[int, torch.Tensor]] = []
        for box in boxes:
            raw = torch.empty(0, dtype=RAW[box.itemsize], device=memory.device)
            steps = [step // box.itemsize for step in (box.page_stride, *box.strides[1:])]
            sizes, storage = (held.num_pages, *box.extent[1:]), storages[memory.bases[box.region]]
            view = raw.set_(storage, box.offset // box.itemsize, sizes, steps)
            self._boxes.append((box.first[1] * box.extent[4], view))

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """Returns the bits of some pages as integers `[pages * tokens, heads, content]`, in host memory."""
        shape = (len(pages) * self.page_size, self.heads, self.content)
        found = torch.empty(shape, dtype=RAW[self.itemsize])
        for first, elements in self._boxes:
            held = elements[list(pages)].permute(0, 3, 2, 1, 4).reshape(*shape[:2], -1)
            found[..., first : first + held.shape[-1]] = held.cpu()
        return found

    def write(self, pages: Sequence[int], found: torch.Tensor) -> None:
        """Writes elements to pages. `found` has integers in the shape that `read` returns."""
        for first, elements in self._boxes:
            _, sides, heads, tokens, dims = elements.shape
            held = found[..., first : first + sides * dims].reshape(len(pages), tokens, heads, sides, dims)
            elements[list(pages)] = held.permute(0, 3, 2, 1, 4).to(elements.device)
