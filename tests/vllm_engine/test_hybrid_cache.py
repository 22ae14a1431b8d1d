"""Models with windows, recurrent states and draft models, with vLLM's prefix cache on at both sides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm_engine.engine import Engine, Shape, expected_tokens, run_until
from tests.vllm_engine.states import States
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled, served

Make = Callable[..., Engine]
CACHED = {"states": States(block_size=16)}
WINDOWS = {"windows": (0, 40)}
SIDES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "states": (CACHED, CACHED),
    "states, cache off at prefill": ({"states": States()}, {"states": States()}),
    "gated delta": ({"states": States("gdn", block_size=16)}, {"states": States("gdn", block_size=16)}),
    "states, TP 1 to 2": (CACHED, CACHED | {"tp_size": 2}),
    "states, TP 2 to 1": (CACHED | {"tp_size": 2}, CACHED),
    "states and windows": (CACHED | WINDOWS, CACHED | WINDOWS),
    "windows": (WINDOWS, WINDOWS),
    "drafts at decode": ({"windows": (0, 0)}, {"windows": (0, 0), "drafts": 2}),
    "drafts, TP 1 to 2": ({"windows": (0, 0), "drafts": 3}, {"windows": (0, 0), "drafts": 2, "tp_size": 2}),
    "drafts, blocks of 16 to 8": ({"windows": (0, 0), "drafts": 2}, {"windows": (0, 0), "drafts": 2, "block_size": 8}),
    "drafts and windows": (WINDOWS | {"drafts": 2}, WINDOWS | {"drafts": 2}),
    "windows, blocks of 16 to 8": (WINDOWS, WINDOWS | {"block_size": 8}),
    "windows, blocks of 8 to 16": (WINDOWS | {"block_size": 8}, WINDOWS),
    "windows, blocks of 16 to 32": (WINDOWS, WINDOWS | {"block_size": 32}),
    "window alone, blocks of 32 to 16": ({"windows": (33,), "block_size": 32}, {"windows": (33,)}),
}


def computed(engine: Engine, request_id: str) -> int:
    return sum(step.get(request_id, 0) for step in engine.scheduled)


@pytest.mark.parametrize(("left", "right"), SIDES.values(), ids=SIDES)
def test_prompts_that_begin_alike_are_answered_right(make: Make, left: dict[str, Any], right: dict[str, Any]) -> None:
    """Each hand-over finds the blocks of earlier ones in both prefix caches, and pulls what decode lacks."""
    prefill, decode = make("kv_producer", Shape(blocks=200, **left)), make("kv_consumer", Shape(blocks=200, **right))
    numbers = random.Random(1)
    for at in range(6):
        length = numbers.choice((33, 48, 49, 64, 65, 80, 96, 97, 112, 113))
        prompt = PROMPT[: numbers.choice((16, 32, 48, 64, 80))]
        prompt = [*prompt, *(numbers.randrange(2000) for _ in range(max(1, length - len(prompt))))]
        params = prefilled(prefill, f"p{at}", prompt)
        alone = at % 3 == 2
        begun = len(decode.scheduled)
        tokens = served([prefill, decode], f"d{at}", prompt, 20, None if alone else params)
        steps = sum(f"d{at}" in step for step in decode.scheduled[begun:])
        assert steps < 20 if decode.shape.drafts else steps >= 20, "right drafts save steps"
        assert tokens == expected_tokens(prompt, 20, decode.shape), (at, len(prompt))
        again = served([prefill, decode], f"again{at}", prompt, 3, None)
        assert again == expected_tokens(prompt, 3, decode.shape), (at, len(prompt))
        if alone:
            served([prefill, decode], f"late{at}", prompt, 1, params)
    assert_empty(prefill, decode)


@pytest.mark.parametrize(("more", "is_divided"), [({}, True), (WINDOWS, False)], ids=["states", "with windows"])
def test_decode_pulls_the_state_of_a_prefix_whose_other_blocks_it_has(
    make: Make, more: dict[str, Any], is_divided: bool
) -> None:
    """A window would lack tokens before the prefix ends, so with windows vLLM looks for a prefix of all groups."""
    prefill, decode = (make(role, Shape(**CACHED, **more)) for role in ("kv_producer", "kv_consumer"))
    served([prefill, decode], "d", PROMPT, 3, prefilled(prefill, "p", PROMPT))
    prompt, loaded, allocated = [*PROMPT, *range(5000, 5050)], list[int](), decode.connector.update_state_after_alloc
    decode.connector.update_state_after_alloc = lambda *given: (loaded.append(given[2]), allocated(*given))
    decode.add("d2", prompt, 3, prefilled(prefill, "p2", prompt))
    run_until([prefill, decode], lambda: decode.finish_reason("d2"))
    assert decode.tokens("d2") == expected_tokens(prompt, 3, decode.shape)
    assert loaded[0] == (149 - 96 if is_divided else 149), "decode has no state after whole blocks of the first prompt"
    assert_empty(prefill, decode)
