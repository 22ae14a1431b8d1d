"""Proves, when caches are registered, that our description of their memory matches where vLLM's kernels write.

A *box* is our description of where a part of a layer's KV lies in memory, and peers read pages by these boxes. The
proof makes vLLM's own operation write two pages of each layer, as a step of the model would, and then reads the two
pages through the boxes. The written values number every element of the pages, one digit at a time, so that no two
elements can be confused. A digit is recognised by the rank of its value among all values that are read, which works for
every type of cache. The proof takes about a millisecond per layer and restores the pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transfer.connector.cache_layout import Cache, LayerView, cache_layout
from transfer.connector.config import GroupConfig, WorkerConfig
from transfer.errors import InvalidEngineError

_FEW, _MANY = 8, 128
"""How many different digits the proof uses: the first number for types of one byte, the second one for larger types.

Each type holds the whole numbers from 1 to its limit exactly and in order.
"""


def prove(config: WorkerConfig, layers: Mapping[str, Any], caches: Mapping[str, Cache], dtype: torch.dtype) -> int:
    """Tests the caches of every attention layer. Returns the number of layers that were tested.

    Args:
        config: config of the rank.
        layers: vLLM's layers by name, with their caches bound.
        caches: the tensors of each layer, in the form in which they will be registered.
        dtype: dtype of the model's keys and values.

    Raises:
        InvalidEngineError: vLLM does not write to the addresses that the boxes give, or the test write has failed.
    """
    memory, tried = cache_layout(config, caches), 0
    with torch.inference_mode():
        for number, group in enumerate(config.groups):
            if group.is_state:  # states are moved whole, so there is nothing to prove
                continue
            for name in [name for name in group.layers if name in caches]:
                where = f"engine {config.engine_id!r} rank {config.rank}: group {number}, layer {name!r}"
                view = LayerView(memory, caches, number, group.layers[name])
                _Proof(where, layers[name], group, view, dtype).run()
                tried += 1
    return tried


@dataclass(frozen=True)
class _Proof:
    """The proof of one layer."""

    where: str
    layer: Any
    group: GroupConfig
    view: LayerView
    dtype: torch.dtype

    def run(self) -> None:
        """Tests two pages, and restores their contents."""
        pages = sorted({1 % self.view.num_pages, self.view.num_pages - 1})
        before = self.view.read(pages)
        try:
            fault = next(self._whole(pages) if self.group.whole_pages else self._elements(pages), "")
        finally:
            self.view.write(pages, before)
        if fault:
            raise InvalidEngineError(
                f"{self.where}: {self._writer} writes to other offsets in a page than a transfer would read: {fault}"
            )

    @property
    def _writer(self) -> str:
        return type(getattr(self.layer, "impl", self.layer)).__name__

    def _elements(self, pages: Sequence[int]) -> Iterator[str]:
        """Writes the number of every element, digit by digit, and reads the digits back.

        Yields a message for each digit that is not read back from where it was written.
        """
        view = self.view
        shape = (len(pages) * view.page_size, view.heads, view.content)
        numbers, unit = torch.arange(math.prod(shape)).view(shape), 1
        base = _FEW if view.itemsize == 1 else _MANY
        while unit < numbers.numel():
            digits = numbers // unit % base
            self._write(digits + 1, pages)
            yield from self._misplaced(digits, view.read(pages), pages)
            unit *= base

    def _misplaced(self, digits: torch.Tensor, found: torch.Tensor, pages: Sequence[int]) -> Iterator[str]:
        codes = torch.zeros(int(digits.max()) + 1, dtype=torch.int64)
        codes[digits] = found.long()
        wrong = (codes[digits] != found).nonzero()
        if len(wrong):
            token, head, element = map(int, wrong[0])
            yield (
                f"{len(wrong)} of {digits.numel()} elements differ, the first is element {element} of head {head} of "
                f"token {token % self.view.page_size} of page {pages[token // self.view.page_size]}"
            )
        elif not bool((codes.diff() > 0).all()):  # among positive numbers, a larger bit pattern is a larger number
            yield f"values written in ascending order are read in another order: {[int(code) for code in codes[:8]]}"

    def _whole(self, pages: Sequence[int]) -> Iterator[str]:
        """Yields a message for each page with elements that do not change when all tokens of the page are written.

        A read of such a page would include bytes of other pages. This test is used if only the backend knows the layout
        within a page.
        """
        for page in pages:
            found: list[torch.Tensor] = []
            for value in (1, 2):
                self._write(torch.full((self.view.page_size, self.view.heads, self.view.content), value), [page])
                found.append(self.view.read([page]))
            if same := int((found[0] == found[1]).sum()):
                yield f"{same} elements of page {page} do not change when all of its tokens are written"

    def _write(self, content: torch.Tensor, pages: Sequence[int]) -> None:
        """Makes vLLM write `content`, `[pages * tokens, heads, content]`, to all tokens of some pages."""
        layer, size = self.layer, self.view.page_size
        slots = (torch.tensor(pages)[:, None] * size + torch.arange(size)).reshape(-1)
        try:
            cache: torch.Tensor = layer.kv_cache
            given, slots = content.to(cache.device, self.dtype), slots.to(cache.device)
            if self.group.kind == "mla":
                rank, scale = layer.kv_lora_rank, layer._k_scale  # noqa: SLF001
                given = self._scaled(given, scale)
                latents, rotary = given[:, 0, :rank].contiguous(), given[..., rank:].contiguous()
                layer.impl.do_kv_cache_update(latents, rotary, cache, slots, layer.kv_cache_dtype, scale)
            else:
                keys, values = given[..., : layer.head_size], given[..., layer.head_size :]
                keys, values = self._scaled(keys, layer._k_scale), self._scaled(values, layer._v_scale)  # noqa: SLF001
                layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), cache, slots)
        except Exception as error:
            raise InvalidEngineError(
                f"{self.where}: the test write by {self._writer}, which checks the page layout, failed: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _scaled(self, given: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Multiplies values by the scale by which an 8-bit kernel will divide them.

        The scale is one number for all heads, or one for each head. The product is increased by 3 %, because some
        kernels truncate values that the type cannot represent, and others round them.
        """
        if self.view.itemsize > 1:
            return given
        scales = torch.ones(1) if scale is None else scale.float().reshape(1, -1, 1)
        return (given.float() * scales.to(given.device) * 1.03).to(given.dtype)
