"""Models and the two sides of a transfer. The caches of each rank are filled and compared through torch's own indexing,
without boxes, plans or runs.

The value of an element identifies its place in the model, so the expected content of every cache is known without a
transfer. Elements that no transfer may write hold `UNTOUCHED`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from transfer.connector.config import GroupConfig, StatePart, WorkerConfig, share

UNTOUCHED = -1
JUNK = -2
"""The value of all elements in the source's pages that do not belong to the request. It must not arrive anywhere."""

_CANONICAL = ("page", "token", "layer", "side", "head", "dim")


@dataclass(frozen=True)
class GroupSpec:
    """A layer group of a model, independent of its division over ranks."""

    kind: str = "full"
    layers: tuple[int, ...] = (0, 1)
    heads: int = 4
    dim: int = 4
    window: int = 0
    state_heads: int = 4
    state_groups: int = 2

    @property
    def sides(self) -> int:
        return 1 if self.kind == "mla" else 2

    @property
    def parts(self) -> tuple[StatePart, ...]:
        if self.kind != "mamba":
            return ()
        heads, groups = self.state_heads, self.state_groups
        return (
            StatePart(kind="conv.x", units=heads, width=3, dtype="int32"),
            StatePart(kind="conv.B", units=groups, width=2, dtype="int32"),
            StatePart(kind="conv.C", units=groups, width=2, dtype="int32"),
            StatePart(kind="ssm", units=heads, width=1, dtype="int32", tensor=1),
        )

    def element(self, group: int, token: int = 0) -> int:
        """Returns the value of a token's first element. A token has fewer than 4096 elements."""
        return (group * 1024 + token) * 4096


@dataclass(frozen=True)
class Side:
    """The ranks of one engine, and the layout of its caches."""

    tp: int = 1
    pp: int = 1
    block_size: int = 8
    kernel_block_size: int = 0
    layout: str = "HND"
    num_blocks: int = 24
    apart: bool = False
    order: tuple[int, ...] = ()
    channels_first: bool = True
    host_buffer: bool = False

    @property
    def cross_layer(self) -> bool:
        return "layer" in group_config(GroupSpec(), self).axes


@dataclass(frozen=True)
class Pair:
    """A model, its two engines, and a request with its blocks on each side and the number of tokens that the reader
    already has.
    """

    groups: tuple[GroupSpec, ...]
    source: Side
    reader: Side
    num_tokens: int
    computed: int = 0
    extra_blocks: int = 0
    source_blocks: tuple[tuple[int, ...], ...] = field(default=())
    reader_blocks: tuple[tuple[int, ...], ...] = field(default=())


def group_config(spec: GroupSpec, side: Side) -> GroupConfig:
    parts = spec.parts
    if not side.channels_first:
        parts = tuple(
            StatePart(kind=p.kind, units=p.units, width=p.width, dtype=p.dtype, tensor=p.tensor, axes="page,dim,head")
            if p.tensor == 0
            else p
            for p in parts
        )
    return GroupConfig(
        layers={f"model.layers.{layer}.mixer": layer for layer in spec.layers},
        kind=spec.kind,
        block_size=side.block_size,
        kernel_block_size=side.kernel_block_size,
        layout="mla" if spec.kind == "mla" and "layer" not in side.layout else side.layout,
        num_kv_heads=1 if spec.kind == "mla" else spec.heads,
        head_dim=spec.dim,
        dtype="int32",
        window=spec.window,
        state=parts,
    )


def worker_config(
    groups: tuple[GroupSpec, ...], side: Side, rank: int, engine_id: str, incarnation: str, **options: object
) -> WorkerConfig:
    return WorkerConfig(
        engine_id=engine_id,
        incarnation=incarnation,
        groups=tuple(group_config(spec, side) for spec in groups),
        model="test",
        tp_rank=rank % side.tp,
        tp_size=side.tp,
        pp_rank=rank // side.tp,
        pp_size=side.pp,
        kv_buffer_device="cpu" if side.host_buffer else "",
        registrable=("cuda",) if side.host_buffer else ("cpu", "cuda"),
        **options,
    )


def stage_layers(groups: tuple[GroupSpec, ...], side: Side, rank: int) -> set[int]:
    """Returns the layers of a rank's pipeline stage."""
    layers = sorted({layer for spec in groups for layer in spec.layers})
    stage = rank // side.tp
    return set(layers[len(layers) * stage // side.pp : len(layers) * (stage + 1) // side.pp])


class RankCaches:
    """The caches of one rank. Every tensor begins as `UNTOUCHED`.

    Attributes:
        tensors: by layer, as they are registered.
        names: layers of the one tensor of a cross-layer cache; empty otherwise.
    """

    def __init__(self, groups: tuple[GroupSpec, ...], side: Side, rank: int) -> None:
        self.groups, self.side = groups, side
        self.tp_rank = rank % side.tp
        self.stage = stage_layers(groups, side, rank)
        self.tensors: dict[str, torch.Tensor | tuple[torch.Tensor, ...]] = {}
        self.names: tuple[str, ...] = ()
        for spec in groups:
            config = group_config(spec, side)
            here = [name for name, layer in config.layers.items() if layer in self.stage]
            if not here:
                continue
            if spec.kind == "mamba":
                self.tensors |= {name: self._state(spec) for name in here}
            elif side.cross_layer:
                self.names = tuple(here)
                self.tensors[here[0]] = self._attention(spec, config, len(here))
            else:
                self.tensors |= {name: self._attention(spec, config, 1) for name in here}

    def _attention(self, spec: GroupSpec, config: GroupConfig, layers: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
        sizes = {
            "page": self.side.num_blocks * config.block_pages,
            "token": config.page_size,
            "layer": layers,
            "side": spec.sides,
            "head": len(share(config.num_kv_heads, self.side.tp, self.tp_rank)),
            "dim": spec.dim,
        }
        names = config.axes.split(",")
        if self.side.apart and "side" in names:
            names.remove("side")
            return tuple(_strided([sizes[name] for name in names], self.side.order) for _ in range(spec.sides))
        shape = [sizes[name] for name in names]
        if names[-2:] == ["side", "dim"]:
            shape[-2:] = [shape[-2] * shape[-1]]
        return _strided(shape, self.side.order)

    def _state(self, spec: GroupSpec) -> tuple[torch.Tensor, torch.Tensor]:
        channels = [len(share(part.units, self.side.tp, self.tp_rank)) * part.width for part in spec.parts]
        pages, length = self.side.num_blocks, 3
        # The states of the convolution and of the SSM share one storage, as in hybrid models. A page holds the state of
        # the convolution, the state of the SSM, and padding.
        conv, ssm = sum(channels[:3]) * length, channels[3] * 2 * spec.dim
        memory = torch.full((pages, conv + ssm + 5), UNTOUCHED, dtype=torch.int32)
        shape = (pages, sum(channels[:3]), length) if self.side.channels_first else (pages, length, sum(channels[:3]))
        first = memory[:, :conv].unflatten(1, shape[1:])
        second = memory[:, conv : conv + ssm].unflatten(1, (channels[3], 2, spec.dim))
        return first, second

    def fill_all(self, value: int) -> None:
        for cache in self.tensors.values():
            for tensor in (cache,) if isinstance(cache, torch.Tensor) else cache:
                tensor.fill_(value)

    def write(
        self, group: int, blocks: tuple[int, ...], first: int, tokens: tuple[int, int], value: int | None = None
    ) -> None:
        """Writes a request's tokens into its blocks. The first of the blocks is block number `first` of the request.
        Each element gets its defined value, or `value` if `value` is given.
        """
        spec = self.groups[group]
        config = group_config(spec, self.side)
        if spec.kind == "mamba":
            self._write_state(group, blocks[-1])
            return
        heads = share(config.num_kv_heads, self.side.tp, self.tp_rank)
        here = [layer for layer in spec.layers if layer in self.stage]
        wanted = torch.arange(*tokens)
        block, within = wanted // config.block_size - first, wanted % config.block_size
        pages = torch.tensor(blocks, dtype=torch.long)[block] * config.block_pages + within // config.page_size
        values = self._values(group, wanted, here, heads)
        if value is not None:
            values.fill_(value)
        for view, layers, sides in self._views(group):
            rows = [here.index(layer) for layer in layers]
            view[pages, within % config.page_size] = values[:, rows][:, :, sides]

    def _values(self, group: int, tokens: torch.Tensor, layers: list[int], heads: range) -> torch.Tensor:
        """Returns the defined value of each element, int32 `[tokens, layers, sides, heads, dim]`."""
        spec = self.groups[group]
        token = tokens.view(-1, 1, 1, 1, 1) * 4096 + spec.element(group)
        layer = torch.tensor(layers).view(1, -1, 1, 1, 1) * 512
        side = torch.arange(spec.sides).view(1, 1, -1, 1, 1) * 256
        head = torch.arange(heads.start, heads.stop).view(1, 1, 1, -1, 1) * 16
        return (token + layer + side + head + torch.arange(spec.dim)).to(torch.int32)

    def _views(self, group: int) -> list[tuple[torch.Tensor, list[int], slice]]:
        """Yields views `[pages, token, layers, sides, heads, dim]` of a group's tensors, each with its layers and
        sides.
        """
        spec = self.groups[group]
        config = group_config(spec, self.side)
        found: list[tuple[torch.Tensor, list[int], slice]] = []
        for name, layer in config.layers.items():
            if name not in self.tensors:
                continue
            layers = [config.layers[one] for one in self.names] or [layer]
            cache = self.tensors[name]
            parts = (cache,) if isinstance(cache, torch.Tensor) else cache
            for at, tensor in enumerate(parts):
                names = config.axes.split(",")
                if len(parts) > 1:
                    names.remove("side")
                view = tensor
                if names[-2:] == ["side", "dim"] and tensor.dim() == len(names) - 1:
                    view = view.unflatten(-1, (spec.sides, spec.dim))
                for axis in _CANONICAL:
                    if axis not in names:
                        names.append(axis)
                        view = view.unsqueeze(-1)
                view = view.permute([names.index(axis) for axis in _CANONICAL])
                found.append((view, layers, slice(at, at + 1) if len(parts) > 1 else slice(None)))
        return found

    def _write_state(self, group: int, block: int) -> None:
        spec = self.groups[group]
        for name, layer in group_config(spec, self.side).layers.items():
            if name not in self.tensors:
                continue
            conv, ssm = self.tensors[name]
            rows = []
            for number, part in enumerate(spec.parts[:3]):
                held = share(part.units, self.side.tp, self.tp_rank)
                channel = torch.arange(held.start * part.width, held.stop * part.width).view(-1, 1)
                rows.append(spec.element(group, number + 1) + layer * 512 + channel * 8 + torch.arange(3))
            values = torch.cat(rows).to(torch.int32)
            conv[block] = values if self.side.channels_first else values.T
            held = share(spec.parts[3].units, self.side.tp, self.tp_rank)
            head = torch.arange(held.start, held.stop).view(-1, 1, 1) * 2 * spec.dim
            inner = torch.arange(2 * spec.dim).view(1, 2, spec.dim)
            ssm[block] = (spec.element(group, 9) + layer * 512 + head + inner).to(torch.int32)

    def differences(self, expected: RankCaches, allowed: RankCaches) -> list[str]:
        """Returns the differences from `expected`, tensor by tensor. An element may also equal the corresponding
        element of `allowed`.
        """
        found: list[str] = []
        for name, cache in self.tensors.items():
            for at, tensor in enumerate((cache,) if isinstance(cache, torch.Tensor) else cache):
                one, other = (
                    side.tensors[name] if isinstance(cache, torch.Tensor) else side.tensors[name][at]
                    for side in (expected, allowed)
                )
                wrong = (tensor != one) & (tensor != other)
                if wrong.any():
                    where = torch.nonzero(wrong)[0].tolist()
                    found.append(
                        f"{name}[{at}]{where}: {tensor[tuple(where)]}, expected {one[tuple(where)]} "
                        f"({int(wrong.sum())} elements)"
                    )
        return found


def _strided(shape: list[int], order: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor whose dimensions have the memory order `order`, given as ranks of their strides. With an empty
    `order` the tensor is dense.
    """
    if len(order) != len(shape):
        return torch.full(shape, UNTOUCHED, dtype=torch.int32)
    memory = torch.full([shape[axis] for axis in order], UNTOUCHED, dtype=torch.int32)
    return memory.permute([order.index(axis) for axis in range(len(shape))])


def reach(pair: Pair, group: int) -> tuple[int, int, int]:
    """Returns three token positions: the first token that a reader may receive, the first token that it must receive,
    and the end of the tokens that it receives.
    """
    spec = pair.groups[group]
    ours, theirs = group_config(spec, pair.reader), group_config(spec, pair.source)
    needed = max(pair.computed, ours.needed(pair.num_tokens))
    begin = max(pair.computed, needed // ours.block_size * ours.block_size)
    up = [-(-pair.num_tokens // size) * size for size in (ours.page_size, theirs.page_size)]
    return begin, needed, min(up)
