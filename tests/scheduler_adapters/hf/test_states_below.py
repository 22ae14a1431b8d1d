"""Recurrent states in host memory and in files. The device has far too little memory, and the tokens are still the
model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.errors import PoolTooSmallError
from kvcache.replica.context import TextContext
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Request, ServingLoop
from tests.kvcache.build import proven, state_pages
from tests.kvcache.tiers.stored_objects import StoredObjects
from tests.scheduler_adapters.hf.states_below import below, found_share, turns_of
from tests.scheduler_adapters.serving import assert_nothing_held, loop_of, own_tokens, serve, tokens_of

pytestmark = pytest.mark.slow

MODEL = "bamba"
PAGE, NEW = 8, 12
USERS = ("Who wrote it?", "And who read it, some time later?", "x", "Was it long?")
PROMPTS = [ByteTokenizer().encode(f"{text} {at} What all of these ask for.") for at, text in enumerate(USERS)]


@pytest.fixture(scope="module", params=["bamba", "qwen3_next", "lfm2", "kimi_linear"])
def each_model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    return shared_model(request.param)


def turns(loop: ServingLoop, model: Any, asked: int = 2) -> None:
    """Runs the turns of all users. All answers must be the model's own."""
    for name, prompt, tokens in turns_of(model, PROMPTS, asked, NEW):
        assert tokens_of(serve(loop, [Request(name, prompt, NEW)])) == [tokens]


@pytest.mark.parametrize(("slabs", "budget", "shards"), [(True, 64, 1), (False, 7, 2)])
def test_conversations_that_the_device_has_no_room_for_come_back_from_the_host(
    each_model: Any, slabs: bool, budget: int, shards: int
) -> None:
    """Each user's turn evicts the pages of the other three users. The pages of every turn after the first are found in
    host memory.
    """
    manager = below(each_model, slabs=slabs, shards=shards)
    loop = loop_of(manager, each_model, budget)
    turns(loop, each_model)
    metrics = manager.metrics
    assert metrics.h2d_states_copied == manager.states[0].hits == 4
    assert metrics.d2h_states_copied >= 8
    assert metrics.h2d_blocks_copied
    assert metrics.evictions
    # The last token of the previous answer was never run, so its last page has to run again with everything after it.
    asked = [len(prompt) for _, prompt, _ in turns_of(each_model, PROMPTS, 1, NEW)]
    assert metrics.cache_tokens == sum((count + NEW - 1) // PAGE * PAGE for count in asked)
    assert_nothing_held(manager)


@pytest.mark.parametrize("slabs", [True, False])
def test_another_process_continues_from_files(each_model: Any, slabs: bool, tmp_path: Path) -> None:
    """A manager with one form of memory finds the pages and states of a manager with the other form."""
    first = below(each_model, slabs=slabs, folder=tmp_path)
    asked = list(turns_of(each_model, PROMPTS, 2, NEW))
    for name, prompt, tokens in asked[: len(PROMPTS)]:
        assert tokens_of(serve(loop_of(first, each_model), [Request(name, prompt, NEW)])) == [tokens]
    first.close()
    assert first.metrics.file_states_written >= len(PROMPTS)
    again = below(each_model, slabs=not slabs, folder=tmp_path)
    loop = loop_of(again, each_model)
    for name, prompt, tokens in asked[len(PROMPTS) :]:
        assert tokens_of(serve(loop, [Request(name, prompt, NEW)])) == [tokens]
    metrics = again.metrics
    assert again.states[0].hits == metrics.h2d_states_copied == metrics.file_states_read == len(PROMPTS)
    assert metrics.cache_tokens == sum((len(prompt) + NEW - 1) // PAGE * PAGE for _, prompt, _ in asked[: len(PROMPTS)])
    again.close()
    assert_nothing_held(again)


@pytest.mark.parametrize("slabs", [True, False])
def test_another_machine_continues_from_an_object_store(each_model: Any, slabs: bool) -> None:
    """Another machine also continues if the hit ends within an object of pages. A damaged object is a miss."""
    store = StoredObjects()
    over = {"object_tier_io": store, "file_tier_key": "a model", "object_tier_pages": 4}
    first = below(each_model, slabs=slabs, over=over)
    asked = list(turns_of(each_model, PROMPTS, 2, NEW))
    for name, prompt, tokens in asked[: len(PROMPTS)]:
        assert tokens_of(serve(loop_of(first, each_model), [Request(name, prompt, NEW)])) == [tokens]
    first.close()
    assert first.metrics.object_states_written >= len(PROMPTS)
    found = [(len(prompt) + NEW - 1) // PAGE for _, prompt, _ in asked[: len(PROMPTS)]]
    assert any(pages % 4 for pages in found)
    again = below(each_model, slabs=not slabs, over=over)
    loop = loop_of(again, each_model, 7)
    for name, prompt, tokens in asked[len(PROMPTS) :]:
        assert tokens_of(serve(loop, [Request(name, prompt, NEW)])) == [tokens]
    metrics = again.metrics
    assert again.states[0].hits == metrics.h2d_states_copied == metrics.object_states_read == len(PROMPTS)
    assert metrics.cache_tokens == sum(found) * PAGE
    again.close()
    assert_nothing_held(again)
    for key, content in store.pages.items():
        store.objects[key] = content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
    last = below(each_model, slabs=slabs, over=over)
    name, prompt, tokens = asked[-1]
    assert tokens_of(serve(loop_of(last, each_model), [Request(name, prompt, NEW)])) == [tokens]
    assert last.metrics.object_blocks_refused
    assert last.states[0].hits == 0
    last.close()
    assert store.open == 0


def test_a_reservation_without_an_announcement_waits_for_the_pages_in_files(model: Any, tmp_path: Path) -> None:
    first = below(model, folder=tmp_path)
    serve(loop_of(first, model), [Request("first", PROMPTS[1], NEW)])
    first.close()
    again = below(model, folder=tmp_path)
    context = TextContext(PROMPTS[1], 4096, "again")
    again.external_claim("again")
    assert again.maybe_reserve(context)
    assert context.start_idx == (len(PROMPTS[1]) - 1) // PAGE * PAGE
    assert (again.states[0].hits, again.metrics.file_states_read) == (1, 1)
    again.close()


def test_a_host_tier_finds_what_a_device_with_room_for_all_does(each_model: Any) -> None:
    swapping = {"enable_kvcache_swapping_to_host": False}
    alone, tiered, roomy = (
        found_share(loop_of(manager, each_model), each_model, PROMPTS, 2, NEW)
        for manager in (
            below(each_model, over=swapping),
            below(each_model),
            below(each_model, pages=400, over=swapping),
        )
    )
    assert alone < tiered == roomy


def asked_again(manager: Any, model: Any) -> None:
    """Serves the first user's prompt, other prompts that evict it from the device, and then the first prompt again."""
    loop = loop_of(manager, model)
    for at in (0, 1, 2, 3, 0):
        answer = own_tokens(model, PROMPTS[at], NEW)
        assert tokens_of(serve(loop, [Request("r", PROMPTS[at], NEW)])) == [answer]


def test_a_full_host_keeps_no_state_and_refuses_nothing(model: Any) -> None:
    manager = below(model, host_states=2, checks=False)  # The checks do not know that this test holds slots.
    pool = manager._replicas.state_tiers.host.pool
    slots = pool.allocate(2)
    asked_again(manager, model)
    assert manager.metrics.d2h_states_copied == manager.metrics.h2d_states_copied == 0
    pool.release(slots)
    asked_again(manager, model)
    assert manager.metrics.d2h_states_copied
    assert_nothing_held(manager)


class SlowCopy:
    """A copy whose bytes move at once, but which does not report its end."""

    begun = True
    is_over = False

    def begin(self) -> None: ...
    def order(self) -> None: ...

    def over(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        SlowCopy.is_over = True


def test_a_page_and_a_slot_stay_with_a_slow_copy(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = below(model, rows=1, slabs=False)
    tier = manager.states[0].below
    serve(loop_of(manager, model), [Request("r", PROMPTS[1], NEW)])
    manager.flush_tiers()
    manager.states[0].forget_copies()
    load = tier._mover.load

    def slowly(*rows: Any) -> SlowCopy:
        load(*rows).begin()
        return SlowCopy()

    tier._mover.load = slowly
    context = TextContext(PROMPTS[1], 4096, "a")
    manager.external_claim("a")
    assert manager.maybe_reserve(context)
    manager.check()
    assert context.start_idx
    # The device starts the request after the copy, so the request may run.
    assert manager.states[0].tokens_of("a") == context.start_idx
    manager.release("a")
    manager.check()
    assert manager.states[0].num_held == 1
    assert tier.host.pool.holders.sum() == 1
    monkeypatch.setattr(SlowCopy, "is_over", True)
    manager._replicas.state_tiers.tick()
    assert tier.host.pool.holders.sum() == 0
    assert_nothing_held(manager)


def test_a_reset_forgets_states_below(model: Any, tmp_path: Path) -> None:
    manager = below(model, folder=tmp_path)
    asked_again(manager, model)
    manager.flush_tiers()
    manager.reset_prefix_cache()
    before = manager.metrics.cache_tokens
    asked_again(manager, model)
    # Only the second request of `asked_again` finds pages.
    assert manager.metrics.cache_tokens - before == (len(PROMPTS[0]) - 1) // PAGE * PAGE
    manager.reset_prefix_cache()
    manager.close()
    assert not files_of_states_in(tmp_path)


def files_of_states_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/epoch-*/*.pages"))


@pytest.mark.parametrize("end", ["cancel", "commit", "release"])
@pytest.mark.parametrize("slabs", [True, False])
def test_an_import_that_begins_with_a_state_from_below(model: Any, slabs: bool, end: str) -> None:
    source = below(model, pages=60)
    prompt, answer = PROMPTS[1], own_tokens(model, PROMPTS[1], NEW)
    turn = [*prompt, *answer[:4]]
    serve(loop_of(source, model), [Request("s", turn, 1, hold_pages=True)])
    target = below(model, slabs=slabs)
    loop = loop_of(target, model)
    serve(loop, [Request("t", prompt, 1)])
    target.flush_tiers()
    target.states[0].forget_copies()
    table = source.block_table("s")
    context = loop.context_for(Request("r", [*turn, answer[4]], NEW - 5))
    target.external_claim("r")
    pending = target.import_block_table(context, table)
    had = (len(prompt) - 1) // PAGE * PAGE
    assert context.start_idx == had
    there, here = state_pages(pending)
    if end == "commit":
        for mine, theirs in zip(target.states[0].blocks[0], source.states[0].blocks[0], strict=True):
            mine[here] = theirs[there]
        target.device_tensors[0][0][pending.parts[0].dst_pages] = source.device_tensors[0][0][
            pending.parts[0].src_pages
        ]
        target.commit_import(context, pending, proven(target, pending))
    else:
        for blocks in target.states[0].blocks[0]:
            blocks[here] = 7
        if end == "release":
            target.release("r")
        target.cancel_import(pending)
    if end == "release":
        assert tokens_of(serve(loop, [Request("r", turn, NEW - 4)])) == [answer[4:]]
    else:
        loop.adopt(Request("r", turn, NEW - 4), context)
        tokens = [answer[4]]
        while loop.has_work:
            tokens += [int(output.token or 0) for output in loop.step()]
        assert tokens == answer[4:]
    assert_nothing_held(target)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tier_state_share": 0.0}, "tier_state_share is 0.0: the share must hold 2 states"),
        ({"tier_state_share": 1.0}, "at least one page of"),
    ],
)
def test_memory_that_does_not_hold_both_is_refused(model: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(PoolTooSmallError, match=message):
        below(model, over=params)
