"""`KeptStates`: the tokens after which a request's state is kept, and the resumption of requests from kept states.

A copy of a state is worth its memory if another request can resume from it. Copies are kept

- at the end of a prompt's last full page, for the same prompt again,
- at the end of the prefix that a prompt shares with earlier ones, for the next prompt with that prefix,
- after the last full page that a request has reached, for the next turn of its conversation,
- and every `every` pages, if that is configured.

Prompts run in chunks that end at these tokens, because a state exists only right after its last token.
"""

from __future__ import annotations

from kvcache.errors import InvariantError
from kvcache.pool.index import Digests
from kvcache.replica.context import Context
from kvcache.replica.replica import Replica
from kvcache.replica.resume import Reservation, StatePlan
from kvcache.replica.rows import Ints, Rows, rows_at
from kvcache.states.state_pages import StatePages


class KeptStates:
    """The rule for one replica, with copies in `pages`. `every`: pages of tokens between two copies, 0 for none."""

    def __init__(self, pages: StatePages, replica: Replica, every: int) -> None:
        self._pages, self._replica = pages, replica
        self._spacing = every * replica.page_size
        self._ends: dict[str, tuple[int, ...]] = {}  # by request: tokens after which chunks of its prompt end

    def planned(self, request_id: str, context: Context, plan: Reservation, reached: int) -> Reservation:
        """The reservation, its chunk cut where a state is to be kept. `reached`: columns whose pages were found."""
        start, active, of_prompt = plan.start, plan.active, self._ends.get(request_id, ())
        # Chunks of one token had no lookup: a first chunk of one token, or a fork that decodes.
        if not of_prompt and (plan.cached or active - start > 1):
            last, size = context.current_length - 1, self._replica.page_size
            of_prompt = (reached * size, last - last % size)
        ends = [*of_prompt, start - start % self._spacing + self._spacing if self._spacing else 0]
        digest = self.digest_at(context, plan.cached) if plan.cached else None
        active = min((end for end in ends if start < end < active), default=active)
        return plan._replace(active=active, state=StatePlan(digest, of_prompt))

    def reserved(self, request_id: str, plan: StatePlan, start: int) -> None:
        """The request runs from `start`: the state that was found, if any, is copied into its page."""
        if plan.digest is not None:
            self._pages.resume(request_id, plan.digest, start)
        if plan.ends:
            self._ends[request_id] = plan.ends

    def computed(self, stepped: Rows, computed: Ints) -> None:
        """After a step: keep the states of the rows whose `computed` tokens now end a page."""
        size, rows = self._replica.page_size, self._replica.rows
        at = ((computed % size == 0) & (computed > 0)).nonzero()[0]
        if not at.size:
            return
        ended, tokens = rows_at(stepped, at), computed[at]
        pages = rows.table[0, ended, tokens // size - 1]
        if len(there := pages.nonzero()[0]) < len(pages):  # null page: the window moved on, and nothing was computed
            ended, tokens, pages = ended[there], tokens[there], pages[there]
        of_rows: list[int] = ended.tolist()
        counts: list[int] = tokens.tolist()
        names = [rows.request_ids[row] or "" for row in of_rows]
        stay = [self._stays(name, count) for name, count in zip(names, counts, strict=True)]
        digests = self._replica.pool.index.digests_of(pages)
        if not any(stay) and self._pages.keep_passing(names, digests, tokens):
            return
        for place, (name, count) in enumerate(zip(names, counts, strict=True)):
            self._pages.keep(name, digests[place : place + 1], count, passing=not stay[place])

    def _stays(self, request_id: str, tokens: int) -> bool:
        """Whether the copy of a state after so many tokens stays once the request has gone further."""
        return tokens in self._ends.get(request_id, ()) or (self._spacing > 0 and tokens % self._spacing == 0)

    def digest_at(self, context: Context, tokens: int) -> Digests:
        """The digest of a request's first `tokens` tokens, which are full pages: `[1, words]`."""
        last = tokens // self._replica.page_size
        hasher = self._replica.hasher(self._replica.rows.row_of[context.request_id], context)
        return hasher.digests(context.tokens, last - 1, last)

    def leave(self, request_id: str) -> None:
        """Forget a released request."""
        self._ends.pop(request_id, None)

    def mend(self) -> None:
        """Forget requests that no mended row has."""
        for request_id in self._ends.keys() - self._replica.rows.row_of.keys():
            del self._ends[request_id]

    def check(self) -> None:
        """Raise `InvariantError` if there are ends for a request that is not claimed."""
        if odd := self._ends.keys() - self._replica.rows.row_of.keys():
            raise InvariantError(f"the ends of chunks are recorded for requests that are not claimed: {sorted(odd)}")
