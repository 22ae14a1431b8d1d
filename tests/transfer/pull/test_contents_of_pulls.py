"""The oracle of contents, with hand-overs that are pulled over NIXL instead of copied between tensors."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvcache import ImportProof, KVCacheError, PendingImport
from tests.kvcache.contents_oracle import KINDS, HandOver, Pair, Request
from transfer.pull.exchange import PageExchange
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import Offered
from transfer.pull.source import Source

LONG_S = 300.0  # no lease and no pull ends because the machine is busy


class Pulled(HandOver):
    """An import whose pages are pulled under a lease of the source's exchange."""

    def __init__(self, pair: PairOverNixl, request: Request, offer: Source) -> None:
        source, reader = pair.engines
        super().__init__(source, reader, request, source.manager.block_table(request.name))
        self.pair, self.offer, self.is_leased = pair, offer, True
        self.is_posted = False

    def begin(self) -> bool:
        if begun := super().begin():
            return begun
        self.pair.exchanges[0].revoke(self.offer, "the reader has no place for it")
        return False

    def post(self) -> None:
        """Post the READs. They and the fence go on while both engines do other things."""
        if self.pending is not None and self.pending.needs_copy and not self.is_posted:
            self.pair.exchanges[1].pull(self.request.name, self.offer, self.pending, LONG_S)
            self.is_posted = True

    def copied(self, pending: PendingImport) -> ImportProof:
        """Pull the pages, and wait until the fence has passed."""
        if not pending.needs_copy:
            self.pair.exchanges[0].revoke(self.offer, "the reader has all pages")
            return super().copied(pending)
        self.post()
        key = self.request.name
        self.pair.until(lambda: key in self.pair.proofs)
        self.reader.reached["pulls"] += 1
        return self.pair.proofs.pop(key)


class PairOverNixl(Pair):
    """Two engines whose exchanges hand the pages over."""

    hand_overs = 10

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self.exchanges = [PageExchange(engine.manager, engine.name) for engine in self.engines]
        self.granted: set[int] = set()
        self.proofs: dict[str, ImportProof] = {}

    def poll(self) -> None:
        for exchange in self.exchanges:
            for happened in exchange.poll():
                event = happened.event
                if isinstance(event, Offered):
                    assert not event.error, event
                    self.granted.add(event.lease_id)
                elif isinstance(event, PullEvent) and event.safe:
                    assert happened.proof is not None, event
                    self.proofs[event.key] = happened.proof

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not condition():
            self.poll()
            time.sleep(1e-4)
            assert time.monotonic() < deadline

    def further_moves(self) -> list[tuple[float, Callable[[], object]]]:
        """Pulls go on between other calls, and one engine often gets the weights that the other has by now."""
        return [(3, self.post), (1, self.poll), (0.7, self.follow)]

    def post(self) -> None:
        for one in self.open:
            assert isinstance(one, Pulled)
            one.post()
        if self.open and self.random.random() < 0.4:
            self.follow()

    def follow(self) -> None:
        ahead, behind = self.random.sample(self.engines, 2)
        reached = ahead.reached
        reached["switches while pages are read"] += any(isinstance(one, Pulled) and one.is_posted for one in self.open)
        behind.switch(ahead.version)

    def exported(self, request: Request) -> HandOver | None:
        offer = self.exchanges[0].offer(request.name, LONG_S)
        if offer is None:
            return None
        self.until(lambda: offer.lease.lease_id in self.granted)
        request.pulls += 1
        try:
            return Pulled(self, request, offer)
        except KVCacheError:
            self.exchanges[0].revoke(offer, "its table promises more than can be kept")
            raise

    def end_hand_overs(self) -> None:
        """Also wait until the source has given back all pages that it leased to the reader, and close the exchanges."""
        super().end_hand_overs()
        for engine in self.engines:
            while engine.leases:
                engine.end_lease()
        self.until(lambda: not self.engines[0].manager.num_leased_blocks)
        for exchange in self.exchanges:
            exchange.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_that_was_pulled_sees_only_its_own_kv(kind: str) -> None:
    reached = PairOverNixl(kind, 0).run(200)
    for seed in range(1, 12):  # engines with different weights refuse each other, so some seeds pull nothing
        if seed > 1 and reached["pulls"] > 1 and reached["switches while pages are read"]:
            break
        reached += PairOverNixl(kind, seed).run(200)
    assert reached["pulls"] > 1, reached
    assert reached["switches while pages are read"], reached
