"""Models with windows, chunks and states over several block tables. One process prefills the prompts, and another
process decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.scheduler_adapters.hf.test_groups import ALONE, MODELS
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.service.test_peer_prefixes import outcome, served
from tests.scheduler_adapters.serving import own_tokens

pytestmark = pytest.mark.slow

PAGE = 8
HEAD = ByteTokenizer().encode("What all prompts begin with, and what is longer than any window of these models. " * 2)
PROMPTS = [[*HEAD, *ByteTokenizer().encode(text)] for text in ("one", "another one", "the third, which is longest")]


GROUPED = [pytest.param(name, marks=() if name in ("gemma3", "llama4") else pytest.mark.ci) for name in MODELS]


@pytest.fixture(scope="module", params=GROUPED)
def model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    """Returns LFM3: a model with windows, short convolutions and full attention."""
    kind, changes = (MODELS | ALONE).get(request.param, (request.param, {}))
    return shared_model(kind, **({"num_hidden_layers": 4, **changes} if changes else {}))


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def make(prefill: dict[str, Any], decode: dict[str, Any], *, of: Any = model, **options: Any) -> Service:
        told = {"page_size": PAGE, "groups": True, "params": {"enable_prefix_caching": True}}
        services.append(Service(of, tmp_path, *(Side(**{**told, **side}) for side in (prefill, decode)), **options))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.mark.parametrize(
    ("prefill", "decode", "chunkwise"),
    [({"tp": 2}, {}, False), ({"budget": 24, "page_size": 16, "pages": 50}, {"tp": 2}, True)],
)
def test_tokens_are_the_models_own_and_only_windows_are_pulled(
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
    assert len(manager.layer_tables.tables) == 4
    whole = [-(-len(prompt) // PAGE) for prompt in PROMPTS]
    # Three of the four layers need only a window of 20 tokens, which touches 4 pages, or a chunk of 24 tokens.
    assert whole[0] < stats.pages_pulled <= sum(whole) + 3 * 4 * len(PROMPTS) < 2 * sum(whole)
    per_page = sum(layout.page_bytes for layout in manager.layouts)
    # If pages have other sizes or shards, whole pages go through the staging area.
    assert stats.bytes_pulled == stats.pages_pulled * per_page or chunkwise
    assert service.serve(PROMPTS) == expected
    pulled_again = service.decode.stats().pages_pulled - stats.pages_pulled
    assert pulled_again <= 4 * len(PROMPTS), "everything except a page that is not full was already cached"
    service.assert_nothing_held()


@pytest.mark.parametrize("model", ["lfm3"], indirect=True)
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
    # Two of the three layers need only a window of 20 tokens, which touches 4 pages. Each prompt also needs its state.
    assert stats.pages_pulled <= whole + (2 * 4 + 1) * len(PROMPTS) < 2 * whole
    assert service.serve(PROMPTS) == expected
    again = service.decode.stats().pages_pulled - stats.pages_pulled
    assert again <= (3 + 1) * len(PROMPTS), "everything except a page that is not full and the state was already cached"
    service.assert_nothing_held()


@pytest.mark.few(2)
@pytest.mark.parametrize("chunkwise", [False, True])
@pytest.mark.parametrize("model", ["mistral alone", "llama4 alone"], indirect=True)
def test_with_only_windows_or_chunks_decode_pulls_the_pages_that_the_next_token_sees(
    start: Callable[..., Service], expected: list[list[int]], chunkwise: bool
) -> None:
    service = start({"budget": 24}, {"tp": 2}, chunkwise=chunkwise)
    assert service.serve(PROMPTS) == expected
    pulled = service.decode.stats().pages_pulled
    assert pulled <= 4 * len(PROMPTS), "a window of 20 tokens, or a chunk of 24, touches 4 pages"
    assert service.serve(PROMPTS) == expected
    assert service.decode.stats().pages_pulled - pulled <= 2 * len(PROMPTS)
    service.assert_nothing_held()


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [*GROUPED, "lfm3"], indirect=True)
def test_a_decode_process_computes_its_preempted_requests_itself(start: Callable[..., Service], model: Any) -> None:
    prompts = [[at, *prompt] for at, prompt in enumerate(PROMPTS)]
    # With 72 new tokens each, all requests run at the same time for a while, even on a fast machine.
    wanted = [own_tokens(model, prompt, 72) for prompt in prompts]
    service = start({}, {"pages": 21 if "Lfm3" in type(model).__name__ else 19, "budget": 16})
    assert service.serve(prompts, 72) == wanted
    assert service.decode.stats().preemptions
    service.assert_nothing_held()


def test_a_request_that_does_not_fit_into_several_tables_fails_without_affecting_others(
    start: Callable[..., Service], expected: Any
) -> None:
    service = start({}, {"pages": 16})  # Each of the 64 pages has only one layer.
    assert service.serve([PROMPTS[0], [*HEAD, *HEAD, *HEAD]])[0] == expected[0]
    assert "do not fit: the cache has room for" in service.ended["r1"].error
    service.assert_nothing_held()


def test_pages_that_are_not_whole_in_a_window_are_refused_by_name(start: Callable[..., Service], model: Any) -> None:
    service = start({}, {"page_size": 16, "pages": 50})
    # The window of the next token begins with a token that is the first token of a page of 8 tokens. The same token is
    # in the middle of a page of 16 tokens.
    prompt = PROMPTS[0][: 24 * 7 + 3]
    service.serve([prompt])
    if "error" in service.ended["r0"].finished:  # pyright: ignore[reportOperatorIssue]
        assert "are needed" in service.ended["r0"].error
    else:
        assert service.tokens["r0"] == own_tokens(model, prompt, NEW)
    service.assert_nothing_held()


def test_a_peer_with_one_table_is_refused_by_name(start: Callable[..., Service]) -> None:
    service = start({"groups": False}, {})
    service.serve([PROMPTS[0]])
    # Decode refuses either the first pages of the request or the description of the process.
    error = service.ended["r0"].error
    assert "has 1 page groups; this manager has 4" in error or "layer tables: None at the source, 'full of" in error
    service.assert_nothing_held()


def test_a_source_of_other_layers_is_refused_at_first_contact(
    start: Callable[..., Service], make_model: Callable[..., Any], tmp_path: Path
) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    other = make_model("qwen3", num_hidden_layers=4, layer_types=kinds, sliding_window=20, use_sliding_window=True)
    alike = make_model(
        "qwen3", num_hidden_layers=4, layer_types=kinds[::-1], sliding_window=20, use_sliding_window=True
    )
    here, there = start({}, {}, of=other), Service(alike, tmp_path / "there", *[Side(page_size=PAGE, groups=True)] * 2)
    try:
        source, reader = there.exchanges["p0"], here.exchanges["d0"]
        manager = there.loops["p0"].manager
        manager.external_claim("x")
        offered = source.offer("x", 5.0)
        assert offered is not None
        reader.open_pull(0, "k", offered, 5.0)
        events: list[Any] = []

        def ended() -> bool:
            events.extend(one.event for one in reader.poll())
            source.poll()
            return bool(events)

        here.until(ended, "the refusal", poll=lambda: None)
        assert "is not compatible: layer tables: 'full of layers 3, window" in events[0].error
        assert "full of layers 0" in events[0].error
        manager.release("x")
    finally:
        there.close()


def test_one_process_pulls_a_prefix_of_another_for_all_tables(
    start: Callable[..., Service], expected: list[list[int]]
) -> None:
    service = start({"count": 2}, {})
    links = [one for decode in service.decodes.values() for one in decode.connections]
    service.until(lambda: all(one.welcome for one in links), "the connections")
    assert served(service, "first", PROMPTS[0], "p0") == expected[0]
    assert served(service, "second", PROMPTS[2], "p1") == expected[2]
    assert outcome(service) == {"pulled": 1}
    pages = len(HEAD) // PAGE
    assert service.ended["second"].cached_tokens == PAGE * pages
    assert service.prefills["p1"].stats().pages_pulled == pages
    lent = sum(service.exchanges[name].lending.pages_lent for name in ("p0", "d0"))
    # In the three layers with a window, the source lends only the pages that the next token sees.
    assert pages < lent <= pages + 3 * 4
    service.assert_nothing_held()
