"""What does a decode step cost the host in each setting of the manager? Requests are passed as a list.

A step is reserve, fetch, update and step, for one request or for 256. The requests of a row have equally many tokens,
so most steps need no page, and one in 16 needs a page for each request: `page_mean` is the mean over 16 steps. `leased`
are requests that a reader may still copy, and with `states` each request has a recurrent state. `one by one` calls
`maybe_reserve` for each request, `a list` calls `reserve_batch` once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.decode_step import by_calls
from benchmarks.frame import WARM_UP, Row, options, pin, report, samples, summary
from benchmarks.pools import expect
from kvcache import KVCacheParams, KVEvents, LayerGroup, PagedKVCacheManager, TextContext
from kvcache.params import StateShape

PAGE, PROMPT, LONGEST = 16, 1024, 4096
LAYERS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "leased": {},
    "host tier": {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 0.01},
    "window": {"groups": (LayerGroup("full", (0, 1)), LayerGroup("window", (2, 3), 64))},
    "KV events": {"kv_events": KVEvents("tcp://127.0.0.1:0")},
    "two replicas": {"data_parallel_degree": 2, "n_devices": 2},
    "states": {"states": StateShape(1, 8, 1, 1, 1, 2, torch.uint8, torch.uint8, "short_conv")},
}
_STATISTICS = (
    "columns us_*: minimum and median of the n steps of a row; page_mean: median of the means over as many steps as a "
    "page has tokens"
)


def manager_in(setting: str, requests: int, steps: int) -> PagedKVCacheManager:
    """Returns a manager in this setting, with pages for `steps` more steps of so many requests of `PROMPT` tokens."""
    chosen = SETTINGS[setting]
    params = KVCacheParams(
        dtype=torch.uint8, n_kv_heads=1, head_dim=1, page_size=PAGE, enable_prefix_caching=True, **chosen
    )
    count = params.data_parallel_degree
    memory = (requests + 1) * (PROMPT + steps + 2 * PAGE) * 2 * LAYERS + (1 << 20)
    return PagedKVCacheManager(
        params, requests * count, LONGEST, LAYERS, ["cpu"] * count, available_cache_memory=memory * count
    )


def begun(manager: PagedKVCacheManager, requests: int) -> list[TextContext]:
    """Returns running requests on the first replica, whose prompts are computed."""
    rng = np.random.default_rng(0)
    contexts = [TextContext(rng.integers(0, 1 << 30, PROMPT), LONGEST, str(number)) for number in range(requests)]
    for context in contexts:
        manager.external_claim(context.request_id, 0)
    while contexts[0].end_idx == PROMPT:  # with states, the prompt runs in two chunks
        expect(bool(manager.reserve_batch(contexts).all()), "the pool has room for every request")
        run(manager, contexts)
        manager.fetch(contexts)
        for context in contexts:
            context.update(1)
        manager.step(contexts)
    return contexts


def run(manager: PagedKVCacheManager, contexts: Sequence[TextContext]) -> None:
    """Records in the states, if there are any, that a model runs the active tokens."""
    for states in manager.states[:1]:
        names = [context.request_id for context in contexts]
        pages = states.pages_at(names, [context.start_idx for context in contexts])
        states.advance(pages, [context.active_idx for context in contexts])


def as_a_list(manager: PagedKVCacheManager, contexts: list[TextContext]) -> None:
    """Runs a step that reserves the pages of all requests in one call."""
    manager.reserve_batch(contexts)
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    manager.step(contexts)


CALLS: dict[str, Callable[[PagedKVCacheManager, list[TextContext]], None]] = {
    "one by one": by_calls,
    "a list": as_a_list,
}


def measure(setting: str, requests: int, calls: str, repeats: int) -> Row:
    """Returns the row for one setting."""
    repeats = -(-repeats // PAGE) * PAGE
    manager, step = manager_in(setting, requests, repeats + WARM_UP), CALLS[calls]
    contexts = begun(manager, requests)
    leases = [manager.lease(context.request_id) for context in contexts] if setting == "leased" else []
    times = samples(repeats, lambda: run(manager, contexts), lambda _: step(manager, contexts))
    expect(contexts[0].end_idx == PROMPT + 1 + repeats + WARM_UP, "every request got a token a step")
    manager.check()
    for lease in leases:
        manager.end_lease(lease)
    manager.close()
    means = [statistics.mean(times[at : at + PAGE]) for at in range(0, repeats, PAGE)]
    shape = {"setting": setting, "requests": requests, "calls": calls}
    return {**shape, **summary(times), "page_mean": round(statistics.median(means), 2)}


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    shapes = ((1, "one by one"), (256, "one by one"), (256, "a list"))
    repeats = 64 if chosen.quick else 512
    rows = [measure(setting, *shape, repeats) for shape in shapes for setting in SETTINGS]
    report("settings", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
