"""A loop finishes every request that it accepts, whatever the pool, the windows, the states and the token budget.

The model is left out, because only the number of its tokens matters here.
"""

import logging
import random
import re
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from kvcache import KVCacheParams, LayerGroup, PagedKVCacheManager, PageLease, StateShape
from kvcache.errors import InvalidRequestError, PromptTooLongError, StatePageError
from kvcache.sizing import estimated_memory_size
from scheduler_adapters.loop import Request, ServingLoop
from scheduler_adapters.overlapped import OverlappedLoop, RunBatch

ROWS = 3
STATE = StateShape(layers=2, heads=40, head_dim=1, groups=1, d_state=1, kernel=20, conv_dtype=torch.float32)


class Counted:
    """Yields the token 1 for each request, and records how many tokens each step runs."""

    eos_token_ids = frozenset[int]()

    def __init__(self) -> None:
        self.ran: list[list[int]] = []

    def run(self, batch: Sequence[Any], inputs: Sequence[Any]) -> list[int]:
        del inputs
        self.ran.append([one.active_length for one in batch])
        return [1] * len(batch)

    def launch(self, batches: Sequence[RunBatch]) -> "Future[list[int]]":
        tokens: Future[list[int]] = Future()
        tokens.set_result([token for batch, inputs in batches for token in self.run(batch, inputs)])
        return tokens


def drawn_params(draw: random.Random) -> tuple[KVCacheParams, int]:
    """Returns the params of a cache of a few layers, and the number of its layers."""
    kinds: list[tuple[Any, int]] = [("window", draw.randint(1, 40)), ("chunked", draw.randint(1, 40))]
    kinds = draw.choice([kinds[:1], kinds[1:], kinds]) if draw.random() < 0.85 else []
    if draw.random() < 0.85:
        kinds.append(("full", 0))
    groups, layers = list[LayerGroup](), 0
    for kind, window in kinds:
        count = draw.randint(1, 3)
        groups.append(LayerGroup(kind, tuple(range(layers, layers + count)), window))
        layers += count
    more: dict[str, Any] = {}
    if draw.random() < 0.3:
        more = {"states": STATE, "share_state_memory": draw.random() < 0.6}
    params = KVCacheParams(
        torch.float32,
        n_kv_heads=1,
        head_dim=8,
        page_size=draw.choice([1, 2, 4, 5, 8, 16]),
        groups=tuple(groups),
        enable_prefix_caching=draw.random() < 0.6,
        **more,
    )
    return params, layers or 2


def drawn_manager(draw: random.Random) -> PagedKVCacheManager:
    """Returns a manager whose pool is often too small for a request of `max_seq_len` tokens."""
    params, layers = drawn_params(draw)
    memory = estimated_memory_size(params, 1, draw.randint(1, 150), layers, 1 << 40, ["cpu"])
    if params.states is not None and not params.share_state_memory:
        memory += estimated_memory_size(params, ROWS, 1, layers, 1 << 40, ["cpu"])
    return PagedKVCacheManager(params, ROWS, draw.randint(100, 200), layers, ["cpu"], available_cache_memory=memory)


class Readers:
    """Leases a running request at drawn moments, and exports tables of its prompt for readers, as a hand-over does.

    Before the first lease, it also exports tables that name the pages of windows. The request runs before it is leased,
    so no reader may use these tables any more.
    """

    def __init__(self, manager: PagedKVCacheManager, draw: random.Random) -> None:
        self.leases: list[PageLease] = []
        self.grants = self.tables = 0
        self._manager, self._draw, self._whole = manager, draw, False

    def after_step(self, name: str) -> None:
        if not self._manager.contains(name):
            for lease in self.leases:
                self._manager.end_lease(lease)
            self.leases.clear()
            return
        if not self._whole and len(self.leases) < 3 and self._draw.random() < 0.2:
            self.leases.append(self._manager.lease(name))
            self.grants += 1
        self._whole = not self.leases and self._draw.random() < 0.3
        if self._whole or self.leases:
            try:
                self._manager.block_table(name, full_pages=not self._whole)
            except (InvalidRequestError, StatePageError):
                self._whole = False  # nothing has been computed yet, or a step is in flight
            else:
                self.tables += bool(self.leases)


def finish(
    loop: ServingLoop[Any], runner: Counted, requests: Sequence[Request], readers: Readers | None = None
) -> None:
    """Runs the requests to their ends. Each of them must yield all its tokens, in steps within the budget."""
    for request in requests:
        loop.add(request)
    left = {request.request_id: request.max_new_tokens for request in requests}
    most = 50 + 10 * sum(len(request.prompt) + request.max_new_tokens for request in requests)
    for _ in range(most):
        if not loop.has_work:
            break
        for output in loop.step():
            assert not output.error
            left[output.request_id] -= 1
        if readers is not None:
            for request in requests:
                readers.after_step(request.request_id)
    assert not any(left.values()), f"{left} tokens are missing after {most} steps"
    for counts in runner.ran:
        decoding = counts.count(1)
        assert sum(counts) <= max(loop.token_budget, decoding + 1)
    runner.ran.clear()
    loop.manager.check()
    assert loop.manager.num_held_blocks == 0


@pytest.mark.parametrize("seed", range(60))
def test_every_length_up_to_the_longest_finishes_and_the_next_one_is_refused(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw, runner = random.Random(seed), Counted()
    with caplog.at_level(logging.WARNING, "pagewire"):
        manager = drawn_manager(draw)
    longest = manager.longest_request
    told = [re.search(r"requests of up to (\d+) tokens", record.getMessage()) for record in caplog.records]
    assert [int(one[1]) for one in told if one] == ([longest] if longest < manager.max_seq_len else [])
    overlaps = not manager.states and draw.random() < 0.4
    loop = (OverlappedLoop if overlaps else ServingLoop)(
        manager, runner, token_budget=draw.choice([1, 2, 3, 7, 16, 40])
    )
    lengths, readers = range(1, longest + 1), Readers(manager, draw)
    for length in {*draw.sample(lengths, min(6, longest)), *lengths[-2:]}:
        # the last new token needs no room
        new = 1 if draw.random() < 0.5 else draw.randint(1, length)
        prompt = [draw.choice([0, length])] * (length + 1 - new)
        finish(loop, runner, [Request("r", prompt, new)])
        finish(loop, runner, [Request("r", [length, *prompt[1:]], new)], readers)
    for new in {1, max(1, longest // 2)}:
        with pytest.raises(PromptTooLongError, match=f"request 'r': .* has room for {longest} tokens"):
            loop.add(Request("r", [0] * (longest + 2 - new), new))
    many = list[Request]()
    for at in range(5 if longest else 0):
        length = draw.randint(1, longest)
        new = draw.randint(1, length)
        common = draw.randint(0, length + 1 - new)  # these tokens are the same in all prompts
        many.append(Request(f"r{at}", [9] * common + [at] * (length + 1 - new - common), new))
    finish(loop, runner, many)
    loop.close()
