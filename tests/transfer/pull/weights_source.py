"""A source in its own process whose weights change on command. Each element of a page is the number of the version of
the weights that computed it.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from kvcache import KVCacheError, TextContext
from tests.transfer.pull.test_ownership import Reader
from transfer.pull.replica import Offered

PROMPT = [*range(18)]  # four full pages and two tokens
FIRST = 8  # tokens of the first chunk


class Weighted(Reader):
    """A side whose model writes the number of its version."""

    version = 0

    def switch(self, version: int, running: Any = "finish") -> None:
        self.version = version
        self.manager.set_weights(version, running)

    def chunk(self, context: TextContext, end: int) -> None:
        """Runs the tokens up to `end`."""
        context.set_token_indices(active_idx=min(end, context.end_idx))
        self.run(context, self.version)


def serve(pipe: Connection, name: str, options: dict[str, Any]) -> None:
    """Serves commands until the process is killed: the name of a method, and its arguments."""
    source = _Source(name, exchange={"lend": 1.0}, **options)
    pipe.send((source.exchange.address, source.exchange.engine_id(0)))
    while True:
        source.poll()
        if pipe.poll(1e-4):
            method, *arguments = pipe.recv()
            try:
                pipe.send(getattr(source, method)(*arguments))
            except KVCacheError as error:
                pipe.send(error)


class _Source(Weighted):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.contexts: dict[str, TextContext] = {}
        self.offers: dict[str, Any] = {}

    def begin(self, name: str, salt: str, end: int) -> None:
        """Claims a request, and runs its tokens up to `end`."""
        context = self.contexts[name] = TextContext(PROMPT, 32, name, cache_salt=salt)
        self.manager.external_claim(name)
        self.chunk(context, end)

    def go_on(self, name: str) -> None:
        """Runs the rest of the prompt."""
        self.chunk(self.contexts[name], len(PROMPT))

    def overwrite_free(self) -> None:
        """Runs another prompt on all pages that are free, and releases it."""
        if free := self.manager.num_free_blocks:
            self.compute("beside", [*range(50, 50 + 4 * free - 1)], -1)
            self.manager.release("beside")

    def lease(self, name: str) -> Any:
        """Leases the pages of a request. Returns the offer once it is granted."""
        offer = self.offers[name] = self.exchange.offer(name, 60.0, running=True)
        assert offer is not None
        self.until(lambda: any(one.event.lease_id == offer.lease.lease_id for one in self.of(Offered)))
        return offer

    def table(self, name: str, full_pages: bool) -> Any:
        return self.manager.block_table(name, full_pages=full_pages)

    def release(self, name: str) -> None:
        if self.manager.contains(name):
            self.manager.release(name)

    def end(self, name: str, reason: str) -> None:
        """Releases a request, and ends its lease if that is open."""
        self.release(name)
        if name in self.offers:
            self.exchange.revoke(self.offers.pop(name), reason)

    def held(self) -> tuple[int, int]:
        self.manager.check()
        return self.manager.num_held_blocks, len(self.exchange.threads[0].replica.leases)


def values_of(side: Weighted, pages: Any) -> set[int]:
    """Returns the versions that have computed these pages."""
    return {int(value) for shard in side.manager.device_tensors[0] for value in shard[list(pages)].unique()}
