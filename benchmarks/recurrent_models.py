"""The models of `benchmarks.layer_groups` with recurrent layers, and our manager for them.

As in `benchmarks.layer_groups`, one byte stands for an element of a page, and a state takes the corresponding number of
bytes. No model computes the states; the manager is only told how far each state has got. `split` has a part of the
memory only for states. This part holds three states for each request that may run: the request's own state and two
copies. The number of such requests is chosen so that the other part has pages for `FOR` tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.frame import now
from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.errors import NoFreeStatePageError
from kvcache.params import StateShape

FOR = 8192
MIXED = (200, 1500, 4000, 9000)


class RecurrentModel(NamedTuple):
    """A model's layers and their bytes: `full` layers keep each token, `recurrent` layers one state per request."""

    full: int
    heads: int
    head_dim: int
    recurrent: int
    conv: tuple[int, int]  # how many inputs of each channel the convolution keeps, and its number of channels; bfloat16
    matrix: tuple[int, int, int]  # float32

    @property
    def of_token(self) -> int:
        """Bytes of a token in one full layer."""
        return self.heads * self.head_dim * 2 * 2

    @property
    def of_state(self) -> int:
        """Bytes of a state in one recurrent layer."""
        return int(np.prod(self.conv)) * 2 + int(np.prod(self.matrix)) * 4

    def bytes_of(self, tokens: int) -> int:
        """The bytes that a request of this many tokens must keep."""
        return tokens * self.full * self.of_token + self.recurrent * self.of_state


RECURRENT = {
    "Qwen3-Next 80B": RecurrentModel(12, 2, 256, 36, (3, 8192), (32, 128, 128)),
    "Nemotron-H 47B": RecurrentModel(5, 8, 128, 45, (3, 256 * 64 + 2 * 8 * 256), (256, 64, 256)),
}


def manager_of(
    name: str, budget: int, *, page: int, longest: int, rows: int, split: bool = False
) -> PagedKVCacheManager:
    """A manager with `budget` bytes. It counts memory in units: the bytes of a token in one full layer."""
    model = RECURRENT[name]
    unit = model.of_token // 2  # a token of a layer takes one byte for the key and one for the value
    size = model.recurrent * model.of_state // unit
    shape = StateShape(1, size, 1, 1, 1, 2, torch.uint8, torch.uint8, "short_conv")
    if split:
        states = 2 * model.recurrent * model.of_state
        rows = min(rows, budget // (model.bytes_of(FOR + 1) + states))
    params = KVCacheParams(
        dtype=torch.uint8,
        n_kv_heads=1,
        head_dim=1,
        page_size=page,
        enable_prefix_caching=True,
        states=shape,
        share_state_memory=not split,
    )
    return PagedKVCacheManager(params, rows, longest, model.full, ["cpu"], available_cache_memory=budget // unit)


def claimed(manager: PagedKVCacheManager, context: TextContext) -> bool:
    """Claim the request. Returns False if the manager has no state left for it."""
    if manager.states and not manager.admission(context).fits:
        return False
    try:
        manager.external_claim(context.request_id)
    except NoFreeStatePageError:
        return False
    return True


def run(manager: PagedKVCacheManager, names: Sequence[str], starts: Sequence[int], ends: Sequence[int]) -> None:
    """Records in the states, if there are any, that a model has run tokens of requests.

    For a request in `names`, the tokens are those from its entry in `starts` to its entry in `ends`.
    """
    for states in manager.states:
        states.advance(states.pages_at(names, starts), ends)


def claims_us(manager: PagedKVCacheManager, claims: int) -> list[float]:
    """Microseconds of claims while requests of 200 to 9,000 tokens fill the memory. They arrive and leave at random."""
    chosen, running, took = np.random.default_rng(1), list[str](), list[float]()
    while len(took) < claims:
        name, length = f"c{len(took)}", int(chosen.choice(MIXED))
        context = TextContext(np.arange(length) + len(took) * MIXED[-1], length + 1, name)
        while not manager.admission(context).fits:
            manager.release(running.pop(int(chosen.integers(len(running)))))
        start = now()
        manager.external_claim(name)
        took.append((now() - start) / 1e3)
        if manager.maybe_reserve(context):  # if this fails, the request's state has taken the last pages
            running.append(name)
        else:
            manager.release(name)
    for name in running:
        manager.release(name)
    return took


def held_pages(manager: PagedKVCacheManager) -> int:
    """The pages in use, including those of states in slabs."""
    return manager.num_held_blocks - sum(states.num_held for states in manager.states)


def lost_percent(name: str, length: int, held: int, page: int) -> float:
    """The percentage of the bytes in a request's `held` pages that it does not need."""
    model = RECURRENT[name]
    return round(100 * (1 - model.bytes_of(length + 1) / (held * page * model.full * model.of_token)), 2)
