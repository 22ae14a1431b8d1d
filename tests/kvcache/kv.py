"""KV that depends on its tokens. It takes the place of a model, and shows every wrong, stale or missing byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from kvcache import DraftGroup, LayerGroup, PagedKVCacheManager, RaggedKVCacheInputs, TextContext

UNKNOWN = -99  # the KV of draft layers at a token whose next token is not known
Keys = tuple[tuple[int, bytes], ...]
Named = tuple[str | None, Keys]  # The salt and all keys of a request.

_WEIGHTS = np.random.default_rng(0).integers(1, 1 << 64, 4096, np.uint64, endpoint=False) | np.uint64(1)


class Run(NamedTuple):
    """A running request: tokens before `start` are cached, and the tokens from `start` to `active` run now."""

    request_id: str
    replica: int
    named: Named
    tokens: list[int]
    start: int
    active: int
    # Draft layers compute the KV of the token before this one again, because they did not know this token. -1: none.
    again: int = -1

    @classmethod
    def of(cls, manager: PagedKVCacheManager, context: TextContext) -> Run:
        replica, named = manager.get_replica(context), (context.cache_salt, context.extra_keys)
        return cls(context.request_id, replica, named, context.tokens.tolist(), context.start_idx, context.active_idx)


class KVTokens:
    """Writes and reads int64 KV. A token's value depends on the salt, and on all tokens and keys up to this token."""

    def __init__(self, manager: PagedKVCacheManager) -> None:
        self.manager = manager
        self.compared = 0

    def run_contexts(self, batch: Sequence[TextContext], inputs: Sequence[RaggedKVCacheInputs]) -> None:
        """Runs the contexts in the state after `fetch`."""
        self.run([Run.of(self.manager, context) for context in batch], inputs)

    def run(self, batch: Sequence[Run], inputs: Sequence[RaggedKVCacheInputs]) -> None:
        """Compares the KV of every cached token of the batch, then writes the KV of the tokens to run."""
        replicas = self.manager.num_replicas
        shards = len(inputs) // replicas
        for replica in range(replicas):
            mine = [run for run in batch if run.replica == replica]
            for shard, entry in enumerate(inputs[replica * shards : (replica + 1) * shards]):
                tables = entry.lookup_table if entry.lookup_table.ndim == 3 else entry.lookup_table[None]
                for number, (table, of_layers) in enumerate(zip(tables, self.manager.layer_tables.tables, strict=True)):
                    for run, row in zip(mine, table.tolist(), strict=True):
                        self._run(run, row, entry, (shard, number) if number else shard, of_layers.group)

    def _run(self, run: Run, row: list[int], entry: RaggedKVCacheInputs, part: object, group: LayerGroup) -> None:
        """Runs one request.

        `part` names the part of the model's KV. `group` are the layers of this part.
        """
        size, active = self.manager.page_size, run.active
        start = run.start - (isinstance(group, DraftGroup) and run.start == run.again)
        values = kv_of_group(run.tokens, run.named, part, group)
        positions = np.arange(active)
        seen = (positions >= int(group.first_seen(np.array(run.start)))) | (positions < getattr(group, "sinks", 0))
        pages, offsets = np.array(row)[positions // size], positions % size
        for pool in (entry.blocks, entry.kv_scales):
            if pool is None:
                continue
            held, kept = pool.cpu().numpy(), _as_elements(values, pool)[:, None, None, None, None]
            # In this element type, the scale of a page is the scale of its last token. A page that is not full
            # therefore has no meaningful scale.
            of_page = pool.shape[3] < size
            read = np.flatnonzero(seen[:start] & ((offsets[:start] == size - 1) | (not of_page)))
            within = offsets * 0 if of_page else offsets
            found = held[pages[read], :, :, within[read]]  # [tokens, sides, layers, heads, dim]
            wrong = np.flatnonzero((found != kept[read]).any(axis=(1, 2, 3, 4)))
            assert not wrong.size, f"{run.request_id}: the KV of token {read[wrong[0]]} of {start} is another's"
            new = torch.from_numpy(kept[start:active]).to(pool.device)
            pool[pages[start:active], :, :, within[start:active]] = new.expand(-1, *pool.shape[1:3], *pool.shape[4:])
        assert pages[seen].all(), f"{run.request_id}: a token that is seen has no page"
        self.compared += int(np.count_nonzero(seen[:start]))


def _as_elements(values: np.ndarray, pool: torch.Tensor) -> np.ndarray:
    """Converts 64-bit integers to elements of a pool. The result keeps as many bits as an element has."""
    if pool.dtype == torch.int64:
        return values
    return values.astype(np.int8) if pool.dtype == torch.int8 else (values & ((1 << 52) - 1)).astype(np.float64)


def kv_of(tokens: list[int], named: Named, part: object) -> np.ndarray:
    """Returns the KV of each token as int64: a sum over all tokens and keys up to this token, each token weighted by
    its position.
    """
    salt, keys = named
    sums = np.cumsum((np.array(tokens, np.uint64) + np.uint64(1)) * _WEIGHTS[: len(tokens)])
    for position, key in keys:
        sums[position:] += np.uint64(xxhash.xxh3_64_intdigest(repr((position, key)).encode()))
    return (sums ^ np.uint64(xxhash.xxh3_64_intdigest(repr((salt, part)).encode()))).view(np.int64)


def kv_of_group(tokens: list[int], named: Named, part: object, group: LayerGroup) -> np.ndarray:
    """Does the same for layers of this group. The KV of draft layers depends on the next token, too. At the last token,
    this token is not known, so the KV there is not right.
    """
    values = kv_of(tokens, named, part)
    return np.append(values[1:], UNKNOWN) if isinstance(group, DraftGroup) else values


def goes_on(manager: PagedKVCacheManager, context: TextContext, steps: int) -> None:
    """Runs a request for some steps, and compares all cached KV that it sees."""
    for _ in range(steps):
        assert manager.maybe_reserve(context)
        KVTokens(manager).run_contexts([context], manager.fetch([context]))
        context.update(7)
        manager.step([context])
