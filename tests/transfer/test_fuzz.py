from __future__ import annotations

import random
import time

import msgspec
import pytest

from tests.transfer import fuzz, fuzz_replies
from transfer.errors import MetadataError
from transfer.plan.boxes import Box, Group, ShardLayout
from transfer.pull.remote import RemoteEngine
from transfer.wire.messages import open_rank, sealed_rank


def test_no_incoming_bytes_end_a_process_or_fill_its_memory():
    said: list[str] = []
    assert fuzz.run(6000, random.randrange(1 << 32), said.append) == []
    assert any(line.startswith("sealed metadata") and "'refused'" in line and "'taken'" in line for line in said), said


def test_no_changed_reply_ends_the_reader_or_a_source():
    said: list[str] = []
    assert fuzz_replies.run(40, random.randrange(1 << 32), said.append) == []
    assert "vouched for by nobody" in said[0]
    assert "deaths of the reader 0, of the source 0" in said[0]


@pytest.mark.parametrize("count", [100, 400, 3000])
def test_boxes_that_cut_each_other_into_too_many_cells_are_refused_at_once(count: int):
    rng = random.Random(0)
    places = [tuple(rng.randrange(limit) for limit in (1 << 20, 1000, 1 << 20, 1 << 20)) for _ in range(count)]
    boxes = tuple(
        Box("kv", "bfloat16", 2, 0, 64 * at, 64 * count, first, (1, 1, 1, 1, 2), (0, 0, 0, 0, 2))
        for at, first in enumerate(places)
    )
    layout = ShardLayout((Group(1, 2, boxes),), (128 * count + 64,))
    ranks = [
        open_rank(sealed_rank(msgspec.structs.replace(fuzz.rank_metadata(rank), layout=layout), fuzz.KEY), fuzz.KEY)
        for rank in range(2)
    ]
    mine = open_rank(sealed_rank(fuzz.rank_metadata(0, "d"), fuzz.KEY), fuzz.KEY)
    begin = time.process_time()
    with pytest.raises(MetadataError, match="cells"):
        RemoteEngine(ranks, mine, {})
    # The time bounds the amount of work. Without the limit, the work would take terabytes.
    assert time.process_time() - begin < 5
