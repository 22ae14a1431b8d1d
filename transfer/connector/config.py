"""What a connector worker is told: which rank it is, and how the caches of its model lie in memory.

Every struct is plain data that pickles and encodes: who plans a deployment makes one for each rank. The names of
groups, blocks and kernel blocks are those of vLLM, whose tensors these are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from transfer.errors import InvalidEngineError
from transfer.plan.shapes import (
    BLOCKS_FIRST_HND,
    BLOCKS_FIRST_NHD,
    LATENT,
    PACKED_HND,
    PACKED_NHD,
    SPLIT_HND,
    SPLIT_NHD,
)
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.messages import PROTOCOL
from transfer.wire.secret import fleet_keys

Kind: TypeAlias = Literal["full", "sliding_window", "mla", "mamba"]

LAYOUTS = {
    "NHD": SPLIT_NHD,
    "HND": SPLIT_HND,
    "blocks-first": BLOCKS_FIRST_NHD,
    "blocks-first-HND": BLOCKS_FIRST_HND,
    "packed": PACKED_HND,
    "packed-NHD": PACKED_NHD,
    "mla": LATENT,
    # vLLM 0.33's own names: layers, blocks, heads, tokens, and the content of both sides, in the order in memory
    "LBHNC": PACKED_HND,
    "LBNHC": PACKED_NHD,
    "LHBNC": "head,page,token,side,dim",
    "BLHNC": "page,layer,head,token,side,dim",
    "BLNHC": "page,layer,token,head,side,dim",
    "BHLNC": "page,head,layer,token,side,dim",
    "cross-layer": "page,layer,side,head,token,dim",
    "cross-layer-NHD": "page,layer,side,token,head,dim",
}
"""Names of layouts, and the axes of a tensor of each, as `transfer.plan.shapes` names them.

They name the dimensions of the tensor, outermost first; how they lie in memory its strides say. Packed sides,
"side,dim", may be one dimension of twice the size.
"""


_AXES = {"page", "layer", "side", "head", "token", "dim"}


def share(units: int, ranks: int, rank: int) -> range:
    """The units (heads or groups of channels) that rank `rank` of `ranks` holds: an even share, or one, replicated."""
    if ranks >= units:
        first = rank * units // ranks
        return range(first, first + 1)
    return range(rank * units // ranks, (rank + 1) * units // ranks)


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """Channels of a recurrent state that are split over tensor-parallel ranks in one way.

    A Mamba 2 layer has four: x (a unit for each head, of head_dim channels), B and C (a unit for each group, of d_state
    channels), all in the convolution's tensor, one after another; and the SSM's state (a unit for each head).

    Attributes:
        kind: names it on both sides: "conv.x", "conv.B", "conv.C", "ssm".
        units: that the model has. Ranks hold even shares, or one unit each where there are more ranks.
        width: channels of a unit.
        dtype: name of the element type.
        tensor: which of the layer's tensors holds it.
        axes: of that tensor: "page,head,dim" where channels come first ("DS"), "page,dim,head" otherwise. Further
            dimensions belong to "dim", the last one.
    """

    kind: str
    units: int
    width: int = 1
    dtype: str = "bfloat16"
    tensor: int = 0
    axes: str = "page,head,dim"


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table, of the whole model. Ranks register those that they have.

    Attributes:
        layers: name of each layer to its number in the model.
        kind: what the layers keep.
        block_size: tokens of a block, as the scheduler counts.
        layout: a name of `LAYOUTS`, or the axes themselves. Not used for "mamba".
        kernel_block_size: tokens of a page as the tensors have them; 0 if it is the block size.
        num_kv_heads: heads of the model.
        head_dim: elements of a head, or of a latent.
        dtype: name of the element type.
        window: tokens that a sliding window counts, the one that looks included.
        state: what a state consists of, in the order in memory.
        content: names what else of a page both sides must have alike; nothing where empty.
        whole_pages: only the engine knows what lies where in a head of a page: pages are moved as a whole, to pages of
            the same size.
    """

    layers: dict[str, int]
    kind: Kind = "full"
    block_size: int = 16
    layout: str = "HND"
    kernel_block_size: int = 0
    num_kv_heads: int = 1
    head_dim: int = 0
    dtype: str = "bfloat16"
    window: int = 0
    state: tuple[StatePart, ...] = ()
    content: str = ""
    whole_pages: bool = False

    @property
    def axes(self) -> str:
        """The axes of an attention layer's tensor."""
        return LAYOUTS.get(self.layout, self.layout)

    @property
    def is_state(self) -> bool:
        """Whether a request has one block, whatever its tokens."""
        return self.kind == "mamba"

    @property
    def page_size(self) -> int:
        """Tokens of a page in memory; 1 for a state."""
        return 1 if self.is_state else self.kernel_block_size or self.block_size

    @property
    def block_pages(self) -> int:
        """Pages in memory of a block."""
        return 1 if self.is_state else self.block_size // self.page_size

    def needed(self, num_tokens: int) -> int:
        """The first token that is needed to compute token `num_tokens` next."""
        return max(0, num_tokens - self.window + 1) if self.window else 0


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds.

    Attributes:
        lease: that a lease lasts without a word of its readers.
        load: until a load fails by itself.
        handshake: that a source may take to answer.
        heartbeat: between signs of life of a source while it is read from.
        dead_after: of silence until it is given up.
        idle: until an unused source is forgotten.
    """

    lease: float = 30.0
    load: float = 120.0
    handshake: float = 5.0
    heartbeat: float = 1.0
    dead_after: float = 5.0
    idle: float = 3600.0


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rank.

    Attributes:
        engine_id: shared by all ranks of the engine; no other engine has it.
        incarnation: random, new with each start, shared by all ranks (`transfer.pull.rank.new_incarnation`).
        groups: the same on all ranks, and in the same order on peers.
        model: name of the weights, the same on peers.
        compatibility: whatever else must agree with a peer, such as a quantisation.
        tp_rank: of `tp_size` tensor-parallel ranks.
        tp_size: tensor-parallel ranks.
        pp_rank: of `pp_size` pipeline stages.
        pp_size: pipeline stages.
        kv_buffer_device: "cpu" to move pages through host memory; otherwise the caches' own device.
        registrable: kinds of devices whose memory NIXL can register.
        page_checks: a source notes a checksum of each page that it leases.
        verify: share of the pages that a reader compares with them.
        key: of the digests over metadata; one of `secret` where that is given.
        secret: shared by all engines of a fleet: turns on keys for metadata and for the sockets of the side channel.
            "file:PATH", "env:NAME", or the secret itself, which is never shown.
        allowed_peers: addresses, networks and host names of sources that may be contacted, beside this host.
        timing: limits.
    """

    engine_id: str
    incarnation: str
    groups: tuple[GroupConfig, ...]
    model: str
    compatibility: dict[str, str] = {}
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    kv_buffer_device: str = ""
    registrable: tuple[str, ...] = ("cpu", "cuda")
    page_checks: bool = False
    verify: float = 0.0
    key: bytes = b""
    secret: str = ""
    allowed_peers: tuple[str, ...] = ()
    timing: Timing = Timing()

    def __repr__(self) -> str:
        hidden = ("key", "secret")
        shown = [f"{name}={'...' if name in hidden else repr(getattr(self, name))}" for name in self.__struct_fields__]
        return f"WorkerConfig({', '.join(shown)})"

    @property
    def rank(self) -> int:
        """The number of this rank among `ranks`: pipeline stage by pipeline stage."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.pp_size

    def fingerprint(self) -> dict[str, str]:
        """The settings that must agree with a peer, by name.

        A refused peer is told each that differs, with both values.

        Layouts, page sizes and parallelism are not included, because the plan takes any, unless pages are moved whole.
        """
        groups = {f"group {number}": _described(group) for number, group in enumerate(self.groups)}
        return {"model": self.model, "protocol": str(PROTOCOL)} | groups | self.compatibility


def _described(group: GroupConfig) -> str:
    layers = sorted(group.layers.values())
    parts = [f"{part.kind} {part.units} x {part.width} {part.dtype}" for part in group.state]
    held = parts or [f"{group.num_kv_heads} heads of {group.head_dim} {group.dtype}", f"window {group.window}"]
    held += [group.content] if group.content else []
    held += [f"whole pages of {group.page_size} tokens"] if group.whole_pages else []
    return ", ".join([f"{group.kind}, {len(layers)} layers from {layers[0]} to {layers[-1]}", *held])


def check_config(config: WorkerConfig) -> WorkerConfig:
    """Returns `config` if it is one that a worker can be made of."""
    where = f"engine {config.engine_id!r} rank {config.rank}"
    if fault := next(_faults(config), ""):
        raise InvalidEngineError(f"{where}: {fault}")
    AllowedPeers(config.allowed_peers)
    fleet_keys(where, config.secret, config.key)
    return config


def _faults(config: WorkerConfig) -> Iterator[str]:
    """What is wrong; whoever asks for the next fault has seen to those before it."""
    if not config.engine_id or not config.incarnation or not config.groups:
        yield "an engine id, an incarnation and at least one group are needed"
    for name, rank, size in (("tp", config.tp_rank, config.tp_size), ("pp", config.pp_rank, config.pp_size)):
        if not 0 <= rank < size:
            yield f"{name}_rank is {rank}, the range is 0 to {size - 1}"
    if not 0 <= config.verify <= 1:
        yield f"verify is {config.verify}, the range is 0 to 1"
    for name in Timing.__struct_fields__:
        if not 0 < (seconds := getattr(config.timing, name)) < math.inf:
            yield f"{name} is {seconds} s, above 0 is needed"
    names: set[str] = set()
    for number, group in enumerate(config.groups):
        yield from (f"group {number}: {fault}" for fault in _faults_of_group(group))
        if shared := names & set(group.layers):
            yield f"layer {min(shared)!r} is in two groups"
        names |= set(group.layers)


def _faults_of_group(group: GroupConfig) -> Iterator[str]:
    if not group.layers or len(set(group.layers.values())) != len(group.layers) or min(group.layers.values()) < 0:
        yield "layers must have different numbers from 0 on, and be at least one"
    if group.block_size < 1 or group.kernel_block_size < 0 or group.block_size % max(group.page_size, 1):
        yield f"blocks of {group.block_size} tokens, kernel blocks of {group.kernel_block_size}: must divide"
    if (group.kind == "sliding_window") != (group.window > 0):
        yield f"kind {group.kind!r} with a window of {group.window} tokens"
    if group.num_kv_heads < 1 or (group.kind == "mla" and group.num_kv_heads != 1):
        yield f"{group.num_kv_heads} heads of kind {group.kind!r}"
    if not group.is_state and group.head_dim < 1:
        yield f"heads of {group.head_dim} elements, at least 1 is needed"
    if not group.is_state and not {"page", "token"} <= set(group.axes.split(",")) <= _AXES:
        yield f"layout {group.layout!r} is none of {', '.join(LAYOUTS)}, nor axes such as {SPLIT_HND!r}"
    if group.is_state != bool(group.state):
        yield f"kind {group.kind!r} with {len(group.state)} parts of a state"
    for part in group.state:
        if part.units < 1 or part.width < 1 or part.tensor < 0:
            yield f"{part.kind!r} has {part.units} units of {part.width} channels"
