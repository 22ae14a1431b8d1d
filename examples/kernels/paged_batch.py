"""The inputs of an attention kernel: requests whose earlier keys and values are in pages, and their new tokens.

The kernels beside this file attend over such a batch. It holds what a serving loop has when attention runs: the inputs
that `fetch` returned, and the queries, keys and values that the model has just computed for the new tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagewire import KVCacheParams, PagedKVCacheManager, RaggedKVCacheInputs, TextContext

PAGE_ORDERS = ("head,layer,side,token,dim", "layer,side,head,token,dim", "layer,side,token,head,dim")
LAYERS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# For each request: how many of its tokens are cached, and how many run now. Two requests decode, the third runs a chunk
# of its prompt, and the fourth runs its whole prompt.
REQUESTS = ((36, 1), (0, 1), (20, 29), (0, 33))


@dataclass(frozen=True)
class PagedBatch:
    """One step of a batch. The new tokens of all requests are packed, request after request."""

    manager: PagedKVCacheManager
    inputs: RaggedKVCacheInputs  # as `fetch` returned them
    counts: list[int]  # new tokens of each request
    query: torch.Tensor  # [tokens, heads, head_dim]
    key: torch.Tensor  # [layers, tokens, kv_heads, head_dim], keys of the new tokens
    value: torch.Tensor
    # for each request, all of its keys and values: [layers, tokens, ...]
    known: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def page_size(self) -> int:
        """Number of tokens in a page."""
        return self.inputs.blocks.shape[3]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of a layer's keys and values: views `[pages, page_size, kv_heads, head_dim]`."""
        return self.inputs.blocks[:, 0, layer], self.inputs.blocks[:, 1, layer]

    @property
    def starts(self) -> torch.Tensor:
        """For each request, the number of tokens that were cached before this step: int32 `[requests]`."""
        return self.inputs.cache_lengths

    @property
    def lengths(self) -> torch.Tensor:
        """For each request, the number of tokens including the new ones: int32 `[requests]`."""
        return self.starts + torch.tensor(self.counts, dtype=torch.int32, device=self.starts.device)

    @property
    def first_rows(self) -> torch.Tensor:
        """The first packed row of each request's new tokens, and the end of the last one's: int32 `[requests + 1]`."""
        return torch.tensor([0, *self.counts], device=self.starts.device).cumsum(0).to(torch.int32)

    @property
    def slots(self) -> torch.Tensor:
        """The slot of each new token: int64 `[tokens]`, see `slots_of`."""
        return torch.cat([self.slots_of(row, int(start)) for row, start in enumerate(self.starts)])

    def slots_of(self, row: int, first: int = 0) -> torch.Tensor:
        """Returns the slots of a request's tokens from token `first` on: int64 `[tokens]`.

        A slot is `page * page_size` plus the token's index in the page.
        """
        at = torch.arange(first, int(self.lengths[row]), device=self.starts.device)
        pages = self.inputs.lookup_table[row].long()[at // self.page_size]
        return pages * self.page_size + at % self.page_size

    def flat(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns a layer's keys and values as flat views `[slots, kv_heads, head_dim]`, and a page's stride in slots.

        Token t of page p is in slot `p * stride + t`. The stride may exceed the page size, because a page also holds
        the data of other layers and sides. Slots with such data exist in the view, but no token of the layer is in
        them.
        """
        keys, values = self.layer(layer)
        page, token, head, element = keys.stride()
        stride = page // token
        shape = ((keys.shape[0] - 1) * stride + self.page_size, *keys.shape[2:])
        views = [states.as_strided(shape, (token, head, element), states.storage_offset()) for states in (keys, values)]
        return views[0], views[1], stride

    def write(self, layer: int) -> None:
        """Writes the new keys and values to the pages, in plain torch."""
        keys, values = self.layer(layer)
        page, place = self.slots // self.page_size, self.slots % self.page_size
        keys[page, place] = self.key[layer]
        values[page, place] = self.value[layer]

    def expected(self, layer: int) -> torch.Tensor:
        """Returns the causal attention of the new tokens, computed without pages: `[tokens, heads, head_dim]`."""
        outputs: list[torch.Tensor] = []
        for row, (keys, values) in enumerate(self.known):
            query = self.query[self.first_rows[row] : self.first_rows[row + 1]]
            end = keys.shape[1]
            mask = torch.arange(end) <= torch.arange(end - len(query), end)[:, None]
            mask = mask.to(query.device)
            query, key, value = (one.transpose(0, 1)[None].float() for one in (query, keys[layer], values[layer]))
            found = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
            outputs.append(found[0].transpose(0, 1))
        return torch.cat(outputs)


def make_batch(
    page_order: str,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    device: str = DEVICE,
) -> PagedBatch:
    """Returns a batch of four requests with random keys and values.

    All other values in the pool are large, so that a kernel that reads from the wrong position gives a wrong result.
    """
    params = KVCacheParams(dtype, kv_heads, head_dim, page_size=page_size, page_order=page_order)  # pyright: ignore[reportArgumentType] - one of PAGE_ORDERS
    memory = 24 * page_size * params.bytes_per_token(LAYERS)
    manager = PagedKVCacheManager(params, 8, 24 * page_size, LAYERS, [device], available_cache_memory=memory)
    random = torch.Generator().manual_seed(0)
    manager.device_tensors[0][0].fill_(1e3)

    # This request is released between the claims of the others, so that their pages are not consecutive.
    passing = TextContext(range(3 * page_size), 4 * page_size, request_id="passing")
    manager.external_claim("passing")
    manager.maybe_reserve(passing)

    requests: list[TextContext] = []
    known: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (start, count) in enumerate(REQUESTS):
        request = TextContext(range(start + count), 24 * page_size, request_id=f"request-{number}")
        manager.external_claim(request.request_id)
        manager.maybe_reserve(request)
        if number == 0:
            manager.release("passing")
        key, value = (
            torch.randn(LAYERS, start + count, kv_heads, head_dim, generator=random).to(device, dtype) for _ in range(2)
        )
        known.append((key, value))
        if start:  # an earlier chunk
            request.set_token_indices(active_idx=start)
            (inputs,) = manager.fetch([request])
            at = torch.arange(start, device=device)
            pages = inputs.lookup_table[0].long()[at // page_size]
            for layer in range(LAYERS):
                inputs.blocks[pages, 0, layer, at % page_size] = key[layer, :start]
                inputs.blocks[pages, 1, layer, at % page_size] = value[layer, :start]
            request.update(0)
            manager.step([request])
        requests.append(request)

    (inputs,) = manager.fetch(requests)
    counts = [count for _, count in REQUESTS]
    new_keys, new_values = (
        torch.cat([states[side][:, -count:] for states, count in zip(known, counts, strict=True)], 1) for side in (0, 1)
    )
    query = torch.randn(sum(counts), heads, head_dim, generator=random).to(device, dtype)
    return PagedBatch(manager, inputs, counts, query, new_keys, new_values, known)


def print_errors(
    attend: Callable[[PagedBatch, int], torch.Tensor],
    page_size: int = 16,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    page_orders: Sequence[str] = PAGE_ORDERS,
    head_dim: int = 64,
) -> None:
    """Runs a kernel over each page order, and prints its largest error.

    `attend` writes the new tokens of a layer and returns the output.
    """
    for dtype in dtypes:
        for page_order in page_orders:
            batch = make_batch(page_order, dtype, page_size, head_dim=head_dim)
            error = max(float((attend(batch, at) - batch.expected(at)).abs().max()) for at in range(LAYERS))
            print(f"{page_order:26} {dtype!s:14} largest error {error:.1e}")
            batch.manager.close()
