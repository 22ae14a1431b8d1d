"""The bytes that a hand-over moves, and the bandwidth that it needs."""

import itertools
from pathlib import Path

import pytest
import torch

from kvcache.params import StateShape
from pagewire.plan.layers import AlikeLayers, CachedModel, read_model
from pagewire.plan.link import Target, pulls

CONFIGS = Path(__file__).parent / "configs"
TARGET = Target(first_token_s=2.0, prefill_speed=10_000.0, chunk=4096)


@pytest.mark.parametrize(
    ("name", "tps", "ranks", "runs"),
    [
        ("llama-3-70b", (8, 8), 8, 8),  # Each rank reads a page as one run.
        ("llama-3-70b", (4, 8), 8, 8),  # half of the heads of a prefill rank are also one run
        ("llama-3-70b", (8, 2), 2, 8),
        ("qwen3-235b-a22b", (8, 8), 8, 8),  # The replicated heads are pulled, too.
        ("deepseek-v3", (1, 8), 8, 8),
        ("gemma-3-27b", (8, 8), 8, 8),  # The pages of windows and of full layers are in one page of the pool.
    ],
)
def test_bytes_and_runs_of_public_models(name: str, tps: tuple[int, int], ranks: int, runs: int) -> None:
    model = read_model(CONFIGS / name)
    (pull,) = pulls(model, tps, 16, [8200], TARGET)
    token = sum(one.layers * one.heads * one.width for one in model.paged) * 2
    copies = {"qwen3-235b-a22b": 2, "deepseek-v3": ranks}.get(name, 1)
    assert pull.bytes == 513 * 16 * token * copies
    assert pull.runs == 513 * runs


def test_the_rate_that_is_asked_for_brings_every_chunk_in_time() -> None:
    model = CachedModel("small", None, torch.bfloat16, (AlikeLayers("full", 2, heads=2, width=32),))
    for length, chunk, seconds in itertools.product((100, 4096, 10_000, 19_999), (512, 4096, 50_000), (2.0, 9.0)):
        target = Target(seconds, 10_000.0, chunk)
        (pull,) = pulls(model, (1, 1), 16, [length], target)
        assert pull.after_gbps is not None
        assert pull.chunks_gbps is not None
        assert length / 10_000 + pull.bytes / 1e9 / pull.after_gbps == pytest.approx(seconds)
        ends = [min(at + chunk, length) for at in range(0, length, chunk)]  # The tokens at which the chunks end.
        clock, worst = 0.0, 0.0
        for before, end in zip([0, *ends], ends, strict=False):
            clock = max(clock, end / 10_000) + (end - before) / length * pull.bytes / 1e9 / pull.chunks_gbps
            worst = max(worst, clock)
        assert worst <= seconds * (1 + 1e-9)
        assert pull.chunks_gbps <= pull.after_gbps * (1 + 1e-9)
        if length % chunk == 0 or chunk >= length:
            assert worst == pytest.approx(seconds), "no chunk may come later than that"


def test_a_prompt_that_takes_too_long_alone_has_no_rate() -> None:
    (pull,) = pulls(read_model(CONFIGS / "gpt-oss-120b"), (1, 1), 16, [20_000], TARGET)
    assert pull.compute_s == 2.0
    assert (pull.after_gbps, pull.after_runs_s, pull.chunks_gbps, pull.chunks_runs_s) == (None,) * 4


def test_states_move_as_they_are() -> None:
    convolved = AlikeLayers("conv", 1, state=StateShape(1, 250, 1, 1, 1, 3, torch.bfloat16, form="short_conv"))
    model = CachedModel("small", None, torch.bfloat16, (AlikeLayers("full", 1, heads=2, width=32), convolved))
    (pull,) = pulls(model, (2, 2), 4, [4], TARGET)
    assert pull.bytes == 4 * 2 * 32 * 2 + 1000
