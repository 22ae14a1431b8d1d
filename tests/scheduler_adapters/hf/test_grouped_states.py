"""LFM3 has windows, full attention and short convolutions. It runs over several block tables and kept states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache import LayerGroup
from scheduler_adapters.hf.recurrent import groups_of
from scheduler_adapters.loop import Request
from tests.kvcache.tiers.stored_objects import StoredObjects
from tests.scheduler_adapters.hf.test_groups import PROMPTS
from tests.scheduler_adapters.hf.test_own_tokens import conversations, loop_of, manager_of
from tests.scheduler_adapters.serving import assert_nothing_held, own_tokens, requests_of, serve, tokens_of

pytestmark = pytest.mark.slow

PAGE, NEW = 8, 20
STATES = pytest.mark.parametrize("states", ["among pages", "apart"])


@pytest.fixture(scope="module")
def model(shared_model: Callable[..., Any]) -> Any:
    return shared_model("lfm3")


def test_the_groups_are_of_the_layers_that_attend(model: Any, make_model: Callable[..., Any]) -> None:
    assert groups_of(model.config) == (LayerGroup("full", (1,)), LayerGroup("window", (0, 2), 20))
    named = {"layers_block_type": ["linear_attention", "full_attention"], "sliding_window": 8}
    assert groups_of(make_model("nemotron", **named).config) == ()


def test_a_window_in_a_nemotron_changes_nothing_as_its_layers_do_not_look_at_it(make_model: Callable[..., Any]) -> None:
    model = make_model("nemotron", sliding_window=8)
    manager = manager_of(model, "states among pages", 200)
    assert not manager.params.groups
    wanted = [own_tokens(model, prompt, NEW) for prompt in PROMPTS]
    assert tokens_of(serve(loop_of(manager, model), requests_of(PROMPTS, NEW))) == wanted


@pytest.mark.each_value
@STATES
@pytest.mark.parametrize(("budget", "tp"), [(512, 1), (16, 2)])
def test_a_minimax_with_a_window_has_one_table(
    make_model: Callable[..., Any], budget: int, tp: int, states: str
) -> None:
    """All attention layers have the same window, so there is one table, which keeps every page. Each layer sees only
    the last tokens.
    """
    kinds = ["full_attention", "linear_attention", "full_attention"]
    model, unbounded = (make_model("minimax", layer_types=kinds, sliding_window=tokens) for tokens in (8, None))
    wanted = [own_tokens(model, prompt, NEW) for prompt in PROMPTS]
    assert wanted[0] != own_tokens(unbounded, PROMPTS[0], NEW)
    manager = manager_of(model, f"states {states}", n_devices=tp)
    assert not manager.params.groups
    loop = loop_of(manager, model, budget)
    assert [tokens_of(serve(loop, [Request("r", prompt, NEW)]))[0] for prompt in PROMPTS] == wanted
    assert tokens_of(serve(loop, [Request("r", PROMPTS[0], NEW)])) == wanted[:1]
    assert manager.states[0].hits == 3
    assert_nothing_held(manager)


@pytest.mark.parametrize("budget", [512, 16])
def test_a_minimax_with_a_window_and_a_recurrent_layer_first_gives_its_own_logits(
    make_model: Callable[..., Any], own_logits: Callable[..., Any], budget: int
) -> None:
    """`generate` takes the length of its attention mask from the first layer. The first layer has no keys here, so
    `generate` divides the prompt into other steps than pagewire does.
    """
    model = make_model("minimax", sliding_window=8)
    manager = manager_of(model, "states among pages")
    (tokens,) = tokens_of(serve(loop_of(manager, model, budget), [Request("r", PROMPTS[0], NEW)]))
    wanted = [int(own_logits(model, [*PROMPTS[0], *tokens[:at]]).argmax()) for at in range(NEW)]
    assert tokens == wanted
    assert tokens != own_tokens(model, PROMPTS[0], NEW)


@pytest.mark.each_value
@STATES
@pytest.mark.parametrize(("count", "budget"), [(1, 64), (4, 7)])
def test_tokens_equal_with_hits_from_an_object_store(model: Any, states: str, count: int, budget: int) -> None:
    """Another machine continues from the objects of the first machine. The prefix may also end within an object of
    several pages.
    """
    store = StoredObjects()
    tiers: dict[str, Any] = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-2}
    tiers |= {"object_tier_io": store, "object_tier_pages": count, "file_tier_key": "model"}
    first = manager_of(model, f"groups and states {states}", 300, tiers=tiers)
    answered = conversations(loop_of(first, model), 2, 1)
    first.close()
    other = "apart" if states == "among pages" else "among pages"
    again = manager_of(model, f"groups and states {other}", 300, tiers=tiers)
    loop = loop_of(again, model, budget)
    for prompt, answer in answered:
        follow = [*prompt, *answer, 3, 4, 5]
        assert tokens_of(serve(loop, [Request("r", follow, NEW)])) == [own_tokens(model, follow, NEW)]
    found = sum((len(prompt) + len(answer) - 1) // PAGE * PAGE for prompt, answer in answered)
    metrics = again.metrics
    assert metrics.cache_tokens == found
    assert metrics.object_states_read == again.states[0].hits == len(answered)
    assert metrics.object_blocks_read
    again.close()
    assert_nothing_held(again)
    assert store.open == 0
