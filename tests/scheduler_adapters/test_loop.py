from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache.errors import AlreadyClaimedError, InvalidRequestError, PromptTooLongError, UnknownRequestError
from scheduler_adapters.hf.runner import HFRunner
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Output, Request, ServingLoop, finish_reason, plan_chunks
from tests.kvcache.build import proven
from tests.scheduler_adapters import serving
from tests.scheduler_adapters.serving import (
    HEAD,
    PROMPTS,
    Unwalked,
    assert_nothing_held,
    new_loop,
    new_manager,
    own_tokens,
    serve,
    tokens_of,
)

NEW = 16


def requests_of(prompts: list[list[int]], new: int = NEW, **fields: Any) -> list[Request]:
    return serving.requests_of(prompts, new, **fields)


@pytest.mark.parametrize(
    ("page_size", "budget", "params"),
    [
        (16, 64, {}),
        (128, 512, {}),
        (16, 7, {}),
        (16, 1, {}),
        (8, 64, {"n_devices": 2}),
        (16, 64, {"n_devices": 4, "data_parallel_degree": 2}),
        (16, 64, {"enable_prefix_caching": False}),
    ],
)
def test_every_request_gets_the_models_own_tokens(
    model: Any, expected: list[list[int]], page_size: int, budget: int, params: dict[str, Any]
) -> None:
    loop = new_loop(model, page_size=page_size, budget=budget, **params)
    outputs = serve(loop, requests_of(PROMPTS))
    assert tokens_of(outputs) == expected
    for whole in outputs.values():
        assert [output.finished for output in whole[:-1]] == [None] * (len(whole) - 1)
        assert whole[-1].finished in {"eos", "length"}
    assert_nothing_held(loop.manager)


def test_a_tiny_pool_preempts_and_still_gives_equal_tokens(model: Any, expected: list[list[int]]) -> None:
    longest = max(len(prompt) for prompt in PROMPTS) + NEW - 1
    loop = new_loop(model, pages=-(-longest // 4), page_size=4, enable_prefix_caching=False)
    prompts = [PROMPTS[1], PROMPTS[3][:60], PROMPTS[1], PROMPTS[3][:80], PROMPTS[0]]
    wanted = [own_tokens(model, prompt, 40) for prompt in prompts[:4]]
    outputs = serve(loop, requests_of(prompts[:4], new=40))
    assert loop.preemptions > 0
    assert tokens_of(outputs) == wanted
    assert_nothing_held(loop.manager)
    outputs = serve(loop, requests_of(PROMPTS))
    assert tokens_of(outputs) == expected
    assert_nothing_held(loop.manager)


def test_the_oldest_request_is_never_preempted(model: Any) -> None:
    loop = new_loop(model, pages=12, page_size=4, enable_prefix_caching=False)
    outputs: list[Output] = []
    for request in requests_of([[5] * 10, [6] * 10, [7] * 10], new=30):
        loop.add(request)
    while loop.has_work:
        outputs += loop.step()
    ends = [output.request_id for output in outputs if output.finished]
    assert loop.preemptions > 0
    assert ends == ["r0", "r1", "r2"]


def test_a_preempted_request_comes_before_those_that_wait(model: Any) -> None:
    loop = new_loop(model, pages=12, page_size=4, rows=2, enable_prefix_caching=False)
    for request in [*requests_of([[5] * 10, [6] * 10], new=30), Request("r2", [7] * 4, 3)]:
        loop.add(request)
    outputs: list[Output] = []
    while loop.has_work:
        outputs += loop.step()
    assert loop.preemptions > 0
    first_of_r2 = next(i for i, output in enumerate(outputs) if output.request_id == "r2")
    end_of_r0 = next(i for i, output in enumerate(outputs) if output.request_id == "r0" and output.finished)
    assert first_of_r2 > end_of_r0


def test_requests_that_wait_behind_the_first_are_not_looked_at(model: Any, expected: list[list[int]]) -> None:
    loop = new_loop(model, rows=2)
    loop._waiting = Unwalked()
    last = Request("last", PROMPTS[0], NEW)
    loop.add(last)
    assert loop.abort("last")
    assert tokens_of(serve(loop, requests_of(PROMPTS))) == expected


def test_shared_heads_are_computed_once(model: Any, expected: list[list[int]]) -> None:
    loop = new_loop(model)
    serve(loop, requests_of(PROMPTS[:1]))
    before = loop.manager.metrics
    outputs = serve(loop, requests_of([PROMPTS[2]]))
    assert tokens_of(outputs) == [expected[2]]
    after = loop.manager.metrics
    shared = len(ByteTokenizer().encode(HEAD)) // 16 * 16
    assert after.cache_tokens - before.cache_tokens == shared
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPTS[2])


def test_other_salts_share_nothing(model: Any) -> None:
    loop = new_loop(model)
    serve(loop, [Request("a", PROMPTS[0], 2, cache_salt="one")])
    serve(loop, [Request("b", PROMPTS[0], 2, cache_salt="two")])
    assert loop.manager.metrics.cache_tokens == 0


def test_a_prompt_that_can_never_fit_is_refused_by_name_and_the_others_run(
    model: Any, expected: list[list[int]]
) -> None:
    loop = new_loop(model, pages=20)
    loop.add(Request("small", PROMPTS[1], NEW))
    with pytest.raises(PromptTooLongError, match=r"'giant'.*400 prompt tokens.*room for 320 tokens"):
        loop.add(Request("giant", [1] * 400, NEW))
    outputs: list[Output] = []
    while loop.has_work:
        outputs += loop.step()
    assert [output.token for output in outputs] == expected[1]
    assert_nothing_held(loop.manager)


def test_a_request_past_the_sequence_limit_is_refused_and_the_others_run(model: Any, expected: list[list[int]]) -> None:
    loop = new_loop(model, pages=600)  # The pool has room for 9,600 tokens. A sequence may have 4,096 tokens.
    loop.add(Request("short", PROMPTS[1], NEW))
    for prompt, new in (([1] * 4096, 2), ([1] * 2, 4096)):
        with pytest.raises(PromptTooLongError, match="'long'.*room for 4096 tokens"):
            loop.add(Request("long", prompt, new))
    outputs: list[Output] = []
    while loop.has_work:
        outputs += loop.step()
    assert [output.token for output in outputs] == expected[1]
    assert_nothing_held(loop.manager)


@pytest.mark.parametrize(
    "request_", [Request("r", [], 1), Request("r", [1], 0), Request("r", [-1], 1), Request("r", [1 << 40], 1)]
)
def test_bad_requests_are_refused_before_they_are_queued(model: Any, request_: Request) -> None:
    loop = new_loop(model)
    with pytest.raises(InvalidRequestError, match="'r'"):
        loop.add(request_)
    assert not loop.has_work


def test_the_last_token_of_the_vocabulary_is_taken_and_the_one_after_it_is_not(model: Any) -> None:
    loop = new_loop(model)
    size = model.get_input_embeddings().weight.shape[0]
    loop.add(Request("last", [1, size - 1], 1))
    with pytest.raises(
        InvalidRequestError, match=f"request 'r': token {size} is not in the vocabulary of {size} tokens"
    ):
        loop.add(Request("r", [size, 1], 1))
    assert loop.num_waiting == 1


def test_an_id_can_be_used_by_one_request_at_a_time(model: Any) -> None:
    loop = new_loop(model)
    loop.add(Request("r", [1, 2], 2, hold_pages=True))
    for _ in range(4):  # The first request waits, then runs, and then holds its pages.
        with pytest.raises(AlreadyClaimedError, match="'r'"):
            loop.add(Request("r", [1, 2], 2))
        loop.step()
    loop.free("r")
    loop.add(Request("r", [1, 2], 2))


def test_held_pages_stay_until_freed_and_requests_wait_for_them(model: Any) -> None:
    loop = new_loop(model, pages=4)
    outputs = serve(loop, [Request("held", [1] * 50, 1, hold_pages=True)])
    assert [output.finished for output in outputs["held"]] == ["length"]
    assert loop.manager.block_table("held").num_tokens == 50
    loop.add(Request("next", [2] * 30, 1))
    assert loop.step() == loop.step() == []
    assert loop.num_waiting == 1
    loop.free("held")
    with pytest.raises(UnknownRequestError, match="'held'"):
        loop.free("held")
    assert [output.request_id for output in loop.step()] == ["next"]
    assert_nothing_held(loop.manager)


def test_abort_takes_a_request_out_of_every_state(model: Any) -> None:
    loop = new_loop(model, rows=2)
    for request in requests_of(PROMPTS[:3]):
        loop.add(request)
    loop.add(Request("held", [1, 2, 3], 1, hold_pages=True))
    loop.step()
    assert (loop.num_running, loop.num_waiting) == (2, 2)
    assert loop.abort("r0")
    assert loop.abort("r2")
    while loop.has_work:
        assert all(output.request_id in {"r1", "held"} for output in loop.step())
    assert loop.abort("held")
    assert not loop.abort("held")
    assert_nothing_held(loop.manager)


def test_an_end_token_ends_the_request_with_that_token(model: Any, expected: list[list[int]]) -> None:
    runner = HFRunner(model)
    runner.eos_token_ids = frozenset({expected[0][5]})
    first = expected[0].index(expected[0][5])
    loop = ServingLoop(new_manager(model, 100), runner)
    outputs = serve(loop, requests_of(PROMPTS[:1]))
    assert tokens_of(outputs) == [expected[0][: first + 1]]
    assert outputs["r0"][-1].finished == "eos"
    assert_nothing_held(loop.manager)


def test_an_adopted_request_continues_where_another_manager_stopped(model: Any, expected: list[list[int]]) -> None:
    source, target = new_loop(model), new_loop(model)
    request = Request("r", PROMPTS[0], NEW)
    serve(source, [Request("r", PROMPTS[0], 1, hold_pages=True)])
    context = target.context_for(request)
    context.update(0)  # The token 0 is a placeholder. The token of prefill replaces it below.
    context = target.context_for(Request("r", [*PROMPTS[0], expected[0][0]], NEW - 1))
    target.manager.external_claim("r")
    pending = target.manager.import_block_table(context, source.manager.block_table("r"))
    assert pending is not None
    for there, here in zip(pending.parts[0].src_pages, pending.parts[0].dst_pages, strict=True):
        blocks = [loop.manager.device_tensors[0][0] for loop in (target, source)]
        blocks[0][int(here)] = blocks[1][int(there)]
    target.manager.commit_import(context, pending, proven(target.manager, pending))
    target.adopt(request, context)
    tokens = [expected[0][0]]
    while target.has_work:
        tokens += [int(output.token or 0) for output in target.step()]
    assert tokens == expected[0]
    source.free("r")
    assert_nothing_held(source.manager)
    assert_nothing_held(target.manager)


def test_a_budget_below_one_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequestError, match="token_budget is 0"):
        new_loop(model, budget=0)


@pytest.mark.parametrize(
    ("pending", "budget", "counts"),
    [
        ([], 8, []),
        ([1, 1, 1], 2, [1, 1, 1]),
        ([10, 1, 10], 8, [7, 1, 0]),
        ([3, 1, 10], 8, [3, 1, 4]),
        ([1, 10], 1, [1, 1]),
        ([10, 10], 100, [10, 10]),
    ],
)
def test_a_step_runs_decodes_first_and_then_the_oldest_prompts(
    pending: list[int], budget: int, counts: list[int]
) -> None:
    assert plan_chunks(pending, budget) == counts


def test_the_reason_for_which_a_request_ends() -> None:
    request = Request("r", [1, 2], 3)
    assert finish_reason(request, 3, 9, frozenset({9})) == "eos"
    assert finish_reason(request, 4, 8, frozenset({9})) is None
    assert finish_reason(request, 5, 8, frozenset({9})) == "length"


def test_a_reused_page_with_garbage_does_not_spoil_a_batch(model: Any, expected: list[list[int]]) -> None:
    loop = new_loop(model, enable_prefix_caching=False)
    serve(loop, requests_of(PROMPTS[:2]))
    for blocks in loop.manager.device_tensors[0]:
        blocks[1:] = float("nan")  # A reused page may have any content.
    assert tokens_of(serve(loop, requests_of(PROMPTS))) == expected
    assert not any(torch.any(blocks[0]) for blocks in loop.manager.device_tensors[0])


def test_a_request_may_fill_the_cache_to_its_last_token_and_not_beyond(model: Any) -> None:
    # The cache has room for 64 tokens. The last token of a request is never fed back, so it needs no room.
    loop = new_loop(model, pages=4)
    prompt = PROMPTS[3][:50]
    outputs = serve(loop, [Request("fits", prompt, 15)])
    assert tokens_of(outputs) == [own_tokens(model, prompt, 15)]
    with pytest.raises(PromptTooLongError, match=r"50 prompt tokens and 16 new ones do not fit: .* room for 64"):
        loop.add(Request("too long", prompt, 16))
    assert_nothing_held(loop.manager)


def test_a_replica_short_of_pages_takes_none_from_another(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest request runs on the replica that has pages. It is never preempted."""
    loop = new_loop(model, pages=12, page_size=4, n_devices=2, data_parallel_degree=2, enable_prefix_caching=False)
    at = {"r0": 0, "r1": 0, "r2": 1}
    monkeypatch.setattr(loop.manager, "get_or_recommend_replica", lambda context: at[context.request_id])
    admitted: list[tuple[str, int]] = []
    loop.on_admit = lambda request_id, replica, _: admitted.append((request_id, replica))
    prompts = [[5] * 10, [6] * 10, [7] * 10]
    outputs = serve(loop, requests_of(prompts, new=30))
    assert tokens_of(outputs) == [own_tokens(model, prompt, 30) for prompt in prompts]
    assert loop.preemptions == 1
    assert admitted == [("r0", 0), ("r1", 0), ("r2", 1), ("r1", 0)]
    assert_nothing_held(loop.manager)


def test_pages_that_never_arrive_hold_a_request_up_for_five_seconds_and_no_other_any_longer(
    model: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("scheduler_adapters.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    loop = new_loop(model)
    # The store has the pages, but does not answer.
    monkeypatch.setattr(loop.manager, "prefetch", lambda context: context.request_id == "r1")
    for request in requests_of(PROMPTS[:3]):
        loop.add(request)
    for now[0] in (100.0, 102.5, 104.9):
        loop.step()
        assert (loop.fetching, loop.num_running, loop.num_waiting) == (True, 1, 2)
    now[0] = 105.0  # Five seconds have passed since the first attempt to fetch.
    outputs = loop.step()
    assert (loop.fetching, loop.num_running, loop.num_waiting) == (False, 3, 0)
    while loop.has_work:
        outputs += loop.step()
    assert [[output.token for output in outputs if output.request_id == name] for name in ("r1", "r2")] == expected[1:3]
    assert_nothing_held(loop.manager)


def test_with_windows_a_budget_of_one_token_still_finds_cached_prefixes(make_model: Callable[..., Any]) -> None:
    """With several block tables, only one chunk at a time has pages. A chunk of one token would count as a decode
    step.
    """
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    windowed = make_model("gemma3", layer_types=layers, sliding_window=24)
    prompt = PROMPTS[0][:60]
    loop = new_loop(windowed, budget=1, page_size=8, group_layers=True)
    assert len(loop.manager.layer_tables.tables) > 1
    admitted: list[int] = []
    loop.on_admit = lambda _request_id, _replica, cached: admitted.append(cached)
    wanted = [own_tokens(windowed, prompt, 4)]
    for _ in range(2):
        assert tokens_of(serve(loop, requests_of([prompt], new=4))) == wanted
    assert admitted == [0, 56]
    assert_nothing_held(loop.manager)


def test_a_chunk_ends_where_found_pages_begin(model: Any) -> None:
    prompt = [at % 250 for at in range(16 * 12 + 3)]
    loop = new_loop(model, page_size=16, budget=40)
    loop.add(Request("r", prompt, 1))
    loop.meet("stranger", 64)
    loop.step()
    starts, context = [40], loop._running["r"].context
    assert context.start_idx == 40
    loop.meet("r", 64)
    while loop.has_work:
        loop.step()
        starts.append(context.start_idx)
    assert starts[:4] == [40, 64, 104, 144], "a chunk ends at the found pages, and the next one has the usual length"
    assert_nothing_held(loop.manager)
