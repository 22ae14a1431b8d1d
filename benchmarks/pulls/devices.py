"""Pulls between a source and a reader process with pages on devices: checks the bytes, and measures the time."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from benchmarks.pools import expect
from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from transfer.pull.exchange import PageExchange
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver, Offered

PAGE_SIZE, LAYERS, KV_HEADS, HEAD_DIM = 16, 4, 4, 128  # 128 KiB a page


def manager_on(device: str, pages: int, heads_first: bool = True) -> PagedKVCacheManager:
    """A manager with room for one request of this many pages."""
    order: Any = "head,layer,side,token,dim" if heads_first else "layer,side,token,head,dim"
    params = KVCacheParams(torch.bfloat16, KV_HEADS, HEAD_DIM, page_size=PAGE_SIZE, page_order=order)
    memory = (pages + 2) * PAGE_SIZE * params.bytes_per_token(LAYERS)
    return PagedKVCacheManager(params, 8, (pages + 2) * PAGE_SIZE, LAYERS, [device], available_cache_memory=memory)


def bytes_of(name: str, count: int, device: str) -> torch.Tensor:
    """The contents of a request's pages, int16 `[count, sides, layers, page_size, heads, dim]`."""
    shape = (count, 2, LAYERS, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    numbers = torch.arange(math.prod(shape) // 2, dtype=torch.int32, device=device)
    return numbers.mul_(1_640_531_527).add_(zlib.crc32(name.encode()) >> 1).view(torch.int16).view(shape)


def until(exchange: PageExchange, kind: type) -> Any:
    """Waits for the next event of a kind."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for happened in exchange.poll():
            if isinstance(happened.event, kind):
                return happened
        exchange.wait(replica=0, timeout_s=0.1)
    raise TimeoutError(kind.__name__)


def source(pipe: Connection, device: str, counts: list[int], order: bool) -> None:
    """Runs the source: computes a request of each number of pages, offers it, and waits until it was read."""
    manager = manager_on(device, max(counts), order)
    exchange = PageExchange(manager, "source")
    for number, count in enumerate(counts):
        name = f"r{number}"
        context = TextContext(range(count * PAGE_SIZE), (count + 1) * PAGE_SIZE, name)
        with manager.claim(context):
            expect(manager.maybe_reserve(context), "the pages are free")
            pages = torch.tensor(manager.get_req_blocks(name), device=device)[:count]
            manager.device_tensors[0][0][pages] = bytes_of(name, count, device).view(torch.bfloat16)
            if device != "cpu":
                torch.cuda.synchronize()
            context.update(0)
            manager.step([context])
            offer = exchange.offer(name, 30.0)
            table = manager.block_table(name)
        happened = until(exchange, Offered)
        expect(not happened.event.error, happened.event.error)
        pipe.send((offer, table))
        until(exchange, LeaseOver)
    pipe.recv()
    exchange.close()
    manager.close()


def reader(pipe: Connection, device: str, counts: list[int], order: bool) -> None:
    """Runs the reader, which pulls each of the requests.

    For each request it sends `(pages, seconds, wrong pages)`, first for a pull with the copy, then for one without.
    """
    manager = manager_on(device, max(counts), order)
    exchange = PageExchange(manager, "reader")
    for number, count in enumerate(counts):
        name = f"r{number}"
        offer, table = pipe.recv()
        context = TextContext(range(count * PAGE_SIZE + 1), (count + 1) * PAGE_SIZE, name)
        with manager.claim(context):
            start = time.perf_counter()
            pending = manager.import_block_table(context, table)
            if pending is None:
                raise RuntimeError(f"no pages are free for {name}")
            exchange.pull(name, offer, pending, timeout_s=30.0)
            happened = until(exchange, PullEvent)
            expect(not happened.event.error, happened.event.error)
            manager.commit_import(context, pending, happened.proof)
            seconds = time.perf_counter() - start
            pages = torch.tensor(manager.get_req_blocks(name), device=device)[:count]
            # Stands for a kernel that is launched right after the commit.
            read = manager.device_tensors[0][0][pages].clone()
            wanted = bytes_of(name, count, device)
            wrong = int((read.view(torch.int16) != wanted).flatten(1).any(1).sum())
        pipe.send((count, seconds, wrong))
    pipe.send(None)
    exchange.close()
    manager.close()


def between(source_device: str, reader_device: str, counts: list[int], **orders: bool) -> list[tuple[int, float, int]]:
    """Yields `(pages, seconds, wrong pages)` for each hand-over.

    All hand-overs are between the same two new processes.
    """
    from_source, source_process = _started(source, source_device, counts, orders.get("source", True))
    from_reader, reader_process = _started(reader, reader_device, counts, orders.get("reader", True))
    try:
        found: list[tuple[int, float, int]] = []
        for _ in counts:
            from_reader.send(_next(from_source, 60))
            found.append(_next(from_reader, 60))
        from_source.send(None)
        return found
    finally:
        for one in (source_process, reader_process):
            one.join(20)
            one.kill()


def _started(side: Callable[..., None], device: str, counts: list[int], order: bool) -> tuple[Connection, BaseProcess]:
    processes = get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=side, args=(theirs, device, counts, order))
    process.start()
    theirs.close()  # so that the parent notices when the child dies
    return ours, process


def _next(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError("the other side says nothing")
    return pipe.recv()
