"""Prefill computes a prompt in chunks. Decode reads the pages of one chunk while the next one runs.

The lease is requested before anything is computed (`running=True`). After each chunk, prefill sends a block table with
the new pages. `last` marks the last table. Only the last table may name a page that is not full. In this example both
sides run in one process.

    python examples/chunk_by_chunk.py
"""

import torch

from pagewire import (
    ExchangeEvent,
    KVCacheParams,
    Offered,
    PagedKVCacheManager,
    PageExchange,
    PendingImport,
    PullEvent,
    TextContext,
)

CHUNKS = (40, 72, 96)
"""A chunk ends after each of these numbers of prompt tokens."""


def start(name: str) -> tuple[PagedKVCacheManager, PageExchange]:
    """Returns a manager and its exchange."""
    params = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=64, page_size=16)
    manager = PagedKVCacheManager(params, 8, 2048, 2, ["cpu"], available_cache_memory=64 << 20)
    return manager, PageExchange(manager, name)


def wait_for(kind: type[Offered | PullEvent], exchange: PageExchange) -> ExchangeEvent:
    """Waits for the next event of a kind, and returns it."""
    while not (found := [one for one in exchange.poll() if isinstance(one.event, kind)]):
        exchange.wait(replica=0, timeout_s=1.0)
    return found[0]


def main() -> None:
    """Runs a prompt in three chunks. Each chunk is offered and read once it has run."""
    (prefill, source), (decode, reader) = start("prefill"), start("decode")
    with prefill.claim(prompt := TextContext(range(96), max_length=2048, request_id="r")):
        decode.external_claim("r")
        request = TextContext(range(97), max_length=2048, request_id="r")
        pending: PendingImport | None = None
        offer = source.offer("r", duration_s=10.0, running=True)  # the lease's time begins later, at `start_clock`
        if offer is None:
            raise SystemExit("no further lease can be granted: too many leases are open")
        wait_for(Offered, source)
        for end in CHUNKS:
            prompt.set_token_indices(active_idx=end)  # only the tokens before `end` run now
            prefill.maybe_reserve(prompt)
            prompt.update(token=96)  # a model would run here; `update` keeps only the token after the last chunk
            prefill.step([prompt])
            last = end == CHUNKS[-1]
            table = prefill.block_table("r", full_pages=not last)  # the last table also names windows and states
            if pending is None:  # decode reserves pages for the first table
                pending = decode.import_block_table(request, table, partial=True)
                if pending is None:
                    raise SystemExit("decode has too few free pages")
                reader.open_pull(0, "r", offer, timeout_s=30.0)
            else:
                decode.extend_import(request, pending, table, last=last)
            print(end, "tokens computed,", table.num_tokens, "offered")
            reader.read(0, "r", pending, last=last)  # the new pages
        source.start_clock(offer)  # from now on the lease ends if its reader sends nothing for `duration_s`
    if pending is not None:
        decode.commit_import(request, pending, wait_for(PullEvent, reader).proof)
    decode.maybe_reserve(request)
    print("decode runs tokens", request.start_idx, "to", request.active_idx)
    decode.release("r")
    for one in (source, reader, prefill, decode):
        one.close()


if __name__ == "__main__":
    main()
