"""On the CPU the calling thread makes the copies. It copies to host slots at once, and to pages when they are
needed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache import copies
from kvcache.copies import Copy, PageMover

PAGES, SLOTS = np.array([1, 2], np.int32), np.array([3, 0], np.int32)


class Shards:
    """Two shards of pages, slots of which each shard has one half of a row, and the mover between pages and slots."""

    def __init__(self) -> None:
        self.pages = [torch.arange(8).view(4, 2) + first for first in (0, 100)]
        self.host = torch.zeros((4, 32), dtype=torch.uint8)
        self.mover = PageMover([(self.pages[0], self.host[:, :16]), (self.pages[1], self.host[:, 16:])], None)

    def rows(self) -> list[list[int]]:
        return [shard.flatten().tolist() for shard in self.pages]


def test_a_copy_to_slots_has_ended_when_the_call_returns_and_includes_every_shard() -> None:
    shards = Shards()
    copy = shards.mover.store(PAGES, SLOTS)
    assert copy.begun
    assert copy.over()
    assert shards.host.view(torch.int64).tolist() == [[4, 5, 104, 105], [0] * 4, [0] * 4, [2, 3, 102, 103]]


@pytest.mark.parametrize("need", [Copy.begin, Copy.wait, Copy.order])
def test_a_copy_to_pages_is_made_once_and_only_when_it_is_needed(need: object) -> None:
    shards = Shards()
    before = shards.rows()
    copy = shards.mover.load(SLOTS, PAGES)
    assert (copy.begun, copy.over(), shards.rows()) == (False, False, before)
    assert callable(need)
    need(copy)
    assert (copy.begun, copy.over()) == (True, True)
    assert shards.rows() == [[0, 1, 0, 0, 0, 0, 6, 7], [100, 101, 0, 0, 0, 0, 106, 107]]
    shards.host[:] = 1
    need(copy)
    assert shards.rows()[0][2:6] == [0] * 4


def test_a_copy_that_was_interrupted_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards()
    copy = shards.mover.load(SLOTS, PAGES)

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "copy_pages", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy.order()
    assert not copy.begun
    copy.order()
    assert shards.rows()[1][2:6] == [0] * 4
