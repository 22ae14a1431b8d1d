"""Scales of quantised pages between processes with different tensor parallelism.

Every byte of every page is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcache import BlockTable, TextContext
from kvcache.params import ScaleOf
from tests.forked import start
from tests.transfer.pull.scaled_source import PROMPT, ScaledSide, serve
from transfer import KVTransferEngine
from transfer.errors import InvalidEngineError
from transfer.pull.pull_state import PullEvent
from transfer.pull.source import Source

KINDS: list[ScaleOf] = ["token and head", "page and head", "page"]


@pytest.fixture
def source() -> Iterator[Callable[..., tuple[Source, BlockTable]]]:
    processes: list[Any] = []

    def make(*arguments: Any) -> tuple[Source, BlockTable]:
        process, pipe = start(serve, *arguments)
        processes.append(process)
        return pipe.recv()

    yield make
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
def reader() -> Iterator[Callable[..., ScaledSide]]:
    made: list[ScaledSide] = []

    def make(*arguments: Any) -> ScaledSide:
        made.append(ScaledSide("d", *arguments))
        return made[-1]

    yield make
    for side in made:
        side.exchange.close()
        side.manager.check()
        side.manager.close()


def pulled(side: ScaledSide, offer: Source, table: BlockTable) -> PullEvent:
    context = TextContext([*PROMPT, 1], 64, "d")
    side.manager.external_claim("d")
    pending = side.manager.import_block_table(context, table)
    assert pending is not None
    side.exchange.pull("k", offer, pending, 30.0)
    happened = side.until(lambda one: isinstance(one.event, PullEvent) and one.event.safe)
    assert isinstance(happened.event, PullEvent)
    if happened.event.error:
        side.manager.cancel_import(pending)
    else:
        side.manager.commit_import(context, pending, happened.proof)
    return happened.event


@pytest.mark.each_value
@pytest.mark.parametrize("scale_of", KINDS)
@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2)])
def test_scales_arrive_with_their_pages(source: Any, reader: Any, theirs: int, ours: int, scale_of: ScaleOf) -> None:
    offer, table = source(theirs, scale_of)
    side = reader(ours, scale_of)
    assert pulled(side, offer, table).error == ""
    pages = side.manager.get_req_blocks("d")[: len(table.groups[0])]
    assert len(pages) == 8
    for shard, rows in enumerate(side.rows()):
        expected = side.filled(rows, shard, pages)
        assert torch.equal(rows[pages], expected[pages])
    side.manager.release("d")


def test_scales_of_tokens_arrive_in_pages_of_another_size(source: Any, reader: Any) -> None:
    offer, table = source(1, "token and head", 8)
    side = reader(2, "token and head", 4)
    assert pulled(side, offer, table).error == ""
    pages = side.manager.get_req_blocks("d")[:7]
    for shard, rows in enumerate(side.rows()):
        assert torch.equal(rows[pages], side.filled(rows, shard, pages)[pages])
    side.manager.release("d")


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        (("page", 8), ("page", 4), r"shared by a page \(pages of 4\) here but by a page \(pages of 8\) at the source"),
        (("page", 4), ("page and head", 4), "scales: '[^']*of a page' .*'[^']*of a page and head'"),
        (("page", 4), (None, 4), "scales: '[^']*of a page' "),
    ],
)
def test_scales_of_another_kind_are_refused_by_name(
    source: Any, reader: Any, theirs: Any, ours: Any, told: str
) -> None:
    offer, table = source(1, *theirs)
    side = reader(1, *ours)
    assert re.search(told, pulled(side, offer, table).error)
    side.manager.release("d")


def test_an_engine_over_pages_as_rows_moves_scales_too(reader: Any) -> None:
    side = reader(1, "page")
    engine = KVTransferEngine("e", [list(side.rows())], total_num_pages=len(next(side.rows())))
    assert engine.bytes_per_page == side.manager.layouts[0].page_bytes
    engine.cleanup()
    with pytest.raises(InvalidEngineError, match="leaves gaps"):
        KVTransferEngine("e", side.manager.device_tensors, total_num_pages=len(next(side.rows())))
