"""State pages: they keep the recurrent states of the requests of a hybrid model.

`kvcache.states.state_memory` describes a page. The state of a request includes all tokens of the request so far. Each
new token overwrites the state. Therefore other requests can resume from a state only if a copy of the state was kept. A
copy is a page of the same pool. A copy has no holder, and is found by the digest of the last token page that its state
includes. The least recently used copies are evicted first, to make room for other copies and for new requests.
`kvcache.replica.row_states` decides which states are copied.

A state cannot be rolled back, and some drafted tokens may be removed again. So a run of drafted tokens reads the
request's own page, and writes the new state to a second page. `StatePages.settle` then decides with which of the two
pages the request continues. A speculating engine does this in each step:

1. Reserve pages for one token and for each possible guess: `maybe_reserve(context, 1 + guesses)`.
2. If all known tokens are active and `HFRunner.draft` returns True, append the guesses (`update`), and set `start_idx`
   back to its former value. Otherwise the request runs without guesses.
3. `fetch`, then `HFRunner.verify`, which returns the model's own token for the position of each guess, and for the
   position after the last guess.
4. Remove the wrong guesses (`set_token_indices(active_idx=..., end_idx=...)`), and `update` with the token after the
   right guesses.
5. `step`. If a guess was wrong, `step` sets `start_idx` back to before all tokens that ran. The tokens that stay run
   again in the next step.

Guesses up to the end of the request's last page need no additional page of the pool, and leave the cached copies of
states unchanged. If each step has a wrong guess, more and more tokens have to run again. An occasional step without
guesses brings the state up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvariantError, NoFreeStatePageError, StatePageError, UnknownRequestError
from kvcache.layout import KindPages, from_numpy
from kvcache.params import StateShape
from kvcache.pool.index import NO_PAGE, Digests, Pages
from kvcache.pool.pages import HeldPages
from kvcache.pool.pages_below import Asked, PagesBelow, last_end
from kvcache.states.state_memory import StateRoom, StateViews, state_rows
from kvcache.uncopied import Uncopied
from kvcache.under_way import Call, UnderWay
from kvcache.unmoved import Unmoved

Counts = NDArray[np.int64]
"""A number for each page of a pool."""
NO_STATE: Digests = np.zeros((0, 1), np.uint64)  # the digest if a request does not resume from a cached state
_DRAFT = Call("draft")
_LOOKED_AT = 128  # how many pages of a prompt are searched at a time for the newest state


class _PageOf(dict[str, int]):
    """The state page of each request."""

    def __missing__(self, request_id: str) -> NoReturn:
        raise UnknownRequestError(f"request {request_id!r} holds no state page")


class StatePages(Uncopied):
    """The state pages of one replica: their memory, each request's page, and how many tokens each state includes.

    A `PagePool` tracks the holders and writers of state pages. The request and its leases hold its page, and a transfer
    may write to the page. This class adds the rules of states. A state cannot be rolled back, and a leased state does
    not advance past the tokens that its reader knows. The manager checks which calls a request may make (`RowStates`).

    `room` has the memory. Separate memory has one page for each request that can hold a state at a time. Its remaining
    pages are for cached copies. If states lie in slabs of token pages, a slab is taken for each state, and given back
    when the state has no holder and is not cached.

    Attributes:
        tensors: separate memory for states, `[shard][kind]`; empty lists if they lie in the token pages.
        hits: how many requests have resumed from a copy.
    """

    def __init__(self, shape: StateShape, room: StateRoom, mark: UnderWay) -> None:
        self._mark = mark  # the manager's mark
        self.layouts, self.blocks, self.tensors, self._kinds, self.pool = room
        self.shape, self.num_pages = shape, room.pool.num_pages
        self._unmoved = Unmoved({f"states {at}": one for at, one in enumerate(chain.from_iterable(self.blocks))})
        self._rows = state_rows(self.layouts, self.blocks)
        self._views = StateViews(self.layouts, self.blocks, shape.matrix)
        self.read, self.write = self._views.read, self._views.write
        self._tokens = np.zeros(self.num_pages + 1, np.int64)  # how many tokens the state in each page includes
        # For each page, how many tokens its state included when a block table last named the page; 0 if no table has
        # named it.
        self._told = np.zeros(self.num_pages + 1, np.int64)
        self.below = PagesBelow()
        self._page_of = _PageOf()
        self.drafted: dict[str, int] = {}  # the second page of each request that runs drafted tokens
        # For each page that a transfer writes, the cached state from which the page's request had resumed.
        self._before: dict[int, int] = {}
        # For each page that a transfer writes: the page's former content, in host memory. The content is saved only if
        # the state from which the request had resumed is not cached.
        self._saved: dict[int, list[torch.Tensor]] = {}
        # For each request, the digest of its last full page, whose state is kept as a copy until the next page is full.
        self._passing: dict[str, bytes] = {}
        self.hits = 0

    @property
    def num_held(self) -> int:
        """The number of pages that a request or a lease holds, or that a transfer writes."""
        return self.pool.num_held

    @property
    def num_kept(self) -> int:
        """The number of cached copies of states from which a request can resume."""
        return int(np.count_nonzero(self.pool.index.published))

    # ---- holders

    def allocate(self, request_id: str) -> int:
        """Give a request a zeroed page, which is the state before its first token. Raises `NoFreeStatePageError`."""
        if not self.pool.make_room(moving=True):
            raise NoFreeStatePageError(f"request {request_id!r}: all {self.num_pages} state pages are held")
        page = self._page_of[request_id] = self.pool.allocate_one()
        self._reset(page)
        return page

    def release(self, request_id: str) -> None:
        """Release the request's page. The page becomes free when no lease holds it and no transfer writes it."""
        page = self.page_of(request_id)
        del self._page_of[request_id]
        # the copy of the state after the request's last full page stays cached
        if (stays := self._passing.pop(request_id, None)) is not None:
            digest = self._digests(stays)
            self._keep_below(int(self.pool.index.find(digest)[0]), digest)
        self._let_go(page)
        self._drop_drafted(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether the request has a page."""
        return request_id in self._page_of

    def page_of(self, request_id: str) -> int:
        """Returns the request's page. Raises `UnknownRequestError` if the request holds none."""
        return self._page_of[request_id]

    def _pages_of(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        """`page_of` for each request."""
        return np.fromiter(map(self._page_of.__getitem__, request_ids), np.int64, len(request_ids))

    def tokens_of(self, request_id: str) -> int:
        """Returns the number of tokens in the request's state.

        Raises `StatePageError` while a transfer writes the state.
        """
        page = self.page_of(request_id)
        if self.pool.writers[page]:
            raise StatePageError(f"request {request_id!r}: state page {page} is being written by a transfer")
        return int(self._tokens[page])

    def fork(self, parent: str, child: str) -> None:
        """Copy the parent's state into the child's page. Both must have a page."""
        self._copy(self.page_of(parent), self.page_of(child))

    # ---- lookups, on the device and below

    def kept_after(self, digests: Digests, *, but: int = NO_PAGE) -> NDArray[np.bool_]:
        """Returns whether the device or the host has the state after the page with each digest: bool `[digests]`.

        A copy of a state in the device page `but` does not count.
        """
        pages = self.pool.index.find(digests)
        return ((pages != NO_PAGE) & (pages != but)) | (self.below.slots(digests) != NO_PAGE)

    @property
    def generation(self) -> int:
        """A number that changes whenever the device or a lower tier gets or loses a copy of a state."""
        return self.pool.index.generation + self.below.generation

    def there(self, digests: Digests) -> NDArray[np.bool_]:
        """Do the same as `kept_after`, and also count states that files or objects are known to have."""
        found = self.kept_after(digests)
        return found | self.below.has(digests[None], ~found[None])[0]

    def ask(self, digests: Digests) -> bool:
        """Ask the lower tiers which states they have, unless the answer is already known.

        Later states are asked for first. Only states after the last state on the device or the host are asked for,
        because a request resumes from the latest state. Returns whether an answer is on its way.
        """
        before = self.below.answers
        for _, some, there in self._below_host(digests):
            if self._ask_later(some, there):
                return True
            if there.any():  # a lower tier is known to have a later state, so earlier states do not matter
                break
        return self.below.answers != before  # an answer came during this call, so the caller should ask again

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:
        """Load the latest state that a tier below the host has into host memory.

        Does nothing if the device or the host has a later state. If the state cannot be read, the state before it is
        tried, and so on. Returns whether a state is on its way. With `wait`, waits a while for the state. Never waits
        for an answer about which states exist.
        """
        before = self.below.answers
        for first, some, there in self._below_host(digests):
            if self._ask_later(some, there) and not wait:
                return True
            for at in np.flatnonzero(there[0])[::-1].tolist():
                one = np.zeros_like(there)
                one[0, at] = True
                if self.below.to_host(some, one, first + at + 1, wait=wait):
                    return True
                if self.below.slots(some[0, at : at + 1]).all():
                    return False
        return self.below.answers != before  # an answer came during this call, so the caller should ask again

    def _below_host(self, digests: Digests) -> Iterator[tuple[int, Digests, Asked]]:
        """Yield the digests of the pages after the last state on the device or the host, in chunks of digests.

        The last chunk comes first. A chunk is a tuple: the number of pages between the last state and the chunk; the
        chunk's digests `[1, digests, words]`; and a mask of the states that lower tiers are known to have.
        """
        digests = digests[last_end(self.kept_after(digests)) :]
        for end in range(len(digests), 0, -_LOOKED_AT):
            first = max(0, end - _LOOKED_AT)
            some = digests[None, first:end]
            yield first, some, self.below.has(some, np.ones(some.shape[:2], np.bool_))

    def _ask_later(self, digests: Digests, there: Asked) -> bool:
        """Ask the lower tiers for the states of `digests` that come after the last state that `there` marks.

        Returns whether an answer is on its way.
        """
        later = np.ones_like(there)
        later[0, : last_end(there[0])] = False
        return self.below.ask(digests, later)

    # ---- copies that other requests resume from

    def keep(self, request_id: str, digest: Digests, tokens: int, *, passing: bool) -> None:
        """Keep a copy of the request's state, if it includes exactly `tokens` tokens and a page is free for the copy.

        `digest`, `[1, words]`, is the digest of the last page of these tokens. With `passing`, the request's next copy
        replaces this copy.
        """
        page, pool = self.page_of(request_id), self.pool
        if self._tokens[page] != tokens:
            return
        if (before := self._passing.pop(request_id, None)) is not None:
            self._forget(self._digests(before))
        if not (copy := self._found(digest)):
            if not pool.make_room(moving=False):
                return
            copy = pool.allocate_one()
            self._copy(page, copy)
            copy = self._publish(copy, digest)
            self._let_go(copy)
            if passing:
                self._passing[request_id] = digest.tobytes()
        if not passing:
            self._keep_below(copy, digest)

    def keep_passing(
        self, request_ids: Sequence[str], digests: Digests, tokens: NDArray[np.int64], passing: Sequence[bool]
    ) -> Sequence[int]:
        """Do `keep` at once for all requests whose new copies can overwrite their former passing copies.

        Returns the indices of the other requests. The caller must call `keep` for each of them. A request is among them
        if it is not `passing`, if it has no passing copy, if its passing copy has a holder, or if its state includes a
        different number of tokens. If two requests have the same digest, all requests are among them.
        """
        pages, index, names = self._pages_of(request_ids), self.pool.index, as_bytes(digests)
        former, none = self._passing, bytes(8 * index.digest_words)  # no page has the digest `none`
        before = [former.get(one, none) if passes else none for one, passes in zip(request_ids, passing, strict=True)]
        copies = index.find(self._digests(b"".join(before)))
        fits = (copies != NO_PAGE) & (self.pool.holders[copies] == 0) & (self._tokens[pages] == tokens)
        at = fits.nonzero()[0]
        if not at.size or len({*copies[at].tolist()}) < len(at) or len({*names}) < len(names):
            return range(len(names))
        if len(at) < len(fits):
            some: list[int] = at.tolist()
            pages, copies, digests = pages[at], copies[at], digests[at]
            request_ids, names = [request_ids[one] for one in some], [names[one] for one in some]

        def write(copies: Pages) -> None:
            self._spare(copies)
            self._copy_each(pages, copies)

        kept = self.pool.rewrite(copies, digests, write)
        former.update(zip(request_ids, names, strict=True))
        if kept is not copies:
            there: list[int] = (kept != copies).nonzero()[0].tolist()  # these states were cached already
            for one in there:
                del former[request_ids[one]]
                self._found(digests[one : one + 1])
        others: list[int] = (~fits).nonzero()[0].tolist()
        return others

    def bring_copy(self, digest: Digests, tokens: int) -> bool:
        """Begin to copy the state that the host has under this digest to the device, where it stays cached.

        The state includes `tokens` tokens. Returns whether the copy is on its way. Returns False if the device already
        has the state, if the host does not have it, or if no page is free.
        """
        absent, slots = self.pool.index.find(digest)[0] == NO_PAGE, self.below.slots(digest)
        if not absent or not slots.all():
            return False
        # Making room may evict a state from the device, and this state is then stored in the host. The evicted state
        # must not get the slots of the state that is copied here.
        self.below.hold(slots)
        if not self.pool.make_room(moving=False):
            self.below.drop(slots)
            return False
        page = self.pool.allocate_one()
        self._tokens[page] = tokens
        self.below.bring(one_page(page), slots, digest)
        self._let_go(page)
        return True

    def resume(self, request_id: str, digest: Digests, tokens: int) -> None:
        """Copy the state cached under `digest`, after `tokens` tokens, into the page of a request that resumes from it.

        Raises `InvariantError` if no such state is cached.
        """
        page, copy = self.page_of(request_id), self._found(digest)
        if copy:
            self._copy(copy, page)
        elif not (slots := self.below.slots(digest)).all():
            raise InvariantError(f"request {request_id!r}: the cached state from which it resumes is gone")
        else:  # Later reads of the page see this state. The copy in flight holds the page until the copy has ended.
            self.below.hold(slots)
            self.below.restore(page, one_page(page), slots)
            self.below.arrive(np.array([page]))
            self._tokens[page] = tokens
        self.below.used(digest)
        if (drafted := self.drafted.get(request_id)) is not None:
            self._tokens[drafted] = 0  # the request resumes from another state than the one in its second page
        self.hits += 1

    def forget_copies(self) -> None:
        """Drop every copy. A copy that a lease or an import holds can no longer be found."""
        self.pool.forget()
        self._passing.clear()

    # ---- drafted tokens

    def draft(self, request_id: str) -> bool:
        """Give the request a second page for its next run, until `settle`. Returns False if no page is free.

        Raises the errors of `tokens_of`.
        """
        self._mark.check("draft")
        self.tokens_of(request_id)
        if request_id in self.drafted:
            return True
        self._mark.call = _DRAFT
        # `fetch` has given the ids of token pages to the model, so these pages must not be moved.
        there = self.pool.make_room(moving=False)
        if there:
            page = self.pool.allocate_one()
            self._tokens[page] = self._told[page] = 0
            self.drafted[request_id] = page
        self._mark.call = None
        return there

    def written(self, request_ids: Sequence[str], pages: torch.Tensor) -> torch.Tensor:
        """Returns the page to which the model writes the next state of each request, int64 `[requests]`.

        `pages` are the current state pages of the requests. A request without drafted tokens writes to its current
        page.
        """
        if not self.drafted:
            return pages
        own: list[int] = pages.cpu().numpy().tolist()
        found = [self.drafted.get(request_id, page) for request_id, page in zip(request_ids, own, strict=True)]
        return torch.tensor(found, device=pages.device)

    def check_booked(self, request_id: str) -> None:
        """Raise `StatePageError` if the request's drafted tokens ran and `step` has not settled which of them stay."""
        if (page := self.drafted.get(request_id)) is not None and self._tokens[page]:
            raise StatePageError(f"request {request_id!r}: its drafted tokens ran, but step was not called for them")

    def goes_on_from(self, request_id: str, start: int) -> int:
        """Returns the position from which a request with a second page runs next, if its first `start` tokens stay.

        The request has two states: one before and one after all drafted tokens. If all drafted tokens stay, or if they
        did not run, the request continues at `start`. If some are removed, it continues before all of them, and those
        that stay run again. Raises `StatePageError` if `start` is not between the two states.
        """
        before, after = self.tokens_of(request_id), int(self._tokens[self.drafted[request_id]])
        if not after:  # True if the drafted tokens did not run
            return start
        if not before <= start <= after:
            raise StatePageError(
                f"request {request_id!r}: {start} tokens are computed, but its state pages hold the states after "
                f"{before} and {after}"
            )
        return start if start == after else before

    def settle(self, request_id: str, start: int) -> None:
        """Keep one of the request's two pages: the second if its state includes `start` tokens, otherwise the first.

        `start` is the position from which the request runs next.
        """
        drafted, page = self.drafted[request_id], self._page_of[request_id]
        if self._tokens[drafted] == start:
            if self.pool.holders[page] > 1:  # a lease also holds this page
                self._copy(drafted, page)
            else:
                self._page_of[request_id], self.drafted[request_id] = drafted, page
        self._drop_drafted(request_id)

    def _drop_drafted(self, request_id: str) -> None:
        if (page := self.drafted.pop(request_id, None)) is not None:
            self._let_go(page)

    # ---- pages that a transfer writes

    def begin_import(self, request_id: str, digest: Digests = NO_STATE) -> int:
        """Hand the request's page to a transfer. The request cannot run until the import ends.

        `digest` is the digest of the cached state from which the request had resumed; empty if there is no such state.
        The cached state is held as long as the transfer may write to the request's page.
        """
        page = self.page_of(request_id)
        self._drop_drafted(request_id)
        self.pool.add_writer(one_page(page))
        if len(digest) and (copy := self._found(digest)):
            self.pool.hold(one_page(copy))
            self._before[page] = copy
        # The state is not cached if it was evicted to make room for the import's own pages, or if it came from a lower
        # tier. In this case, the page's content is saved for `cancel_import`.
        elif len(digest):
            self._saved[page] = [blocks[page].to("cpu", copy=True) for blocks in chain.from_iterable(self.blocks)]
        return page

    def commit_import(self, request_id: str, tokens: int) -> None:
        """Record that the transfer has written the whole page, which is now the state after `tokens` tokens."""
        page = self.page_of(request_id)
        self._end_import(page)
        self._tokens[page] = tokens

    def cancel_import(self, page: int) -> None:
        """End an import whose state is not used. The request's page gets back the content that it had before.

        If the request was released, the page becomes free.
        """
        if copy := self._before.get(page):
            self._copy(copy, page)
        elif saved := self._saved.get(page):
            for blocks, content in zip(chain.from_iterable(self.blocks), saved, strict=True):
                blocks[page] = content
        else:
            self._reset(page)
        self._end_import(page)

    def _end_import(self, page: int) -> None:
        self.pool.drop_writer(one_page(page))
        self._saved.pop(page, None)
        if copy := self._before.pop(page, None):
            self._let_go(copy)

    # ---- pages that other managers read

    def held(self, request_id: str) -> HeldPages:
        """Returns the request's page, for a lease. The lease keeps it even if the request is released."""
        return HeldPages(self.pool, one_page(self.page_of(request_id)))

    def held_copy(self, digest: Digests) -> HeldPages:
        """Returns the state that is cached under this digest, for a lease. It must exist, and counts as just used."""
        return HeldPages(self.pool, one_page(self._found(digest)))

    def tell(self, request_id: str) -> None:
        """Record that a block table has named the request's current state.

        From now on, this state must not be overwritten while the request is leased.
        """
        self._told[self.page_of(request_id)] = self.tokens_of(request_id)

    def is_promised(self, request_id: str) -> bool:
        """Whether a block table has named the request's current state, and a lease forbids overwriting it."""
        page = self.page_of(request_id)
        if not 0 < self._tokens[page] == self._told[page]:
            return False
        loads = sum(page in pages for pages in self.below.coming())  # these hold the page, too, until their end is seen
        return bool(self.pool.holders[page] > 1 + loads)

    # ---- access of a model

    def pages_at(self, request_ids: Sequence[str], tokens: Sequence[int]) -> torch.Tensor:
        """Returns the requests' state pages, int64 `[requests]`. Each state must include exactly `tokens` tokens.

        A state cannot be rolled back, and its content does not show how many tokens it includes. If a step ran twice,
        its tokens would enter the state twice, and nothing would reveal the error. A run overwrites the state, so the
        state must not be leased. Raises `UnknownRequestError`, and `StatePageError` if a state includes a different
        number of tokens, is leased, or is being written by a transfer.
        """
        pages = self._pages_of(request_ids)
        has = self._tokens[pages]
        # A quick test for steps of many requests. A lease may forbid overwriting a state that a block table has named.
        # This is rare, so such states are tested one by one.
        told = (has > 0) & (has == self._told[pages])
        if self.drafted or np.count_nonzero((has != tokens) | (self.pool.writers[pages] > 0) | told):
            for request_id, start in zip(request_ids, tokens, strict=True):
                self.check_booked(request_id)
                if (covered := self.tokens_of(request_id)) != start:
                    raise StatePageError(
                        f"request {request_id!r} would run from token {start}, but its state covers {covered} tokens: "
                        "release it and run it from its first token"
                    )
                if self.is_promised(request_id):
                    raise StatePageError(
                        f"request {request_id!r}: its state after {covered} tokens is leased, and the next step would "
                        "overwrite it: end the lease, or release the request and run it from its first token"
                    )
        return from_numpy(pages).to(self.blocks[0][0].device)

    def advance(self, pages: torch.Tensor, tokens: Sequence[int]) -> None:
        """Record that every layer of `pages` was written, and that the states now include `tokens` tokens."""
        self._tokens[pages.cpu().numpy()] = tokens

    # ---- for transfers, recovery and checks

    def kinds(self, shard: int) -> list[KindPages]:
        """Returns the layout of each kind of state on a shard, including page 0."""
        return self._kinds[shard]

    def rebuild(self, written: Sequence[int], leased: Counts) -> None:
        """Release the states of all requests after an interrupt, and build the pool anew. Cached copies stay cached.

        `written` are the pages to which transfers write, and `leased` is the number of leases on each page.
        """
        for of_requests in (self._page_of, self.drafted, self._passing, self._before, self._saved):
            of_requests.clear()
        self.below.restart()
        self.pool.rebuild(*self._counted(written, leased))

    @property
    def _own(self) -> list[int]:
        """Returns the state pages of the requests."""
        return [*self._page_of.values(), *self.drafted.values()]

    def _counted(self, written: Sequence[int], leased: Counts | int) -> tuple[Counts, Counts]:
        """Returns the number of holders and of writers of each page. Slabs that token pages use are not counted."""
        coming = [int(pages[0]) for pages in self.below.coming()]
        held = [*self._own, *self._before.values(), *coming]
        holders, writers = (
            np.bincount(np.array(pages, np.int64), minlength=self.num_pages + 1) for pages in (held, written)
        )
        return holders + leased, writers

    def check(self, request_ids: Iterable[str], written: Sequence[int] = (), leased: Counts | int = 0) -> None:
        """Recount everything. Raises `InvariantError` at the first discrepancy.

        Exactly `request_ids` must have a page. `written` are the pages to which transfers write, and `leased` is the
        number of leases on each page. Page 0 must be empty.
        """
        self._unmoved.check()
        if wrong := set(request_ids).symmetric_difference(self._page_of):
            raise InvariantError(f"these requests have a state page or a row, but not both: {sorted(wrong)}")
        try:
            self.pool.check(*self._counted(written, leased))
        except InvariantError as error:
            raise InvariantError(f"state pages: {error}") from error
        # If states share memory with token pages, token pages use the memory of state page 0, so it is not checked.
        if any(tensor[0].any() for tensor in chain.from_iterable(self.tensors)):
            raise InvariantError("state page 0, the null page, was written")
        published = self.pool.index.published
        for page in (page for page in self._own if published[page]):
            raise InvariantError(f"state page {page} can be found by other requests, but a request writes to it")
        for page in np.flatnonzero(published & (self._tokens == 0))[:1]:
            raise InvariantError(f"state page {page} can be found by other requests, but covers no tokens")
        if odd := self.drafted.keys() - self._page_of.keys():
            raise InvariantError(f"requests {sorted(odd)} have a second state page, but no first state page")
        if not self._passing.keys() <= self._page_of.keys():
            raise InvariantError(
                "some of these requests have a copy that the next copy replaces, but no state page: "
                f"{sorted(self._passing)}"
            )

    # ---- inside

    def _let_go(self, page: int) -> None:
        self.pool.release(one_page(page))

    def _copy(self, source: int, target: int) -> None:
        self._copy_each(one_page(source), one_page(target))

    def _copy_each(self, sources: Pages | Counts, targets: Pages) -> None:
        pairs: list[tuple[int, int]] = list(zip(sources.tolist(), targets.tolist(), strict=True))
        for rows in self._rows:
            for source, target in pairs:
                rows[target] = rows[source]
        self._tokens[targets] = self._tokens[sources]

    def _publish(self, copy: int, digest: Digests) -> int:
        """Publish a held copy. Returns the page that the index now has under `digest`, held for the caller.

        The index may name a page other than `copy`, if the state arrived from a lower tier while room was made for the
        copy.
        """
        found = self.pool.index.publish(one_page(copy), digest)
        if found[0] != copy:
            self.pool.hold(found)
            self._let_go(copy)
        return int(found[0])

    def _digests(self, joined: bytes) -> Digests:
        """Returns digests that lie one after another in `joined`."""
        return np.frombuffer(joined, np.uint64).reshape(-1, self.pool.index.digest_words)

    def _found(self, digest: Digests) -> int:
        """Returns the state that is cached under this digest, marked as just used; `NO_PAGE` if there is none."""
        copy = int(self.pool.index.find(digest)[0])
        if copy != NO_PAGE:
            self.pool.hold(one_page(copy))
            self.pool.idle.hint(one_page(copy), None)  # the state is used again, so a hint to evict it first was wrong
            self._let_go(copy)
        return copy

    def _forget(self, digest: Digests) -> None:
        """Withdraw the state that is cached under this digest, if any, and free its page."""
        copy = int(self.pool.index.find(digest)[0])
        if copy == NO_PAGE:
            return
        self._spare(one_page(copy))
        self.pool.idle.renew(one_page(copy))
        self.pool.hold(one_page(copy))
        self.pool.index.withdraw_one(copy)
        self.pool.idle.forget(one_page(copy))
        self._let_go(copy)

    def _keep_below(self, copy: int, digest: Digests) -> None:
        """Let the lower tiers store the cached state in page `copy`, too. Does nothing if `copy` is `NO_PAGE`."""
        if copy != NO_PAGE:
            for tell in self.pool.journal.came:
                tell(one_page(copy), digest)

    def _spare(self, copies: Pages) -> None:
        """Finish all pending copies of the states in the pages `copies` to the lower tiers.

        These pages are about to be overwritten.
        """
        for save in self.pool.journal.going:
            save(copies)

    def _reset(self, page: int) -> None:
        for tensor in chain.from_iterable(self.blocks):
            tensor[page] = 0
        self._tokens[page] = self._told[page] = 0


def one_page(page: int) -> Pages:
    """Returns an array with the number `page` as its only item."""
    return np.array([page], np.int32)


def as_bytes(digests: Digests) -> list[bytes]:
    """Returns each digest as bytes."""
    names: list[bytes] = digests.view(f"V{8 * digests.shape[1]}")[:, 0].tolist()
    return names
