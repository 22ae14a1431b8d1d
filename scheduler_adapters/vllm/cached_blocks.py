"""`CachedBlocks`: vLLM's cached blocks, found by vLLM's own hashes. Only the engine's thread may use them.

vLLM's hash of a block covers all tokens before its end, the salt, the adapter's name and path, and the identifiers of
images. What it leaves out is compared here: the files of an adapter, and whether the cache is older than the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache.errors import BlockTableMismatchError
from kvcache.replica.block_table import PageDigests
from scheduler_adapters.peers.peer_blocks import TakenBlocks
from scheduler_adapters.vllm.weights import named_adapter
from transfer.connector.config import GroupConfig
from transfer.connector.lending import HeldBlocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


def why_unfit(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: Sequence[GroupConfig]) -> str:
    """Returns why this engine's cached blocks cannot be exchanged by hash. Empty if they can."""
    transfer: Any = vllm_config.kv_transfer_config
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    device = str(vllm_config.device_config.device_type)
    if not vllm_config.cache_config.enable_prefix_caching:
        return "vLLM's prefix cache is off"
    if any(group.is_state for group in groups):
        return "the model has recurrent states"
    if tuple(kv_cache_config.transfer_group_ids) != tuple(range(len(kv_cache_config.kv_cache_groups))):
        return "some of the model's cache groups are not transferred"
    if len(sizes) > 1:
        return f"the model's cache groups have blocks of {sorted(sizes)} tokens"
    if transfer.kv_buffer_device == "cpu" and device != "cpu":
        return f"its blocks are in memory of {device}, but kv_buffer_device is cpu"
    return ""


class _Adapter(NamedTuple):
    """What is known of an adapter's files and of the blocks that they have computed.

    Attributes:
        digest: of the files of its latest request.
        used: the map of cached blocks when a request of it last came or ended.
        stale: a map that may have blocks of other files; None if there is none.
        running: the digest for each request that has not ended.
    """

    digest: str
    used: Any
    stale: Any
    running: dict[str, str]


class CachedBlocks:
    """The cached blocks of an engine.

    Args:
        manager: vLLM's manager, with its prefix cache on.
        groups: the groups of layers, all of which have blocks of `manager`'s hash size.
        algorithm: name of the hash.
    """

    def __init__(self, manager: KVCacheManager, groups: Sequence[GroupConfig], algorithm: str) -> None:
        self._pool: Any = manager.block_pool
        self._groups = groups
        self._algorithm = algorithm
        self._full = [at for at, group in enumerate(groups) if not group.window]
        self._windows = [at for at, group in enumerate(groups) if group.window]
        # the map of cached blocks when the weights were changed; vLLM makes a new map when it resets its cache
        self._stale: Any = None
        self._adapters: dict[str, _Adapter] = {}

    @property
    def page_size(self) -> int:
        """Tokens of a block."""
        return int(self._pool.hash_block_size)

    @property
    def hashed_by(self) -> str:
        """Names the hash and the seed of its first block. Two engines with the same name have the same hashes."""
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415  (vLLM sets the seed when it has started)

        ahead = getattr(self._pool, "num_hash_lookahead_tokens", 0)
        return f"vllm {self._algorithm} {kv_cache_utils.NONE_HASH.hex()[:24]} +{ahead}"

    @property
    def hash_bytes(self) -> int:
        """Bytes of a hash."""
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

        return len(kv_cache_utils.NONE_HASH)

    def see(self, request: Request) -> None:
        """Records the adapter of a new request. Blocks that other files of the same name have computed are not lent."""
        if request.lora_request:
            name, digest = named_adapter(request.lora_request)
            cached = self._pool.cached_block_hash_to_block
            before = self._adapters.get(name) or _Adapter(digest, None, None, {})
            # after a reset, only the requests that run on can bring blocks of other files: see `over`
            is_mixed = before.digest != digest and before.used is cached
            before.running[request.request_id] = digest
            self._adapters[name] = _Adapter(digest, cached, cached if is_mixed else before.stale, before.running)

    def over(self, request: Request) -> None:
        """Records that a request has ended, so that it computes no more blocks."""
        for name, adapter in self._adapters.items() if request.lora_request else ():
            if (digest := adapter.running.pop(request.request_id, None)) is not None:
                cached = self._pool.cached_block_hash_to_block
                stale = adapter.stale if digest == adapter.digest else cached
                self._adapters[name] = adapter._replace(used=cached, stale=stale)
                return

    def changed_weights(self) -> None:
        """Records that the weights have changed. No block is lent until vLLM has reset its prefix cache."""
        self._stale = self._pool.cached_block_hash_to_block

    # For readers: `transfer.connector.lending.BlockSource`

    def hold(self, wanted: PageDigests, most: int) -> HeldBlocks | None:
        """See `transfer.connector.lending.BlockSource.hold`."""
        self._check(wanted)
        width, ids = self.hash_bytes, self._full
        hashes = [wanted.digests[at : at + width] for at in range(0, len(wanted.digests), width)]
        full: list[list[Any]] = []
        for one in hashes if ids else ():
            if (found := self._pool.get_cached_block(one, ids)) is None:
                break
            full.append(found)
        hashes = hashes[: len(full)] if ids else hashes
        windows = {at: [self._pool.get_cached_block(one, [at]) for one in hashes] for at in self._windows}
        for end in range(len(hashes), 0, -1):
            begins = {at: max(0, self._first(at, wanted.first_page + end) - wanted.first_page) for at in windows}
            held = len(ids) * end + sum(end - begin for begin in begins.values())
            if held <= most and all(all(windows[at][begin:end]) for at, begin in begins.items()):
                return self._held(full[:end], {at: windows[at][begin:end] for at, begin in begins.items()}, end)
        return None

    def _held(self, full: list[list[Any]], windows: dict[int, list[Any]], end: int) -> HeldBlocks:
        by_group = {group: [found[at] for found in full] for at, group in enumerate(self._full)}
        by_group |= {group: [found[0] for found in blocks] for group, blocks in windows.items()}
        blocks = [by_group[at] for at in range(len(self._groups))]
        for group in blocks:
            self._pool.touch(group)
        return HeldBlocks(end, tuple(tuple(block.block_id for block in group) for group in blocks))

    def free(self, held: HeldBlocks) -> None:
        """Gives up held blocks. vLLM will evict the last ones first."""
        for group in held.block_ids:
            self._pool.free_blocks([self._pool.blocks[at] for at in reversed(group)])

    def _check(self, wanted: PageDigests) -> None:
        """Raises `BlockTableMismatchError` unless blocks with these hashes hold what the reader needs."""
        ours, theirs = (self.page_size, self.hashed_by), (wanted.page_size, wanted.hash_algorithm)
        fault = ""
        if ours != theirs or len(wanted.digests) % self.hash_bytes:
            fault = f"it caches blocks of {ours[0]} tokens by {ours[1]!r}, but {theirs[0]} by {theirs[1]!a} are wanted"
        elif self._stale is self._pool.cached_block_hash_to_block:
            fault = "its prefix cache was not reset after its weights had changed"
        for name, value in wanted.named:
            adapter = self._adapters.get(name) or _Adapter("", None, None, {})
            if adapter.digest != value:
                fault = f"{name}: {adapter.digest!r} at the source, {value!r} at the reader"
            elif any(digest != value for digest in adapter.running.values()):
                fault = f"{name}: requests with other files have not ended"
            elif adapter.stale is self._pool.cached_block_hash_to_block:
                fault = f"{name}: its prefix cache was not reset after these files had changed"
        if fault:
            raise BlockTableMismatchError(f"the cached blocks cannot be lent: {fault}")

    # For a pull: `scheduler_adapters.peers.peer_blocks.PeerPool`

    def number(self, block_hash: bytes) -> int:
        """See `PeerPool.number`. vLLM tells routers the last 64 bits of a hash."""
        return int.from_bytes(block_hash[-8:], "big")

    def named(self, request: Request) -> tuple[tuple[str, str], ...]:
        """See `PeerPool.named`."""
        return (named_adapter(request.lora_request),) if request.lora_request else ()

    def take(self, first: int, end: int) -> TakenBlocks | None:
        """Takes free blocks for the pages from `first` to `end`, at most half of those that are free."""
        firsts = tuple(max(first, self._first(at, end)) for at in range(len(self._groups)))
        count = sum(end - begin for begin in firsts)
        if not count or count > self._pool.get_num_free_blocks() // 2:
            return None
        blocks = (block.block_id for block in self._pool.get_new_blocks(count))
        return TakenBlocks(firsts, end, tuple(tuple(islice(blocks, end - begin)) for begin in firsts))

    def publish(self, request: Request, taken: TakenBlocks) -> None:
        """See `PeerPool.publish`."""
        null = self._pool.null_block
        for at, (first, blocks) in enumerate(zip(taken.firsts, self._blocks_of(taken), strict=True)):
            self._pool.cache_full_blocks(request, [null] * first + blocks, first, taken.end, self.page_size, at)
        self.give_up(taken)

    def give_up(self, taken: TakenBlocks) -> None:
        """See `PeerPool.give_up`."""
        for blocks in self._blocks_of(taken):
            self._pool.free_blocks(reversed(blocks))

    def _blocks_of(self, taken: TakenBlocks) -> list[list[Any]]:
        return [[self._pool.blocks[at] for at in group] for group in taken.block_ids]

    def _first(self, group: int, end: int) -> int:
        """Returns the first page of a group that a request needs if it resumes after page `end`."""
        return self._groups[group].needed(end * self.page_size) // self.page_size
