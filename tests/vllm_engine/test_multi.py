"""Our connector and vLLM's offloading connector, with our tiers, in one `MultiConnector`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm_engine.engine import BOTH, Engine, Shape, expected_tokens, run_until
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled
from tests.vllm_engine.test_tiers import BLOCK_BYTES, SPEC

Make = Callable[..., Engine]
OURS = {"host": "127.0.0.1", "port": 0}


def both(role: str, **shape: Any) -> Shape:
    """Returns the shape of an engine with both connectors. The tiers have room for 200 blocks."""
    tiers = SPEC | {"host_kvcache_swap_space_gb": 201.5 * BLOCK_BYTES / 2**30}
    connectors = [
        {
            "kv_connector": "PagewireConnector",
            "kv_connector_module_path": "scheduler_adapters.vllm",
            "kv_role": role,
            "kv_connector_extra_config": OURS,
        },
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tiers},
    ]
    return Shape(connector=BOTH, extra={"connectors": connectors}, **shape)


@pytest.mark.parametrize("sides", ["prefill", "decode", "both"])
@pytest.mark.parametrize("windows", [(0,), (0, 40)], ids=str)
def test_tokens_are_right_beside_our_tiers(make: Make, sides: str, windows: tuple[int, ...]) -> None:
    """The pools are small, so the tiers serve blocks that a pool has evicted."""
    shapes = {
        role: both(role, blocks=24, windows=windows)
        if sides in ("both", side)
        else Shape(blocks=24, windows=windows, extra=OURS)
        for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    }
    prefill, decode = (make(role, shape) for role, shape in shapes.items())
    for at in range(8):
        prompt = [*PROMPT[:64], *range(3000 + 50 * (at % 4), 3040 + 50 * (at % 4))]
        params = prefilled(prefill, f"p{at}", prompt)
        for name, given in ((f"d{at}", params), (f"alone{at}", None)):
            decode.add(name, prompt, 5, given)
            run_until([prefill, decode], lambda name=name: decode.finish_reason(name))
            assert decode.tokens(name) == expected_tokens(prompt, 5, decode.shape), name
    assert_empty(prefill, decode)
