"""The configuration of a connector worker: its rank, and how the caches of its model lie in memory.

Every struct is plain data that pickles and encodes. A deployment creates one `WorkerConfig` for each rank. Groups,
blocks and kernel blocks are named as in vLLM, which owns the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, cast

import msgspec

from kvcache.arguments import integer, shown
from kvcache.arguments import number as finite
from transfer.errors import InvalidEngineError, InvalidTransferError
from transfer.plan import shapes
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.messages import PROTOCOL
from transfer.wire.secret import fleet_keys

Kind: TypeAlias = Literal["full", "sliding_window", "mla", "mamba"]

LAYOUTS = {
    "NHD": shapes.SPLIT_NHD,
    "HND": shapes.SPLIT_HND,
    "blocks-first": shapes.BLOCKS_FIRST_NHD,
    "blocks-first-HND": shapes.BLOCKS_FIRST_HND,
    "packed": shapes.PACKED_HND,
    "packed-NHD": shapes.PACKED_NHD,
    "mla": shapes.LATENT,
    # vLLM 0.33's names for layouts: the axes in memory order. L is layers, B blocks, H heads, N tokens, and C the
    # content of keys and values.
    "LBHNC": shapes.PACKED_HND,
    "LBNHC": shapes.PACKED_NHD,
    "LHBNC": "head,page,token,side,dim",
    "BLHNC": "page,layer,head,token,side,dim",
    "BLNHC": "page,layer,token,head,side,dim",
    "BHLNC": "page,head,layer,token,side,dim",
    "cross-layer": "page,layer,side,head,token,dim",
    "cross-layer-NHD": "page,layer,side,token,head,dim",
}
"""The layouts, by name. Each value gives the axes of a tensor, named as in `transfer.plan.shapes`.

The axes name the dimensions of the tensor, outermost first; its strides give the order in memory. Packed sides,
"side,dim", may be one dimension of twice the size.
"""


_AXES = {"page", "layer", "side", "head", "token", "dim"}


def share(units: int, ranks: int, rank: int) -> range:
    """Returns the range of units (heads or channel groups) that rank `rank` of `ranks` holds.

    Each rank holds an even share of the units. If there are at least as many ranks as units, each rank holds a single
    unit, which other ranks may hold, too.
    """
    if ranks >= units:
        first = rank * units // ranks
        return range(first, first + 1)
    return range(rank * units // ranks, (rank + 1) * units // ranks)


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """Channels of a recurrent state that are split over tensor-parallel ranks in the same way.

    A Mamba 2 layer has four parts. The first three follow one another in the convolution's tensor: x (one unit per
    head, of head_dim channels), then B and C (one unit per group, of d_state channels each). The fourth part is the SSM
    state (one unit per head).

    Attributes:
        kind: name of the part, which must be equal on both sides: "conv.x", "conv.B", "conv.C", "ssm".
        units: number of units of the whole model. Ranks hold even shares; if there are more ranks than units, each
            holds one replicated unit.
        width: channels of a unit.
        dtype: name of the element type.
        tensor: index of the layer's tensor that holds the part.
        axes: axes of that tensor: "page,head,dim" if channels come first ("DS"), otherwise "page,dim,head". Further
            dimensions are merged into the last one.
    """

    kind: str
    units: int
    width: int = 1
    dtype: str = "bfloat16"
    tensor: int = 0
    axes: str = "page,head,dim"


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of the whole model that share a block table. A rank registers only the layers that it has.

    Attributes:
        layers: index of each layer in the model, by the layer's name.
        kind: the kind of cache that the layers have.
        block_size: tokens per block of the scheduler.
        layout: a name in `LAYOUTS`, or the axes themselves. Not used for "mamba".
        kernel_block_size: tokens per page of the tensors; 0 if this equals `block_size`.
        num_kv_heads: KV heads of the model.
        head_dim: elements of a head, or of a latent.
        dtype: name of the element type.
        window: tokens of a sliding window, including the current one; 0 for full attention.
        state: parts of a recurrent state, in memory order.
        content: a string that names further properties of the page contents. It must be equal on both sides. Empty if
            there are no such properties.
        whole_pages: True if only the engine knows how the elements of a head lie in a page. Pages are then moved whole,
            and only to pages of the same size.
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
        """Whether a request has a single block, however many tokens it has."""
        return self.kind == "mamba"

    @property
    def page_size(self) -> int:
        """Tokens per page of the tensors; 1 for a state."""
        return 1 if self.is_state else self.kernel_block_size or self.block_size

    @property
    def block_pages(self) -> int:
        """The number of tensor pages that one block of the scheduler spans."""
        return 1 if self.is_state else self.block_size // self.page_size

    def needed(self, num_tokens: int) -> int:
        """Returns the index of the first token whose KV is needed to compute the token with index `num_tokens`.

        This is the start of the sliding window, or 0 without a window.
        """
        return max(0, num_tokens - self.window + 1) if self.window else 0


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits, all in seconds.

    Attributes:
        lease: duration of a lease that no reader renews.
        load: time after which a load fails.
        handshake: time that a source may take to answer.
        heartbeat: interval between pings to a source that is being read.
        dead_after: a source that stays silent for this long after a ping is given up.
        idle: time after which an unused source is forgotten.
    """

    lease: float = 30.0
    load: float = 120.0
    handshake: float = 5.0
    heartbeat: float = 1.0
    dead_after: float = 5.0
    idle: float = 3600.0


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one rank.

    Attributes:
        engine_id: the engine's id, which all its ranks share. No other engine has it.
        incarnation: a random name, new at each start, which all ranks share (`transfer.pull.rank.new_incarnation`).
        groups: the model's layer groups. They must be the same on all ranks, and in the same order on all peers.
        model: name of the weights; peers must have the same.
        compatibility: any other settings that must agree with a peer, such as the quantisation.
        tp_rank: index of this rank among the `tp_size` tensor-parallel ranks.
        tp_size: number of tensor-parallel ranks.
        pp_rank: index of this rank's pipeline stage among `pp_size` stages.
        pp_size: number of pipeline stages.
        kv_buffer_device: "cpu" moves pages through buffers in host memory. With any other value, pages are read from
            and written to the device of the caches.
        registrable: the device types whose memory NIXL can register.
        page_checks: True if a source records a checksum of each page that it leases.
        verify: share of the pages, 0 to 1, that a reader compares with these checksums.
        key: key of the digests over metadata. Leave it empty if `secret` is given.
        secret: secret shared by all engines of a fleet. It turns on keys for metadata and for the sockets of the side
            channel. Either "file:PATH", "env:NAME", or the secret itself; `repr` never shows it.
        allowed_peers: addresses, networks and host names of the sources that may be contacted, in addition to this
            host.
        timing: time limits.
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
        shown = [f"{name}={'...' if name in _HIDDEN else repr(getattr(self, name))}" for name in self.__struct_fields__]
        return f"WorkerConfig({', '.join(shown)})"

    @property
    def rank(self) -> int:
        """The index of this rank among `ranks`, counted pipeline stage by pipeline stage."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        """The number of ranks of the engine."""
        return self.tp_size * self.pp_size

    def fingerprint(self) -> dict[str, str]:
        """Returns the settings that must agree with a peer, by name.

        A peer with other settings is refused, and is told each difference with both values. Layouts, page sizes and
        parallelism are not included, because the transfer plan handles any combination. The page size is included if
        pages are moved whole.
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
    """Returns `config` if a worker can be created from it. Raises `InvalidEngineError` otherwise."""
    if fault := next(_wrong_types("config", config, WorkerConfig), ""):
        raise InvalidEngineError(fault)
    where = f"engine {config.engine_id!r} rank {config.rank}"
    if fault := next(_faults(config), ""):
        raise InvalidEngineError(f"{where}: {fault}")
    AllowedPeers(config.allowed_peers)
    fleet_keys(where, config.secret, config.key)
    return config


def check_groups(where: str, groups: Sequence[GroupConfig], *given: Sequence[object]) -> None:
    """Raises `InvalidTransferError` unless each list in `given` has one entry for each group."""
    for one in given:
        if len(one) != len(groups):
            raise InvalidTransferError(f"{where}: got blocks for {len(one)} groups; there are {len(groups)}")


def check_endpoint(name: str, value: object) -> None:
    """Raises `InvalidEngineError` unless `value` is a string that can name an endpoint or a host."""
    if not isinstance(value, str) or not value:
        raise InvalidEngineError(f"{name} is {shown(value)}: a string that is not empty is needed")


_PARTS: dict[type[msgspec.Struct], dict[str, type[msgspec.Struct]]] = {
    WorkerConfig: {"groups": GroupConfig, "timing": Timing},
    GroupConfig: {"state": StatePart},
}
_HIDDEN = {"key", "secret"}


def _wrong_types(name: str, value: object, kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yields a message for each field of `value` whose type is not the declared one.

    The message shows the field's value, unless the field is a secret.
    """
    if not isinstance(value, kind):
        yield f"{name} is {shown(value)}: a {kind.__name__} is needed"
        return
    parts = _PARTS.get(kind, {})
    for field in msgspec.structs.fields(kind):
        given, where = getattr(value, field.name), f"{name}.{field.name}"
        if field.name not in parts:
            try:
                plain = msgspec.to_builtins(given, builtin_types=(bytes,), enc_hook=_plain)
                msgspec.convert(plain, field.type, builtin_types=(bytes,))
            except (TypeError, ValueError, RecursionError) as error:
                seen = f"a {type(given).__name__}" if field.name in _HIDDEN else shown(given)
                yield f"{where} is {seen}: {error}"
        elif isinstance(given, list | tuple):
            for at, one in enumerate(cast("Sequence[object]", given)):
                yield from _wrong_types(f"{where}[{at}]", one, parts[field.name])
        elif field.name == "timing":
            yield from _wrong_types(where, given, parts[field.name])
        else:
            yield f"{where} is {shown(given)}: a tuple of {parts[field.name].__name__} is needed"


def _plain(value: object) -> object:
    """Converts another library's number, such as a NumPy integer, to Python's int or float."""
    found = integer(value)
    return found if found is not None else float(finite("value", value, error=InvalidEngineError))


def _faults(config: WorkerConfig) -> Iterator[str]:
    """Yields a message for each fault in a config.

    Only the first message is meaningful, because each check relies on the checks before it.
    """
    if not config.engine_id or not config.incarnation or not config.groups:
        yield "an engine id, an incarnation and at least one group are needed"
    for name, rank, size in (("tp", config.tp_rank, config.tp_size), ("pp", config.pp_rank, config.pp_size)):
        if not 0 <= rank < size:
            yield f"{name}_rank is {rank}: 0 to {size - 1} is needed, because {name}_size is {size}"
    if not 0 <= config.verify <= 1:
        yield f"verify is {config.verify}: 0 to 1 is needed"
    for name in Timing.__struct_fields__:
        if not 0 < (seconds := getattr(config.timing, name)) < math.inf:
            yield f"timing.{name} is {seconds} s: a finite time above 0 is needed"
    names: set[str] = set()
    for number, group in enumerate(config.groups):
        yield from (f"group {number}: {fault}" for fault in _faults_of_group(group))
        if shared := names & set(group.layers):
            yield f"layer {min(shared)!r} is in two groups: each layer belongs to one"
        names |= set(group.layers)


def _faults_of_group(group: GroupConfig) -> Iterator[str]:
    if not group.layers or len(set(group.layers.values())) != len(group.layers) or min(group.layers.values()) < 0:
        yield "layers: at least one layer is needed, each with a number of its own, 0 or more"
    if group.block_size < 1 or group.kernel_block_size < 0 or group.block_size % max(group.page_size, 1):
        yield (
            f"block_size is {group.block_size} and kernel_block_size {group.kernel_block_size}: "
            "block_size must be positive, and a multiple of kernel_block_size unless that is 0"
        )
    if (group.kind == "sliding_window") != (group.window > 0):
        yield f"window is {group.window} with kind {group.kind!r}: 'sliding_window' needs more than 0, others need 0"
    if group.num_kv_heads < 1 or (group.kind == "mla" and group.num_kv_heads != 1):
        yield f"num_kv_heads is {group.num_kv_heads} with kind {group.kind!r}: 1 or more is needed, and 1 for 'mla'"
    if not group.is_state and group.head_dim < 1:
        yield f"head_dim is {group.head_dim}: 1 or more is needed"
    if not group.is_state and not {"page", "token"} <= set(group.axes.split(",")) <= _AXES:
        yield f"layout is {group.layout!r}: one of {', '.join(LAYOUTS)} is needed, or axes such as {shapes.SPLIT_HND!r}"
    if group.is_state != bool(group.state):
        yield f"state has {len(group.state)} parts with kind {group.kind!r}: 'mamba' needs parts, others need none"
    for part in group.state:
        if part.units < 1 or part.width < 1 or part.tensor < 0:
            yield (
                f"part {part.kind!r} has {part.units} units of {part.width} channels in tensor {part.tensor}: "
                "at least 1 unit and 1 channel are needed, and a tensor number of 0 or more"
            )
