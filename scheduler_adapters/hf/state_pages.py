"""State pages: what the recurrent layers of a hybrid model keep of a request, one page of fixed size for each.

`scheduler_adapters.hf.state_layout` says what lies in a page. A state cannot be had from another request's pages: it
is of all tokens before, and of no page of them. So there is no prefix caching over states, and a preempted request
computes its tokens again.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvcache.errors import AlreadyClaimedError, InvalidParamsError, InvariantError, UnknownRequestError
from kvcache.layout import PageLayout
from kvcache.storage import allocate_blocks
from scheduler_adapters.errors import NoFreeStatePageError, StatePageError
from scheduler_adapters.hf.state_layout import StateLayout, StatePart, StateShape, state_layouts

if TYPE_CHECKING:
    from collections.abc import Sequence


class StatePages:
    """The state pages of one process: memory, who holds which page, and how far the state in it has come.

    A request holds one page from `allocate` to `release`. A page that a transfer writes (`begin_import`) goes to nobody
    else before `commit_import` or `cancel_import`, also where its request is released meanwhile. A leased one (`lease`)
    goes to nobody else before its last lease has ended, and is not run on from the tokens that were told of it.

    Args:
        shape: of the model.
        num_pages: most requests that hold a state at a time.
        devices: one for each shard.

    Raises:
        InvalidParamsError: no page, or shards that cannot share the heads.
        PoolTooSmallError: (a RuntimeError) a device has not that much memory.
    """

    def __init__(self, shape: StateShape, num_pages: int, devices: Sequence[torch.device | str] = ("cpu",)) -> None:
        if num_pages < 1:
            raise InvalidParamsError(f"num_pages is {num_pages}: at least 1 is needed")
        self.shape = shape
        self.num_pages = num_pages
        self.layouts = state_layouts(shape, len(devices))
        # Page 0 is nobody's, as in every pool: a table that names it names no state.
        self.tensors = [
            _allocate(layout.page_bytes, num_pages + 1, torch.device(device))
            for layout, device in zip(self.layouts, devices, strict=True)
        ]
        self._views = [
            {part.kind: _view(tensor, layout, part) for part in layout.parts}
            for tensor, layout in zip(self.tensors, self.layouts, strict=True)
        ]
        self._page_of: dict[str, int] = {}
        self._free = list(range(1, num_pages + 1))  # a heap: lower pages first, as rows are
        self._tokens = np.zeros(num_pages + 1, np.int64)
        self._importing = set[int]()
        self._leases: dict[int, set[object]] = {}  # of each leased page
        self._told: dict[int, int] = {}  # of each page the tokens of the state that a table named last

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages that a request or a lease holds, or that a transfer writes."""
        return self.num_pages - len(self._free)

    # ---- who holds what

    def allocate(self, request_id: str) -> int:
        """A zeroed page for the request: the state before its first token.

        Raises:
            AlreadyClaimedError: (a ValueError) it holds one.
            NoFreeStatePageError: (a NoFreeRowError) none is free.
        """
        if request_id in self._page_of:
            raise AlreadyClaimedError(f"request {request_id!r} holds state page {self._page_of[request_id]} already")
        if not self._free:
            raise NoFreeStatePageError(f"request {request_id!r}: all {self.num_pages} state pages are held")
        page = self._page_of[request_id] = heapq.heappop(self._free)
        self._reset(page)
        return page

    def release(self, request_id: str) -> None:
        """Give the request's page back.

        Raises:
            UnknownRequestError: (a KeyError) it holds none.
        """
        page = self.page_of(request_id)
        del self._page_of[request_id]
        self._free_unused(page)

    def page_of(self, request_id: str) -> int:
        """The request's page.

        Raises:
            UnknownRequestError: (a KeyError) it holds none.
        """
        page = self._page_of.get(request_id)
        if page is None:
            raise UnknownRequestError(f"request {request_id!r} holds no state page")
        return page

    def tokens_of(self, request_id: str) -> int:
        """Tokens that the request's state has taken up.

        Raises:
            UnknownRequestError: (a KeyError) it holds no page.
            StatePageError: (a ValueError) a transfer is writing it.
        """
        page = self.page_of(request_id)
        if page in self._importing:
            raise StatePageError(f"request {request_id!r}: state page {page} is being written by a transfer")
        return int(self._tokens[page])

    def fork(self, parent: str, child: str) -> None:
        """Copy the parent's state into the child's page; both hold one.

        Raises:
            UnknownRequestError, StatePageError: as `tokens_of`.
        """
        tokens, source, target = self.tokens_of(parent), self.page_of(parent), self.page_of(child)
        for tensor in self.tensors:
            tensor[target] = tensor[source]
        self._tokens[target] = tokens

    # ---- pages that a transfer fills

    def begin_import(self, request_id: str) -> int:
        """The request's page, which belongs to a transfer from now on; the request cannot run.

        Raises:
            UnknownRequestError, StatePageError: as `tokens_of`.
        """
        self.tokens_of(request_id)
        page = self.page_of(request_id)
        self._importing.add(page)
        return page

    def commit_import(self, request_id: str, tokens: int) -> None:
        """Every byte of the page has arrived: it is the state after `tokens` tokens.

        Raises:
            UnknownRequestError: (a KeyError) released meanwhile: `cancel_import`.
            StatePageError: (a ValueError) no transfer writes its page.
        """
        page = self.page_of(request_id)
        if page not in self._importing:
            raise StatePageError(f"request {request_id!r}: no transfer writes its state page {page}")
        self._importing.remove(page)
        self._tokens[page] = tokens

    def cancel_import(self, page: int) -> None:
        """Nothing writes the page any more: it is as allocated, or free if its request is gone. Safe twice."""
        if page not in self._importing:
            return
        self._importing.remove(page)
        if page in self._page_of.values():
            self._reset(page)
        else:
            self._free_unused(page)

    # ---- pages that others read

    def lease(self, request_id: str, lease: object) -> None:
        """Hold the request's page until `end_lease`, also when the request is released meanwhile.

        Raises:
            UnknownRequestError, StatePageError: as `tokens_of`.
        """
        self.tokens_of(request_id)
        self._leases.setdefault(self.page_of(request_id), set()).add(lease)

    def end_lease(self, lease: object) -> None:
        """Nobody reads under the lease any more. Safe twice."""
        for page in [page for page, leases in self._leases.items() if lease in leases]:
            self._leases[page].remove(lease)
            if not self._leases[page]:
                del self._leases[page]
                if page not in self._page_of.values():
                    self._free_unused(page)

    def tell(self, request_id: str) -> None:
        """A table has named the request's state as it is now: while it is leased it stays so.

        Raises:
            UnknownRequestError, StatePageError: as `tokens_of`.
        """
        self._told[self.page_of(request_id)] = self.tokens_of(request_id)

    # ---- what a model reads and writes

    def pages_at(self, request_ids: Sequence[str], tokens: Sequence[int]) -> torch.Tensor:
        """The requests' pages, int64 `[requests]`, whose states have taken up just `tokens`.

        A state cannot go back, and does not say by itself how far it is: a step run twice would take tokens up twice.
        And it is written over: one that others were told of, under a lease, cannot run on.

        Raises:
            UnknownRequestError: (a KeyError) a request holds no page.
            StatePageError: (a ValueError) a state is elsewhere, or leased, or a transfer is writing it.
        """
        for request_id, start in zip(request_ids, tokens, strict=True):
            has = self.tokens_of(request_id)
            if has != start:
                raise StatePageError(
                    f"request {request_id!r} runs from token {start}, its state has taken up {has}: "
                    "release it and run it from its first token"
                )
            page = self.page_of(request_id)
            if page in self._leases and self._told.get(page) == has:
                raise StatePageError(
                    f"request {request_id!r}: its state after {has} tokens is leased, running on would write over it: "
                    "end the lease, or release the request and run it from its first token"
                )
        return torch.tensor([self.page_of(request_id) for request_id in request_ids], device=self.tensors[0].device)

    def read(self, layer: int, pages: torch.Tensor, kinds: Sequence[str]) -> torch.Tensor:
        """A copy of the states of `kinds`, one after another, of all shards: `[pages, channels or heads, ...]`."""
        found = list[torch.Tensor]()
        for kind in kinds:
            seen = 0
            for views, layout in zip(self._views, self.layouts, strict=True):
                part = layout.part(kind)
                if part.first + part.count > seen:  # with more shards than groups, several hold the same one
                    found.append(views[kind][pages, layer])
                    seen = part.first + part.count
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def write(self, layer: int, pages: torch.Tensor, kinds: Sequence[str], states: torch.Tensor) -> None:
        """Put what `read` gives, changed, back in its place, on every shard that holds it."""
        before = 0
        for kind in kinds:
            for views, layout in zip(self._views, self.layouts, strict=True):
                part = layout.part(kind)
                first = before + part.first
                views[kind][pages, layer] = states[:, first : first + part.count].to(part.dtype)
            before += max(part.first + part.count for part in (layout.part(kind) for layout in self.layouts))

    def advance(self, pages: torch.Tensor, tokens: Sequence[int]) -> None:
        """Every layer of `pages` has been written: their states have taken up `tokens`."""
        self._tokens[pages.cpu().numpy()] = tokens

    def view(self, shard: int, kind: str) -> torch.Tensor:
        """The states of one kind on one shard, `[pages + 1, layers, channels or heads, ...]`: the memory itself."""
        return self._views[shard][kind]

    def check(self, request_ids: Sequence[str] | None = None) -> None:
        """Every page is free, held by one request, or written for or leased from one that is gone; page 0 is empty.

        Args:
            request_ids: where given, just these requests hold a page.

        Raises:
            InvariantError: (a RuntimeError) naming the first discrepancy.
        """
        held = sorted(self._page_of.values())
        orphans = (self._importing | self._leases.keys()).difference(held)
        every = sorted([*self._free, *held, *orphans])
        if every != list(range(1, self.num_pages + 1)):
            raise InvariantError(
                f"state pages free {sorted(self._free)}, held {held}, written or leased {sorted(orphans)}"
            )
        if any(tensor[0].any() for tensor in self.tensors):
            raise InvariantError("state page 0, which is nobody's, was written")
        if request_ids is not None and set(request_ids) != set(self._page_of):
            wrong = set(request_ids).symmetric_difference(self._page_of)
            raise InvariantError(f"state pages and rows are not of the same requests: {sorted(wrong)}")

    def _reset(self, page: int) -> None:
        for tensor in self.tensors:
            tensor[page] = 0
        self._tokens[page] = 0
        self._told.pop(page, None)

    def _free_unused(self, page: int) -> None:
        """The page of a request that is gone is free, unless a transfer writes it or a lease holds it."""
        if page not in self._importing and page not in self._leases:
            heapq.heappush(self._free, page)


def _allocate(page_bytes: int, num_pages: int, device: torch.device) -> torch.Tensor:
    """uint8 `[num_pages, page_bytes]`, in the kind of memory that transfers are fast from."""
    layout = PageLayout("uint8", 1, 1, 1, 0, 1, 1, page_bytes, "head,layer,side,token,dim")
    return allocate_blocks(layout, num_pages, device).view(num_pages, page_bytes)


def _view(tensor: torch.Tensor, layout: StateLayout, part: StatePart) -> torch.Tensor:
    size = part.dtype.itemsize
    inner = [math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
    strides = (layout.page_bytes // size, layout.layer_bytes // size, part.stride // size, *inner)
    shape = (tensor.shape[0], layout.layers, part.count, *part.shape)
    return tensor.view(part.dtype).as_strided(shape, strides, part.offset // size)
