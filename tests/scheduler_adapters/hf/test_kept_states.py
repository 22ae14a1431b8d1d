"""Recurrent states that are kept for other requests. Tests which states are kept, which requests use them, and that the
tokens are the model's own.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.errors import InvariantError, StatePageError
from kvcache.replica.context import TextContext
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Request, ServingLoop
from tests.scheduler_adapters.serving import assert_nothing_held, loop_of, new_manager, own_tokens, serve, tokens_of

pytestmark = pytest.mark.slow

MODEL = "bamba"
PAGE, NEW = 8, 20
SYSTEM = ByteTokenizer().encode("What all of these prompts begin with. ")
ENDS = ("Who wrote it?", "And who read it, some time later?", "x", "Was it long?")
PROMPTS = [[*SYSTEM, *ByteTokenizer().encode(text)[1:]] for text in ENDS]


def cached_loop(
    model: Any, budget: int = 64, pages: int = 200, shards: int = 1, rows: int = 8, copies: int = 16, every: int = 0
) -> ServingLoop:
    states = {"state_copies": copies, "state_every_pages": every}
    manager = new_manager(model, pages, PAGE, rows, states=states, n_devices=shards, enable_prefix_caching=True)
    return loop_of(manager, model, budget)


def states_of(loop: ServingLoop) -> Any:
    return loop.manager.states[0]  # type: ignore[attr-defined]


def served(loop: ServingLoop, prompt: list[int], new: int = NEW, name: str = "r") -> tuple[list[int], int]:
    """Serves one request. Returns its tokens, and the number of its prompt's tokens that were found cached."""
    before = loop.manager.metrics.cache_tokens
    (tokens,) = tokens_of(serve(loop, [Request(name, prompt, new)]))
    return [int(token or 0) for token in tokens], loop.manager.metrics.cache_tokens - before


def full(tokens: int) -> int:
    return tokens - tokens % PAGE


def test_copies_are_made_at_a_spacing(model: Any) -> None:
    loop = cached_loop(model, every=2)
    prompt = (SYSTEM * 3)[: 7 * PAGE]
    served(loop, prompt, 1)
    assert states_of(loop).num_kept == 3 + 1  # The states are after pages 2, 4 and 6, and after the prompt's last page.
    for shared in (1, 2, 3, 5):
        assert served(loop, [*prompt[: shared * PAGE], 7, 7], 1)[1] == shared // 2 * 2 * PAGE


def test_without_a_copy_nothing_is_found_and_nothing_is_lost(model: Any) -> None:
    loop = cached_loop(model, rows=1, copies=0)
    expected = own_tokens(model, PROMPTS[0], NEW)
    assert served(loop, PROMPTS[0]) == (expected, 0)
    assert served(loop, PROMPTS[0]) == (expected, 0)  # The pool has only one state page, which the request itself uses.
    assert_nothing_held(loop.manager)


def test_a_reset_forgets_the_states_too(model: Any) -> None:
    loop = cached_loop(model)
    served(loop, PROMPTS[0])
    loop.manager.reset_prefix_cache()  # type: ignore[attr-defined]
    assert states_of(loop).num_kept == 0
    assert served(loop, PROMPTS[0])[1] == 0


def test_tokens_that_ran_are_not_taken_away_again(model: Any) -> None:
    loop = cached_loop(model)
    manager, runner = loop.manager, loop.runner
    context = TextContext(PROMPTS[0], 4096, "r")
    manager.external_claim("r")
    while context.end_idx < len(PROMPTS[0]) + 3:
        assert manager.maybe_reserve(context)
        token = runner.run([context], manager.fetch([context]))[0]
        context.update(token)
        manager.step([context])
    end = context.end_idx - 2
    context.set_token_indices(start_idx=end - 1, active_idx=end, end_idx=end)
    assert manager.maybe_reserve(context)
    with pytest.raises(
        StatePageError, match=r"'r' would run from token \d+, but its state covers \d+ tokens: release it"
    ):
        runner.run([context], manager.fetch([context]))
    manager.release("r")
    assert served(loop, context.tokens.tolist(), 1)[1] == full(len(PROMPTS[0]) - 1)


@pytest.mark.parametrize("told", [True, False], ids=["told", "leased-alone"])
def test_a_state_that_a_reader_was_promised_is_not_overwritten_by_a_hit(model: Any, told: bool) -> None:
    loop = cached_loop(model, budget=16)
    manager = loop.manager
    context = TextContext(PROMPTS[1], 4096, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    context.set_token_indices(active_idx=2 * PAGE)
    loop.runner.run([context], manager.fetch([context]))
    context.update(0)
    manager.step([context])
    lease = manager.lease("r")  # type: ignore[attr-defined]
    if told:
        manager.block_table("r", full_pages=False)
    served(loop, PROMPTS[1], 1, "other")  # The other request keeps states from which the first request could continue.
    assert manager.maybe_reserve(context)
    # Readers know of a state only if a block table names it.
    at = 2 * PAGE if told else full(len(PROMPTS[1]) - 1)
    assert (context.start_idx, states_of(loop).tokens_of("r")) == (at, at)
    manager.end_lease(lease)  # type: ignore[attr-defined]
    assert manager.maybe_reserve(context)
    assert context.start_idx == states_of(loop).tokens_of("r") == full(len(PROMPTS[1]) - 1)
    manager.release("r")
    assert_nothing_held(manager)


def test_admission_waits_for_a_state_page(model: Any) -> None:
    loop = cached_loop(model, rows=1, copies=0)
    manager: Any = loop.manager
    serve(loop, [Request("r", PROMPTS[0], 1, hold_pages=True)])
    lease = manager.lease("r")
    loop.free("r")
    context = TextContext(PROMPTS[2], 4096, "next")
    assert not manager.admission(context).fits
    manager.end_lease(lease)
    assert manager.admission(context).fits


def test_check_names_inconsistent_books(model: Any) -> None:
    def broken() -> Any:
        loop = cached_loop(model)
        served(loop, PROMPTS[0])
        loop.add(Request("r", PROMPTS[1], NEW))
        loop.step()
        loop.manager.check()
        return loop.manager

    manager = broken()
    manager.states[0]._tokens[manager.states[0].pool.index.published] = 0
    with pytest.raises(InvariantError, match="found by other requests, but covers no tokens"):
        manager.check()
    manager = broken()
    manager.states[0]._passing["gone"] = b""
    with pytest.raises(InvariantError, match="'gone'"):
        manager.check()
    manager = broken()
    manager.states[0].pool.hold(manager.states[0].pool.idle.pages()[:1])
    with pytest.raises(InvariantError, match="state pages: page"):
        manager.check()
