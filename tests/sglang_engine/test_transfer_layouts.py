"""Page sizes and ranks that differ between SGLang's prefill and decode servers, with the substitutes of
`test_transfer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang_engine.pd_pair import NEW, Pair, check_works
from tests.sglang_engine.test_engine import PROMPTS

pytestmark = pytest.mark.timeout(300)


def check_tokens(pair: Pair, expected: Any) -> None:
    try:
        for place, prompt in enumerate(PROMPTS):
            pair.send(f"r{place}", prompt, NEW)
        found = [pair.decode.answer(f"r{place}")["tokens"] for place in range(len(PROMPTS))]
        assert found == [expected(prompt) for prompt in PROMPTS]
        check_works(pair, expected)
    finally:
        pair.close()


@pytest.mark.parametrize("pages", [(16, 4), (4, 16)])
def test_page_sizes_that_differ(model_dir: Path, tmp_path: Path, expected: Any, pages: tuple[int, int]) -> None:
    check_tokens(Pair(model_dir, tmp_path, pages), expected)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_tensor_parallel_sizes_that_differ(
    model_dir: Path, tmp_path: Path, expected: Any, page_size: int, ranks: tuple[int, int]
) -> None:
    check_tokens(Pair(model_dir, tmp_path, (page_size, page_size), ranks), expected)


def test_both_sides_at_an_ipv6_address(model_dir: Path, tmp_path: Path, expected: Any, page_size: int) -> None:
    pair = Pair(model_dir, tmp_path, (page_size, page_size), environment={"SGLANG_HOST_IP": "::1"})
    check_tokens(pair, expected)
