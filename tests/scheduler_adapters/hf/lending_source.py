"""A process that computes prompts of the small Llama and lends their pages. A test drives the process over a pipe."""

from __future__ import annotations

import dataclasses
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvcache import KVCacheParams, TextContext
from scheduler_adapters.hf import runner
from scheduler_adapters.loop import Request
from scheduler_adapters.service.server import build_loop
from tests.kvcache.build import evict_idle
from tests.scheduler_adapters.server_config import server_config
from transfer import PageExchange

CONFIG = server_config(seed=3, page_size=8, cache_bytes=1 << 20, max_seq_len=512)


def serve(
    pipe: Connection, name: str = "p", bind: str = "tcp://127.0.0.1:0", host: int = 0, model: str | None = None
) -> None:
    """Lends its pages until it is killed.

    The command `run` computes a prompt, `reset` forgets all idle pages, and `tail` forgets all idle pages except a
    prompt's pages from a given page on. `host` is the size of a host tier in bytes, for which servers have no setting.
    `model` is the model's directory; None for the small Llama.
    """
    if host:
        tier = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": host / 2**30}
        params_of = runner.kv_params_of

        def with_tier(config: Any, **options: Any) -> KVCacheParams:
            return dataclasses.replace(params_of(config, **options), **tier)

        runner.kv_params_of = with_tier
    loop, compatibility = build_loop(msgspec.structs.replace(CONFIG, model=model))
    exchange = PageExchange(loop.manager, name, bind=bind, compatibility=compatibility, lend=1.0)
    pipe.send(exchange.address)
    while True:
        exchange.poll()
        if not pipe.poll(1e-3):
            continue
        match pipe.recv():
            case ("run", prompt):
                loop.add(Request("theirs", prompt, 1))
                while loop.has_work:
                    loop.step()
                    exchange.poll()  # If the pool has too few pages, only `poll` takes back lent pages.
            case ("tail", prompt, page):
                contents = loop.manager.contents
                wanted = contents.digests(TextContext([*prompt, 0], len(prompt) + 1, "tail"), page)
                found = contents.lease("tail", 0, wanted, 64)
                assert found is not None
                evict_idle(loop.manager)
                loop.manager.end_lease(found[0])
            case ("reset",):
                loop.manager.reset_prefix_cache()
            case _:
                loop.manager.check()
        pipe.send((loop.manager.num_held_blocks, len(exchange.threads[0].replica.leases)))
