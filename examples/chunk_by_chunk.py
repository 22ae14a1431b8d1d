"""A prompt that prefill computes in chunks is read while the next chunk runs. Both sides run in one process here.

The lease begins before anything is computed (`running=True`). Each further block table names pages that are new. `last`
says that no table follows: only then may a page be named that is not full.

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
"""Tokens that are known before each chunk ends."""


def start(name: str) -> tuple[PagedKVCacheManager, PageExchange]:
    """A manager, and its exchange."""
    params = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=64, page_size=16)
    manager = PagedKVCacheManager(params, 8, 2048, 2, ["cpu"], available_cache_memory=64 << 20)
    return manager, PageExchange(manager, name)


def wait_for(kind: type[Offered | PullEvent], exchange: PageExchange) -> ExchangeEvent:
    """The next event of a kind."""
    while not (found := [one for one in exchange.poll() if isinstance(one.event, kind)]):
        exchange.wait(replica=0, timeout_s=1.0)
    return found[0]


def main() -> None:
    """Run three chunks. Each is offered and read after it has run."""
    (prefill, source), (decode, reader) = start("prefill"), start("decode")
    with prefill.claim(prompt := TextContext(range(96), max_length=2048, request_id="r")):
        decode.external_claim("r")
        request = TextContext(range(97), max_length=2048, request_id="r")
        pending: PendingImport | None = None
        offer = source.offer("r", duration_s=10.0, running=True)  # the lease's time does not run yet
        if offer is None:
            raise SystemExit("as many leases stand as can")
        wait_for(Offered, source)
        for end in CHUNKS:
            prompt.set_token_indices(active_idx=end)  # of the known tokens, those before `end` run now
            prefill.maybe_reserve(prompt)
            prompt.update(token=96)  # the model; only what it makes of the last chunk becomes a token
            prefill.step([prompt])
            table, last = prefill.block_table("r", full_pages=True), end == CHUNKS[-1]
            if pending is None:  # decode: the first pages
                pending = decode.import_block_table(request, table, partial=True)
                if pending is None:
                    raise SystemExit("decode has too few free pages")
                reader.open_pull(0, "r", offer, timeout_s=30.0)
            else:
                decode.extend_import(request, pending, table, last=last)
            print(end, "tokens computed,", table.num_tokens, "told of")
            reader.read(0, "r", pending, last=last)  # the new pages
        source.start_clock(offer)  # from now on the lease ends if its reader is silent for `duration_s`
    if pending is not None:
        decode.commit_import(request, pending, wait_for(PullEvent, reader).proof)
    decode.maybe_reserve(request)
    print("decode runs tokens", request.start_idx, "to", request.active_idx)
    decode.release("r")
    for one in (source, reader, prefill, decode):
        one.close()


if __name__ == "__main__":
    main()
