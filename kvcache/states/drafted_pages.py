"""`DraftedPages`: the second state pages of requests that run drafted tokens, which may be taken away again.

A state cannot go back. So a run of drafted tokens reads the request's own page and writes the new state to a second
one. `StatePages.settle` then decides with which of the two pages the request continues. A speculating engine does in
each step:

1. Reserve as usual, for one step and one more for each possible guess: `maybe_reserve(context, 1 + guesses)`.
2. If all known tokens are active and `HFRunner.draft` returns True, append the guesses (`update`), and set `start_idx`
   back to its former value. Otherwise the request runs without guesses.
3. `fetch`, then `HFRunner.verify`, which returns the model's own token before and after each guess.
4. Remove the wrong guesses (`set_token_indices(active_idx=..., end_idx=...)`), and `update` with the token after the
   right ones.
5. `step`. If guesses were wrong, `start_idx` is then before all tokens that ran; those that stay run again next time.

Guesses that end with the page cost no page, and leave the copies of states unchanged. If each step has a wrong guess,
more and more tokens run again; an occasional step without guesses brings the state up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvariantError, StatePageError


class DraftedPages:
    """The page that each request's next run writes. `tokens`: by page, the number of tokens in its state."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.page_of: dict[str, int] = {}
        self._tokens = tokens

    def goes_on_from(self, request_id: str, before: int, start: int) -> int:
        """The token at which a request with a second page runs next if `start` tokens stay: `start`, or `before`.

        It has two states: after `before` tokens, and after all drafted ones. If some drafted tokens are removed, those
        that stay run again. Raises `StatePageError` if `start` is not between the two.
        """
        after = int(self._tokens[self.page_of[request_id]])
        if not after:  # the drafted tokens did not run
            return start
        if not before <= start <= after:
            raise StatePageError(
                f"request {request_id!r}: {start} tokens are computed, but its state pages hold the states after "
                f"{before} and {after}"
            )
        return start if start == after else before

    def written(self, request_ids: Sequence[str], pages: torch.Tensor) -> torch.Tensor:
        """The pages to which the next states of requests with these `pages` go, int64 `[requests]`."""
        if not self.page_of:
            return pages
        own: list[int] = pages.cpu().numpy().tolist()
        found = [self.page_of.get(request_id, page) for request_id, page in zip(request_ids, own, strict=True)]
        return torch.tensor(found, device=pages.device)

    def forget_run(self, request_id: str) -> None:
        """The request resumes from another state, so the state in its second page is dropped."""
        if (page := self.page_of.get(request_id)) is not None:
            self._tokens[page] = 0

    def check_booked(self, request_id: str) -> None:
        """Raise `StatePageError` if drafted tokens ran and no `step` has said which of them stay."""
        if (page := self.page_of.get(request_id)) is not None and self._tokens[page]:
            raise StatePageError(f"request {request_id!r}: its drafted tokens ran, but step was not called for them")

    def check(self, request_ids: Iterable[str]) -> None:
        """Raise `InvariantError` unless all requests with a second page are among these, which have a first one."""
        if odd := self.page_of.keys() - set(request_ids):
            raise InvariantError(f"{sorted(odd)} have a second state page but no first one")
