"""Compares `pagewire plan` with vLLM's own layers, groups and pool, for five public models and for every figure that
both have.

The models are made without memory, so the figures come from vLLM's own code for each layer.
`tests/pagewire/plan/test_blocks.py` has the same figures as constants, and runs without vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pagewire.plan.layers import read_model
from pagewire.plan.memory import choice
from pagewire.plan.ways import MemoryAsked
from tests.pagewire.plan.test_blocks import CONFIGS, LENGTHS, MEMORY, PUBLIC, STEP, WHOLE
from tests.vllm_engine.pool import Answer, Question

# On vLLM's CPU backend blocks have at least 32 tokens with windows, and 16 with latents.
SIZES = {name: 32 if name in WHOLE else 16 for name in PUBLIC}


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, int, str], Answer]:
    """Returns vLLM's figures for each model, on 8 ranks and on one rank. One model also has figures with fp8 pages."""
    keys = [(name, tp, "auto") for name in PUBLIC for tp in (8, 1)] + [("llama-3-70b", 8, "fp8")]
    asked = [Question(str(CONFIGS / name), tp, MEMORY, SIZES[name], STEP, LENGTHS, dtype) for name, tp, dtype in keys]
    settings = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.vllm_engine.pool"],
        input=msgspec.json.encode(asked),
        stdout=subprocess.PIPE,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **settings},
    )
    return dict(zip(keys, msgspec.json.decode(done.stdout, type=list[Answer]), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [8, 1])
@pytest.mark.parametrize("name", PUBLIC)
def test_the_plan_has_the_figures_of_vllm(name: str, tp: int, answers: dict[tuple[str, int, str], Answer]) -> None:
    theirs, model = answers[name, tp, "auto"], read_model(CONFIGS / name)
    found = choice(model, tp, 1, MemoryAsked(MEMORY, SIZES[name], STEP, LENGTHS))
    ours = {room.way: room for room in found.rooms}
    assert sum(theirs.layer_page_bytes) == found.token_bytes * SIZES[name] == ours["pagewire"].page_bytes
    assert len(theirs.layer_page_bytes) == sum(one.layers for one in model.each)
    assert (ours["vllm"].page_bytes, ours["vllm"].pages) == (theirs.block_bytes, theirs.num_blocks)
    # vLLM admits a request if these blocks are free.
    assert {length: size + ours["vllm"].chunk_bytes[length] for length, size in ours["vllm"].request_bytes.items()} == {
        length: blocks * theirs.block_bytes for length, blocks in theirs.request_blocks.items()
    }
    if len(theirs.group_layers) == 1:  # If no layers share a page, vLLM's blocks and pagewire's pages are the same.
        assert (ours["pagewire"].page_bytes, ours["pagewire"].pages) == (theirs.block_bytes, theirs.num_blocks)


@pytest.mark.timeout(600)
def test_quantised_pages_are_half_as_large(answers: dict[tuple[str, int, str], Answer]) -> None:
    theirs = answers["llama-3-70b", 8, "fp8"]
    found = choice(read_model(CONFIGS / "llama-3-70b", "fp8"), 8, 1, MemoryAsked(MEMORY, 16, STEP, LENGTHS))
    assert (found.rooms[0].page_bytes, found.rooms[0].pages) == (theirs.block_bytes, theirs.num_blocks)
