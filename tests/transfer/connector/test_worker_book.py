"""Which pages a load asks for, and what is booked of it."""

from __future__ import annotations

from typing import Any

import pytest

from transfer.connector.config import GroupConfig, StatePart
from transfer.connector.metadata import LoadRequest
from transfer.connector.worker_book import Loads
from transfer.errors import InvalidTransferError
from transfer.pull.pull_state import BlocksOfGroup, LeaseRef, PullEvent

FULL = GroupConfig(layers={"a": 0}, block_size=8, head_dim=4)
KERNEL = GroupConfig(layers={"a": 0}, block_size=8, kernel_block_size=2, head_dim=4)
WINDOW = GroupConfig(layers={"w": 1}, kind="sliding_window", window=10, block_size=8, head_dim=4)
STATE = GroupConfig(layers={"m": 2}, kind="mamba", state=(StatePart(kind="ssm", units=4),))


def asked(local: Any, remote: Any, tokens: tuple[int, int], **changes: Any) -> LoadRequest:
    start, stop = tokens
    options = {
        "address": "tcp://x:1",
        "engine_id": "p",
        "lease": LeaseRef(1, 0, 30.0),
        "local_block_ids": local,
        "first_blocks": (start // 8,) * len(local),
        "remote_block_ids": remote,
        "num_computed_tokens": start,
        "num_tokens": stop,
        "remote_num_tokens": stop,
        "total_tokens": stop,
    }
    return LoadRequest(**(options | changes))


def pages(found: BlocksOfGroup) -> tuple[list[int], tuple[int, int], int]:
    return [int(page) for page in found.local], found.tokens, found.needed


def make(*groups: GroupConfig, whole_pages: bool = False) -> Loads:
    return Loads(groups, whole_pages=whole_pages)


def test_the_whole_of_a_request() -> None:
    load, (group,) = make(FULL).add("r", asked(((4, 5, 6),), ((7, 8, 9),), (0, 20)))
    assert pages(group) == ([4, 5, 6], (0, 20), 0)
    assert (group.blocks, group.end) == ((7, 8, 9), 20)
    assert (load.closed, load.silent, load.blocks, load.pages) == (True, False, {4, 5, 6}, [[4, 5, 6]])


def test_blocks_beyond_the_tokens_are_left_alone() -> None:
    _, (group,) = make(FULL).add("r", asked(((4, 5, 6, 7),), ((7, 8, 9),), (0, 20)))
    assert pages(group)[0] == [4, 5, 6]


def test_kernel_pages_of_blocks() -> None:
    _, (group,) = make(KERNEL).add("r", asked(((3, 5),), ((7, 8),), (0, 11)))
    assert pages(group)[0] == [12, 13, 14, 15, 20, 21]
    _, (group,) = make(KERNEL).add("s", asked(((3, 5),), ((7, 8),), (5, 11)))
    assert pages(group)[0] == [14, 15, 20, 21]


def test_a_window_is_clipped_to_what_it_needs() -> None:
    _, (group,) = make(WINDOW).add("r", asked(((1, 2, 3, 4, 5),), ((9,) * 5,), (0, 40)))
    assert pages(group) == ([4, 5], (24, 40), 31)
    _, (group,) = make(WINDOW).add("s", asked(((4, 5),), ((9,) * 5,), (0, 40), first_blocks=(3,)))
    assert pages(group) == ([4, 5], (24, 40), 31)
    _, (group,) = make(WINDOW).add("t", asked(((5,),), ((9,) * 5,), (32, 40)))
    assert pages(group) == ([5], (32, 40), 32)
    with pytest.raises(InvalidTransferError, match="our blocks begin with token 32, token 24 is the first to read"):
        make(WINDOW).add("u", asked(((5,),), ((9,) * 5,), (0, 40), first_blocks=(4,)))


def test_a_state_is_one_page_and_comes_with_the_last_tokens() -> None:
    loads = make(FULL, STATE)
    _, (_, state) = loads.add(
        "r", asked(((4, 5), (3,)), ((7, 8, 9), (2,)), (0, 16), total_tokens=20, remote_num_tokens=16)
    )
    assert pages(state)[1] == (0, 0)
    _, (_, state) = loads.add("r", asked(((6,), (3,)), ((7, 8, 9), (2,)), (16, 20)))
    assert pages(state)[:2] == ([3], (16, 20))
    assert state.blocks == (2,)
    with pytest.raises(InvalidTransferError, match="group 1: the source's state is that after 24 tokens, 20 are to be"):
        loads.add("s", asked(((4, 5, 6), (3,)), ((7, 8, 9), (2,)), (0, 20), remote_num_tokens=24))


def test_a_group_with_nothing_to_load_reads_nothing() -> None:
    load, (full, window) = make(FULL, WINDOW).add("r", asked(((), ()), ((5, 6), (7,)), (16, 16)))
    assert (pages(full), pages(window)) == (([], (0, 0), 0), ([], (0, 0), 0))
    assert load.silent


def test_too_few_blocks_are_not_nothing() -> None:
    load, (group,) = make(FULL).add("r", asked(((),), ((5, 6),), (0, 16)))
    assert group.tokens == (0, 16)
    assert not load.silent


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asked(((1,), (2,)), ((1,),), (0, 8)), r"blocks of \[2, 2, 1\] groups, there are 1"),
        (asked(((1,),), ((1,),), (0, 8), remote_num_tokens=7), "tokens 0 to 8 of 8, the source has computed 7"),
        (asked(((1,),), ((1,),), (-8, 8)), "tokens -8 to 8"),
        (
            asked(((1,),), ((1,),), (0, 12), total_tokens=20),
            "token 12, before which more is to follow, is not at the end",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_of_its_request(request_: LoadRequest, message: str) -> None:
    loads = make(FULL)
    with pytest.raises(InvalidTransferError, match=f"request 'r'.*{message}"):
        loads.add("r", request_)
    load = loads.find("r")
    loads.fail(load, "why", safe=True)
    assert loads.failed == {"r": "request 'r': why"}
    assert loads.received == {"r"}
    assert len(loads) == 0


def test_host_buffers_take_whole_pages() -> None:
    with pytest.raises(InvalidTransferError, match="token 5 is within a page of 2"):
        make(KERNEL, whole_pages=True).add("r", asked(((3, 5),), ((7, 8),), (5, 11)))
    make(KERNEL, whole_pages=True).add("r", asked(((3, 5),), ((7, 8),), (6, 11)))


def test_a_load_that_is_whole_takes_no_more_until_it_has_ended() -> None:
    loads = make(FULL)
    loads.check_new(["r"])
    load, _ = loads.add("r", asked(((4,),), ((7,),), (0, 8), total_tokens=20))
    loads.check_new(["r"])
    loads.add("r", asked(((5, 6),), ((7, 8, 9),), (8, 20)))
    with pytest.raises(InvalidTransferError, match="request 'r': its load has not ended yet"):
        loads.check_new(["q", "r"])
    loads.on_event(PullEvent(load.key, "", safe=True))
    loads.check_new(["r"])


def test_a_failure_is_told_once_with_every_group_s_blocks_and_its_end_later() -> None:
    loads = make(FULL, WINDOW)
    load, _ = loads.add("r", asked(((4, 5), (14, 15)), ((7, 8), (9, 9)), (0, 16)))
    assert loads.on_event(PullEvent(load.key, "lost", safe=False)) is None
    assert (loads.failed, loads.received, loads.bad_blocks) == ({"r": "request 'r': lost"}, set(), {4, 5, 14, 15})
    loads.failed, loads.bad_blocks = {}, set()
    assert loads.on_event(PullEvent(load.key, "lost", safe=True)) is None
    assert (loads.failed, loads.received, loads.bad_blocks) == ({}, {"r"}, set())
    assert loads.on_event(PullEvent(load.key, "lost", safe=True)) is None


def test_what_was_given_up_is_no_failure_and_what_was_silent_is_nothing() -> None:
    loads = make(FULL)
    load, _ = loads.add("r", asked(((4, 5),), ((7, 8),), (0, 16)))
    load.cancelled = True
    loads.on_event(PullEvent(load.key, "left", safe=True))
    assert (loads.failed, loads.received, loads.bad_blocks) == ({}, {"r"}, set())
    silent, _ = loads.add("s", asked(((),), ((7, 8),), (16, 16)))
    loads.on_event(PullEvent(silent.key, "no answer", safe=True))
    assert (loads.failed, loads.received, len(loads)) == ({}, {"r"}, 0)


def test_names_of_pulls_are_not_used_twice() -> None:
    loads = make(FULL)
    keys = set()
    for _ in range(3):
        load, _ = loads.add("r", asked(((4, 5),), ((7, 8),), (0, 16)))
        keys.add(load.key)
        assert loads.on_event(PullEvent(load.key, "", safe=True)) is load
    assert len(keys) == 3


def test_a_layer_is_there_when_every_part_of_the_load_has_brought_it() -> None:
    loads = make(FULL)
    load, _ = loads.add("r", asked(((4,),), ((7,),), (0, 8), total_tokens=20))
    load.arrived += [range(2), range(2, 4)]
    assert not load.has(0)
    loads.add("r", asked(((5, 6),), ((7, 8, 9),), (8, 20)))
    assert not load.has(0)
    load.arrived.append(range(2))
    assert [load.has(layer) for layer in range(4)] == [True, True, False, False]
