"""Staged pulls over real NIXL give the same bytes as direct pulls, even with few buffers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvcache.layout import PageLayout, as_blocks
from kvcache.replica.block_table import PageCopy
from tests.transfer.pull.test_pull import Rig
from tests.transfer.replicas import run
from transfer.errors import AgentError
from transfer.plan.plan import plan
from transfer.plan.shapes import dense
from transfer.pull import staging_area
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory, new_incarnation
from transfer.pull.replica import LeaseOffer, LeaseOver, ReplicaTransfer
from transfer.pull.source import Source
from transfer.pull.staging_area import _cut
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer

HEAD_MAJOR, TOKEN_MAJOR = "head,layer,side,token,dim", "layer,side,token,head,dim"
PAGES, LAYERS, HEADS, DIM = 48, 3, 4, 16


class Pool:
    """An engine with one rank, over pages of a given order and size."""

    def __init__(self, engine_id: str, order: str, page_size: int) -> None:
        self.page_size = page_size
        page = PageLayout("int16", 2, LAYERS, 2, 0, HEADS, page_size, DIM, order)
        flat = torch.randint(-(1 << 15), 1 << 15, (PAGES * page.page_elements,), dtype=torch.int16)
        self.blocks = as_blocks(flat, page, PAGES)
        incarnation = new_incarnation()
        self.rank = RankTransfer(
            RankIdentity(engine_id=engine_id, incarnation=incarnation),
            ShardMemory(dense(page, PAGES), [flat.data_ptr()]),
        )
        self.replica = ReplicaTransfer([self.rank], HandshakeClient())
        self.card = EngineCard(engine_id, incarnation, (self.rank.metadata,))
        self.events: list[object] = []

    def poll(self) -> None:
        self.replica.poll()
        self.events.extend(self.replica.events)
        self.replica.events.clear()

    def tokens(self, pages: list[int], start: int, stop: int) -> torch.Tensor:
        """`[sides, layers, tokens, heads, dim]`"""
        rows = self.blocks[pages].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        return rows[:, :, start:stop].clone()


@pytest.fixture
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[Pool, Pool]]:
    (there, here) = request.param
    made = Pool("p", *there), Pool("d", *here)
    yield made
    for pool in made:
        pool.replica.close()


@pytest.mark.parametrize(
    "pools",
    [
        ((HEAD_MAJOR, 16), (TOKEN_MAJOR, 16)),
        ((TOKEN_MAJOR, 16), (HEAD_MAJOR, 16)),
        ((HEAD_MAJOR, 64), (TOKEN_MAJOR, 16)),
        ((TOKEN_MAJOR, 8), (HEAD_MAJOR, 32)),
    ],
    indirect=True,
    ids=["to tokens first", "to heads first", "64 to 16", "8 to 32"],
)
@pytest.mark.parametrize("buffer_bytes", [staging_area.BUFFER_BYTES, 64 << 10])
def test_a_staged_pull_brings_the_bytes_of_the_source(
    pools: tuple[Pool, Pool], buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(staging_area, "BUFFER_BYTES", buffer_bytes)
    source, reader = pools
    start, stop = 64, 64 * 4 + 5
    rng = np.random.default_rng(0)
    theirs, ours = (rng.permutation(PAGES)[: -(-stop // pool.page_size)].tolist() for pool in pools)
    before = reader.tokens(ours, 0, start)
    lease = LeaseRef(new_lease_id(), 0, 30.0)
    source.replica.offer(LeaseOffer("r", lease))
    read: list[int] = []
    area = reader.rank._staging
    assert area is not None
    monkeypatch.setattr(area, "take", lambda take=area.take: read.append(1) or take())
    with HandshakeServer([source.card]) as server:
        reader.replica.pull("r", Source(server.endpoint, "p", lease), 30.0)
        pages = PageCopy(ours[start // reader.page_size :], theirs[start // source.page_size :], (start, stop))
        reader.replica.add_pages("r", [pages], last=True)
        run(source, reader, until=lambda: reader.events and len(source.events) > 1)
    assert reader.events == [PullEvent("r", "", safe=True)]
    assert isinstance(source.events[-1], LeaseOver)
    assert source.events[-1].reason == "read"
    assert torch.equal(reader.tokens(ours, start, stop), source.tokens(theirs, start, stop))
    assert torch.equal(reader.tokens(ours, 0, start), before)
    assert len(read) >= (1 if buffer_bytes > 1 << 20 else 3)
    assert len(area._free) == staging_area.BUFFERS


def test_a_part_whose_first_read_cannot_be_posted_gives_its_slab_back() -> None:
    """The first READ of a part cannot be posted. An earlier part may be in flight and use its own buffer."""
    page = PageLayout("int16", 2, LAYERS, 2, 0, HEADS, 16, DIM, HEAD_MAJOR)
    theirs = PageLayout("int16", 2, LAYERS, 2, 0, HEADS, 32, DIM, TOKEN_MAJOR)
    local, remote = dense(page, PAGES), dense(theirs, PAGES)
    memory = np.zeros(local.region_bytes[0], np.uint8)
    bases = (memory.ctypes.data,)
    area = staging_area.StagingArea(local, bases)
    planned = plan(local, remote, (bases, bases))
    parts = [staging_area.StagedPart(area, planned, 0, ([at, at + 1], [at], (0, 32))) for at in range(3)]
    rig = Rig()
    rig.agent.auto = False
    rig.agent.raise_at = {1: AgentError("no such address")}
    rig.open()
    rig.add(*parts)
    assert [event.safe for event in rig.polled()] == [False]
    assert len(area._free) == staging_area.BUFFERS - 1  # The part in flight still has its buffer of the staging area.
    rig.agent.end(0)
    assert [event.safe for event in rig.polled()] == [False, True]
    assert sorted(area._free) == [*range(staging_area.BUFFERS)]
    rig.agent.raise_at = {2: AgentError("no such address")}
    rig.open("next")
    rig.add(staging_area.StagedPart(area, planned, 0, ([0, 1], [0], (0, 32))), key="next")
    assert rig.polled()[-1].safe
    assert sorted(area._free) == [*range(staging_area.BUFFERS)]


def test_a_part_that_is_settled_again_does_not_give_back_a_slab_of_another_part() -> None:
    page = PageLayout("int16", 2, LAYERS, 2, 0, HEADS, 16, DIM, HEAD_MAJOR)
    theirs = PageLayout("int16", 2, LAYERS, 2, 0, HEADS, 32, DIM, TOKEN_MAJOR)
    local, remote = dense(page, PAGES), dense(theirs, PAGES)
    memory = np.zeros(local.region_bytes[0], np.uint8)
    bases = (memory.ctypes.data,)
    area = staging_area.StagingArea(local, bases)
    planned = plan(local, remote, (bases, bases))
    parts = [staging_area.StagedPart(area, planned, 0, ([0, 1], [0], (0, 32))) for _ in range(staging_area.BUFFERS + 1)]
    assert [part.is_ready() for part in parts] == [True] * staging_area.BUFFERS + [False]
    buffers = [part._buffer for part in parts[:-1]]
    assert sorted(buffers) == [*range(staging_area.BUFFERS)]
    ends = [int(part.local[-1, 0] + part.local[-1, 1]) - area.address for part in parts[:-1]]
    assert [(end - 1) // staging_area.BUFFER_BYTES for end in ends] == buffers, (
        "each part must read into its own buffer"
    )
    parts[-1].settle()  # The last part never got a buffer.
    assert area._free == []
    parts[0].settle()
    assert parts[-1].is_ready()
    for part in (parts[0], parts[0]):
        part.settle()
    assert area._free == [], "the buffer belongs to another part now"
    for part in (*parts, *parts):
        part.settle()
    assert sorted(area._free) == [*range(staging_area.BUFFERS)]


@pytest.mark.parametrize(("ours", "theirs"), [(4, 8), (8, 4), (4, 4)])
def test_every_piece_of_a_staged_pull_ends_at_a_page_end_of_both_sides(ours: int, theirs: int) -> None:
    """A buffer has room only for whole pages, so no page may be divided between two pieces."""
    pieces = list(_cut((range(100, 110), range(200, 210), (5, 29)), ours, theirs, 8))
    assert [tokens for *_, tokens in pieces] == [(5, 8), (8, 16), (16, 24), (24, 29)]
    for pages, first, size in ((0, 100, ours), (1, 200, theirs)):
        assert [int(piece[pages][0]) - first for piece in pieces] == [at // size - 5 // size for at in (5, 8, 16, 24)]
