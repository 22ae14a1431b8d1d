"""Hybrid models (attention and Mamba-2 layers) are served with their recurrent states in state pages."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvcache.errors import (
    AlreadyClaimedError,
    BlockTableMismatchError,
    InvalidParamsError,
    InvalidRequestError,
    NotReservedError,
    PoolTooSmallError,
    StatePageError,
)
from kvcache.manager import PagedKVCacheManager
from kvcache.params import KVCacheParams
from kvcache.replica.context import TextContext
from kvcache.states.state_memory import page_bytes, state_layouts
from scheduler_adapters.errors import UnsupportedModelError
from scheduler_adapters.hf.recurrent import PagedStates, state_shape_of
from scheduler_adapters.hf.runner import (
    HFRunner,
    kv_params_of,
    load_model,
    manager_for,
    num_layers_of,
)
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Output, Request, ServingLoop
from tests.kvcache.build import proven, state_pages
from tests.scheduler_adapters.conftest import HYBRIDS
from tests.scheduler_adapters.serving import (
    assert_nothing_held,
    loop_of,
    new_manager,
    own_tokens,
    requests_of,
    serve,
    tokens_of,
)

pytestmark = pytest.mark.slow

MODEL = "bamba"
TEXTS = ("A state is of all tokens before it, and of no page of them. " * 2, "x", "Who wrote it?", "abc" * 30, "Why?")
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]
NEW = 12
PAGE = 8


@pytest.fixture(scope="module", params=HYBRIDS)
def each_model(request: pytest.FixtureRequest, shared_model: Callable[..., Any]) -> Any:
    return shared_model(request.param)


def hybrid_manager(model: Any, pages: int = 200, shards: int = 1, **manager: Any) -> Any:
    return new_manager(model, pages, PAGE, n_devices=shards, **manager)


def hybrid_loop(model: Any, budget: int = 64, **manager: Any) -> ServingLoop:
    return loop_of(hybrid_manager(model, **manager), model, budget)


def states_of(loop: ServingLoop) -> Any:
    return loop.manager.states[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("budget", "shards", "rows"), [(64, 1, 8), (7, 2, 3), (3, 1, 8), (500, 4, 8)])
def test_every_request_gets_the_models_own_tokens(each_model: Any, budget: int, shards: int, rows: int) -> None:
    expected = [own_tokens(each_model, prompt, NEW) for prompt in PROMPTS]
    loop = hybrid_loop(each_model, budget, shards=shards, rows=rows)
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert_nothing_held(loop.manager)


def test_a_forgotten_state_changes_the_tokens(each_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten state changes the tokens. The equal tokens in the other tests therefore show that the states are
    right.
    """
    expected = own_tokens(each_model, PROMPTS[0], NEW)
    shape = state_shape_of(each_model)
    for forgotten in [part for part, kept in (("conv.", shape.conv_kinds), ("ssm", shape.matrix)) if kept]:
        loop = hybrid_loop(each_model)
        write = states_of(loop).write

        def forget(layer: int, pages: Any, kinds: Any, states: Any, part: str = forgotten, write: Any = write) -> None:
            write(layer, pages, kinds, torch.zeros_like(states) if kinds[0].startswith(part) else states)

        monkeypatch.setattr(states_of(loop), "write", forget)
        assert tokens_of(serve(loop, requests_of(PROMPTS[:1], NEW))) != [expected]


def test_pages_and_states_that_held_anything_before_change_nothing(model: Any, expected: list[list[int]]) -> None:
    loop = hybrid_loop(model)
    serve(loop, requests_of(PROMPTS[:2], NEW))
    for blocks in loop.manager.device_tensors[0]:
        blocks[1:] = float("nan")
    for tensor in states_of(loop).tensors[0]:
        tensor[1:] = float("nan")
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected


@pytest.mark.parametrize("shards", [1, 2])
def test_a_request_continues_from_copied_pages_and_a_copied_state_page(
    model: Any, expected: list[list[int]], shards: int
) -> None:
    source, target = hybrid_loop(model, shards=shards), hybrid_loop(model, shards=shards)
    # These requests hold pages, so that the target's page numbers differ from the source's.
    serve(target, requests_of(PROMPTS[1:3], 2, hold_pages=True))
    for name, prompt, tokens in zip("abc", PROMPTS, expected, strict=False):
        serve(source, [Request(name, prompt, 1, hold_pages=True)])
        table = source.manager.block_table(name)
        context = target.context_for(Request(name, [*prompt, tokens[0]], NEW - 1))
        target.manager.external_claim(name)
        pending = target.manager.import_block_table(context, table)
        assert pending is not None
        there, here = state_pages(pending)
        for shard in range(shards):
            blocks = [loop.manager.device_tensors[0][shard] for loop in (target, source)]
            blocks[0][pending.parts[0].dst_pages] = blocks[1][pending.parts[0].src_pages]
            of_shard = [states_of(loop).tensors[shard] for loop in (target, source)]
            for mine, theirs in zip(*of_shard, strict=True):
                mine[here] = theirs[there]
        target.manager.commit_import(context, pending, proven(target.manager, pending))
        target.adopt(Request(name, prompt, NEW), context)
        source.free(name)
    assert_nothing_held(source.manager)
    outputs: dict[str, list[Any]] = {name: [tokens[0]] for name, tokens in zip("abc", expected, strict=False)}
    while target.has_work:
        for output in target.step():
            outputs[output.request_id].append(output.token)
    assert list(outputs.values()) == expected[:3]
    for name in ("r0", "r1"):
        target.free(name)
    assert_nothing_held(target.manager)


def imported(
    target: ServingLoop, source: ServingLoop, name: str = "r0", first_token: int = 1
) -> tuple[TextContext, Any]:
    table = source.manager.block_table(name)
    context = target.context_for(Request(name, [*PROMPTS[0], first_token], NEW))
    target.manager.external_claim(name)
    return context, target.manager.import_block_table(context, table)


def test_a_lease_holds_pages_and_state_of_a_request_that_has_left(model: Any) -> None:
    loop = hybrid_loop(model, rows=2)
    manager = loop.manager
    serve(loop, requests_of(PROMPTS[:1], 1, hold_pages=True))
    lease = manager.lease("r0")
    table = manager.block_table("r0")
    (page,) = table.groups[1]
    state = [tensor[page].clone() for tensor in states_of(loop).tensors[0]]
    loop.free("r0")
    manager.check()
    assert manager.num_leased_blocks == len(table.groups[0])
    serve(loop, requests_of(PROMPTS[:3], 3))
    now = [tensor[page] for tensor in states_of(loop).tensors[0]]
    assert all(torch.equal(*pair) for pair in zip(now, state, strict=True))
    assert state[3].any()
    assert states_of(loop).num_held == 1
    manager.end_lease(lease)
    assert_nothing_held(manager)


def test_an_import_of_a_state_needs_a_proof_and_its_page_stays_with_the_copier(model: Any) -> None:
    source, target = hybrid_loop(model), hybrid_loop(model)
    serve(source, requests_of(PROMPTS[:1], 1, hold_pages=True))
    context, pending = imported(target, source)
    pages = state_pages(pending)
    with pytest.raises(InvalidRequestError, match="'r0': commit_import without a proof"):
        target.manager.commit_import(context, pending)
    copier = target.manager.copier(pending)
    tokens, state = copier.take()
    assert (state.src_pages.tolist(), state.dst_pages.tolist()) == ([pages[0]], [pages[1]])
    assert state.tokens == tokens.tokens == (0, len(PROMPTS[0]))
    target.manager.cancel_import(pending)
    target.manager.release("r0")
    assert states_of(target).num_held == 1
    copier.give_up()
    assert_nothing_held(target.manager)


def test_tables_that_do_not_fit_are_refused_and_nothing_is_taken(model: Any) -> None:
    source, target = hybrid_loop(model), hybrid_loop(model)
    serve(source, requests_of(PROMPTS[:1], 1, hold_pages=True))
    table = source.manager.block_table("r0")
    context = target.context_for(Request("r0", [*PROMPTS[0], 1], NEW))
    target.manager.external_claim("r0")
    before = target.manager.num_free_blocks
    replace = msgspec.structs.replace
    for wrong, message in (
        (replace(table, groups=table.groups[:1]), "1 page groups; this manager has 2"),
        (replace(table, groups=(table.groups[0], (1, 2))), "names 2 state pages; a request has one"),
        (replace(table, groups=(table.groups[0], (0,))), "state page 0"),
    ):
        with pytest.raises(BlockTableMismatchError, match=message):
            target.manager.import_block_table(context, wrong)
    pending = target.manager.import_block_table(context, table)
    with pytest.raises(NotReservedError, match="'r0': import_block_table while its import is pending"):
        target.manager.import_block_table(context, table)
    other = (table.groups[0], (table.groups[1][0] + 1,))
    with pytest.raises(BlockTableMismatchError, match="'r0': .* state page 2; the earlier table named 1"):
        target.manager.extend_import(context, pending, replace(table, groups=other), last=True)
    target.manager.cancel_import(pending)
    target.manager.release("r0")
    target.manager.external_claim("r0")
    assert target.manager.num_free_blocks == before
    assert states_of(target).tokens_of("r0") == 0


def test_a_step_that_failed_changed_nothing_and_runs_again(
    model: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = hybrid_loop(model)
    loop.add(Request("r", PROMPTS[0], NEW))
    outputs: list[Output] = loop.step()

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt("behind every layer")

    with monkeypatch.context() as patched:
        patched.setattr(model.lm_head, "forward", fail)  # Every layer has run when `lm_head` is called.
        with pytest.raises(KeyboardInterrupt, match="behind every layer"):
            loop.step()
    while loop.has_work:
        outputs += loop.step()
    assert [output.token for output in outputs if output.token is not None] == expected[0]


def test_a_step_that_was_not_booked_is_refused_when_it_runs_again(model: Any) -> None:
    manager = hybrid_manager(model)
    runner = HFRunner(model, manager.states)
    context = TextContext(PROMPTS[0], 4096, "r")
    with manager.claim(context):
        manager.maybe_reserve(context)
        runner.run([context], manager.fetch([context]))
        with pytest.raises(StatePageError, match=f"would run from token 0, but its state covers {len(PROMPTS[0])}"):
            runner.run([context], manager.fetch([context]))
        context.update(1)
        manager.step([context])
        assert manager.block_table("r").groups[1] == (manager.states[0].page_of("r"),)
        manager.maybe_reserve(context)
        runner.run([context], manager.fetch([context]))
        with pytest.raises(StatePageError, match="its pages hold"):
            manager.block_table("r")
    assert manager.states[0].num_held == 0


def test_requests_wait_for_a_row_and_its_state_page(model: Any, expected: list[list[int]]) -> None:
    loop = hybrid_loop(model, rows=2)
    assert states_of(loop).num_pages == 2
    loop.manager.external_claim("r")
    with pytest.raises(AlreadyClaimedError, match="'r': is already claimed on replica 0"):
        loop.manager.external_claim("r")
    assert states_of(loop).num_held == 1
    loop.manager.release("r")
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
    assert loop.preemptions == 0
    assert_nothing_held(loop.manager)


def test_features_that_exclude_states_are_refused_with_the_reason(model: Any) -> None:
    assert not kv_params_of(model.config).enable_prefix_caching
    assert kv_params_of(model.config, enable_prefix_caching=True).enable_prefix_caching
    shape = state_shape_of(model)
    params: dict[str, Any] = {
        "dtype": torch.float32,
        "n_kv_heads": 2,
        "head_dim": 16,
        "page_size": PAGE,
        "states": shape,
    }
    caching = {"enable_prefix_caching": True}
    for wrong, message in (
        ({"state_every_pages": 2}, "state_every_pages is 2: both need enable_prefix_caching"),
        ({"state_copies": 3}, "state_copies is 3 .* need enable_prefix_caching"),
        ({**caching, "state_copies": 0, "share_state_memory": True}, "state_copies is 0: with share_state_memory"),
        ({"share_state_memory": 1}, "share_state_memory is 1"),
        ({"state_copies": -1}, "state_copies is -1"),
        ({"states": 1}, "states is 1: a StateShape is needed"),
    ):
        with pytest.raises(InvalidParamsError, match=message):
            KVCacheParams(**(params | wrong))


def test_state_pages_are_part_of_the_budget(model: Any) -> None:
    params = dataclasses.replace(kv_params_of(model.config, page_size=PAGE), share_state_memory=False)
    page = PAGE * params.bytes_per_token(num_layers_of(model.config))
    state = page_bytes(state_layouts(state_shape_of(model), 1))

    def built(memory: int) -> PagedKVCacheManager:
        return manager_for(model, params, 4, 128, ["cpu"], available_cache_memory=memory)

    states = 5 * state  # The memory holds the states of four requests and the null state page.
    assert built(states + 20 * page).total_num_pages == 20
    with pytest.raises(
        PoolTooSmallError,
        match=f"{page - 1} bytes for the pages of each of 1 replicas: at least one page of {page} bytes",
    ):
        built(states + page - 1)
    for memory in (1, states):
        with pytest.raises(
            PoolTooSmallError, match=f"is {memory} bytes: 4 state pages and the null state page take {states}"
        ):
            built(memory)


def test_a_hybrid_without_state_pages_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="bamba: layer 0 is recurrent: pass the manager's state pages"):
        HFRunner(model)


def test_a_pass_that_goes_past_a_recurrent_layer_is_an_error(model: Any) -> None:
    manager = hybrid_manager(model)
    manager.external_claim("r")
    for convolved, recurred in (((0,), (0, 2)), ((0, 2), (0,))):
        states = PagedStates(manager.states[0], {0: 0, 2: 1}, manager.states[0].pages_at(["r"], [0]))
        for layer in convolved:
            states.get_conv_state(layer)
        for layer in recurred:
            states.get_recurrent_state(layer)
        with pytest.raises(UnsupportedModelError, match=r"layers \[0\], but layers \[0, 2\] are recurrent"):
            states.store([1])
    manager.release("r")


def test_a_saved_hybrid_is_loaded_with_the_same_tokens(model: Any, expected: list[list[int]], tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loop = hybrid_loop(load_model(tmp_path))
    assert tokens_of(serve(loop, requests_of(PROMPTS, NEW))) == expected
