"""vLLM resets its prefix cache while requests are handed over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm_engine.engine import Engine, Shape, expected_tokens, run_until
from tests.vllm_engine.test_engine import PREFILL, PROMPT, assert_empty, prefilled, served

Make = Callable[..., Engine]
EXTRA: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "kv_lease_duration": 600.0}


def sides(make: Make, **shape: Any) -> tuple[Engine, Engine]:
    return make("kv_producer", Shape(extra=EXTRA, **shape)), make("kv_consumer", Shape(extra=EXTRA, **shape))


@pytest.mark.parametrize("windows", [(0,), (0, 40)], ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_requests_that_run_are_computed_again_after_a_reset(make: Make, windows: tuple[int, ...], steps: int) -> None:
    prefill, decode = sides(make, windows=windows)
    prefill.add("p", PROMPT, 1, dict(PREFILL))
    for _ in range(steps):  # a prompt of 100 tokens in chunks of 64, under a lease that has been granted
        prefill.step()
        if not prefill.finish_reason("p"):
            assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    run_until([prefill], lambda: prefill.finish_reason("p"))
    decode.add("d", PROMPT, 8, prefill.params("p"))
    run_until([prefill, decode], lambda: len(decode.tokens("d")) == 3)
    assert decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert decode.tokens("d") == expected_tokens(PROMPT, 8, decode.shape)
    assert_empty(prefill, decode)


def test_a_reset_names_the_hand_overs_for_which_it_fails(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = sides(make)
    params = prefilled(prefill, "p", PROMPT)
    decode.add("d", PROMPT, 3, params)
    decode.step()
    for engine, name in ((prefill, "p"), (decode, "d")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pagewire.vllm"), pytest.raises(RuntimeError, match="Failed to reset"):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert "the prefix cache was not reset. 1 hand-overs hold blocks" in caplog.text
        assert f"[{name!r}]" in caplog.text
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert decode.tokens("d") == expected_tokens(PROMPT, 3, decode.shape)
    assert_empty(prefill, decode)
    for engine in (prefill, decode):
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert served([decode], "again", PROMPT, 3, None) == expected_tokens(PROMPT, 3, decode.shape)
    assert decode.scheduled[-3] == {"again": 36}, "nothing is found after a reset"
