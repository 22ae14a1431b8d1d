"""A copy that passes, and that another request lets stay, is copied to the host before it is written over."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcache.states.state_pages import StatePages
from kvcache.states.state_slabs import kind_offsets
from kvcache.states.state_tiers import StateTier
from kvcache.tiers.host_tier import HostTier
from tests.kvcache.states.state_moves import SHAPE


def digest(number: int) -> np.ndarray:
    return np.array([[number]], np.uint64)


@pytest.mark.parametrize("together", [True, False])
def test_a_passing_copy_that_another_request_lets_stay(together: bool) -> None:
    states = StatePages(SHAPE, 5)
    offsets = [kind_offsets(kinds) for kinds in states.layouts]
    host = HostTier([offsets[0][-1]], 4, 1, pinned=False)
    states.below = StateTier(host, states.places, offsets)
    pages = torch.tensor([states.allocate(name) for name in "ab"])
    for tensor in states.blocks[0]:
        tensor[pages] = 5
    states.advance(pages, [8, 8])
    states.keep("a", digest(1), 8, passing=True)
    states.keep("b", digest(1), 8, passing=False)
    assert not states.below.in_host(digest(1))[0]
    for tensor in states.blocks[0]:
        tensor[pages[0]] = 7
    states.advance(pages[:1], [16])
    if together:
        assert states.keep_passing(["a"], digest(2), np.array([16]))
    else:
        states.keep("a", digest(2), 16, passing=True)
    assert states.below.in_host(digest(1))[0]
    states.resume("b", digest(1), 8)
    assert all((tensor[pages[1]] == 5).all() for tensor in states.blocks[0])
    states.check(["a", "b"])


def test_files_are_asked_for_later_states_than_those_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    states, asked = StatePages(SHAPE, 3), list[list[int]]()
    offsets = [kind_offsets(kinds) for kinds in states.layouts]
    states.below = below = StateTier(HostTier([offsets[0][-1]], 4, 1, pinned=False), states.places, offsets)
    monkeypatch.setattr(below, "bring_newest", lambda digests, *, wait: asked.append(digests[:, 0].tolist()) or wait)
    page = torch.tensor([states.allocate("a")])
    states.advance(page, [16])
    prompt = np.concatenate([digest(number) for number in (1, 2, 3)])
    assert not states.bring_newest(prompt, wait=False)
    states.keep("a", digest(2), 16, passing=False)
    assert states.bring_newest(prompt, wait=True)
    assert asked == [[1, 2, 3], [3]]
