"""State pages: what the recurrent layers of a hybrid model keep of a request, one page for each kind of state.

`scheduler_adapters.hf.state_layout` says what lies in a page. A state cannot be had from another request's pages: it
is of all tokens before, and of no page of them. So there is no prefix caching over states, and a preempted request
computes its tokens again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvariantError, UnknownRequestError
from kvcache.layout import PageLayout
from kvcache.pool.pages import PagePool
from kvcache.storage import allocate_blocks
from scheduler_adapters.errors import NoFreeStatePageError, StatePageError
from scheduler_adapters.hf.state_layout import SSM_KIND, StateShape, state_layouts
from transfer.plan.boxes import Box, Group, ShardLayout
from transfer.plan.shapes import dense


class StatePages:
    """The state pages of one process: memory, which page a request has, and how far the state in it has come.

    Who holds a page, and who may write to it, is known to a `PagePool` as for any other page: its request, and its
    leases, hold it; a transfer writes to it. What is a state's alone is here: it cannot go back, and once leased it is
    not run on from the tokens that were told of it. What a request may do when is for the manager to check
    (`HybridKVCacheManager`).

    There are `num_pages`, one for each request that may hold a state at a time, on a device for each shard. Raises
    `InvalidParamsError` for shards that cannot share the heads, `PoolTooSmallError` where a device is too small.
    """

    def __init__(self, shape: StateShape, num_pages: int, devices: Sequence[torch.device | str] = ("cpu",)) -> None:
        self.num_pages = num_pages
        # Of each shard the page of each kind, and its memory, page after page; page 0 is nobody's.
        self.layouts = state_layouts(shape, len(devices))
        self.tensors = [
            [allocate_blocks(layout, num_pages + 1, torch.device(device)) for layout in kinds.values()]
            for kinds, device in zip(self.layouts, devices, strict=True)
        ]
        # Of each kind what every shard holds: `[pages + 1, layers, channels or heads, ...]`.
        self._views: dict[str, list[tuple[PageLayout, torch.Tensor]]] = {}
        for kinds, tensors in zip(self.layouts, self.tensors, strict=True):
            for (kind, layout), blocks in zip(kinds.items(), tensors, strict=True):
                view = blocks[:, 0, :, 0]
                if kind == SSM_KIND:
                    view = view.view(*view.shape[:3], shape.head_dim, shape.d_state)
                self._views.setdefault(kind, []).append((layout, view))
        self._pool = PagePool(num_pages, digest_words=1)  # nothing is published: it has no digest
        self._page_of: dict[str, int] = {}
        self._leased: dict[object, int] = {}  # by lease
        self._tokens = np.zeros(num_pages + 1, np.int64)
        self._told = np.zeros(num_pages + 1, np.int64)  # tokens of the state that a table named last

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return self._pool.free_count

    @property
    def num_held(self) -> int:
        """Pages that a request or a lease holds, or that a transfer writes."""
        return self.num_pages - self.num_free

    # ---- who holds what

    def allocate(self, request_id: str) -> int:
        """A zeroed page for a request without: the state before its first token. Raises `NoFreeStatePageError`."""
        if not self.num_free:
            raise NoFreeStatePageError(f"request {request_id!r}: all {self.num_pages} state pages are held")
        page = self._page_of[request_id] = self._pool.allocate_one()
        self._reset(page)
        return page

    def release(self, request_id: str) -> None:
        """Give the request's page back; it is free once no lease holds it, and no transfer writes it."""
        page = self.page_of(request_id)
        del self._page_of[request_id]
        self._pool.release(_one(page))

    def page_of(self, request_id: str) -> int:
        """The request's page. Raises `UnknownRequestError` where it holds none."""
        page = self._page_of.get(request_id)
        if page is None:
            raise UnknownRequestError(f"request {request_id!r} holds no state page")
        return page

    def tokens_of(self, request_id: str) -> int:
        """Tokens that the request's state has taken up. Raises `StatePageError` while a transfer writes it."""
        page = self.page_of(request_id)
        if self._pool.writers[page]:
            raise StatePageError(f"request {request_id!r}: state page {page} is being written by a transfer")
        return int(self._tokens[page])

    def fork(self, parent: str, child: str) -> None:
        """Copy the parent's state into the child's page; both hold one."""
        source, target = self.page_of(parent), self.page_of(child)
        for tensor in chain.from_iterable(self.tensors):
            tensor[target] = tensor[source]
        self._tokens[target] = self._tokens[source]

    # ---- pages that a transfer fills

    def begin_import(self, request_id: str) -> int:
        """The request's page, which belongs to a transfer from now on; the request cannot run."""
        page = self.page_of(request_id)
        self._pool.add_writer(_one(page))
        return page

    def commit_import(self, request_id: str, tokens: int) -> None:
        """Every byte of the page has arrived: it is the state after `tokens` tokens."""
        page = self.page_of(request_id)
        self._pool.drop_writer(_one(page))
        self._tokens[page] = tokens

    def cancel_import(self, page: int) -> None:
        """Nothing writes the page any more: it is as allocated, or free if its request is gone."""
        self._pool.drop_writer(_one(page))
        self._reset(page)

    # ---- pages that others read

    def lease(self, request_id: str, lease: object) -> None:
        """Hold the request's page until `end_lease`, also when the request is released meanwhile."""
        page = self._leased[lease] = self.page_of(request_id)
        self._pool.hold(_one(page))

    def end_lease(self, lease: object) -> None:
        """Nobody reads under the lease any more. Safe twice."""
        page = self._leased.pop(lease, None)
        if page is not None:
            self._pool.release(_one(page))

    def tell(self, request_id: str) -> None:
        """A table has named the request's state as it is now: while it is leased it stays so."""
        self._told[self.page_of(request_id)] = self.tokens_of(request_id)

    # ---- what a model reads and writes

    def pages_at(self, request_ids: Sequence[str], tokens: Sequence[int]) -> torch.Tensor:
        """The requests' pages, int64 `[requests]`, whose states have taken up just `tokens`.

        A state cannot go back, and does not say by itself how far it is: a step run twice would take tokens up twice.
        And it is written over: one that others were told of, under a lease, cannot run on. Raises
        `UnknownRequestError`, and `StatePageError` for a state that is elsewhere, or leased, or that a transfer writes.
        """
        pages: list[int] = []
        for request_id, start in zip(request_ids, tokens, strict=True):
            has, page = self.tokens_of(request_id), self.page_of(request_id)
            if has != start:
                raise StatePageError(
                    f"request {request_id!r} runs from token {start}, its state has taken up {has}: "
                    "release it and run it from its first token"
                )
            if has and self._told[page] == has and self._pool.holders[page] > 1:
                raise StatePageError(
                    f"request {request_id!r}: its state after {has} tokens is leased, running on would write over it: "
                    "end the lease, or release the request and run it from its first token"
                )
            pages.append(page)
        return torch.tensor(pages, device=self.tensors[0][0].device)

    def read(self, layer: int, pages: torch.Tensor, kinds: Sequence[str]) -> torch.Tensor:
        """A copy of the states of `kinds`, one after another, of all shards: `[pages, channels or heads, ...]`."""
        found = list[torch.Tensor]()
        for kind in kinds:
            seen = 0
            for layout, view in self._views[kind]:
                if _end(layout) > seen:  # with more shards than groups, several hold the same one
                    found.append(view[pages, layer])
                    seen = _end(layout)
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def write(self, layer: int, pages: torch.Tensor, kinds: Sequence[str], states: torch.Tensor) -> None:
        """Put what `read` gives, changed, back in its place, on every shard that holds it."""
        before = 0
        for kind in kinds:
            for layout, view in self._views[kind]:
                view[pages, layer] = states[:, before + layout.first_head : before + _end(layout)].to(view.dtype)
            before += _end(self._views[kind][-1][0])

    def advance(self, pages: torch.Tensor, tokens: Sequence[int]) -> None:
        """Every layer of `pages` has been written: their states have taken up `tokens`."""
        self._tokens[pages.cpu().numpy()] = tokens

    # ---- as others see them

    def beside(self, layout: ShardLayout, shard: int) -> ShardLayout:
        """The layout of a shard with its state pages as a further group, whose regions follow: those of `tensors`."""
        boxes, sizes = list[Box](), list(layout.region_bytes)
        for kind, page in self.layouts[shard].items():
            pages = dense(page, self.num_pages + 1)
            boxes.append(msgspec.structs.replace(pages.groups[0].boxes[0], kind=kind, region=len(sizes)))
            sizes += pages.region_bytes
        group = Group(page_size=1, num_pages=self.num_pages + 1, boxes=tuple(boxes), state=True)
        return ShardLayout((*layout.groups, group), tuple(sizes))

    def check(self, request_ids: Iterable[str], written: Sequence[int] = ()) -> None:
        """Recount: just these requests have a page, transfers write `written`, and page 0 is empty.

        Raises `InvariantError` at the first discrepancy.
        """
        if wrong := set(request_ids).symmetric_difference(self._page_of):
            raise InvariantError(f"state pages and rows are not of the same requests: {sorted(wrong)}")
        held = [*self._page_of.values(), *self._leased.values()]
        holders, writers = (
            np.bincount(np.array(pages, np.int64), minlength=self.num_pages + 1) for pages in (held, written)
        )
        try:
            self._pool.check(holders, writers)
        except InvariantError as error:
            raise InvariantError(f"state pages: {error}") from error
        if any(tensor[0].any() for tensor in chain.from_iterable(self.tensors)):
            raise InvariantError("state page 0, which is nobody's, was written")

    def _reset(self, page: int) -> None:
        for tensor in chain.from_iterable(self.tensors):
            tensor[page] = 0
        self._tokens[page] = self._told[page] = 0


def _one(page: int) -> NDArray[np.int32]:
    return np.array([page], np.int32)


def _end(layout: PageLayout) -> int:
    return layout.first_head + layout.num_heads
