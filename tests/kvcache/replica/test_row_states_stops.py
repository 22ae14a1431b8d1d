"""The tokens at which the chunks of a prompt end, and from which later requests resume, compared with a plain model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache import TextContext
from tests.kvcache.served import SIZE
from tests.kvcache.states.served_states import ServedStates

Tokens = tuple[int, ...]


class Watched(ServedStates):
    """A manager with states that lists the ends of the chunks that run."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.ends: list[int] = []

    def run(self, *contexts: TextContext) -> None:
        self.ends += [context.active_idx for context in contexts]
        super().run(*contexts)


class PlainStates:
    """The prefixes with a cached state, and the prefixes with cached pages, in a memory that is large enough for all.

    A copy of a state stays cached at the end of a prefix that was cached, of the prompt's last full page, and of every
    `every` pages. Other copies are replaced by the next copy of their request.
    """

    def __init__(self, every: int) -> None:
        self.spacing = every * SIZE or 1 << 30
        self.states, self.pages = set[Tokens](), set[Tokens]()

    def serve(self, prompt: Tokens, chunk: int, new: int) -> tuple[int, list[int]]:
        """Returns the number of tokens that a request finds cached, and the ends of its chunks."""
        last = (len(prompt) - 1) // SIZE * SIZE
        ends = range(SIZE, last + 1, SIZE)
        at = found = max((end for end in ends if prompt[:end] in self.states), default=0)
        reached = max((end for end in ends if prompt[:end] in self.pages), default=0)
        tokens, chunks, passing = prompt, list[int](), None
        while len(tokens) < len(prompt) + new:
            # The first chunk was set before the request knew what is cached.
            begin = at if chunks or at >= chunk else 0
            active = min(len(tokens), begin + chunk)
            every = at - at % self.spacing + self.spacing
            active = min((stop for stop in (reached, last, every) if at < stop < active), default=active)
            self.pages.update(tokens[:end] for end in range(SIZE, active + 1, SIZE))
            at = active
            chunks.append(at)
            if at % SIZE == 0:
                self.states.discard(passing or ())
                passing = None
                if tokens[:at] not in self.states and at % self.spacing and at not in (reached, last):
                    passing = tokens[:at]
                self.states.add(tokens[:at])
            if at == len(tokens):
                tokens = (*tokens, 1)
        return found, chunks


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_requests_resume_where_a_plain_model_says(every: int, seed: int) -> None:
    no_tier = {"enable_kvcache_swapping_to_host": False, "host_kvcache_swap_space_gb": None, "tier_state_share": 0.5}
    it = Watched(1500, 1, 1, every=every, checks=False, params=no_tier)
    plain, random = PlainStates(every), np.random.default_rng(seed)
    prompts = [(0,)]
    for _ in range(30):
        before = prompts[int(random.integers(len(prompts)))][:40]
        prompt = (
            *before[: int(random.integers(1, len(before) + 1))],
            *random.integers(2, 9, int(random.integers(20))).tolist(),
        )
        prompts.append(prompt)
        # For a chunk of one token no prefix is looked up, so chunks here have two tokens at least.
        chunk, new = int(random.choice([2, 3, SIZE, 7, 256])), int(random.integers(1, 9))
        it.ends.clear()
        found = it.serve(prompt, chunk=chunk, new=new)
        assert (found, it.ends) == plain.serve(prompt, chunk, new)
    it.manager.check()
    it.manager.close()
