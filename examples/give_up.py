"""Gives up three of four requests: one during the read, one before the read, and one at the source. The fourth is read.

The pull of `b` may succeed before it is cancelled; its last event says whether it succeeded. A serving loop remembers
which requests it has given up, so it drops `b` in either case. In this example both sides run in one process.

    python examples/give_up.py
"""

import torch

from pagewire import (
    BlockTable,
    ImportProof,
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

GONE = "its client has gone"


def start(name: str) -> tuple[PagedKVCacheManager, PageExchange]:
    """Returns a manager and its exchange."""
    params = KVCacheParams(torch.float32, n_kv_heads=4, head_dim=64, page_size=16)
    manager = PagedKVCacheManager(params, 8, 2048, 2, ["cpu"], available_cache_memory=64 << 20)
    return manager, PageExchange(manager, name)


class Decode:
    """The decode process: its manager, its exchange, and the imports of its requests."""

    def __init__(self) -> None:
        self.manager, self.exchange = start("decode")
        self.imports: dict[str, tuple[TextContext, PendingImport]] = {}

    def begin(self, name: str, offer: Source, table: BlockTable) -> None:
        """Reserves pages for a request, and starts to read them."""
        self.manager.external_claim(name)
        request = TextContext(range(97), max_length=2048, request_id=name)
        pending = self.manager.import_block_table(request, table)
        if pending is None:
            raise SystemExit("decode has too few free pages")
        self.imports[name] = (request, pending)
        self.exchange.pull(name, offer, pending, timeout_s=30.0)

    def finish(self, name: str, error: str, proof: ImportProof | None) -> None:
        """Commits or cancels the import of a request. Call it only when no transfer of its pull is in flight."""
        if name not in self.imports:
            return  # the request was given up before pages were reserved for it
        request, pending = self.imports[name]
        if error:
            self.manager.cancel_import(pending)
        else:
            self.manager.commit_import(request, pending, proof)  # now the request could run
        self.manager.release(name)


def offers_of(prefill: PagedKVCacheManager, source: PageExchange) -> dict[str, tuple[Source, BlockTable]]:
    """Prefill computes each request, leases its pages and releases it. Returns the leases and block tables."""
    offers: dict[str, tuple[Source, BlockTable]] = {}
    for name in "abcd":
        with prefill.claim(request := TextContext(range(96), max_length=2048, request_id=name)):
            prefill.maybe_reserve(request)
            request.update(token=96)
            prefill.step([request])
            offer = source.offer(name, duration_s=10.0)
            if offer is None:
                raise SystemExit("no further lease can be granted: too many leases are open")
            offers[name] = (offer, prefill.block_table(name))
    return offers


def main() -> None:
    """Runs until four leases and three pulls have ended."""
    (prefill, source), decode = start("prefill"), Decode()
    reader, offers, ended = decode.exchange, offers_of(prefill, source), dict[str, str]()
    while len(ended) < 7:
        source.wait(replica=0, timeout_s=0.001)  # a real loop would run a step of its batch here
        for _, event, proof in source.poll() + reader.poll():  # keep every event
            match event:
                case Offered("a", _, ""):
                    decode.begin("a", *offers["a"])
                case Offered("b", _, ""):
                    decode.begin("b", *offers["b"])
                    reader.cancel_pull(0, "b", GONE)  # during a pull
                case Offered("c", _, ""):
                    reader.open_pull(0, "c", offers["c"][0], timeout_s=30.0)
                    reader.cancel_pull(0, "c", GONE)  # before a pull
                case Offered("d", _, ""):
                    source.revoke(offers["d"][0], GONE)
                case LeaseOver(name, _, reason):
                    ended["lease " + name] = reason
                case PullEvent(name, error, True):
                    ended["pull " + name] = error
                    decode.finish(name, error, proof)
                case _:
                    pass
    print([ended["lease " + name] for name in "acd"])
    print(prefill.num_held_blocks, prefill.num_leased_blocks, decode.manager.num_held_blocks, reader.open_pulls)
    # exchanges close first: they end everything that is open, and give pages back to the managers
    for one in (source, reader, prefill, decode.manager):
        one.close()


if __name__ == "__main__":
    main()
