"""Pulls from and into pools that torch is asked to move, or that have moved: they succeed, or the reason is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.multiprocessing

from kvcache import MovedMemoryError, TextContext
from tests.transfer.pull.test_lending import LONGER, asked, computed
from tests.transfer.pull.test_ownership import Reader, Side, check_accepted, leased
from transfer.pull.replica import LeaseOver, Offered

MOVED = "was moved from 0x"


@pytest.fixture
def sides() -> Iterator[tuple[Side, Reader]]:
    made = Side("p", caching=True), Reader("d", caching=True)
    yield made
    for side in made:
        side.exchange.close()
        side.manager.close()


def move(side: Side) -> None:
    """Makes the side's pages lie at another address. The old memory stays mapped."""
    blocks = side.manager.device_tensors[0][0]
    blocks.set_(blocks.clone())


def test_a_hand_over_goes_on_after_a_tensor_of_either_pool_was_to_be_sent(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    request = source.compute()
    offer, table = source.offer(), source.manager.block_table("r")
    assert source.manager.maybe_reserve(request)
    ours, theirs = torch.multiprocessing.Pipe()
    with ours, theirs:
        for side, batch in ((source, [request]), (reader, [])):
            for one in side.manager.fetch(batch):
                with pytest.raises(MovedMemoryError, match="torch cannot move this memory"):
                    ours.send(one.blocks[1:2])
    check_accepted(source, reader, offer, table)


@pytest.mark.parametrize("when", ["before the pull", "before its pages are named", "before its event is read"])
def test_a_pull_into_a_pool_that_has_moved_says_so(sides: tuple[Side, Reader], when: str) -> None:
    source, reader = sides
    offer, _, pending = leased(source, reader)
    if when == "before the pull":
        move(reader)
    reader.open(offer)
    if when == "before its pages are named":
        move(reader)
    reader.exchange.read(0, "k", pending, last=True)
    if when == "before its event is read":
        reader.exchange.wait(0, 60.0)
        move(reader)
    event, proof = reader.end(source)
    assert MOVED in event.error
    assert "tensor 0 of shard 0" in event.error
    assert "gone" not in event.error
    assert proof is None
    with pytest.raises(MovedMemoryError):
        reader.manager.check()
    reader.manager.cancel_import(pending)
    reader.manager.release("r")
    assert reader.idle
    source.until(lambda: source.of(LeaseOver))  # the source gets its pages back


def test_a_source_that_has_moved_grants_no_lease_and_ends_those_that_it_has(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    offer, _, pending = leased(source, reader)
    move(source)
    source.until(lambda: source.of(LeaseOver))
    (over,) = source.of(LeaseOver)
    assert isinstance(over.event, LeaseOver)
    assert MOVED in over.event.reason
    event, proof = reader.pull(source, offer, pending)
    assert "no longer held the pages" in event.error
    assert proof is None
    reader.manager.cancel_import(pending)
    source.compute()
    assert source.exchange.offer("r", 30.0) is not None
    source.until(lambda: len(source.of(Offered)) == 2)
    refused = source.of(Offered)[-1].event
    assert isinstance(refused, Offered)
    assert refused.error.startswith("request 'r': tensor 0 of shard 0: this memory was moved")
    assert source.manager.num_leased_blocks == 0


def test_a_source_that_has_moved_lends_no_page(sides: tuple[Side, Reader]) -> None:
    source, reader = sides
    computed(source, LONGER)
    move(source)
    assert MOVED in asked(reader, source, TextContext(LONGER, 32, "r")).error
