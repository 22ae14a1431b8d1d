"""LFM3, windows and short convolutions, prefilled in one process and decoded in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.service.test_grouped_service import PAGE, PROMPTS
from tests.scheduler_adapters.serving import own_tokens


@pytest.fixture(scope="module")
def model(shared_model: Callable[..., Any]) -> Any:
    return shared_model("lfm3")


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [own_tokens(model, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def make(prefill: dict[str, Any], decode: dict[str, Any], **options: Any) -> Service:
        told = {"page_size": PAGE, "groups": True, "params": {"enable_prefix_caching": True}}
        services.append(Service(model, tmp_path, *(Side(**{**told, **side}) for side in (prefill, decode)), **options))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.mark.parametrize(
    ("prefill", "decode", "chunkwise"),
    [
        ({"tp": 2}, {}, False),
        ({"budget": 24}, {"tp": 2}, True),
        ({"budget": 24, "replaced": {"share_state_memory": False}}, {}, True),
    ],
)
def test_tokens_are_the_models_own_and_windows_and_a_state_are_pulled(
    start: Callable[..., Service],
    expected: list[list[int]],
    prefill: dict[str, Any],
    decode: dict[str, Any],
    chunkwise: bool,
) -> None:
    service = start(prefill, decode, chunkwise=chunkwise)
    assert service.serve(PROMPTS) == expected
    service.assert_nothing_held()
    stats, manager = service.decode.stats(), service.loops["d0"].manager
    assert len(manager.layer_tables.tables) == 3
    whole = sum(-(-len(prompt) // PAGE) for prompt in PROMPTS)
    # In two layers of three a prompt takes a window of 20 tokens, which touches 4 pages; and its state.
    assert stats.pages_pulled <= whole + (2 * 4 + 1) * len(PROMPTS) < 2 * whole
    assert service.serve(PROMPTS) == expected
    again = service.decode.stats().pages_pulled - stats.pages_pulled
    assert again <= (3 + 1) * len(PROMPTS), "all but a page that is not full, and the state, was here"
    service.assert_nothing_held()


def test_a_decode_process_whose_requests_give_way_computes_them_itself(
    start: Callable[..., Service], model: Any
) -> None:
    prompts = [[at, *prompt] for at, prompt in enumerate(PROMPTS)]
    wanted = [own_tokens(model, prompt, 72) for prompt in prompts]
    service = start({}, {"pages": 21, "budget": 16})
    assert service.serve(prompts, 72) == wanted
    assert service.decode.stats().preemptions
    service.assert_nothing_held()
