"""Serving gives the tokens of `generate` with every form of cache, whether pages are found, shared, moved or guessed.

A form is a memory layout: one block table or one for each kind of layer, and states in their own memory or among the
pages. Features of only one form are tested in its own file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcache.layer_groups import layer_tables
from kvcache.replica.context import TextContext
from kvcache.sizing import page_bytes
from scheduler_adapters.hf.runner import (
    is_rounding_tie,
    kv_params_of,
    manager_for,
    num_layers_of,
    state_bytes_of,
)
from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.loop import Request, ServingLoop
from tests.kvcache.build import proven, state_pages
from tests.scheduler_adapters.conftest import HYBRIDS
from tests.scheduler_adapters.hf.conftest import FORMS as KINDS_OF_STATE
from tests.scheduler_adapters.hf.speculating import Engine, assert_equal
from tests.scheduler_adapters.hf.test_groups import ALONE, MODELS, WINDOW
from tests.scheduler_adapters.serving import assert_nothing_held, loop_of, own_tokens, requests_of, serve, tokens_of

pytestmark = pytest.mark.slow

PAGE, NEW, COPIES = 8, 12, 16
SYSTEM = ByteTokenizer().encode("What all of these prompts begin with. ")
ENDS = ("Who wrote it?", "And who read it, some time later?", "x", "Long was it?")
PROMPTS = [[*SYSTEM, *ByteTokenizer().encode(text)[1:]] for text in ENDS]
OTHERS = [[at, *prompt] for at, prompt in enumerate(PROMPTS)]  # No two of these prompts share a page.


class Form(NamedTuple):
    """The models of one form, the place of their states, and numbers of pages and slabs. These pages and slabs are
    enough for the prompts of two requests, but not for their whole answers.
    """

    models: tuple[str, ...]
    states: str
    few: tuple[int, int]


FORMS = {
    "states apart": Form(tuple(HYBRIDS), "apart", (14, 0)),
    "states among pages": Form(("bamba", "qwen3_next", "lfm2", "kimi_linear"), "among", (17, 2)),
    "groups": Form(tuple(MODELS), "", (40, 0)),
    "groups of one window": Form(("mistral alone", "phi3 alone", "qwen3 alone"), "", (7, 0)),
    "groups and states apart": Form(("lfm3",), "apart", (30, 0)),
    "groups and states among pages": Form(("lfm3",), "among", (30, 2)),
}
IN_CI = HYBRIDS.keys() - KINDS_OF_STATE.keys() - {"lfm3"}
LFM3 = ("groups and states apart", "lfm3")
CASES = [(form, model) for form, has in FORMS.items() for model in has.models]


def of_forms(has: str = "", **beside: Sequence[Any]) -> pytest.MarkDecorator:
    """Makes one case for each form that `has` accepts and each of the arguments. The case uses the first model of the
    form. CI also runs the other models with one of the arguments. `make long` runs the other models with all arguments.
    """
    every, named = [*product(*beside.values())], list[Any]()
    for turn, (form, name) in enumerate(case for case in CASES if has in case[0]):
        for at, more in enumerate(every):
            mark = pytest.mark.ci if at == turn % len(every) else pytest.mark.long
            named.append(pytest.param(form, name, *more, marks=() if name == FORMS[form].models[0] else mark))
    return pytest.mark.parametrize(("form", "name", *beside), named)


def of_each_model(*settings: tuple[int, int]) -> pytest.MarkDecorator:
    """Parametrises by model.

    `make test` runs one model for each kind of state with one of the settings, and CI runs all models with all
    settings.
    """
    cases = [(*case, *setting) for case in CASES for setting in settings]
    here = {(*case, *settings[at % len(settings)]) for at, case in enumerate(CASES) if case[1] not in IN_CI}
    marked = [pytest.param(*case, marks=() if case in here else pytest.mark.ci) for case in cases]
    return pytest.mark.parametrize(("form", "name", "budget", "shards"), marked)


@pytest.fixture
def model(name: str, shared_model: Callable[..., Any]) -> Any:
    kind, changes = (MODELS | ALONE).get(name, (name, {}))
    return shared_model(kind, **({"num_hidden_layers": 4, **changes} if changes else {}))


def manager_of(
    model: Any,
    form: str,
    pages: int = 400,
    slabs: int = 13,
    *,
    rows: int = 8,
    copies: int = COPIES,
    tiers: dict[str, Any] | None = None,
    **params: Any,
) -> Any:
    """Returns a manager with this many pages and states or slabs. A page has all layers of its table."""
    options = {"enable_prefix_caching": True, "group_layers": form.startswith("groups"), **params}
    cache = dataclasses.replace(kv_params_of(model.config, page_size=PAGE, **options), **(tiers or {}))
    page = page_bytes(cache, layer_tables(cache.groups, num_layers_of(model.config)).layers_per_page, PAGE)
    devices, memory = ["cpu"] * cache.n_devices, pages * page
    caching, states = cache.enable_prefix_caching, FORMS[form].states
    if states:
        kept = copies if states == "apart" and caching else None
        cache = dataclasses.replace(cache, share_state_memory=states == "among", state_copies=kept)
        memory += state_bytes_of(model, cache.n_devices, rows + (kept or 0)) if states == "apart" else 0
    if states == "among":
        probe = manager_for(model, cache, rows, 512, devices, available_cache_memory=4 << 20)
        memory += slabs * probe.slab_pages * page
        probe.close()
    return manager_for(model, cache, rows, 512, devices, available_cache_memory=memory, enable_runtime_checks=True)


def full(tokens: int) -> int:
    return tokens - tokens % PAGE


@of_each_model((64, 1), (7, 2))
def test_tokens_equal_and_prefixes_are_found(form: str, model: Any, budget: int, shards: int) -> None:
    """The second request diverges from the first request where no state was kept. The third request finds a state
    there.
    """
    expected = [own_tokens(model, prompt, NEW) for prompt in PROMPTS]
    turn = [*PROMPTS[0], *expected[0], 1, 2, 3]
    manager = manager_of(model, form, n_devices=shards)
    loop, shared, whole = loop_of(manager, model, budget), full(len(SYSTEM)), len(PROMPTS[0])
    for prompt, tokens, found in zip(
        [*PROMPTS, PROMPTS[0], turn],
        [*expected, expected[0], own_tokens(model, turn, NEW)],
        [0, 0 if manager.states else shared, shared, shared, full(whole - 1), full(whole + NEW - 1)],
        strict=True,
    ):
        before = manager.metrics.cache_tokens
        assert tokens_of(serve(loop, [Request("r", prompt, NEW)])) == [tokens]
        assert manager.metrics.cache_tokens - before == found
    assert [states.hits for states in manager.states] == [4] * len(manager.states)
    assert_nothing_held(manager)


@pytest.mark.each_value
@of_forms(caching=[True, False])
def test_tokens_equal_when_requests_are_preempted(form: str, model: Any, caching: bool) -> None:
    manager = manager_of(model, form, *FORMS[form].few, copies=4, enable_prefix_caching=caching)
    loop = loop_of(manager, model, 16)
    expected = [own_tokens(model, prompt, NEW) for prompt in OTHERS]
    assert tokens_of(serve(loop, requests_of(OTHERS, NEW))) == expected
    assert loop.preemptions
    assert bool(manager.metrics.evictions) == caching
    assert_nothing_held(manager)


@of_forms()
def test_tokens_equal_after_a_hit_and_a_fork(form: str, model: Any) -> None:
    manager = manager_of(model, form, rows=2)
    loop = loop_of(manager, model)
    serve(loop, [Request("r", PROMPTS[0], NEW)])
    manager.reset_metrics()
    parent = TextContext(PROMPTS[0], 512, "parent")
    manager.external_claim("parent")
    contexts = [parent]
    for step in range(NEW):
        assert all(manager.maybe_reserve(context) for context in contexts)
        tokens = loop.runner.run(contexts, manager.fetch(contexts))
        for context, token in zip(contexts, tokens, strict=True):
            context.update(token)
        manager.step(contexts)
        if step == 5:
            contexts.append(parent.fork("child"))
            assert manager.fork(parent, contexts[1])
    assert manager.metrics.cache_tokens == full(len(PROMPTS[0]) - 1)
    for context in contexts:
        assert context.tokens[len(PROMPTS[0]) :].tolist() == own_tokens(model, PROMPTS[0], NEW)
        manager.release(context.request_id)
    assert_nothing_held(manager)


@of_forms("states")
def test_tokens_equal_with_guesses(form: str, model: Any) -> None:
    """If memory is short, some requests run without guesses and are preempted."""
    for pages, slabs in [(400, 13), *[(7, 7)] * (form == "states among pages")]:
        engine = Engine(model, 0.7, manager=manager_of(model, form, pages, slabs))
        answers = engine.knows(PROMPTS)
        for _ in range(2):
            assert_equal(model, answers, engine.serve(PROMPTS))
        assert engine.accepted
        assert engine.set_back
        assert bool(engine.without) == (pages == 7)
        assert_nothing_held(engine.manager)


@of_forms(had=[False, True], end=["commit", "cancel"])
def test_tokens_equal_behind_an_import(form: str, name: str, model: Any, had: bool, end: str) -> None:
    """After an abandoned import, a request continues from the pages that it had found before the import. With windows,
    the request is claimed again.
    """
    expected = own_tokens(model, PROMPTS[0], NEW)
    source, target = (manager_of(model, form, rows=rows) for rows in (2, 1))
    serve(loop_of(source, model, 16), [Request("r", PROMPTS[0], 1, hold_pages=True)])
    taker = loop_of(target, model)
    if had:
        serve(taker, [Request("r", PROMPTS[0], 1)])
    context = taker.context_for(Request("r", [*PROMPTS[0], expected[0]], NEW - 1))
    target.external_claim("r")
    table = source.block_table("r")
    assert name not in ALONE or len(table.groups[0]) <= 4, "a window touches 4 pages"
    pending = target.import_block_table(context, table)
    found = full(len(PROMPTS[0]) - 1) if had else 0
    token = len(PROMPTS[0])
    seen = full(token - WINDOW + 1) if name in ALONE else 0
    assert pending.tokens == (max(found, seen), token)
    target.check()
    states = zip(*([*one.states[0].blocks[0]] if one.states else [] for one in (target, source)), strict=True)
    for mine, theirs in states:
        there, here = state_pages(pending)
        mine[here] = theirs[there] if end == "commit" else 7
    if end == "commit":
        for dst, src, (first, stop) in pending.take(last=True)[: len(target.layer_tables.tables)]:
            count = -(-stop // PAGE) - first // PAGE if first < stop else 0
            target.device_tensors[0][0][dst[:count]] = source.device_tensors[0][0][src[:count]]
        target.commit_import(context, pending, proven(target, pending))
    else:
        target.cancel_import(pending)
        assert context.start_idx == found
        assert [one.tokens_of("r") for one in target.states] == [found] * len(target.states)
    if end == "cancel" and form.startswith("groups"):
        target.release("r")
        context = taker.context_for(Request("r", [*PROMPTS[0], expected[0]], NEW - 1))
        target.external_claim("r")
    taker.adopt(Request("r", PROMPTS[0], NEW), context)
    tokens = expected[:1]
    while taker.has_work:
        tokens += [int(output.token or 0) for output in taker.step()]
    assert tokens == expected
    assert_nothing_held(target)


def conversations(loop: ServingLoop, users: int, turns: int) -> list[tuple[list[int], list[int]]]:
    """Returns the prompts and answers of users who share a system prompt. All users take each turn at the same time."""
    said = [[*SYSTEM, *ByteTokenizer().encode(f"User {user}")[1:]] for user in range(users)]
    answered: list[tuple[list[int], list[int]]] = []
    for turn in range(turns):
        answers = tokens_of(serve(loop, requests_of(said, NEW)))
        answered += [
            (prompt, [int(token or 0) for token in answer]) for prompt, answer in zip(said, answers, strict=True)
        ]
        question = ByteTokenizer().encode(f"And then, {turn}?")[1:]
        said = [[*prompt, *answer, *question] for prompt, answer in answered[-users:]]
    return answered


@of_forms()
def test_conversations_find_all_pages_of_their_earlier_turns(form: str, model: Any) -> None:
    manager = manager_of(model, form, 600, 20)
    answered = conversations(loop_of(manager, model), 4, 3)
    expected = [own_tokens(model, prompt, NEW) for prompt, _ in answered]
    differ = [(*pair, other) for pair, other in zip(answered, expected, strict=True) if pair[1] != other]
    assert len(differ) <= 1
    assert all(is_rounding_tie(model, *one) for one in differ)
    found = sum(full(len(prompt) + len(answer) - 1) for prompt, answer in answered[:8])
    # The largest number of tokens that the first turn can find. It finds them if the requests run one after another.
    most = found + 3 * full(len(SYSTEM) + len("User "))
    assert found <= manager.metrics.cache_tokens <= most
    # Each prompt and each answer leaves a state.
    assert all(states.num_kept <= 4 * (3 + 3) for states in manager.states)
    assert_nothing_held(manager)


@pytest.mark.few(3)
@of_forms("groups")
def test_tokens_equal_with_hits_from_the_host_and_from_files(form: str, name: str, model: Any, tmp_path: Path) -> None:
    """The same test as in `test_states_below`, for every form."""
    tiers: dict[str, Any] = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1e-2}
    tiers |= {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-2, "file_tier_key": "model"}
    prompts = PROMPTS[:2]
    expected = [own_tokens(model, prompt, NEW) for prompt in prompts]
    first = manager_of(model, form, *FORMS[form].few, copies=4, tiers=tiers)
    loop = loop_of(first, model, 16)
    for prompt in (*prompts, *OTHERS):  # Each prompt evicts the earlier prompts.
        serve(loop, [Request("r", prompt, NEW)])
    manager = first
    for again in (False, True):
        if again:
            manager = manager_of(model, form, *FORMS[form].few, copies=4, tiers=tiers)
        loop, before = loop_of(manager, model, 16), manager.metrics
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert tokens_of(serve(loop, [Request("r", prompt, NEW)])) == [tokens]
        more = manager.metrics - before
        assert more.cache_tokens == sum(full(len(prompt) - 1) for prompt in prompts)
        if name in ALONE:
            assert 3 <= more.h2d_blocks_copied <= 2 * 4, "only the pages of the window may be copied"
        else:
            assert more.h2d_blocks_copied > len(SYSTEM) // PAGE
        assert bool(more.h2d_states_copied) == bool(manager.states)
        manager.close()
        assert_nothing_held(manager)
    assert manager.metrics.file_blocks_read >= min(more.h2d_blocks_copied, len(SYSTEM) // PAGE + 1)
    assert bool(manager.metrics.file_states_read) == bool(manager.states)


CHUNKED = ("groups of one window", "llama4 alone")


@pytest.mark.parametrize(("form", "name"), [CHUNKED])
def test_tokens_equal_with_attention_chunks_whose_first_token_sees_nothing_before_it(form: str, model: Any) -> None:
    """The first token of an attention chunk sees no earlier token, so only the last chunk of a prompt has to be
    computed.
    """
    manager = manager_of(model, form, 6)
    loop = loop_of(manager, model, 16)
    expected = [own_tokens(model, prompt, NEW) for prompt in OTHERS]
    for _ in range(2):
        assert tokens_of(serve(loop, requests_of(OTHERS, NEW))) == expected
    assert loop.preemptions
    assert manager.metrics.evictions
    assert_nothing_held(manager)


@pytest.mark.few(4)
@pytest.mark.parametrize(("form", "name"), [*(case for case in CASES if case[1] in MODELS | ALONE), CHUNKED, LFM3])
def test_a_request_holds_only_the_pages_of_its_windows(form: str, model: Any) -> None:
    """A request of 400 tokens holds 50 pages of a layer that attends to all tokens, and 7 pages of a layer with a
    window.
    """

    def longest_held(**params: Any) -> int:
        manager = manager_of(model, form, **params)
        loop = loop_of(manager, model, 16)
        loop.add(Request("r", (SYSTEM * 12)[:380], 20))
        held = 0
        while loop.has_work:
            loop.step()
            held = max(held, manager.total_num_pages - manager.num_free_blocks)
        return held * manager.layouts[0].page_bytes

    layers = num_layers_of(model.config)
    page, full = longest_held(group_layers=False) // 50 // layers, form != "groups of one window"
    assert longest_held() <= (50 * full + 7 * (layers - full)) * page
