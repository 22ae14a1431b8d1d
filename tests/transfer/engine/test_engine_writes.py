"""WRITEs into a manager's pages. A page has a writer before its id is sent to the source. It keeps the writer until the
source can no longer write to the page.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest
import torch

from kvcache import KVCacheParams, PagedKVCacheManager, PendingImport, TextContext
from transfer import KVTransferEngine, TransferReqData

PAGES, PAGE_SIZE = 12, 256


class Side:
    """A manager with pages of 8 MiB, and the engine over its pools."""

    def __init__(self, name: str) -> None:
        params = KVCacheParams(torch.float16, 8, 128, enable_prefix_caching=True, page_size=PAGE_SIZE)
        memory = params.bytes_per_token(8) * PAGE_SIZE * PAGES
        self.manager = PagedKVCacheManager(params, 4, 2560, 8, ["cpu"], available_cache_memory=memory)
        pages = self.manager.total_num_pages + 1
        self.engine = KVTransferEngine(f"{name}-{uuid.uuid4().hex}", self.manager.device_tensors, total_num_pages=pages)
        self.free = self.manager.num_free_blocks

    def close(self) -> None:
        self.engine.cleanup()
        self.manager.close()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    made = Side("source"), Side("target")
    made[0].engine.connect(made[1].engine.metadata)
    made[1].engine.connect(made[0].engine.metadata)
    yield made
    for side in made:
        side.close()


def promised(source: Side, target: Side) -> tuple[TextContext, PendingImport]:
    """Returns a request that the source has computed, and the target's open import of the request. The ids of the
    import's pages may now be sent.
    """
    tokens = list(range(PAGE_SIZE * 9 + 5))
    theirs = TextContext(tokens, 2560)
    source.manager.external_claim(theirs.request_id)
    assert source.manager.maybe_reserve(theirs)
    theirs.update(7)
    source.manager.step([theirs])
    table = source.manager.block_table(theirs.request_id)
    source.manager.release(theirs.request_id)  # This test does not use the contents of the pages.
    ours = TextContext([*tokens, 7], 2560)
    target.manager.external_claim(ours.request_id)
    pending = target.manager.import_block_table(ours, table)
    assert pending is not None
    return ours, pending


def write(source: Side, target: Side, pending: PendingImport) -> TransferReqData:
    # The lists have opposite orders, so no two pages are copied as one run. From eight runs on, NIXL copies in a thread
    # of its own.
    pages = pending.parts[0].src_pages[::-1].tolist(), pending.parts[0].dst_pages.tolist()
    return source.engine.initiate_send_transfer(target.engine.metadata, *pages, 0, 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline


def nobody_else_gets(target: Side, pending: PendingImport) -> bool:
    """Returns whether no free page was promised to the source. The function takes all free pages to find out, and gives
    them back.
    """
    other = TextContext(list(range(10_000, 10_000 + PAGE_SIZE * target.manager.num_free_blocks - 1)), 2560)
    target.manager.external_claim(other.request_id)
    assert target.manager.maybe_reserve(other)
    taken = set(target.manager.get_req_blocks(other.request_id))
    target.manager.release(other.request_id)
    return not taken & set(pending.parts[0].dst_pages.tolist())


def given_up(source: Side, target: Side) -> tuple[TextContext, PendingImport, TransferReqData]:
    """Returns a WRITE that the target gives up while the WRITE is in flight. Sometimes the WRITE ends before the target
    gives it up.
    """
    for _ in range(10):
        context, pending = promised(source, target)
        request = write(source, target, pending)
        target.engine.abandon_transfer(request)
        if target.engine.quarantined_pages(0):
            return context, pending, request
        target.manager.cancel_import(pending)
        target.manager.release(context.request_id)
    pytest.fail("no WRITE took long enough to be given up")


def test_pages_whose_writer_is_given_up_are_nobodys_until_the_write_has_ended(sides: tuple[Side, Side]):
    source, target = sides
    context, pending, request = given_up(source, target)
    while target.engine.quarantined_pages(0):
        assert nobody_else_gets(target, pending)
        target.engine.poll()
        source.engine.is_complete(request)
    arrived = target.manager.device_tensors[0][0].clone()
    target.manager.cancel_import(pending)
    target.manager.release(context.request_id)
    until(lambda: source.engine.is_complete(request))
    # No byte has arrived after the pages left quarantine.
    assert torch.equal(target.manager.device_tensors[0][0], arrived)
    assert target.manager.num_free_blocks == target.free
    target.manager.check()


def test_pages_of_a_released_request_stay_reserved_while_its_import_is_open(sides: tuple[Side, Side]):
    source, target = sides
    context, pending = promised(source, target)
    target.manager.release(context.request_id)  # The client has disconnected. The source still has the page ids.
    assert target.manager.num_free_blocks < target.free
    assert nobody_else_gets(target, pending)
    request = write(source, target, pending)
    until(lambda: source.engine.is_complete(request) and target.engine.is_complete(request))
    target.manager.cancel_import(pending)
    assert target.manager.num_free_blocks == target.free
    target.manager.check()


def test_a_writer_that_is_gone_gives_the_pages_back_at_the_callers_word(sides: tuple[Side, Side]):
    source, target = sides
    context, pending, _ = given_up(source, target)
    assert nobody_else_gets(target, pending)
    # The call waits until the engine's copies have ended. It then destroys the engine's agents.
    source.engine.cleanup()
    target.engine.disconnect(source.engine.name)
    target.engine.release_quarantine(source.engine.name)
    assert not target.engine.quarantined_pages(0)
    target.manager.cancel_import(pending)
    target.manager.release(context.request_id)
    assert target.manager.num_free_blocks == target.free
