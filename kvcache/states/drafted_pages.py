"""`DraftedPages`: the second state pages of requests that run drafted tokens, which may be taken away again.

A state cannot go back. So such a run reads it from the request's own page, and writes the new one to a second page;
`StatePages.settle` says which of the two the request goes on with. An engine that speculates does, for each step,

1. reserve as ever, for as many further steps as there may be guesses: `maybe_reserve(context, 1 + guesses)`;
2. where all known tokens are active, and `HFRunner.draft` says True: put the guesses behind them (`update`), and set
   `start_idx` back to what it was. Elsewhere the request runs without;
3. `fetch`, and `HFRunner.verify`, which gives the model's own token before and after each guess;
4. take the wrong guesses away (`set_token_indices(active_idx=..., end_idx=...)`), and `update` with the token after
   the right ones;
5. `step`. Where guesses were wrong, `start_idx` is then before all that ran, and what stays runs again with the next.

Guesses that end with the page cost no page, and leave the copies of states as they were. Where each step has a wrong
guess, more and more runs again: now and then a step without guesses brings the state up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvariantError, StatePageError


class DraftedPages:
    """The page that a request's next run writes; `tokens`: the number of tokens in each page's state."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.page_of: dict[str, int] = {}
        self._tokens = tokens

    def goes_on_from(self, request_id: str, before: int, start: int) -> int:
        """From which token a request with a second page runs next if `start` tokens stay: `start`, or `before`.

        Its states are that after `before` tokens, and that after all drafted ones: where some are taken away, those
        that stay run again. Raises `StatePageError` for a `start` before all of these tokens, or after.
        """
        after = int(self._tokens[self.page_of[request_id]])
        if not after:  # it did not run
            return start
        if not before <= start <= after:
            raise StatePageError(
                f"request {request_id!r}: {start} tokens are computed, its states are those after {before} and {after}"
            )
        return start if start == after else before

    def written(self, request_ids: Sequence[str], pages: torch.Tensor) -> torch.Tensor:
        """Where the next states of requests with these `pages` go, int64 `[requests]`."""
        if not self.page_of:
            return pages
        own: list[int] = pages.cpu().numpy().tolist()
        found = [self.page_of.get(request_id, page) for request_id, page in zip(request_ids, own, strict=True)]
        return torch.tensor(found, device=pages.device)

    def forget_run(self, request_id: str) -> None:
        """The request goes on from another state: what is in its second page is of no use."""
        if (page := self.page_of.get(request_id)) is not None:
            self._tokens[page] = 0

    def check_booked(self, request_id: str) -> None:
        """Raise `StatePageError` if drafted tokens ran, and no `step` has said which stay."""
        if (page := self.page_of.get(request_id)) is not None and self._tokens[page]:
            raise StatePageError(f"request {request_id!r}: drafted tokens ran, and no step has booked them")

    def check(self, request_ids: Iterable[str]) -> None:
        """Raise `InvariantError` unless all with a second page are of these requests, which have a first one."""
        if odd := self.page_of.keys() - set(request_ids):
            raise InvariantError(f"{sorted(odd)} have a second state page, and no first one")
