"""`KVCacheParams`: shape, placement and policy of a KV cache. All checks of parameters are here.

Some parameters are classes of their own: `StateShape`, `KVCacheQuantizationConfig`, `KVEvents` and `Routing`.
"""

import functools
import importlib.util
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from kvcache.arguments import flag, folder, number, of_kind, one_of, optional, refusal, text, tuple_of, whole
from kvcache.errors import InvalidParamsError
from kvcache.eviction_order import EvictionOrder
from kvcache.layer_groups import LayerGroup
from kvcache.types import MakeObjectIO, PageIO
from kvcache.weights import Version, version_bytes

HashAlgorithm = Literal["sha256", "blake3", "xxh3_128"]
PageOrder = Literal["head,layer,side,token,dim", "layer,side,head,token,dim", "layer,side,token,head,dim"]
ScaleOf = Literal["token and head", "page and head", "page"]
KVEventsReader = Literal["vllm", "dynamo"]
RoutingRule = Literal["prefix", "least-loaded", "round-robin"]
StateForm = Literal["mamba2", "gated_delta", "mamba1", "short_conv", "linear"]

CONV_KINDS = ("conv.x", "conv.B", "conv.C")
SSM_KIND = "ssm"
# For each form of recurrent layer, the inputs that it convolves, in order.
_CONVOLVED: dict[StateForm, tuple[str, ...]] = {
    "mamba2": CONV_KINDS,
    "gated_delta": ("conv.B", "conv.C", "conv.x"),
    "mamba1": ("conv.x",),
    "short_conv": ("conv.x",),
    "linear": (),
}

_TRANSPORTS = ("tcp://", "ipc://", "inproc://")


def _kind(kind: Any, needed: str) -> Callable[[str, Any], object]:
    return functools.partial(of_kind, kind=kind, needed=needed)


def _apply(rules: Mapping[str, Callable[[str, Any], object]], params: object) -> None:
    """Check each field for which there is a rule, and replace numpy's numbers with Python's."""
    for name, rule in rules.items():
        object.__setattr__(params, name, rule(name, getattr(params, name)))


_SHAPE_RULES: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("layers", "heads", "head_dim", "groups", "d_state", "kernel"), functools.partial(whole, least=1)),
    **dict.fromkeys(("conv_dtype", "ssm_dtype"), _kind(torch.dtype, "a torch.dtype")),
    "form": functools.partial(one_of, choices=get_args(StateForm)),
}


@dataclass(frozen=True, slots=True)
class StateShape:
    """The recurrent layers of a model, all of which are alike.

    Raises `InvalidParamsError` if a number is below 1, a convolution has a kernel below 2, the heads are not a multiple
    of the groups, or a value has the wrong type.
    """

    layers: int  # the number of recurrent layers
    heads: int  # the number of heads of one layer
    head_dim: int  # the number of channels of x in each head; 1 for "mamba1", where each channel is a head
    # the number of groups of heads; the heads of a group share one B and one C; 1 if B and C are not convolved
    groups: int
    # the number of elements of the matrix for each channel of x; each group has `d_state` channels of B, and as many
    # channels of C
    d_state: int
    # the width of the convolution; a state keeps the last `kernel - 1` of its inputs; 1 means no convolution
    kernel: int
    conv_dtype: torch.dtype  # the type of the convolution's inputs
    ssm_dtype: torch.dtype = torch.float32  # the type of the matrices
    form: StateForm = "mamba2"

    @property
    def conv_kinds(self) -> tuple[str, ...]:
        """The convolved inputs, in the order in which a layer convolves them."""
        return _CONVOLVED[self.form]

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape of the matrix that a recurrent layer keeps for each head; empty if the layer keeps no matrix."""
        if self.form == "short_conv":
            return ()
        if self.form == "mamba1":
            return (self.d_state,)
        keys_first = self.form in {"gated_delta", "linear"}
        return (self.d_state, self.head_dim) if keys_first else (self.head_dim, self.d_state)

    def __post_init__(self) -> None:
        _apply(_SHAPE_RULES, self)
        if self.form == "mamba1" and self.head_dim != 1:
            raise InvalidParamsError(f"head_dim is {self.head_dim}: with mamba1 it must be 1, as a channel is a head")
        if self.conv_kinds and self.kernel < 2:
            raise InvalidParamsError(
                f"kernel is {self.kernel}: at least 2 is needed, because a kernel of 1 keeps no inputs"
            )
        if self.heads % self.groups:
            raise InvalidParamsError(f"heads is {self.heads}: a multiple of the {self.groups} groups is needed")


_SCALE_RULES: dict[str, Callable[[str, Any], object]] = {
    "scale_dtype": _kind(torch.dtype, "a torch.dtype"),
    "quantization_granularity": functools.partial(whole, least=1),
    "scale_of": functools.partial(one_of, choices=get_args(ScaleOf)),
}


@dataclass(frozen=True, slots=True)
class KVCacheQuantizationConfig:
    """The scales of quantised keys and values: which values of a page share a scale, in each layer and side.

    The values have the 8-bit type `KVCacheParams.dtype`. The model writes and reads values and scales: the real value
    is the stored value times its scale. Raises `InvalidParamsError` (a ValueError).
    """

    scale_dtype: torch.dtype = torch.float32  # the type of scales, which must be a floating-point type
    quantization_granularity: int = 128  # how many elements of `head_dim` share a scale; must divide `head_dim`
    # Which values of a page share a scale. "page" means one scale for all heads of the model, which is stored on each
    # shard. Scales of whole pages cannot be converted to another page size.
    scale_of: ScaleOf = "token and head"

    def __post_init__(self) -> None:
        _apply(_SCALE_RULES, self)
        if not self.scale_dtype.is_floating_point:
            raise InvalidParamsError(f"scale_dtype is {self.scale_dtype}: a floating-point type is needed")

    def check(self, dtype: torch.dtype, head_dim: int) -> None:
        """Raise `InvalidParamsError` unless these scales fit values of type `dtype` and heads of size `head_dim`."""
        if dtype.itemsize != 1:
            raise InvalidParamsError(f"dtype is {dtype}: kvcache_quant_config needs an 8-bit type")
        if head_dim % self.quantization_granularity:
            raise InvalidParamsError(
                f"quantization_granularity is {self.quantization_granularity}: a divisor of head_dim {head_dim} is "
                "needed"
            )


@dataclass(frozen=True, slots=True)
class KVEvents:
    """KV events in the wire format of vLLM 0.33: `KVCacheParams(..., kv_events=KVEvents())`.

    Each replica is a data-parallel rank with its own stream. The port of a rank is the port of `endpoint` plus the
    rank. Port 0 means any free port for each rank. If `endpoint` has no port, `_dp<rank>` is appended for ranks above
    0. `PagedKVCacheManager.kv_event_endpoints` has the bound addresses.

    Events contain the tokens of prompts in clear text, and a replay reveals everything that is cached. Therefore the
    default endpoints can be reached only from this host. Use `secure` before you open them to others.

    Raises `InvalidParamsError` (a ValueError) for a value that cannot work.
    """

    endpoint: str = "tcp://127.0.0.1:5557"  # the address that a PUB socket binds
    # the address that a ROUTER socket binds, for subscribers that missed a batch; None: no replay
    replay_endpoint: str | None = None
    topic: str = ""  # the first frame of every message; some routers want `kv@<pod>@<model>`
    # how many batches are kept for replays; if a subscriber asks for an older batch, the answer is the whole current
    # state
    buffer_steps: int = 10_000
    # how many batches may wait for a slow subscriber; the subscriber misses further batches, and notices the gap in the
    # numbering
    hwm: int = 1_000
    # A function that prepares each socket before it is bound. `Keyring.secure_server` of `transfer` turns CURVE on.
    secure: Callable[[Any], None] | None = None
    # Whose fields the events have. Dynamo separates tenants by `cache_salt`, and ignores vLLM's `extra_keys`. vLLM's
    # router drops a batch that has `cache_salt`. So one stream cannot serve both.
    reader: KVEventsReader = "vllm"

    def __post_init__(self) -> None:
        _check_address("kv_events: endpoint", self.endpoint)
        optional(_check_address)("kv_events: replay_endpoint", self.replay_endpoint)
        text("kv_events: topic", self.topic, "text")
        for name in ("buffer_steps", "hwm"):
            object.__setattr__(self, name, whole(f"kv_events: {name}", getattr(self, name), 1))
        optional(_kind(Callable, "a function"))("kv_events: secure", self.secure)
        one_of("kv_events: reader", self.reader, get_args(KVEventsReader))

    def addresses(self, rank: int) -> tuple[str, str | None]:
        """Returns the addresses for a rank's events and replays."""
        return _of_rank(self.endpoint, rank), self.replay_endpoint and _of_rank(self.replay_endpoint, rank)


def _check_address(name: str, address: object) -> None:
    needed = f"an address of {', '.join(_TRANSPORTS)}"
    given = text(name, address, needed)
    if "\0" in given or not given.startswith(_TRANSPORTS):
        raise refusal(name, address, needed)
    if given.startswith("tcp://") and not given.rpartition(":")[2].isdecimal():
        raise refusal(name, address, "an address with a port (0: any free one)")


def _of_rank(address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    if not address.startswith("tcp://"):
        return f"{address}_dp{rank}" if rank else address
    return f"{host}:{int(port) + rank}" if int(port) else address


@dataclass(frozen=True, slots=True)
class Routing:
    """How `get_or_recommend_replica` chooses a replica.

    `prefix` chooses the replica of the lowest cost. The cost is the number of pages that the request must compute
    there, plus the weighted recent load. `least-loaded` chooses the replica with the fewest claimed requests, and the
    lowest index among equals. `round-robin` chooses the replica after the one that took the last new request.

    The figures below are for 8 replicas on two Mooncake traces: the first of two figures is for the conversation trace,
    the second one for the synthetic trace. *Hits* are given as a percentage of the hits in one pool of the same total
    size. The fair share of a replica is an eighth of the computed pages. *Excess* says by how many percent the busiest
    replica exceeds its fair share, in windows of 500 requests.

    With the default load weight, the hits are 93 and 98 %. The excess is 7 and 5 %, and in the worst window 17 and 7 %.
    Doubling the load weight costs 3 to 5 percentage points of hits. For comparison, a router that sees only the load
    has an excess of 15 and 5 % in the worst window.

    Another rule was rejected: if another replica had a page, the rule counted the page as cheaper to compute. That
    rule cost hits, and balanced the load no better.

    Raises `InvalidParamsError` (a ValueError) on the first value that cannot work.
    """

    rule: RoutingRule = "prefix"  # see above
    # for `prefix`: the weight of a recently computed page; a page that the request must compute has the weight 1
    load_weight: float = 0.25
    load_decay: float = 0.995  # for `prefix`: each admitted request multiplies the load of every replica by this factor

    def __post_init__(self) -> None:
        one_of("rule", self.rule, get_args(RoutingRule))
        number("load_weight", self.load_weight, 0.0)
        number("load_decay", self.load_decay, 0.0, math.nextafter(1.0, 0.0))


MAX_DEVICES = 1 << 10
_CACHING, _SWAPPING = "enable_prefix_caching", "enable_kvcache_swapping_to_host"
_share = functools.partial(number, least=0.0, most=1.0)
_RULES: dict[str, Callable[[str, Any], object]] = {
    "dtype": _kind(torch.dtype, "a torch.dtype"),
    **dict.fromkeys((_CACHING, _SWAPPING, "is_mla"), flag),
    **dict.fromkeys(("n_kv_heads", "head_dim"), functools.partial(whole, least=1)),
    **dict.fromkeys(("n_devices", "data_parallel_degree"), functools.partial(whole, least=1, most=MAX_DEVICES)),
    "page_size": optional(functools.partial(whole, least=1)),
    "hash_algorithm": functools.partial(one_of, choices=get_args(HashAlgorithm)),
    "page_order": functools.partial(one_of, choices=get_args(PageOrder)),
    "routing": _kind(Routing, "a Routing"),
    **dict.fromkeys(("max_hint_share", "tenant_quota", "tier_state_share"), _share),
    "eviction_order": optional(_kind(Callable, "a function that makes an `EvictionOrder` of so many pages")),
    "tenant_quotas": _kind(Mapping, "a dict of salts and shares"),
    **dict.fromkeys(("host_kvcache_swap_space_gb", "file_tier_max_gb"), optional(number)),
    "file_tier_dir": optional(folder),
    "file_tier_key": text,
    "kv_events": optional(_kind(KVEvents, "KVEvents")),
    "file_tier_io": optional(_kind(Callable, "a function that makes a `PageIO` of the tier's memory")),
    "object_tier_io": optional(_kind(Callable, "a function that makes an `ObjectIO`, say a `NixlObjects`")),
    "kvcache_quant_config": optional(_kind(KVCacheQuantizationConfig, "a KVCacheQuantizationConfig")),
    "states": optional(_kind(StateShape, "a StateShape")),
    "weights": version_bytes,
    "state_copies": optional(functools.partial(whole, least=0)),
    "state_every_pages": functools.partial(whole, least=0),
    "share_state_memory": optional(flag),
    "object_tier_pages": functools.partial(whole, least=1, most=1 << 10),
    "object_tier_timeout_s": functools.partial(number, least=0.01, most=60.0),
    "object_tier_tokens_per_s": optional(functools.partial(number, least=1.0, most=1e12)),
}
# For each parameter, the parameter that it needs. If the needed parameter is not given, only the default value is
# accepted.
_REFUSED_WITHOUT = {
    _SWAPPING: _CACHING,
    "file_tier_dir": _SWAPPING,
    "object_tier_io": _SWAPPING,
}
# For each parameter, tuples of needed parameters. The parameter has an effect only if at least one parameter of each
# tuple is given.
_IDLE_WITHOUT = {
    "host_kvcache_swap_space_gb": ((_SWAPPING,),),
    "file_tier_max_gb": (("file_tier_dir",),),
    "file_tier_key": (("file_tier_dir", "object_tier_io"),),
    "file_tier_io": (("file_tier_dir",),),
    "object_tier_tokens_per_s": (("object_tier_io",),),
    **dict.fromkeys(("tenant_quota", "tenant_quotas", "kv_events", "eviction_order"), ((_CACHING,),)),
    **dict.fromkeys(("state_copies", "state_every_pages", "share_state_memory"), (("states",),)),
    "tier_state_share": (("states",), (_SWAPPING,)),
}
_DEFAULT_PAGE_SIZE = 128


@dataclass(frozen=True, slots=True)
class KVCacheParams:
    """Shape, placement and policy of a KV cache.

    `n_devices` is `data_parallel_degree × tp`; devices are listed replica by replica. Heads are split over the `tp`
    shards of a replica. If there are fewer heads than shards, several shards hold the same head.

    Files in `file_tier_dir` are found again after a restart, and may be shared by any number of processes of one user.
    Only that user may access the files and folders, whatever the umask: wider rights of a folder are removed, and a
    link or another user's folder is refused. Everyone who may write there is trusted, because checksums guard only
    against accidents.

    Options that need prefix caching, the host tier or several replicas have no effect without these. The manager then
    logs a warning that names the unused options. Raises `InvalidParamsError` (a ValueError) on the first value that
    cannot work. The message names the limit.
    """

    dtype: torch.dtype  # the element type of keys and values
    n_kv_heads: int  # the number of key/value heads of the whole model
    head_dim: int  # the number of elements of one head of one token (for MLA: latent plus rope part)
    # whether pages of finished requests are kept, and reused by requests with the same tokens
    enable_prefix_caching: bool = False
    # Whether published pages are also copied to host memory. If a prompt needs a page that the device has evicted, the
    # page is copied back.
    enable_kvcache_swapping_to_host: bool = False
    # The size of the host memory for pages, in units of 2**30 bytes. All replicas share it. It also holds copies of the
    # device's pages, so it should be several times as large as the device's pool.
    host_kvcache_swap_space_gb: float | None = None
    page_size: int | None = None  # the number of tokens per page; None: use the manager's argument of the same name
    n_devices: int = 1  # the number of devices of all replicas together
    is_mla: bool = False  # whether a page has one latent side (MLA) instead of separate keys and values
    data_parallel_degree: int = 1  # the number of replicas, each with its own pool and index
    # The hash of the prefix chain. It must be the same wherever pages are exchanged. blake3, an extra, is as strong as
    # sha256, and quicker on some processors without SHA instructions. Collisions of xxh3_128 can be crafted.
    hash_algorithm: HashAlgorithm = "sha256"
    page_order: PageOrder = "head,layer,side,token,dim"  # the axes of a page, outermost first (`kvcache.layout`)
    # how a request's replica is chosen
    routing: Routing = field(default_factory=Routing)
    # The largest share of a replica's idle pages that may follow retention hints, 0.0 to 1.0. The other pages are
    # evicted least recently used first (see `kvcache.policies.hinted_order`). With 0.0, hints are ignored.
    max_hint_share: float = 0.95
    # The share of a replica's pages, 0.0 to 1.0, that may be idle pages of one `cache_salt`. If a salt has more idle
    # pages than that, the surplus is evicted before all other pages.
    tenant_quota: float = 1.0
    # `tenant_quota` for individual salts.
    tenant_quotas: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    file_tier_dir: str | None = None  # the folder for pages below the host tier; None: no files
    file_tier_max_gb: float | None = None  # the most bytes of files with this key and layout, in units of 2**30
    # A name for everything that KV depends on besides tokens, salt and layout: the model and its weights. Pages of
    # different keys are never mixed.
    file_tier_key: str = ""
    # A function that creates the `kvcache.types.PageIO` that moves bytes between files and the host tier. It is called
    # once for each of two threads, with the tier's memory. None means preadv and pwritev.
    file_tier_io: Callable[[Sequence[torch.Tensor]], PageIO] | None = None
    # A function that creates the `kvcache.types.ObjectIO` that moves bytes between an object store and the host tier.
    # It is called once for each of two threads: `transfer.NixlObjects(bucket)`. None means no objects. Objects use
    # `file_tier_key`, whether there are files or not.
    object_tier_io: MakeObjectIO | None = None
    # The number of pages in an object. The pages of an object are written together, and found together. If fewer pages
    # are left at the end of a prompt, they are written only if a state is kept after them (`states`). All processes
    # that share objects need the same number.
    object_tier_pages: int = 8
    # The time limit of a call to the object store, in seconds. After a call that took longer, the store is not used for
    # 10 s. A request waits at most this long to learn which objects exist, and then at most this long again for their
    # pages.
    object_tier_timeout_s: float = 2.0
    # How many tokens the model computes per second. Objects are read only if recent reads have brought more tokens per
    # second than that. None: objects are always read.
    object_tier_tokens_per_s: float | None = None
    kv_events: KVEvents | None = None  # reports cached pages to routers, as vLLM does; None: no events
    # Groups of layers that keep the same tokens; each layer is in exactly one group. If empty, all layers have full
    # attention. All layers have the same heads and `head_dim`. A hit is the longest prefix for which every group still
    # has all pages that the next token sees. See `kvcache.layer_groups`.
    groups: tuple[LayerGroup, ...] = ()
    # For 8-bit values with scales. The scales lie in the page, and are shared, copied, evicted and transferred with it.
    kvcache_quant_config: KVCacheQuantizationConfig | None = None
    # The state that recurrent layers keep for each request; None if there are no such layers. Each claimed request then
    # has a state page. With prefix caching, copies of states are kept, and a hit ends after a page for which such a
    # copy exists (`kvcache.states`).
    states: StateShape | None = None
    # True: states share memory with token pages. Each state takes a run of consecutive pages, and copies of states and
    # pages are evicted by their last use. False: a separate part of each replica's memory holds the states of its
    # requests and `state_copies` copies. None: True, unless `state_copies` is given.
    share_state_memory: bool | None = None
    # how many copies of states the separate memory holds; None: two for each request of a replica
    state_copies: int | None = None
    # The number of pages between two additional copies of a prompt's state. 0: no additional copies. In every case, the
    # states at the ends of prompts, shared prefixes and requests are kept.
    state_every_pages: int = 0
    # The share of host memory and of files that recurrent states get, 0.0 to 1.0, if the model has any (see
    # `kvcache.states`). Pages get the rest.
    tier_state_share: float = 0.5
    # A function that takes a replica's number of pages and returns an `EvictionOrder` (see `kvcache.eviction_order`).
    # The order decides which idle page is evicted first. None: the least recently used page is evicted first, unless
    # retention hints say otherwise.
    eviction_order: Callable[[int], EvictionOrder] | None = None
    # The version of the weights when the manager is made (`PagedKVCacheManager.set_weights`): a number below 2**128, 1
    # to 16 bytes, or a text, such as the name of a checkpoint. Pages of different versions are never mixed. None: not
    # said.
    weights: Version = None

    def __post_init__(self) -> None:
        _apply(_RULES, self)
        dp, tp = self.data_parallel_degree, self.tensor_parallel_degree
        _check(self.n_devices % dp == 0, f"n_devices is {self.n_devices}: not a multiple of data_parallel_degree {dp}")
        _check(
            self.n_kv_heads % tp == 0 or tp % self.n_kv_heads == 0,
            f"n_kv_heads is {self.n_kv_heads}: {tp} shards can neither split these heads evenly nor share them evenly",
        )
        for salt, share in self.tenant_quotas.items():
            of_kind("a salt of tenant_quotas", salt, str, "a string")
            _share(f"tenant_quotas[{salt!r}]", share)
        _check(
            self.hash_algorithm in usable_hashes(),
            f"hash_algorithm is {self.hash_algorithm!r}: its package is not installed, pip install 'pagewire[blake3]'",
        )
        self._check_tiers()
        object.__setattr__(self, "groups", tuple_of("groups", self.groups, LayerGroup, "a tuple of LayerGroup"))
        self._check_states()
        if self.kvcache_quant_config:
            self.kvcache_quant_config.check(self.dtype, self.head_dim)

    @property
    def tensor_parallel_degree(self) -> int:
        """Shards of one replica."""
        return self.n_devices // self.data_parallel_degree

    @property
    def n_kv_heads_per_device(self) -> int:
        """The number of heads that one shard holds."""
        return max(1, self.n_kv_heads // self.tensor_parallel_degree)

    @property
    def sides(self) -> int:
        """The number of sides of a page: 2 for keys and values, 1 for an MLA latent."""
        return 1 if self.is_mla else 2

    @property
    def has_states_in_pages(self) -> bool:
        """Whether there are recurrent states, and they share memory with token pages."""
        copies, share = self.state_copies, self.share_state_memory
        return self.states is not None and (copies is None if share is None else share)

    def states_apart(self, requests: int) -> int:
        """The number of state pages of a replica with this many requests, if states have separate memory."""
        if not self.states or self.has_states_in_pages:
            return 0
        copies = self.state_copies
        return requests + (2 * requests * self.enable_prefix_caching if copies is None else copies)

    def heads_of_shard(self, shard: int) -> range:
        """Returns the model's heads that shard `shard` of a replica holds."""
        tp, count = self.tensor_parallel_degree, self.n_kv_heads_per_device
        first = shard * self.n_kv_heads // tp
        return range(first, first + count)

    def bytes_per_token(self, num_layers: int) -> int:
        """Returns the bytes of one token's keys and values, without scales, on all shards of one replica together."""
        per_shard = self.sides * num_layers * self.n_kv_heads_per_device * self.head_dim * self.dtype.itemsize
        return per_shard * self.tensor_parallel_degree

    def without_effect(self) -> list[str]:
        """Returns a sentence for each given parameter that has no effect.

        The sentence names the parameter that would be needed.
        """
        plain = KVCacheParams(self.dtype, self.n_kv_heads, self.head_dim)

        def is_given(name: str) -> bool:
            value_of = operator.attrgetter(name)
            return value_of(self) != value_of(plain)

        return [
            f"{name} changes nothing without {' or '.join(needed)}"
            for name, every in _IDLE_WITHOUT.items()
            for needed in every
            if is_given(name) and not any(map(is_given, needed))
        ]

    def _check_tiers(self) -> None:
        for name, needed in _REFUSED_WITHOUT.items():
            _check(getattr(self, name) in (None, False, 0) or getattr(self, needed), f"{name} needs {needed}")
        space, most = self.host_kvcache_swap_space_gb, self.file_tier_max_gb
        _check(
            not self.enable_kvcache_swapping_to_host or (space or 0) > 0,
            f"host_kvcache_swap_space_gb is {space}: swapping to the host needs a size above 0",
        )
        has_files = self.file_tier_dir is not None
        _check(not has_files or (most or 0) > 0, f"file_tier_max_gb is {most}: files need a size above 0")
        _check(
            bool(self.file_tier_key) or not (has_files or self.object_tier_io),
            "file_tier_key is not given: the name of the model and its weights is needed, because pages of another "
            "model could be mistaken for its pages",
        )

    def _check_states(self) -> None:
        """Raise if other parameters are incompatible with recurrent states."""
        if not self.states:
            return
        copies, every = self.state_copies, self.state_every_pages
        if self.has_states_in_pages and copies is not None:
            raise InvalidParamsError(
                f"state_copies is {copies}: with share_state_memory the number is not fixed; leave state_copies out"
            )
        if not self.enable_prefix_caching and (copies or every):
            raise InvalidParamsError(
                f"state_copies is {copies} and state_every_pages is {every}: both need enable_prefix_caching"
            )


@functools.cache
def usable_hashes() -> tuple[HashAlgorithm, ...]:
    """Returns the algorithms whose packages are installed. blake3 is an extra."""
    known: tuple[HashAlgorithm, ...] = get_args(HashAlgorithm)
    return tuple(one for one in known if one != "blake3" or importlib.util.find_spec("blake3"))


def resolve_page_size(params: KVCacheParams, page_size: int | None) -> int:
    """Returns the page size in tokens: `params.page_size` if given, else the argument, else 128.

    Raises `InvalidParamsError` if both are given and differ. An argument that equals the default counts as not given.
    """
    page_size = whole("page_size", _DEFAULT_PAGE_SIZE if page_size is None else page_size, 1)
    own = page_size if params.page_size is None else params.page_size
    _check(
        page_size in (own, _DEFAULT_PAGE_SIZE),
        f"page_size is {page_size} in the call and {own} in the params: give one of them",
    )
    return own


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidParamsError(message)
