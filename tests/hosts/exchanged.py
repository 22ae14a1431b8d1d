"""A manager and its exchange as a program on a host: `python -m tests.hosts.exchanged NAME ADDRESS`."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from kvcache import BlockTable, KVCacheParams, PagedKVCacheManager, TextContext
from tests.hosts.network import PEERS
from tests.hosts.told import serve
from transfer.pull.asking import Lent
from transfer.pull.exchange import PageExchange
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver, Offered
from transfer.pull.source import Source

PAGE_SIZE, PAGE_BYTES, MOST_PAGES = 16, 1 << 16, 1100
_STEP_S = 0.002


class Exchanged:
    """One side of a hand-over. Its pages have 64 KiB."""

    def __init__(self, name: str, address: str) -> None:
        params = KVCacheParams(
            torch.float32, n_kv_heads=4, head_dim=64, page_size=PAGE_SIZE, enable_prefix_caching=True
        )
        self.manager = PagedKVCacheManager(
            params, 8, MOST_PAGES * PAGE_SIZE, 2, ["cpu"], available_cache_memory=MOST_PAGES * PAGE_BYTES
        )
        self.exchange = PageExchange(
            self.manager, name, bind=f"tcp://{address}:0", secret=os.environ["PAGEWIRE_TEST_SECRET"],
            allowed_peers=PEERS,
        )  # fmt: skip
        self.lent: dict[str, Any] = {}  # For each request, the lent pages that it has not pulled yet.
        self.ended: dict[str, str] = {}  # For each request, the reason for which its lease has ended.

    def pages(self, name: str) -> Any:
        """Returns the bytes of the request's pages, `[pages, 65536]`."""
        found = self.manager.device_tensors[0][0][self.manager.get_req_blocks(name)]
        return found.contiguous().numpy().view(np.uint8).reshape(len(found), -1)

    @contextmanager
    def computed(self, name: str, pages: int) -> Iterator[None]:
        """Returns a `with` block. Inside it, a request holds the computed pages of a prompt."""
        tokens = [*range(pages * PAGE_SIZE)]
        with self.manager.claim(context := TextContext(tokens, MOST_PAGES * PAGE_SIZE, name)):
            assert self.manager.maybe_reserve(context)
            pool = self.manager.device_tensors[0][0]
            for column, page in enumerate(self.manager.get_req_blocks(name)):
                pool[page] = torch.from_numpy(contents(column).view(np.float32)).view(pool[page].shape)
            context.update(1)
            self.manager.step([context])
            yield

    def compute(self, name: str, pages: int) -> list[str]:
        """Computes a prompt whose pages stay cached. Returns the address at which a reader may ask for them."""
        with self.computed(name, pages):
            return [self.exchange.address]

    def offer(self, name: str, pages: int, duration_s: float) -> list[str]:
        """Computes a prompt of this many pages, and leases them. Returns the offer that a reader needs."""
        with self.computed(name, pages):
            offer = self.exchange.offer(name, duration_s)
            assert offer is not None
            self.until(lambda happened: isinstance(happened.event, Offered))
            return [msgspec.msgpack.encode((offer, self.manager.block_table(name))).hex()]

    def ask(self, name: str, pages: int, address: str, timeout_s: float, engine: str = "p/0") -> list[Any]:
        """Asks a source for the pages of a prompt. Returns the seconds that this took, the error (or ""), and the
        number of pages that the source lends.
        """
        context = TextContext([*range(pages * PAGE_SIZE), 7], MOST_PAGES * PAGE_SIZE, name)
        begin = time.perf_counter()
        self.exchange.ask(0, name, address, engine, self.manager.contents.digests(context), timeout_s)
        lent = self.until(lambda one: isinstance(one.event, Lent) and one.event.key == name).event
        self.lent[name] = lent
        return [time.perf_counter() - begin, lent.error, lent.table.num_tokens // PAGE_SIZE if lent.table else 0]

    def take(self, name: str, timeout_s: float) -> list[Any]:
        """Pulls the pages that a source has lent."""
        lent = self.lent.pop(name)
        return self.read(name, lent.source, lent.table, timeout_s)

    def take_from(self, names: list[str], timeout_s: float) -> list[Any]:
        """Pulls the pages that several sources have lent, from all sources at once. Returns the result of `read`, and
        the number of bytes from each source.
        """
        lent = [self.lent.pop(name) for name in names]
        tables = [one.table for one in lent]
        return self.read(names[0], [one.source for one in lent], tables[0], timeout_s, tables[1:])

    def pull(self, name: str, offered: str, timeout_s: float) -> list[Any]:
        """Pulls the pages of an offer."""
        source, table = msgspec.msgpack.decode(bytes.fromhex(offered), type=tuple[Source, BlockTable])
        return self.read(name, source, table, timeout_s)

    def read(
        self,
        name: str,
        source: Source | list[Source],
        table: BlockTable,
        timeout_s: float,
        others: Sequence[BlockTable] = (),
    ) -> list[Any]:
        """Pulls the pages of a table. Returns the seconds that this took, the error (or ""), and whether every byte is
        right.
        """
        context = TextContext([*range(table.num_tokens), 7], MOST_PAGES * PAGE_SIZE, name)
        self.manager.external_claim(name)
        pending = self.manager.import_block_table(context, table, others=others)
        assert pending is not None
        begin = time.perf_counter()
        self.exchange.pull(name, source, pending, timeout_s=timeout_s)
        happened = self.until(lambda one: isinstance(one.event, PullEvent) and one.event.safe)
        seconds, error = time.perf_counter() - begin, happened.event.error
        right = False
        if error:
            self.manager.cancel_import(pending)
        else:
            self.manager.commit_import(context, pending, happened.proof)
            found = self.pages(name)[: pending.num_tokens // PAGE_SIZE]
            right = all(np.array_equal(page, contents(column)) for column, page in enumerate(found))
        self.manager.release(name)
        self.manager.reset_prefix_cache()
        shares = [{share.contact[1]: share.num_bytes for share in happened.event.shares}] if others else []
        return [seconds, error, right, *shares]

    def held(self) -> list[Any]:
        self.manager.check()
        pulls = len(self.exchange.open_pulls)
        return [self.manager.num_held_blocks, self.manager.num_leased_blocks, pulls, self.ended]

    def polled(self) -> list[Any]:
        happened = self.exchange.poll()
        self.ended |= {one.event.request_id: one.event.reason for one in happened if isinstance(one.event, LeaseOver)}
        return happened

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """Polls until a condition holds."""
        while True:
            for one in self.polled():
                if wanted(one):
                    return one
            self.exchange.wait(replica=0, timeout_s=_STEP_S)


def contents(column: int) -> Any:
    """Returns the bytes of a page of a prompt, by the page's index in the prompt."""
    return np.random.default_rng(column).integers(0, 256, PAGE_BYTES, np.uint8)


if __name__ == "__main__":
    side = Exchanged(sys.argv[1], sys.argv[2])
    serve(side, side.polled, _STEP_S)
    side.exchange.close()
    side.manager.close()
