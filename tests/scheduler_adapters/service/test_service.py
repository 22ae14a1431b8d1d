"""The service as a whole gives the right tokens, and holds no pages at the end."""

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import received
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.serving import Unwalked, own_tokens

pytestmark = pytest.mark.slow

HEAD = "What a page holds, who may write to it, and when it may be used again. " * 3
PROMPTS = [ByteTokenizer().encode(text) for text in (HEAD + "First?", "short", HEAD + "Second?", HEAD + "First?")]

APART = {"replaced": {"share_state_memory": False}}  # With these params recurrent states have separate memory.


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services = []

    def make(pages: tuple[int, int] = (100, 100), *, of: Any = model, **options: Any) -> Service:
        sides = [Side(**{"pages": pages[at], **options.pop(name, {})}) for at, name in enumerate(("prefill", "decode"))]
        services.append(Service(of, tmp_path, *sides, **options))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_prompts_prefilled_here_and_decoded_there_give_the_models_own_tokens(
    start: Callable[..., Service], expected: list[list[int]], tp: int
) -> None:
    service = start(prefill={"tp": tp}, decode={"tp": tp})
    assert service.serve(PROMPTS) == expected
    service.assert_nothing_held()
    decode, prefill = service.decode.stats(), service.prefill.stats()
    pages = [-(-len(prompt) // 16) for prompt in PROMPTS]
    assert decode.pages_pulled + decode.pages_reused == sum(pages)
    assert decode.pages_pulled >= pages[0]
    layouts = service.loops["d0"].manager.layouts
    assert decode.bytes_pulled == decode.pages_pulled * sum(layout.page_bytes for layout in layouts)
    assert decode.pull_seconds > 0
    assert prefill.prompt_tokens == sum(map(len, PROMPTS))
    assert prefill.cached_tokens > 0


TOPOLOGIES = [
    ({"tp": 1}, {"tp": 2}),
    ({"tp": 2}, {"tp": 1}),
    ({"page_size": 16}, {"page_size": 64, "pages": 25}),
    ({"page_size": 64, "pages": 25}, {"page_size": 16}),
    ({"page_size": 24}, {"page_size": 16}),
    ({"tp": 2, "page_size": 64, "pages": 25}, {"tp": 4, "page_size": 16}),
    ({"dp": 2}, {"dp": 2, "tp": 2}),
]


@pytest.mark.each_value
@pytest.mark.parametrize("chunkwise", [False, True])
@pytest.mark.parametrize(("prefill", "decode"), TOPOLOGIES)
def test_sides_that_differ_give_the_same_tokens(
    start: Callable[..., Service],
    expected: list[list[int]],
    prefill: dict[str, int],
    decode: dict[str, int],
    chunkwise: bool,
) -> None:
    service = start(prefill={"budget": 48, **prefill}, decode=decode, chunkwise=chunkwise)
    assert service.serve(PROMPTS) == expected
    assert service.serve(PROMPTS[::-1]) == expected[::-1]  # The prefixes are cached now.
    assert service.decode.stats().pages_reused > 0
    service.assert_nothing_held()


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        ("mistral", {"tp": 2}, {"page_size": 64, "pages": 25}),
        ("gemma3", {"page_size": 64, "pages": 25}, {"tp": 2}),
        ("bamba", APART, APART),
        ("bamba", {"tp": 1, **APART}, {"tp": 2, "page_size": 64, "pages": 25, **APART}),
        ("bamba", {}, {}),
        ("bamba", {"dp": 2}, {"dp": 2, **APART}),
        ("bamba", APART, {"tp": 2}),
        ("granite", {"tp": 2}, {"tp": 1}),
        ("falcon", {}, {}),
        ("kimi_linear", {}, {"tp": 2, **APART}),
        ("kimi_linear", {"tp": 2}, {"page_size": 64, "pages": 25}),
    ],
)
def test_windows_and_recurrent_states_are_served_too(
    start: Callable[..., Service],
    make_model: Callable[..., Any],
    kind: str,
    prefill: dict[str, Any],
    decode: dict[str, Any],
) -> None:
    other = make_model(kind)
    service = start(of=other, prefill={"budget": 48, **prefill}, decode=decode)
    assert service.serve(PROMPTS) == [own_tokens(other, prompt, NEW) for prompt in PROMPTS]
    service.assert_nothing_held()


def test_several_of_each_side_serve_each_other(start: Callable[..., Service], model: Any) -> None:
    service = start(prefill={"count": 2}, decode={"count": 2})
    service.until(
        lambda: all(connection.welcome for one in service.decodes.values() for connection in one.connections),
        "the connections",
    )
    prompts = [[number, *PROMPTS[0]] for number in range(8)]
    assert service.serve(prompts) == [own_tokens(model, prompt, NEW) for prompt in prompts]
    assert all(one.stats().prompt_tokens for one in service.prefills.values())
    assert all(one.stats().pages_pulled for one in service.decodes.values())
    service.assert_nothing_held()


def test_a_prompt_goes_where_its_head_was_computed_and_others_go_elsewhere(
    start: Callable[..., Service], model: Any
) -> None:
    service = start(prefill={"count": 2})
    service.until(lambda: all(connection.welcome for connection in service.decode.connections), "the connections")
    computed = []
    for number, prompt in enumerate(([1, *PROMPTS[0]], [2, *PROMPTS[0]], [1, *PROMPTS[0], 3], [2, *PROMPTS[0], 4]) * 2):
        name = f"r{number}"
        service.submit_one(name, prompt)
        service.until(lambda name=name: name in service.ended, name)
        assert service.tokens[name] == own_tokens(model, prompt, NEW)
        computed.append(tuple(one.stats().cached_tokens for one in service.prefills.values()))
    assert computed[1] == (0, 0), "neither of the first two prompts may be found cached"
    assert all(sum(after) > sum(before) for before, after in itertools.pairwise(computed[1:])), (
        "all later prompts must be found cached"
    )
    assert min(computed[-1]) > 0, "both processes must have computed a share"
    service.assert_nothing_held()


def test_chunks_are_pulled_while_the_rest_of_the_prompt_runs(
    start: Callable[..., Service], expected: list[list[int]]
) -> None:
    service = start(prefill={"budget": 32}, decode={"options": {"enable_runtime_checks": True}})
    service.submit(PROMPTS[:1])
    request = service.decode._requests["r0"]
    service.until(lambda: request.phase == "pulling", "the first chunk")
    assert not request.has_ended_prefill
    assert not service.tokens["r0"]
    service.until(lambda: service.ended, "the last token")
    assert service.tokens["r0"] == expected[0]
    assert service.decode.stats().pages_pulled == -(-len(PROMPTS[0]) // 16)
    service.assert_nothing_held()


def test_a_poll_looks_at_no_request_that_has_no_news(start: Callable[..., Service], expected: list[list[int]]) -> None:
    service = start(prefill={"budget": 32})
    every: list[Any] = [service.prefill, service.decode]
    for one in every:
        one._requests = Unwalked()
        # The process compares deadlines with the clock only every few milliseconds. The test stops this comparison.
        one._expire_at = math.inf
    assert service.serve(PROMPTS) == expected
    for one in every:
        one._requests, one._expire_at = {**one._requests}, 0.0
    service.assert_nothing_held()
    assert (service.prefill._untold, service.decode._unasked) == ({}, {})


def test_requests_without_a_prefill_process_are_not_looked_at_until_one_accepts_them(
    start: Callable[..., Service], expected: list[list[int]]
) -> None:
    service = start()
    service.until(lambda: service.connected, "the connection")
    (connection,) = service.decode.connections
    connection.leaving, unasked = True, service.decode._unasked
    service.decode._unasked = Unwalked()
    service.submit(PROMPTS)
    for _ in range(3):
        service.poll()
    assert len(service.decode._unasked) == len(PROMPTS)
    unasked.update({name: service.decode._requests[name] for name in ("r0", "r1", "r2", "r3")})
    service.decode._unasked, connection.leaving = unasked, False
    service.until(lambda: len(service.ended) == len(PROMPTS), "the last token")
    assert [service.tokens[f"r{number}"] for number in range(len(PROMPTS))] == expected
    service.assert_nothing_held()


def test_decode_pulls_only_what_it_lacks(start: Callable[..., Service], expected: list[list[int]]) -> None:
    service = start()
    service.serve(PROMPTS[:1])
    before = service.decode.stats().pages_pulled
    assert service.serve(PROMPTS[:1]) == expected[:1]
    full, rest = divmod(len(PROMPTS[0]), 16)
    assert rest
    assert service.decode.stats().pages_pulled - before == 1  # The pulled page is the last page, which is not full.
    assert service.decode.stats().pages_reused == full
    service.assert_nothing_held()


def test_a_prompt_whose_full_pages_are_cached_needs_no_read(start: Callable[..., Service], model: Any) -> None:
    service = start()
    prompt = PROMPTS[0][:64]
    wanted = own_tokens(model, prompt, NEW)
    assert service.serve([prompt]) == [wanted]
    before = service.decode.stats().pages_pulled
    assert service.serve([prompt]) == [wanted]
    assert service.decode.stats().pages_pulled == before
    service.assert_nothing_held()


@pytest.mark.parametrize("pages", [(100, 18), (18, 100), (18, 18)])
def test_pools_for_one_request_at_a_time_serve_them_all(
    start: Callable[..., Service], model: Any, pages: tuple[int, int]
) -> None:
    service = start(pages)
    # the first tokens of both prompts differ, so no page is shared
    prompts = [[number, *PROMPTS[0]] for number in range(4)]
    assert service.serve(prompts) == [own_tokens(model, prompt, NEW) for prompt in prompts]
    service.assert_nothing_held()


def test_decode_recomputes_what_it_preempted(start: Callable[..., Service], model: Any) -> None:
    service = start((100, 12))
    prompts = [[7] * 60, [8] * 60, [9] * 30]
    assert service.serve(prompts, 60) == [own_tokens(model, prompt, 60) for prompt in prompts]
    assert service.decode.stats().preemptions > 0
    service.assert_nothing_held()


def test_preempted_requests_come_before_new_ones(start: Callable[..., Service]) -> None:
    service = start((100, 12))
    service.submit([[7] * 60, [8] * 60], 60)
    service.until(lambda: service.decode.stats().preemptions, "a preemption")
    service.decode.submit(msg.Submit(request_id="late", prompt=(9,) * 20, max_new_tokens=4))
    service.until(lambda: len(service.ended) == 3, "the last token")
    assert [len(service.tokens[request_id]) for request_id in ("r0", "r1", "late")] == [60, 60, 4]
    # The request whose pages came last is preempted. If this were the short request, it would end first.
    assert list(service.ended).index("late") > 0, service.ended.keys()
    service.assert_nothing_held()


def test_one_token_or_an_end_token_at_once_needs_no_decode(
    start: Callable[..., Service], expected: list[list[int]]
) -> None:
    service = start()
    assert service.serve(PROMPTS, 1) == [tokens[:1] for tokens in expected]
    service.loops["d0"].runner.eos_token_ids = frozenset({expected[0][0]})
    assert service.serve(PROMPTS[:1]) == [expected[0][:1]]
    assert service.ended["r0"].finished == "eos"
    assert service.decode.stats().pages_pulled == 0
    service.assert_nothing_held()


@pytest.mark.parametrize(("pages", "where"), [((100, 8), "decode"), ((8, 100), "prefill")])
def test_a_prompt_that_fits_only_one_side_fails_without_affecting_others(
    start: Callable[..., Service], expected: list[list[int]], pages: tuple[int, int], where: str
) -> None:
    service = start(pages)
    tokens = service.serve(PROMPTS[:2])
    assert tokens == [[], expected[1]], where
    assert service.ended["r0"].finished == "error"
    assert "'r0'" in service.ended["r0"].error
    assert "128 tokens" in service.ended["r0"].error
    service.assert_nothing_held()


def test_an_id_of_an_open_request_is_refused(start: Callable[..., Service], expected: list[list[int]]) -> None:
    service = start()
    service.submit(PROMPTS[:1])
    service.decode.submit(msg.Submit(request_id="r0", prompt=(1,), max_new_tokens=1))
    (refusal,) = [msg.decode(data) for (data,) in wait_for_messages(service)]
    assert refusal == msg.Tokens(request_id="r0", finished="error", error=refusal.error)
    assert "already open" in refusal.error
    service.until(lambda: service.ended, "the first request")
    assert service.tokens["r0"] == expected[0]
    service.assert_nothing_held()


def wait_for_messages(service: Service) -> list[list[bytes]]:
    assert service.clients["d0"].poll(5000)
    return list(received(service.clients["d0"]))


def test_tenants_share_no_page_on_either_side(start: Callable[..., Service], expected: list[list[int]]) -> None:
    """If two tenants send the same prompt, it is prefilled, pulled and kept twice. If one tenant sends a prompt twice,
    it is prefilled, pulled and kept once.
    """
    service = start()
    pages, seen = -(-len(PROMPTS[0]) // 16), []
    for request_id, salt in (("a", "one"), ("b", "other"), ("c", None), ("a again", "one"), ("b again", "other")):
        service.tokens[request_id] = []
        service.decode.submit(
            msg.Submit(request_id=request_id, prompt=tuple(PROMPTS[0]), max_new_tokens=NEW, cache_salt=salt)
        )
        service.until(lambda request_id=request_id: request_id in service.ended, request_id)
        assert service.tokens[request_id] == expected[0]
        seen.append((service.prefill.stats().cached_tokens, service.decode.stats().pages_pulled))
    full = len(PROMPTS[0]) // 16
    assert seen[:3] == [(0, pages), (0, 2 * pages), (0, 3 * pages)], "no tenant may find pages of another one"
    assert seen[4] == (2 * 16 * full, 3 * pages + 2 * (pages - full)), (
        "each tenant must find its own pages, on both sides"
    )
    service.assert_nothing_held()
