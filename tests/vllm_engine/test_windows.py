"""Windows with different block sizes on the two sides. No other request may use a block of decode that prefill's pages
could not fill completely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from scheduler_adapters.vllm.scheduler import SchedulerSide
from tests.vllm_engine.engine import Engine, Shape, expected_tokens, run_until
from tests.vllm_engine.test_engine import assert_empty, prefilled, served

Make = Callable[..., Engine]
# The tokens of a block at prefill and at decode.
SIZES = ((8, 16), (16, 8), (16, 24), (24, 16), (8, 32), (32, 8), (16, 16))
WINDOWS = ((0, 40), (33,), (0, 21, 40))
OFTEN = {((8, 16), (0, 40)), ((8, 32), (33,)), ((16, 24), (0, 21, 40)), ((24, 16), (33,))}


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the requests whose blocks were not put into the prefix cache."""
    counts, real = Counter[str](), SchedulerSide._hide

    def counted(side: SchedulerSide, request_id: str, unwritten: Mapping[int, int]) -> None:
        counts[request_id] += 1
        real(side, request_id, unwritten)

    monkeypatch.setattr(SchedulerSide, "_hide", counted)
    return counts


def assert_forgotten(decode: Engine) -> None:
    """Checks that no entry of an ended request is left."""
    managers = decode.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert [manager.num_cached_block for manager in managers] == [{}] * len(managers)


def check(make: Make, sizes: tuple[int, int], windows: tuple[int, ...], lengths: range) -> Counter[str]:
    """Loads each prompt. Then decode alone gets prompts that share the beginning of a loaded prompt, up to each of its
    last blocks.
    """
    there, here = sizes
    prefill = make("kv_producer", Shape(block_size=there, windows=windows, max_batched=24))
    decode = make("kv_consumer", Shape(block_size=here, windows=windows))
    seen = Counter[str]()
    for length in lengths:
        prompt = [200 + length, *range(1001, 1000 + length)]
        tokens = served([prefill, decode], f"d{length}", prompt, 2, prefilled(prefill, f"p{length}", prompt))
        assert tokens == expected_tokens(prompt, 2, decode.shape), length
        for end in range(length // here * here, max(0, length - 3 * here), -here):
            begins_alike = [*prompt[:end], 7, 8]
            ran = len(decode.scheduled)
            tokens = served([decode], f"d{length}, {end}", begins_alike, 2, None)
            assert tokens == expected_tokens(begins_alike, 2, decode.shape), f"{end} of {length} tokens"
            computed = sum(sum(step.values()) for step in decode.scheduled[ran:])
            seen["found" if computed < len(begins_alike) else "computed"] += 1
    assert_empty(prefill, decode)
    assert_forgotten(decode)
    return seen


def _cells() -> list[Any]:
    return [
        pytest.param(sizes, windows, marks=[] if (sizes, windows) in OFTEN else pytest.mark.long)
        for sizes in SIZES
        for windows in WINDOWS
    ]


@pytest.mark.parametrize(("sizes", "windows"), _cells())
def test_a_prompt_that_begins_with_what_was_loaded_gets_its_own_tokens(
    make: Make, hidden: Counter[str], request: pytest.FixtureRequest, sizes: tuple[int, int], windows: tuple[int, ...]
) -> None:
    """Windows begin at every place of their first block. Only the tests marked `long` go beyond the lengths within one
    block.
    """
    is_long = request.node.get_closest_marker("long") is not None
    seen = check(make, sizes, windows, range(90, 138 if is_long else 90 + max(sizes), 1 if is_long else 3))
    there, here = sizes
    assert (len(hidden) > 0) is (there % here > 0), (
        "blocks are kept out of the cache if prefill's first block may begin within a block of decode"
    )
    assert seen["found"], seen


def test_a_request_that_ends_while_it_is_loaded_leaves_nothing_behind(make: Make) -> None:
    windows = (0, 40)
    prefill = make("kv_producer", Shape(block_size=8, windows=windows, max_batched=24))
    decode = make("kv_consumer", Shape(block_size=32, windows=windows))
    prompt = list(range(1000, 1100))
    decode.add("d", prompt, 2, prefilled(prefill, "p", prompt))
    decode.step()
    decode.abort("d")
    assert_empty(prefill, decode)
    run_until([prefill, decode], lambda: not prefill.scheduler.requests)
    assert_forgotten(decode)
    assert served([decode], "e", [*prompt[:96], 7], 2, None) == expected_tokens([*prompt[:96], 7], 2, decode.shape)
    assert_forgotten(decode)
