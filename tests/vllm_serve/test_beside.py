"""The connector within vLLM's `MultiConnector`: alone, and together with vLLM's offloading to host memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_serve.client import PROMPTS, TOKENS, ask, ask_all
from tests.vllm_serve.server import LEASE, ON_GPU, OURS, Pair, Settings

_OURS = {**OURS, "kv_role": "kv_both", "kv_connector_extra_config": {"kv_lease_duration": LEASE}}
_OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}


def multi(*connectors: dict[str, Any]) -> dict[str, str]:
    """Returns settings with several connectors."""
    found = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}
    return {"connector": json.dumps(found)}


@pytest.mark.long
@pytest.mark.parametrize(
    "beside",
    [(), pytest.param((_OFFLOADING,), marks=pytest.mark.skipif(not ON_GPU, reason="vLLM offloads from GPUs alone"))],
    ids=["alone", "offloading"],
)
def test_tokens_are_those_of_plain_vllm(
    servers: Any, model: Callable[..., Path], expected: Callable[[Path], list[list[int]]], beside: tuple[Any, ...]
) -> None:
    target = model("llama")
    tokens, changes = expected(target), multi(_OURS, *beside)
    settings = replace(Settings(target), **changes)
    pair: Pair = servers.pair(settings, replace(settings, block_size=64))
    assert [pair.ask(prompt).tokens for prompt in PROMPTS] == tokens
    params = [pair.prefilled(prompt) for prompt in PROMPTS]
    assert all(params)
    again = ask_all(pair.prefill.url, PROMPTS, 8)
    assert [answer.tokens for answer in again] == tokens, "the tokens must be those of a server that serves alone"
    late = ask(pair.decode.url, PROMPTS[-1], kv_transfer_params=params[-1] | {"remote_port": 1})
    assert (late.status == 200 and len(late.tokens) == TOKENS) or late.status == 500
    for server in pair.both:
        server.wait_empty()
        assert server.alive


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="there it starts")
def test_vllms_offloading_refuses_a_cpu(servers: Any, model: Callable[..., Path]) -> None:
    """vLLM's offloading refuses a CPU with or without other connectors. When this changes, the test above can also run
    on CPUs.
    """
    with pytest.raises(RuntimeError, match="CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"):
        servers.get(replace(Settings(model("llama")), **multi(_OURS, _OFFLOADING)))
