"""A model in a few tensor operations, for any device.

Its next token is a sum over the KV of all tokens in the pages, so a page that is wrong, stale or missing changes the
token. On a GPU each step first waits on the device, so that the host runs far ahead. Missing synchronisation then
shows: a copy that does not wait for the model, or a model that does not wait for a copy.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcache import RaggedKVCacheInputs, TextContext

VOCABULARY = 251
_CYCLES = 4_000_000  # about 2 ms


def values_of(tokens: Any, places: Any) -> Any:
    """Returns the KV of tokens at these positions, as integers."""
    return (tokens * 7919 + places * 104_729 + 12_345) % 65_521


def next_token(tokens: list[int]) -> int:
    """Returns the token that follows, computed without pages."""
    return sum(values_of(token, place) * (place + 1) for place, token in enumerate(tokens)) % VOCABULARY


def answer(prompt: list[int], count: int) -> list[int]:
    """Returns the `count` tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def wait_on_device(device: torch.device, cycles: int = _CYCLES) -> None:
    """Delays the work that is launched from now on. The call does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType]


def write(blocks: torch.Tensor, table: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> None:
    """Writes the KV of one token of each row to its page. Does not wait for the device."""
    size = blocks.shape[3]
    pages = table.gather(1, (places // size)[:, None].long())[:, 0].long()
    values = values_of(tokens.long(), places.long())
    blocks[pages, :, :, places.long() % size] = values[:, None, None, None, None].to(blocks.dtype)


def decode(blocks: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Runs one token of each row. Returns the next token of each row, int64 `[rows]`. The call can be captured in a
    graph.
    """
    write(blocks, table, starts, tokens)
    return sums(blocks, table, starts)


def sums(blocks: torch.Tensor, table: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Returns the token after place `last` of each row, int64 `[rows]`."""
    held = blocks[table.long()]  # [requests, blocks, sides, layers, page_size, heads, dim]
    copies = held.shape[2] * held.shape[3] * held.shape[5] * held.shape[6]
    found = held.sum(dim=(2, 3, 5, 6)).flatten(1)
    places = torch.arange(found.shape[1], device=found.device)
    seen = places <= last[:, None]
    return torch.where(seen, found * (places + 1), 0).sum(1) // copies % VOCABULARY


def run(batch: list[TextContext], inputs: list[RaggedKVCacheInputs]) -> torch.Tensor:
    """Runs the active tokens of requests of one replica with one shard.

    Returns the next token of each request, on the device.
    """
    (entry,) = inputs
    device = entry.blocks.device
    wait_on_device(device)
    for row, context in enumerate(batch):
        count = context.active_length
        table = entry.lookup_table[row : row + 1].expand(count, -1)
        places = torch.arange(count, device=device) + entry.cache_lengths[row]
        tokens = torch.as_tensor(context.tokens[context.start_idx : context.active_idx]).to(device)
        write(entry.blocks, table, places, tokens)
    last = torch.tensor([context.active_length - 1 for context in batch]).to(device) + entry.cache_lengths
    return sums(entry.blocks, entry.lookup_table, last)
