"""`KeptStates`: after which tokens a request's recurrent state is kept for others, and who goes on from one.

A state is worth its memory where another request comes by: at the end of a prompt's last full page, for who asks the
same again; where a prompt leaves what others had in common with it, for the next of them; after the last full page that
a request came to, for the next turn of its conversation; and each `every` pages, if that is asked for. A prompt runs
in chunks that end there, as only then its state is that of these tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.pool.index import Digests
from kvcache.replica.context import Context
from kvcache.replica.replica import Replica
from kvcache.replica.rows import Ints, Rows, rows_at
from kvcache.states.state_pages import StatePages


class KeptStates:
    """The rule for one replica, over the copies in `pages`. `every`: pages of tokens between two copies, 0 for none."""

    def __init__(self, pages: StatePages, replica: Replica, every: int) -> None:
        self._pages, self._replica = pages, replica
        self._spacing = every * replica.page_size
        # Of each request the tokens whose pages were found: of a new one from the first on.
        self._shared: dict[str, int] = {}
        self._ends: dict[str, tuple[int, ...]] = {}  # tokens after which chunks of its prompt end

    def ends(self, request_id: str | None, digests: Digests) -> NDArray[np.bool_]:
        """As `PrefixStates.ends`: where there is a copy. Nowhere for a state that others were promised."""
        if request_id is not None:
            self._shared[request_id] = len(digests) * self._replica.page_size
            if self._pages.is_promised(request_id):
                return np.zeros(len(digests), np.bool_)
        return self._pages.kept_after(digests)

    def ends_unclaimed(self, digests: Digests) -> NDArray[np.bool_]:
        """As `PrefixStates.ends_unclaimed`."""
        return self._pages.kept_after(digests, but=self._pages.goes_next)

    @property
    def may_lose_pages(self) -> bool:
        """As `PrefixStates.may_lose_pages`."""
        return self._pages.may_lose_pages

    def there(self, digests: Digests) -> NDArray[np.bool_]:
        """As `PrefixStates.there`."""
        return self._pages.there(digests)

    def ask(self, digests: Digests) -> bool:
        """As `PrefixStates.ask`."""
        return self._pages.ask(digests)

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:
        """As `PrefixStates.bring_newest`."""
        return self._pages.bring_newest(digests, wait=wait)

    @property
    def generation(self) -> int:
        """As `PrefixStates.generation`."""
        return self._pages.generation

    def reserved(self, context: Context, digest: Digests | None) -> None:
        """As `PrefixStates.reserved`: what was found comes into the request's page, and its chunk is cut."""
        request_id, start, active = context.request_id, context.start_idx, context.active_idx
        of_prompt = self._ends.get(request_id, ())
        # Not of one token, for which nothing was looked up: a chunk that comes first, or a fork that decodes.
        if request_id not in self._ends and (digest is not None or active - start > 1):
            last = context.current_length - 1
            of_prompt = (self._shared.get(request_id, 0), last - last % self._replica.page_size)
        ends = [*of_prompt, start - start % self._spacing + self._spacing if self._spacing else 0]
        if later := [end for end in ends if start < end < active]:
            context.set_token_indices(active_idx=min(later))  # first, as a context of the caller's own may refuse
        if digest is not None:
            self._pages.resume(request_id, digest, start)
        if of_prompt:
            self._ends[request_id] = of_prompt

    def computed(self, stepped: Rows, computed: Ints) -> None:
        """Keep the states of those rows of a step that are at the end of a page now: so many tokens are computed."""
        size, rows = self._replica.page_size, self._replica.rows
        at = ((computed % size == 0) & (computed > 0)).nonzero()[0]
        if not at.size:
            return
        ended, tokens = rows_at(stepped, at), computed[at]
        of_rows: list[int] = ended.tolist()
        counts: list[int] = tokens.tolist()
        names = [rows.request_ids[row] or "" for row in of_rows]
        stay = [self._stays(name, count) for name, count in zip(names, counts, strict=True)]
        digests = self._replica.pool.index.digests_of(rows.table[0, ended, tokens // size - 1])
        if not any(stay) and self._pages.keep_passing(names, digests, tokens):
            return
        for place, (name, count) in enumerate(zip(names, counts, strict=True)):
            self._pages.keep(name, digests[place : place + 1], count, passing=not stay[place])

    def _stays(self, request_id: str, tokens: int) -> bool:
        """Whether the copy of a state after so many tokens stays when the request has come further."""
        return tokens in self._ends.get(request_id, ()) or (self._spacing > 0 and tokens % self._spacing == 0)

    def digest_at(self, context: Context, tokens: int) -> Digests:
        """The digest of a request's first `tokens` tokens, full pages: `[1, words]`."""
        last = tokens // self._replica.page_size
        hasher = self._replica.hasher(self._replica.rows.row_of[context.request_id], context)
        return hasher.digests(context.tokens, last - 1, last)

    def leave(self, request_id: str) -> None:
        """The request is released."""
        self._shared.pop(request_id, None)
        self._ends.pop(request_id, None)

    def mend(self) -> None:
        """The rows are mended: of others nothing is known."""
        for of_requests in (self._shared, self._ends):
            for request_id in of_requests.keys() - self._replica.rows.row_of.keys():
                del of_requests[request_id]

    def check(self) -> None:
        """Raise `InvariantError` where something is known of a request that is not claimed."""
        if odd := (self._shared.keys() | self._ends.keys()) - self._replica.rows.row_of.keys():
            raise InvariantError(f"ends of chunks are known of {sorted(odd)}, which are not claimed")
