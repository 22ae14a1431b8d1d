"""Attention over pages in plain torch, behind the attention interface of `transformers`.

A forward pass runs the new tokens of all requests of the batch. They are packed into one row of the model's input, one
request after another. Recurrent layers need one row for each request, with equally many tokens in each. The model knows
nothing of pages. Its attention layers call `paged_attention_forward`, and the keyword argument `paged_batch` of the
model call says where each token lies in the pages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache.layer_groups import LayerGroup
from kvcache.types import RaggedKVCacheInputs
from scheduler_adapters.errors import UnsupportedModelError

NULL_PAGE = 0
Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Expands latents `[requests, 1, keys, elements]` into keys and values, each `[requests, heads, keys, elements]`."""

# Arguments that change the attention scores in some models. Ignoring such an argument would give wrong tokens without
# an error.
_UNSUPPORTED_ARGUMENTS = ("softcap", "position_bias")


@dataclass(frozen=True, slots=True)
class _EqualCounts:
    """Requests with the same number of new tokens. They are computed together, padded to the longest context."""

    rows: torch.Tensor  # int64 [requests, queries], the index of each query in the packed row
    pages: torch.Tensor  # int64 [requests, pages], the pages to read; padding names the null page
    stale: tuple[torch.Tensor, ...]  # index (request, key) of each key beyond its request's last token
    mask: torch.Tensor  # bool [requests, 1, queries, keys], True where a query may see a key


class PagedBatch:
    """Where each token of a forward pass lies in the pages. Built once per pass and read by every layer.

    `inputs` has one entry for each shard of one replica, on the model's device, as `PagedKVCacheManager.fetch` returns
    them. All shards have equal block tables, and each shard holds its own range of heads. `starts` has each request's
    number of cached tokens, and `counts` its number of new tokens. `layers` maps each attention layer of the model to
    its block table and to its index in the pages of that table.
    """

    def __init__(
        self,
        inputs: Sequence[RaggedKVCacheInputs],
        starts: Sequence[int],
        counts: Sequence[int],
        layers: Mapping[int, tuple[int, int]],
    ) -> None:
        self._layers = layers
        self._pools = [shard.blocks for shard in inputs]
        self._scales = [shard.kv_scales for shard in inputs]
        table = inputs[0].lookup_table.long()
        self._tables = table if table.ndim == 3 else table[None]
        self._page_size = self._pools[0].shape[3]
        device = table.device
        self._starts = torch.tensor(starts, device=device)
        self._counts = torch.tensor(counts, device=device)
        self._first_rows = self._counts.cumsum(0) - self._counts
        requests = torch.arange(len(counts), device=device).repeat_interleave(self._counts)
        self.positions = torch.arange(len(requests), device=device) + (self._starts - self._first_rows)[requests]
        self.last_rows = self._first_rows + self._counts - 1
        self._write_pages = self._tables[:, requests, self.positions // self._page_size]
        self._write_offsets = self.positions % self._page_size
        self._by_count: dict[int, list[int]] = defaultdict(list)
        for request, count in enumerate(counts):
            self._by_count[count].append(request)
        self._groups: dict[tuple[int, LayerGroup | None], list[_EqualCounts]] = {}
        # index of the current attention layer, for models in which one module without an index serves several layers
        self.attending = -1

    def position_of(self, layer: int) -> tuple[int, int]:
        """Returns a layer's block table, and the layer's index in the pages of that table.

        Raises `UnsupportedModelError` for a layer that has no pages.
        """
        if layer not in self._layers:
            raise UnsupportedModelError(
                f"layer {layer} calls attention, but the pages hold only layers {sorted(self._layers)}"
            )
        return self._layers[layer]

    def write(self, layer: int, *sides: torch.Tensor) -> None:
        """Writes the new keys and values, each `[tokens, kv_heads, head_dim]`, to the pages of the model's `layer`.

        A layer that keeps latents passes a single tensor with one head.
        """
        table, position = self.position_of(layer)
        self._check_shape(position, sides)
        where = self._write_pages[table], self._write_offsets
        for (pool, heads), scales in zip(self._shards(sides[0].shape[1]), self._scales, strict=True):
            for side, states in enumerate(sides):
                kept = states[:, heads.start : heads.stop]
                if scales is not None:
                    kept, scales[:, side, position][where] = quantized(kept, pool.dtype, scales)
                pool[:, side, position][where] = kept

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        kv_heads: int,
        scale: float,
        seen: LayerGroup | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention of `query`, `[tokens, heads, head_dim]`, over the pages of `layer`, in the same shape.

        `seen` limits the tokens that a query sees; None means all tokens. `sinks`, `[heads]`, has an additional score
        for each head. The score takes part in the softmax, but adds no value.
        """
        output = torch.empty_like(query)
        table, position = self.position_of(layer)
        for group in self._groups_of(table, seen):
            key, value = (self._read(position, side, group, kv_heads, query.dtype) for side in (0, 1))
            output[group.rows] = _grouped_attention(query[group.rows], key, value, group.mask, scale, sinks)
        return output

    def attend_latents(
        self, layer: int, query: torch.Tensor, value_dim: int, scale: float, expand: Expand
    ) -> torch.Tensor:
        """Like `attend`, for pages with latents.

        `expand` turns latents into keys and values. A value has `value_dim` elements.
        """
        output = query.new_empty(*query.shape[:-1], value_dim)
        table, position = self.position_of(layer)
        for group in self._groups_of(table, None):
            key, value = expand(self._read(position, 0, group, 1, query.dtype))
            output[group.rows] = _grouped_attention(query[group.rows], key, value, group.mask, scale, None)
        return output

    def _read(self, layer: int, side: int, group: _EqualCounts, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Reads the keys or values of a group's pages: `[requests, kv_heads, keys, head_dim]`, converted to `dtype`."""
        parts, seen = list[torch.Tensor](), 0
        for (pool, heads), scales in zip(self._shards(kv_heads), self._scales, strict=True):
            if heads.stop > seen:  # with more shards than heads, several shards hold the same head
                tiles = _tiles(pool[:, side, layer], group.pages)
                if scales is not None:
                    tiles = dequantized(tiles, _tiles(scales[:, side, layer], group.pages), dtype)
                parts.append(tiles)
                seen = heads.stop
        states = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).flatten(2, 3)
        # An earlier owner of the page may have left a NaN after the last token. A mask cannot hide it, because a NaN
        # multiplied by zero is still a NaN.
        states[group.stale[0], :, group.stale[1]] = 0
        return states

    def _shards(self, kv_heads: int) -> list[tuple[torch.Tensor, range]]:
        firsts = [shard * kv_heads // len(self._pools) for shard in range(len(self._pools))]
        return [(pool, range(first, first + pool.shape[4])) for pool, first in zip(self._pools, firsts, strict=True)]

    def _groups_of(self, table: int, seen: LayerGroup | None) -> list[_EqualCounts]:
        if (table, seen) not in self._groups:
            self._groups[table, seen] = [self._group(count, self._tables[table], seen) for count in self._by_count]
        return self._groups[table, seen]

    def _group(self, count: int, table: torch.Tensor, seen: LayerGroup | None) -> _EqualCounts:
        device = table.device
        requests = torch.tensor(self._by_count[count], device=device)
        starts = self._starts[requests]
        ends = starts + count
        # Reads only the pages that the first new token of a request can still see.
        first_keys = _first_seen(seen, starts)
        first_pages, end_pages = first_keys // self._page_size, -(-ends // self._page_size)
        columns = first_pages[:, None] + torch.arange(int((end_pages - first_pages).max()), device=device)
        exists = columns < end_pages[:, None]
        pages = table[requests].gather(1, columns.where(exists, 0)).where(exists, NULL_PAGE)
        offsets = torch.arange(self._page_size, device=device)
        keys = (columns[:, :, None] * self._page_size + offsets).flatten(1)
        stale = (keys >= ends[:, None]) & exists.repeat_interleave(self._page_size, dim=1)
        steps = torch.arange(count, device=device)
        positions = starts[:, None] + steps
        mask = keys[:, None, :] <= positions[:, :, None]
        if seen is not None:
            mask &= keys[:, None, :] >= _first_seen(seen, positions)[:, :, None]
        rows = self._first_rows[requests][:, None] + steps
        return _EqualCounts(rows, pages, stale.nonzero(as_tuple=True), mask[:, None])

    def _check_shape(self, layer: int, kept: Sequence[torch.Tensor]) -> None:
        _, sides, layers, size, heads, dim = self._pools[0].shape
        if self._scales[0] is not None and self._scales[0].shape[3:5] != (size, heads):
            raise UnsupportedModelError(
                f"layer {layer}: a page of {[size, heads]} tokens and heads has scales for "
                f"{list(self._scales[0].shape[3:5])}, so writing one token would change others: use scale_of 'token "
                "and head'"
            )
        count = kept[0].shape[1]
        held, dims = self._shards(count)[-1][1].stop, [states.shape[2] for states in kept]
        fits = sides == len(kept) and layer < layers and held == count and set(dims) == {dim}
        if not fits:
            raise UnsupportedModelError(
                f"layer {layer} has {count} heads of {' (keys) and '.join(map(str, dims))} (values) "
                f"elements; the pages hold {sides} sides, {layers} layers and {heads} heads of {dim} on each of "
                f"{len(self._pools)} shards"
            )


def _tiles(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Returns the chosen pages of `pool`, `[pages, tokens, heads, dim]`, as `[requests, heads, pages, tokens, dim]`."""
    tiles = pool.transpose(1, 2)
    return tiles[pages[:, None], torch.arange(tiles.shape[1], device=tiles.device)[None, :, None]]


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    paged_batch: PagedBatch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for `transformers`: stores the new keys and values, and attends over all cached ones.

    `query` is `[rows, heads, tokens, head_dim]`: the new tokens, row after row. `key` and `value` have the same shape
    with `kv_heads`. `paged_batch` is a keyword argument of the model call. Returns the output, `[rows, tokens, heads,
    head_dim]`, and None for the weights. Raises `UnsupportedModelError` if the layer needs a feature that is not
    computed here.
    """
    if paged_batch is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was called without paged_batch: the model does not pass keyword arguments on to "
            "its attention"
        )
    _refuse_unsupported(module, attention_mask, sliding_window, kwargs)
    if query.shape[0] * query.shape[2] != len(paged_batch.positions):
        raise UnsupportedModelError(
            f"{type(module).__name__} got {query.shape[0]} rows of {query.shape[2]} tokens, "
            f"but the batch has {len(paged_batch.positions)} tokens"
        )
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    layer = paged_batch.attending if layer < 0 else layer
    if hasattr(module, "expand_kv"):  # `PagedLatents` has already written the latents of this layer
        of_latents = cast("Any", module)
        rank, expand = int(of_latents.kv_lora_rank), of_latents.expand_kv
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = paged_batch.attend_latents(
            layer,
            query.flatten(0, 1),
            value.shape[-1],
            scale,
            lambda latents: expand(latents[..., :rank], latents[..., rank:]),
        )
        return output.view(*query.shape[:-1], -1), None
    paged_batch.write(layer, key.flatten(0, 1), value.flatten(0, 1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    seen = _seen_by(module, sliding_window)
    output = paged_batch.attend(layer, query.flatten(0, 1), key.shape[2], scale, seen, kwargs.get("s_aux"))
    return output.view(query.shape), None


class PagedLatents:
    """The cache object of a model whose layers keep latents. It writes new latents to the pages of the batch at once.

    `update` returns only the latents of the new tokens. The latents of earlier tokens are read and expanded when the
    layer attends.
    """

    def __init__(self, batch: PagedBatch) -> None:
        self._batch = batch

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the latents and the shared part of the keys of new tokens, each `[rows, 1, tokens, elements]`."""
        self._batch.write(layer_idx, torch.cat((latent, rotated), dim=-1).transpose(1, 2).flatten(0, 1))
        return latent, rotated

    def get_query_offset(self, layer_idx: int) -> int:  # noqa: ARG002  (of the interface)
        """Required by the interface of cache objects. Only masks depend on the result, and no masks are made here."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Required by the interface of cache objects. Only masks depend on the result, and no masks are made here."""
        return query_length, 0


def no_attention_mask(*_args: Any, **_kwargs: Any) -> None:
    """The mask function for `paged_attention_forward`.

    It creates no mask, because the block tables determine which tokens are visible.
    """


def _seen_by(module: torch.nn.Module, sliding_window: int | None) -> LayerGroup | None:
    """Returns which tokens the queries of a layer see, as a layer group; None if they see all tokens."""
    if sliding_window is not None:
        return LayerGroup("window", (0,), sliding_window)
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[int(module.layer_idx)] == "chunked_attention":  # type: ignore[arg-type]
        return LayerGroup("chunked", (0,), config.attention_chunk_size)
    return None


def _first_seen(seen: LayerGroup | None, positions: torch.Tensor) -> torch.Tensor:
    """Returns `LayerGroup.first_seen` of each position in a tensor.

    That method is written for numpy, but uses only operations that torch has too.
    """
    return torch.zeros_like(positions) if seen is None else seen.first_seen(positions)  # type: ignore[arg-type,return-value]


def _grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes grouped-query attention with SDPA, without copying keys for the query heads that share them.

    The query heads that share a key/value head are treated as additional queries of a single head.

    Query and result are `[b, q, heads, dim]`, key and value `[b, kv_heads, k, dim]`, mask `[b, 1, q, k]`, sinks
    `[heads]`.
    """
    batch, queries, heads, dim = query.shape
    kv_heads = key.shape[1]
    share = heads // kv_heads
    stacked = query.view(batch, queries, kv_heads, share, dim).permute(0, 2, 3, 1, 4)
    stacked = stacked.reshape(batch, kv_heads, share * queries, dim)
    mask = mask.repeat(1, 1, share, 1)
    if sinks is not None:  # a sink is one more key and value of zeros, with the sink as its score
        key, value = (torch.nn.functional.pad(states, (0, 0, 0, 1)) for states in (key, value))
        scores = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
        of_sinks = sinks.to(query.dtype).view(1, kv_heads, share, 1).expand(batch, -1, -1, queries)
        scores = scores.expand(-1, kv_heads, -1, -1)
        mask = torch.cat((scores, of_sinks.reshape(batch, kv_heads, share * queries, 1)), dim=-1)
    output = scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scale)
    output = output.view(batch, kv_heads, share, queries, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(batch, queries, heads, -1)


def _refuse_unsupported(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, sliding_window: int | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    for argument in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(argument) is not None:
            raise UnsupportedModelError(f"{name} passes {argument} to attention: not supported over pages")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModelError(f"{name} is not causal: only decoder self-attention runs over pages")
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{name} got an attention mask: over pages, only the block tables decide which tokens are seen"
        )
    if kwargs.get("dropout"):
        raise UnsupportedModelError(f"{name} has dropout {kwargs['dropout']}: call model.eval() first")
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    if layer_types and layer_types[int(module.layer_idx)] == "sliding_attention" and sliding_window is None:  # type: ignore[arg-type]
        raise UnsupportedModelError(f"{name} is a sliding-window layer but does not pass its window to attention")


def quantized(states: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises values to `dtype`. Returns them and their scales.

    Each scale maps the largest value that it applies to onto the largest value of `dtype`.

    `states` is `[tokens, heads, elements]`. `scales` gives the scales' dtype and their number per head.
    """
    groups = states.float().reshape(*states.shape[:-1], scales.shape[-1], -1)
    limit = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    # The scale is rounded to its stored type first, so that values are divided by the same number with which they are
    # later multiplied.
    found = (groups.abs().amax(-1, keepdim=True) / limit).clamp_min(torch.finfo(scales.dtype).tiny).to(scales.dtype)
    values = groups / found.float()
    values = values if dtype.is_floating_point else values.round()
    return values.clamp(-limit, limit).to(dtype).flatten(-2), found.squeeze(-1)


def dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns quantised values, `[..., elements]`, multiplied by their scales, in `dtype`."""
    groups = values.float().reshape(*values.shape[:-1], scales.shape[-1], -1)
    return (groups * scales.float()[..., None]).flatten(-2).to(dtype)
