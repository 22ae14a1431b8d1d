"""Prefill and decode in two processes: decode reads each prompt's pages with NIXL READs, and continues from there.

The prefill process runs the prompts. For each prompt it offers a lease, and sends three things through a pipe: where
the pages can be read (`Source`), which pages they are (`BlockTable`), and the first new token. The decode process
reserves pages, pulls, commits the import and decodes. Any other channel can replace the pipe.

The model is the one of `serving_loop.py`, beside this file.

    python examples/prefill_decode.py
"""

from multiprocessing.connection import Connection

import torch
from serving_loop import HEAD_DIM, HEADS, NEW_TOKENS, PAGE_SIZE, Model

from pagewire import (
    BlockTable,
    ExchangeEvent,
    KVCacheParams,
    LeaseOver,
    Offered,
    PagedKVCacheManager,
    PageExchange,
    PendingImport,
    PullEvent,
    Source,
    TextContext,
)

PROMPTS = {f"request-{number}": [*range(20), 100 + number] for number in range(4)}
MAX_LENGTH = 64


def start(name: str) -> tuple[PagedKVCacheManager, PageExchange]:
    """Creates the manager and the exchange of one process. No two peers may have exchanges with the same name."""
    params = KVCacheParams(torch.float32, HEADS, HEAD_DIM, page_size=PAGE_SIZE)
    manager = PagedKVCacheManager(
        params, max_batch_size=8, max_seq_len=MAX_LENGTH, num_layers=1, devices=["cpu"], available_cache_memory=1 << 20
    )
    return manager, PageExchange(manager, name)


def next_events(exchange: PageExchange) -> list[ExchangeEvent]:
    """Waits for events and returns them.

    `poll` returns the events of all requests, and returns each event only once. So every event must be handled.
    """
    while not (events := exchange.poll()):
        exchange.wait(replica=0, timeout_s=1.0)
    return events


def prefill(pipe: Connection) -> None:
    """Runs every prompt once and offers its pages. Returns when the decode process has read all of them."""
    manager, exchange = start("prefill")
    model, computed = Model(), dict[str, tuple[Source | None, BlockTable, int]]()
    for name, prompt in PROMPTS.items():
        request = TextContext(prompt, MAX_LENGTH, request_id=name)
        with manager.claim(request):
            manager.maybe_reserve(request)
            (inputs,) = manager.fetch([request])
            first = int(model.run(request, inputs, 0)[-1])
            request.update(first)
            manager.step([request])
            source = exchange.offer(name, duration_s=60.0)
            computed[name] = (source, manager.block_table(name), first)
        # The request is released here. Its pages stay until its lease is over.

    leases_open = len(PROMPTS)
    while leases_open:
        for happened in next_events(exchange):
            match happened.event:
                case Offered(request_id=name, error=""):
                    # The lease has been granted, so the decode process may be told of the pages now.
                    pipe.send((name, *computed[name]))
                case Offered(error=error):
                    raise SystemExit(error)
                case LeaseOver():
                    leases_open -= 1
                case _:
                    pass
    exchange.close()
    manager.check()
    manager.close()


def pull(manager: PagedKVCacheManager, exchange: PageExchange, pipe: Connection) -> list[TextContext]:
    """Pulls the pages of every prompt. Returns the requests, which are then ready to run."""
    requests, pending = dict[str, TextContext](), dict[str, PendingImport]()
    for _ in PROMPTS:
        name, source, table, first = pipe.recv()
        requests[name] = TextContext([*PROMPTS[name], first], len(PROMPTS[name]) + NEW_TOKENS, request_id=name)
        manager.external_claim(name)
        reserved = manager.import_block_table(requests[name], table)
        if reserved is None:
            raise SystemExit(f"{name}: too few pages are free")
        exchange.pull(name, source, reserved, timeout_s=60.0)
        pending[name] = reserved

    while pending:
        for happened in next_events(exchange):
            if isinstance(event := happened.event, PullEvent) and event.safe:
                if event.error:
                    raise SystemExit(event.error)
                # The proof shows that the lease was still open when the last byte had arrived.
                manager.commit_import(requests[event.key], pending.pop(event.key), happened.proof)
    return list(requests.values())


def decode(pipe: Connection) -> dict[str, list[int]]:
    """Decodes every prompt that the prefill process has computed. Returns the tokens by request."""
    manager, exchange = start("decode")
    model, requests = Model(), pull(manager, exchange, pipe)
    running = requests
    while running:
        for request in running:
            manager.maybe_reserve(request)
        (inputs,) = manager.fetch(running)
        for row, request in enumerate(running):
            request.update(int(model.run(request, inputs, row)[-1]))
        manager.step(running)
        running = [request for request in running if request.current_length < request.max_length]
    for request in requests:
        manager.release(request.request_id)
    exchange.close()
    manager.check()
    manager.close()
    return {request.request_id: request.tokens.tolist() for request in requests}


def main() -> None:
    """Runs both processes and compares every answer with one computed without a cache."""
    ours, theirs = torch.multiprocessing.Pipe()
    process = torch.multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs,), daemon=True)
    process.start()
    answers = decode(ours)
    process.join()

    model = Model()
    for name, tokens in answers.items():
        expected = list(PROMPTS[name])
        while len(expected) < len(tokens):
            expected.append(model.run_without_cache(expected))
        if tokens != expected:
            raise SystemExit(f"{name}: the tokens are {tokens}, expected {expected}")
    print(f"{len(answers)} prompts were computed in one process and decoded in another: all tokens are equal")


if __name__ == "__main__":
    main()
