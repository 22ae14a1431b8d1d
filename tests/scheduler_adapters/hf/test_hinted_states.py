"""Retention hints with recurrent layers. The next turn is found after a flood of other prompts, and the tokens are the
model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache import Retention
from kvcache.replica.context import TextContext
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, manager_for, num_layers_of
from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.kvcache.policies.hinted_idle import trust
from tests.scheduler_adapters.serving import assert_nothing_held, new_manager, own_tokens

PAGE, NEW = 8, 6
PROMPT = ByteTokenizer().encode("A conversation that goes on after a while.")


def one_memory(model: Any) -> Any:
    """Returns a manager with room for eight states and the pages of their requests."""
    cache = kv_params_of(model.config, page_size=PAGE, enable_prefix_caching=True)
    page = PAGE * cache.bytes_per_token(num_layers_of(model.config))
    slab_pages = manager_for(model, cache, 2, 4096, ["cpu"], available_cache_memory=4 << 20).slab_pages
    return manager_for(model, cache, 2, 4096, ["cpu"], available_cache_memory=(8 * slab_pages + 60) * page)


def apart(model: Any) -> Any:
    states = {"state_copies": 8, "state_every_pages": 0}
    return new_manager(model, 200, PAGE, 2, states=states, n_devices=1, enable_prefix_caching=True)


def served(manager: Any, runner: HFRunner, prompt: list[int], said: Retention | None) -> tuple[list[int], int]:
    """Serves one request. Returns its tokens, and the number of its prompt's tokens that were found cached."""
    context, found = TextContext(prompt, 4096, retention=said), -1
    with manager.claim(context):
        while context.end_idx < len(prompt) + NEW:
            assert manager.maybe_reserve(context)
            found = context.start_idx if found < 0 else found
            (token,) = runner.run([context], manager.fetch([context]))
            context.update(token)
            manager.step([context])
    return context.tokens[len(prompt) : len(prompt) + NEW].tolist(), found


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["bamba", "lfm2"])
@pytest.mark.parametrize("made", [one_memory, apart])
def test_a_hinted_conversation_is_found_after_a_flood(
    name: str, made: Callable[[Any], Any], make_model: Callable[..., Any]
) -> None:
    model = make_model(name)
    found = dict[bool, int]()
    for hinted in (True, False):
        manager = made(model)
        runner = HFRunner(model, manager.states)
        served(manager, runner, [1, 2, 3], Retention())
        hints = manager._replicas.each[0].hints
        trust(hints, 0.95)
        answer, _ = served(manager, runner, PROMPT, Retention(session_continues=True) if hinted else Retention())
        for other in range(14):
            served(manager, runner, [other + 50, *PROMPT[:20]], None)
        turn = [*PROMPT, *answer, 7, 8, 9]
        tokens, found[hinted] = served(manager, runner, turn, None)
        assert tokens == own_tokens(model, turn, NEW)
        assert_nothing_held(manager)
    whole = len(PROMPT) + NEW - 1
    assert found == {True: whole - whole % PAGE, False: 0}
