import numpy as np
import pytest
import torch

from kvcache.errors import (
    InterruptedCallError,
    InvariantError,
    NoFreeRowError,
    NoFreeStatePageError,
    StatePageError,
    UnknownRequestError,
)
from kvcache.params import CONV_KINDS, SSM_KIND, StateShape
from kvcache.pool.index import Digests, Pages
from kvcache.pool.journal import PageReader
from kvcache.pool.pages import HeldPages
from kvcache.states.state_pages import StatePages
from tests.kvcache.build import states_of

SHAPE = StateShape(layers=2, heads=4, head_dim=3, groups=2, d_state=5, kernel=4, conv_dtype=torch.float32)


def held(states: StatePages, request_id: str) -> HeldPages:
    lease = states.held(request_id)
    lease.pool.hold(lease.pages)
    return lease


def test_a_request_holds_one_page_until_it_releases_it() -> None:
    states = states_of(SHAPE, 2)
    assert [states.allocate("a"), states.allocate("b")] == [1, 2]
    assert (states.pool.free_count, states.num_held) == (0, 2)
    with pytest.raises(NoFreeRowError, match="'c': all 2 state pages"):
        states.allocate("c")
    states.release("a")
    with pytest.raises(UnknownRequestError, match="'a' holds no state page"):
        states.release("a")
    assert states.allocate("c") == 1
    states.check(["b", "c"])


def test_a_new_state_page_is_zero_whatever_it_held_before() -> None:
    states = states_of(SHAPE, 1)
    page = states.allocate("a")
    for tensor in states.tensors[0]:
        tensor[page] = 7
    states.advance(torch.tensor([page]), [12])
    assert states.tokens_of("a") == 12
    states.release("a")
    states.allocate("b")
    assert states.tokens_of("b") == 0
    assert not any(tensor.any() for tensor in states.tensors[0])


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_states_come_back_as_written_from_any_number_of_shards(shards: int) -> None:
    whole, split = states_of(SHAPE, 3), states_of(SHAPE, 3, ["cpu"] * shards)
    pages = torch.tensor([3, 1])
    for layer in range(2):
        conv, ssm = torch.randn(2, 12 + 10 + 10, 3), torch.randn(2, 4, 3, 5)
        for states in (whole, split):
            states.write(layer, pages, CONV_KINDS, conv)
            states.write(layer, pages, (SSM_KIND,), ssm)
            assert torch.equal(states.read(layer, pages, CONV_KINDS), conv)
            assert torch.equal(states.read(layer, pages, (SSM_KIND,)), ssm)
            assert torch.equal(states.read(layer, pages.flip(0), ("conv.C",)), conv.flip(0)[:, 22:])
    for kind, parts in split._views.each.items():  # Each shard holds its own part of the single shard's state.
        ((_, all_of_it),) = whole._views.each[kind]
        for layout, held in parts:
            assert torch.equal(held, all_of_it[:, :, layout.first_head : layout.first_head + layout.num_heads])
    for states in (whole, split):
        assert not any(tensor[[0, 2]].any() for tensors in states.tensors for tensor in tensors)


def test_a_step_that_ran_already_is_refused() -> None:
    states = states_of(SHAPE, 2)
    states.allocate("a")
    states.allocate("b")
    pages = states.pages_at(["a", "b"], [0, 0])
    assert pages.tolist() == [1, 2]
    states.advance(pages, [4, 1])
    assert states.pages_at(["b", "a"], [1, 4]).tolist() == [2, 1]
    with pytest.raises(StatePageError, match="'a' would run from token 0, but its state covers 4"):
        states.pages_at(["b", "a"], [1, 0])


def test_a_request_cannot_run_on_a_state_page_that_a_transfer_writes() -> None:
    states = states_of(SHAPE, 2)
    states.allocate("a")
    page = states.begin_import("a")
    for asked in (lambda: states.tokens_of("a"), lambda: states.pages_at(["a"], [0])):
        with pytest.raises(StatePageError, match="'a': state page 1 is being written"):
            asked()
    states.check(["a"], [page])
    states.commit_import("a", 9)
    assert states.pages_at(["a"], [9]).tolist() == [page]
    states.check(["a"])


def test_a_page_released_while_it_is_written_waits_for_the_transfer() -> None:
    states = states_of(SHAPE, 2)
    states.allocate("a")
    page = states.begin_import("a")
    states.release("a")
    states.check([], [page])
    assert (states.pool.free_count, states.num_held) == (1, 1)
    assert states.allocate("a") == 2, "the page that is being written was allocated"
    with pytest.raises(NoFreeRowError, match="request 'b': all 2 state pages are held"):
        states.allocate("b")
    states.cancel_import(page)
    assert states.allocate("b") == page
    states.check(["a", "b"])


def test_a_cancelled_import_leaves_the_page_as_allocated() -> None:
    states = states_of(SHAPE, 1)
    states.allocate("a")
    page = states.begin_import("a")
    states.tensors[0][3][page] = 9  # The import has written half of the state.
    states.cancel_import(page)
    assert states.tokens_of("a") == 0
    assert not any(tensor.any() for tensor in states.tensors[0])
    states.check(["a"])


def test_a_fork_continues_from_a_copy_of_the_state() -> None:
    states = states_of(SHAPE, 2, ["cpu", "cpu"])
    pages = torch.tensor([states.allocate("parent"), states.allocate("child")])
    states.write(1, pages[:1], (SSM_KIND,), torch.randn(1, 4, 3, 5))
    states.advance(pages[:1], [5])
    states.fork("parent", "child")
    assert states.tokens_of("child") == 5
    for tensors in states.tensors:
        assert tensors[3][1].any()
        assert all(torch.equal(tensor[1], tensor[2]) for tensor in tensors)


def test_check_names_the_inconsistency() -> None:
    def broken() -> StatePages:
        states = states_of(SHAPE, 3)
        states.allocate("a")
        states.check(["a"])
        return states

    states = broken()
    states.pool.release(np.array([1], np.int32))
    with pytest.raises(InvariantError, match="state pages: page 1 has 0 holders, but 1 are counted"):
        states.check(["a"])
    states = broken()
    states.begin_import("a")
    with pytest.raises(InvariantError, match="state pages: page 1 has 1 writers, but 0 are counted"):
        states.check(["a"])
    states = broken()
    states.pool._fresh_count -= 1
    with pytest.raises(InvariantError, match="state pages: page 2 is in 0 of the states"):
        states.check(["a"])
    states = broken()
    states.tensors[0][1][0, 0, 0] = 1
    with pytest.raises(InvariantError, match="state page 0"):
        states.check(["a"])
    with pytest.raises(InvariantError, match="'a', 'b'"):
        broken().check(["b"])


def test_a_leased_state_page_outlives_its_request_and_is_not_overwritten_once_readers_know_it() -> None:
    states = states_of(SHAPE, 2)
    page = states.allocate("a")
    first = held(states, "a")
    states.advance(states.pages_at(["a"], [0]), [5])
    states.advance(states.pages_at(["a"], [5]), [9])  # No block table has given the state after 5 tokens to a reader.
    states.tell("a")
    with pytest.raises(StatePageError, match="'a': its state after 9 tokens is leased"):
        states.pages_at(["a"], [9])
    second = held(states, "a")
    states.release("a")
    assert states.num_held == 1
    assert states.allocate("b") != page
    first.release()
    with pytest.raises(NoFreeStatePageError, match="request 'a': all 2 state pages are held"):
        states.allocate("a")
    second.release()
    states.check(["b"])
    assert states.allocate("a") == page
    assert states.pages_at(["a"], [0]).tolist() == [page]  # No block table gives this state page to readers any more.


def test_after_the_end_of_a_lease_the_request_continues_on_its_state_page() -> None:
    states = states_of(SHAPE, 1)
    states.allocate("a")
    lease = held(states, "a")
    states.advance(states.pages_at(["a"], [0]), [5])
    states.tell("a")
    lease.release()
    states.pages_at(["a"], [5])
    states.release("a")
    assert states.pool.free_count == 1


def digest(number: int) -> Digests:
    return np.full((1, 1), number, np.uint64)


def test_a_state_copy_is_found_by_its_digest_and_copied_into_the_page_of_the_request_that_resumes() -> None:
    states = states_of(SHAPE, 4)
    first, second = states.allocate("a"), states.allocate("b")
    states.write(1, torch.tensor([first]), (SSM_KIND,), torch.randn(1, 4, 3, 5))
    states.advance(torch.tensor([first]), [8])
    states.keep("a", digest(1), 7, passing=False)
    assert states.num_kept == 0  # The state covers 8 tokens, so no copy is kept for 7 tokens.
    states.keep("a", digest(1), 8, passing=False)
    assert (states.num_kept, states.num_held, states.pool.free_count) == (1, 2, 2)
    assert [states.kept_after(digest(number)).item() for number in (1, 2, 3)] == [True, False, False]
    states.resume("b", digest(1), 8)
    assert states.tokens_of("b") == 8
    assert torch.equal(states.tensors[0][3][first], states.tensors[0][3][second])
    with pytest.raises(InvariantError, match="'b': the cached state from which it resumes is gone"):
        states.resume("b", digest(2), 16)
    states.check(["a", "b"])


def test_a_passing_copy_is_replaced_by_the_next_copy_of_its_own_request_only() -> None:
    states = states_of(SHAPE, 5)
    pages = [states.allocate(name) for name in "ab"]
    states.advance(torch.tensor(pages), [8, 8])
    states.keep("a", digest(1), 8, passing=True)
    # The copy of digest 1 exists already. Only the next copy of "a" replaces it.
    states.keep("b", digest(1), 8, passing=True)
    states.keep("b", digest(2), 8, passing=True)
    assert states.num_kept == 2
    states.keep("a", digest(3), 8, passing=False)
    assert [int(states.kept_after(digest(number))[0]) for number in (1, 2, 3)] == [0, 1, 1]
    states.forget_copies()
    assert states.num_kept == 0
    states.keep("a", digest(2), 8, passing=False)
    # The passing copy of "b" was forgotten. The copy of digest 2 belongs to "a".
    states.keep("b", digest(4), 8, passing=False)
    assert [int(states.kept_after(digest(number))[0]) for number in (2, 4)] == [1, 1]
    states.check(["a", "b"])


class Came(PageReader):
    """Records the copies that lower tiers learn of."""

    def __init__(self) -> None:
        self.words: list[int] = []

    def came(self, pages: Pages, digests: Digests) -> None:
        assert len(pages) == len(digests)
        self.words += digests[:, 0].tolist()


def test_the_last_passing_copy_of_a_request_is_stored_in_lower_tiers_when_the_request_ends() -> None:
    states, came = states_of(SHAPE, 5), Came()
    states.pool.journal.read(came)
    page = states.allocate("a")
    for number, tokens in ((1, 8), (2, 16)):
        states.advance(torch.tensor([page]), [tokens])
        states.keep("a", digest(number), tokens, passing=True)
    assert came.words == []
    states.release("a")
    assert came.words == [2]
    page = states.allocate("b")
    states.advance(torch.tensor([page]), [8])
    states.keep("b", digest(3), 8, passing=False)
    assert came.words == [2, 3], "a permanent copy is stored in the lower tiers at once"
    states.release("b")
    assert came.words == [2, 3]
    states.check([])


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_a_request_continues_from_the_state_of_its_accepted_tokens(kept: bool, leased: bool) -> None:
    """If only the request knows the id of its state page, the page is exchanged with the page of the drafted state. If
    others know the id, the drafted state is copied to the request's state page.
    """
    states = states_of(SHAPE, 3)
    page = states.allocate("a")
    states.advance(torch.tensor([page]), [8])
    lease = held(states, "a") if leased else None
    assert states.draft("a")
    drafted = states.drafted["a"]
    for tensor in states.blocks[0]:
        tensor[page], tensor[drafted] = 5, 7
    states.advance(torch.tensor([drafted]), [10])
    for start in (7, 11):
        with pytest.raises(StatePageError, match=f"'a': {start} tokens are computed, but .* the states after 8 and 10"):
            states.goes_on_from("a", start)
    assert [states.goes_on_from("a", start) for start in (8, 9, 10)] == [8, 8, 10]
    states.settle("a", 10 if kept else 8)
    own = states.page_of("a")
    assert own == (drafted if kept and not leased else page)
    assert states.tokens_of("a") == (10 if kept else 8)
    assert all((tensor[own] == (7 if kept else 5)).all() for tensor in states.blocks[0])
    assert (states.drafted, states.num_held) == ({}, 1)
    if lease is not None:
        lease.release()
    states.check(["a"])


def test_a_request_that_resumes_forgets_the_state_of_its_drafted_tokens() -> None:
    """Otherwise it would count as waiting for the step of these tokens, or continue from their state."""
    states = states_of(SHAPE, 4)
    states.advance(torch.tensor([states.allocate("a")]), [8])
    states.keep("a", digest(1), 8, passing=False)
    page = states.allocate("b")
    assert states.draft("b")
    states.advance(torch.tensor([states.drafted["b"]]), [10])
    with pytest.raises(StatePageError, match="'b': its drafted tokens ran, but step was not called for them"):
        states.check_booked("b")
    with pytest.raises(StatePageError, match="'b': its drafted tokens ran, but step was not called for them"):
        states.pages_at(["a", "b"], [8, 0])
    states.resume("b", digest(1), 8)
    states.check_booked("b")
    assert (states.tokens_of("b"), states.goes_on_from("b", 8)) == (8, 8)
    states.settle("b", 10)
    assert (states.page_of("b"), states.tokens_of("b"), states.drafted) == (page, 8, {})
    states.check(["a", "b"])


@pytest.mark.parametrize("end", ["released", "imported"])
def test_a_request_that_ends_or_gets_another_state_gives_back_the_page_of_its_drafted_state(end: str) -> None:
    states = states_of(SHAPE, 2)
    page = states.allocate("a")
    assert states.draft("a")
    assert states.num_held == 2
    if end == "released":
        states.release("a")
    else:
        assert states.begin_import("a") == page
    assert (states.drafted, states.num_held) == ({}, end == "imported")
    states.check([] if end == "released" else ["a"], [] if end == "released" else [page])


def test_a_request_has_one_page_for_drafted_tokens_and_none_while_its_state_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = states_of(SHAPE, 3)
    states.allocate("a")
    assert states.draft("a")
    page = states.drafted["a"]
    assert states.draft("a")
    assert (states.drafted, states.num_held) == ({"a": page}, 2)
    page = states.begin_import("a")
    with pytest.raises(StatePageError, match="'a': state page 1 is being written by a transfer"):
        states.draft("a")
    states.cancel_import(page)

    def stops(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(states.pool, "make_room", stops)
        with pytest.raises(KeyboardInterrupt):
            states.draft("a")
    with pytest.raises(InterruptedCallError, match="draft: draft was interrupted"):
        states.draft("a")
    assert states.drafted == {}


def test_copies_give_way_to_requests_and_to_newer_ones() -> None:
    states = states_of(SHAPE, 3)
    states.advance(torch.tensor([states.allocate("a")]), [8])
    for number in (1, 2, 1, 3):  # Copy 1 is used again before copy 3 is made.
        states.keep("a", digest(number), 8, passing=False)
    assert [int(states.kept_after(digest(number))[0]) for number in (1, 2, 3)] == [1, 0, 1]
    states.allocate("b")
    states.allocate("c")
    assert (states.num_kept, states.pool.evictions, states.pool.free_count) == (0, 3, 0)
    states.keep("a", digest(4), 8, passing=False)
    assert states.num_kept == 0
    states.check(["a", "b", "c"])


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("end", ["committed", "cancelled"])
def test_only_cancelling_an_import_restores_what_its_state_page_held_before(end: str, *, cached: bool) -> None:
    """A cancelled import restores the earlier content of the state page. After the release, the page belongs to another
    request, whose state starts at zero. A second cancellation then restores zero.
    """
    states = states_of(SHAPE, 3)
    page = states.allocate("a")
    for tensor in states.blocks[0]:
        tensor[page] = 5
    states.advance(torch.tensor([page]), [8])
    if cached:
        states.keep("a", digest(1), 8, passing=False)
    # If the current state has a copy, the copy is held. Otherwise the content of the page is saved.
    assert states.begin_import("a", digest(1)) == page
    assert (states.num_held, len(states._saved)) == (1 + cached, not cached)
    for tensor in states.blocks[0]:
        tensor[page] = 7
    if end == "committed":
        states.commit_import("a", 8)
    else:
        states.cancel_import(page)
    held = 7 if end == "committed" else 5
    assert all((tensor[page] == held).all() for tensor in states.blocks[0])
    assert (states.tokens_of("a"), states.num_held) == (8, 1)
    states.release("a")
    assert states.allocate("b") == page
    assert states.begin_import("b") == page
    for tensor in states.blocks[0]:
        tensor[page] = 9
    states.cancel_import(page)
    assert all((tensor[page] == 0).all() for tensor in states.blocks[0])
    states.release("b")
    assert states.pool.free_count == 3
    states.check([])


class BroughtMeanwhile(PageReader):
    """Publishes a state while another state is evicted. A tier does the same if its copy to the device ends at this
    moment.
    """

    def __init__(self, states: StatePages, page: int, digest: Digests) -> None:
        self.states, self.page, self.digest, self.told = states, page, digest, list[int]()
        states.pool.journal.read(self, saves=True)

    def going(self, pages: Pages) -> None:  # noqa: ARG002
        if self.page:
            page, self.page = np.array([self.page], np.int32), 0
            self.states._tokens[page] = 8
            self.states.pool.index.publish(page, self.digest)
            self.states.pool.release(page)

    def came(self, pages: Pages, digests: Digests) -> None:  # noqa: ARG002
        self.told += pages.tolist()


def test_a_state_that_arrives_while_room_is_made_for_it_is_used_and_no_free_page_is_stored() -> None:
    states, (old, new) = states_of(SHAPE, 3), (np.array([[number]], np.uint64) for number in (1, 2))
    states.allocate("r")
    states.advance(torch.tensor([1]), [8])
    states.keep("r", old, 8, passing=False)
    reader = BroughtMeanwhile(states, states.pool.allocate_one(), new)
    states.keep("r", new, 8, passing=False)
    assert (states.pool.index.find(new).tolist(), {*reader.told}) == ([3], {3})
    assert (states.num_kept, states.pool.free_count) == (1, 2)
    states.check(["r"])


def test_a_copy_is_idle_unless_a_lease_holds_it() -> None:
    states = states_of(SHAPE, 3)
    states.advance(torch.tensor([states.allocate("a")]), [8])
    states.keep("a", digest(1), 8, passing=False)
    assert not any(states.bring_copy(digest(number), 8) for number in (1, 2)), "it is here, and no tier has the other"
    assert (states.num_held, states.pool.idle.count, states.num_kept) == (1, 1, 1)
    lease = states.held_copy(digest(1))
    lease.pool.hold(lease.pages)
    assert (states.num_held, states.pool.idle.count, states.num_kept) == (2, 0, 1)


def test_the_kinds_of_a_shard_say_where_its_states_lie() -> None:
    states = states_of(SHAPE, 3, ["cpu"] * 2)
    for shard, tensors in enumerate(states.tensors):
        kinds = states.kinds(shard)
        assert {kind.kind: kind.layout for kind in kinds} == states.layouts[shard]
        assert [kind.stride for kind in kinds] == [tensor.stride(0) * tensor.element_size() for tensor in tensors]
        assert [(kind.region, kind.offset) for kind in kinds] == [(at, 0) for at in range(len(tensors))]


def test_after_an_interrupt_requests_have_no_states_and_complete_copies_are_cached() -> None:
    states = states_of(SHAPE, 8)
    page = states.allocate("a")
    states.advance(torch.tensor([page]), [8])
    states.keep("a", digest(1), 8, passing=False)
    states.keep("a", digest(2), 8, passing=True)
    assert states.draft("a")
    for name, number in (("b", 1), ("c", 9)):  # one state has a copy, the other one is saved
        states.allocate(name)
        states.begin_import(name, digest(number))
    of_requests = states._page_of, states.drafted, states._passing, states._before, states._saved
    assert all(of_requests)
    states.rebuild([], np.zeros(9, np.int64))
    assert not any(of_requests)
    states.check([])
    assert (states.num_held, states.num_kept) == (0, 2)
    states.advance(torch.tensor([states.allocate("a")]), [4])
    states.keep("a", digest(3), 4, passing=True)
    assert states.num_kept == 3, "the passing copy of the request before is not replaced"
