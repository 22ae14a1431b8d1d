"""`DraftedPages`: a second state page for each request that runs drafted tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvariantError, StatePageError


class DraftedPages:
    """The second state pages of requests that run drafted tokens. Some of these tokens may be removed again.

    A state cannot be rolled back. So a run of drafted tokens reads the request's own page, and writes the new state to
    a second page. `StatePages.settle` then decides with which of the two pages the request continues. A speculating
    engine does this in each step:

    1. Reserve pages for one token and for each possible guess: `maybe_reserve(context, 1 + guesses)`.
    2. If all known tokens are active and `HFRunner.draft` returns True, append the guesses (`update`), and set
       `start_idx` back to its former value. Otherwise the request runs without guesses.
    3. `fetch`, then `HFRunner.verify`, which returns the model's own token for the position of each guess, and for the
       position after the last guess.
    4. Remove the wrong guesses (`set_token_indices(active_idx=..., end_idx=...)`), and `update` with the token after
       the right guesses.
    5. `step`. If a guess was wrong, `step` sets `start_idx` back to before all tokens that ran. The tokens that stay
       run again in the next step.

    Guesses up to the end of the request's last page need no additional page of the pool, and leave the cached copies of
    states unchanged. If each step has a wrong guess, more and more tokens have to run again. An occasional step without
    guesses brings the state up to date.

    `tokens` has the number of tokens that the state in each state page includes.
    """

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self.page_of: dict[str, int] = {}
        self._tokens = tokens

    def goes_on_from(self, request_id: str, before: int, start: int) -> int:
        """Returns the position from which a request with a second page runs next, if its first `start` tokens stay.

        The request has two states: one after `before` tokens, and one after all drafted tokens. If all drafted tokens
        stay, or if they did not run, the request continues at `start`. If some drafted tokens are removed, the request
        continues at `before`, and the drafted tokens that stay run again. Raises `StatePageError` if `start` is not
        between the two states.
        """
        after = int(self._tokens[self.page_of[request_id]])
        if not after:  # True if the drafted tokens did not run
            return start
        if not before <= start <= after:
            raise StatePageError(
                f"request {request_id!r}: {start} tokens are computed, but its state pages hold the states after "
                f"{before} and {after}"
            )
        return start if start == after else before

    def written(self, request_ids: Sequence[str], pages: torch.Tensor) -> torch.Tensor:
        """Returns the page to which the model writes the next state of each request, int64 `[requests]`.

        `pages` are the current state pages of the requests. A request without drafted tokens writes to its current
        page.
        """
        if not self.page_of:
            return pages
        own: list[int] = pages.cpu().numpy().tolist()
        found = [self.page_of.get(request_id, page) for request_id, page in zip(request_ids, own, strict=True)]
        return torch.tensor(found, device=pages.device)

    def forget_run(self, request_id: str) -> None:
        """Drop the state in the request's second page, because the request resumes from another state."""
        if (page := self.page_of.get(request_id)) is not None:
            self._tokens[page] = 0

    def check_booked(self, request_id: str) -> None:
        """Raise `StatePageError` if the request's drafted tokens ran and `step` has not settled which of them stay."""
        if (page := self.page_of.get(request_id)) is not None and self._tokens[page]:
            raise StatePageError(f"request {request_id!r}: its drafted tokens ran, but step was not called for them")

    def check(self, request_ids: Iterable[str]) -> None:
        """Raise `InvariantError` if a request has a second page but no first page.

        `request_ids` are the requests that have a first page.
        """
        if odd := self.page_of.keys() - set(request_ids):
            raise InvariantError(f"requests {sorted(odd)} have a second state page, but no first state page")
