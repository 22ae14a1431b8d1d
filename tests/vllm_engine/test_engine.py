import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.request import RequestStatus

from tests.vllm_engine.engine import Engine, Shape, expected_tokens, run_until, secret_of
from tests.vllm_engine.states import States

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = list(range(1000, 1100))
Make = Callable[..., Engine]


def prefilled(prefill: Engine, request_id: str, prompt: list[int]) -> dict[str, Any]:
    prefill.add(request_id, prompt, 1, dict(PREFILL))
    run_until([prefill], lambda: prefill.finish_reason(request_id))
    return prefill.params(request_id)


def served(engines: list[Engine], request_id: str, prompt: list[int], count: int, params: Any) -> list[int]:
    decode = engines[-1]
    decode.add(request_id, prompt, count, params)
    run_until(engines, lambda: decode.finish_reason(request_id))
    return decode.tokens(request_id)


def assert_empty(*engines: Engine) -> None:
    run_until(engines, lambda: all(engine.free_blocks == engine.free_at_start for engine in engines))
    assert not any(engine.scheduler.requests for engine in engines)


SIDES = {
    "equal": ({}, {}),
    "TP 1 to 2": ({}, {"tp_size": 2}),
    "TP 2 to 1": ({"tp_size": 2}, {}),
    "TP 4 to 2 of 2 heads": ({"tp_size": 4, "heads": 2}, {"tp_size": 2, "heads": 2}),
    "TP 2 to 4 of 2 heads": ({"tp_size": 2, "heads": 2}, {"tp_size": 4, "heads": 2}),
    "blocks of 8 to 16": ({"block_size": 8}, {}),
    "blocks of 16 to 8": ({}, {"block_size": 8}),
    "blocks of 16 to 8, TP 2 to 1": ({"tp_size": 2}, {"block_size": 8}),
    "full and window": ({"windows": (0, 40)}, {"windows": (0, 40)}),
    "full and window, TP 1 to 2": ({"windows": (0, 40)}, {"windows": (0, 40), "tp_size": 2}),
    "full and states": ({"states": States()}, {"states": States()}),
    "full, window and states, TP 2": (
        {"states": States(), "windows": (0, 40), "tp_size": 2},
        {"states": States(), "windows": (0, 40), "tp_size": 2},
    ),
    "window alone": ({"windows": (33,)}, {"windows": (33,)}),
}


@pytest.mark.parametrize(("left", "right"), SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 97, 103, 112, 113])
def test_decode_waits_pulls_and_continues_and_both_sides_release_their_blocks(
    make: Make, left: dict[str, Any], right: dict[str, Any], length: int
) -> None:
    prefill, decode = make("kv_producer", Shape(**left)), make("kv_consumer", Shape(**right))
    prompt = list(range(1000, 1000 + length))
    params = prefilled(prefill, "p", prompt)
    assert prefill.free_blocks < prefill.free_at_start, "prefill keeps what decode is to read"
    decode.add("d", prompt, 5, params)
    decode.step()
    # With windows or states, decode computes a prompt's last token. For a prompt of one token it therefore loads no
    # block.
    if length > 1 or not (decode.shape.states or any(decode.shape.windows)):
        assert decode.status("d") is RequestStatus.WAITING_FOR_REMOTE_KVS
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert decode.tokens("d") == expected_tokens(prompt, 5, decode.shape)
    assert sum(sum(step.values()) for step in decode.scheduled) == 5, (
        "decode must run one token for each token that it generates"
    )
    assert_empty(prefill, decode)


def test_decode_reads_only_what_it_lacks(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    assert served([decode], "local", PROMPT[:50], 1, None) == expected_tokens(PROMPT[:50], 1, decode.shape)
    assert served([prefill, decode], "d", PROMPT, 3, prefilled(prefill, "p", PROMPT)) == expected_tokens(
        PROMPT, 3, decode.shape
    )
    assert_empty(prefill, decode)
    moved = sum(sum(stats.data["pull_bytes"]) for stats in decode.stats)
    page = 2 * 4 * 16 * 32 * 2  # The bytes of a page in both layers.
    assert moved == 4 * page, "blocks 3 to 6"


def test_a_full_local_hit_lets_prefill_go_at_once(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    params = prefilled(prefill, "p", PROMPT[:96])
    served([decode], "local", PROMPT, 1, None)
    assert served([prefill, decode], "d", PROMPT[:96], 2, params) == expected_tokens(PROMPT[:96], 2, decode.shape)
    assert_empty(prefill, decode)


@pytest.mark.parametrize("extra", [-7, 9])
def test_a_prompt_that_differs_in_length_from_what_was_prefilled_is_served(make: Make, extra: int) -> None:
    """vLLM's own connector ends the engine if decode's prompt is one block longer (reference 2.8, row 8)."""
    prefill, decode = make("kv_producer"), make("kv_consumer")
    prompt = list(range(1000, 1100 + extra))
    params = prefilled(prefill, "p", PROMPT)
    assert served([prefill, decode], "d", prompt, 3, params) == expected_tokens(prompt, 3, decode.shape)
    assert_empty(prefill, decode)


@pytest.mark.parametrize("windows", [(0,), (0, 40)], ids=["one group", "two groups"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_load_does_what_the_policy_says(make: Make, policy: str, windows: tuple[int, ...]) -> None:
    """One case has two cache groups, with which an early vLLM continued with garbage (vllm#52234)."""
    shape = Shape(windows=windows, policy=policy)
    prefill, decode = make("kv_producer", shape), make("kv_consumer", shape)
    params = prefilled(prefill, "p", PROMPT)
    prefill.close()
    decode.add("d", PROMPT, 3, params)
    run_until([decode], lambda: decode.finish_reason("d"), 30)
    if policy == "fail":
        assert (decode.finish_reason("d"), decode.tokens("d")) == ("error", [])
    else:
        assert decode.tokens("d") == expected_tokens(PROMPT, 3, shape)
        assert sum(sum(step.values()) for step in decode.scheduled) == len(PROMPT) + 2
    assert_empty(decode)
    assert served([decode], "next", PROMPT[:20], 2, None) == expected_tokens(PROMPT[:20], 2, shape)


def test_an_abort_in_the_queue_frees_prefill(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", Shape(blocks=14))
    decode.add("big", list(range(180)), 20)
    decode.step()
    decode.add("d", PROMPT, 3, prefilled(prefill, "p", PROMPT))
    decode.step()
    assert decode.scheduler.requests["d"].status is RequestStatus.WAITING
    decode.abort("d")
    run_until([prefill, decode], lambda: prefill.free_blocks == prefill.free_at_start)
    run_until([decode], lambda: decode.finish_reason("big"))
    assert_empty(prefill, decode)


def test_an_abort_while_pages_are_pulled_keeps_blocks_until_the_pull_is_over(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    decode.add("d", PROMPT, 3, prefilled(prefill, "p", PROMPT))
    decode.step()
    assert decode.scheduler.requests["d"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    decode.abort("d")
    assert decode.free_blocks < decode.free_at_start
    assert_empty(prefill, decode)
    assert not decode.tokens("d")


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abort_of_prefill_while_it_computes_frees_its_blocks(make: Make, steps: int) -> None:
    prefill = make("kv_producer", Shape(max_batched=32))
    prefill.add("p", PROMPT, 1, dict(PREFILL))
    for _ in range(steps):
        prefill.step()
    prefill.abort("p")
    assert_empty(prefill)


def test_unread_pages_return_when_their_lease_is_over(make: Make) -> None:
    shape = Shape(extra={"host": "127.0.0.1", "port": 0, "kv_lease_duration": 0.4})
    prefill, decode = make("kv_producer", shape), make("kv_consumer")
    params = prefilled(prefill, "p", PROMPT)
    assert_empty(prefill)
    decode.add("late", PROMPT, 2, params)
    run_until([prefill, decode], lambda: decode.finish_reason("late"))
    assert decode.finish_reason("late") == "error", "the pages may belong to other requests by now"
    assert_empty(prefill, decode)


def test_a_lease_lasts_while_decode_has_no_room(make: Make) -> None:
    """The lease lasts as long as the request waits in vLLM's queue, because the source learns of the request when it
    arrives.
    """
    extra = {"host": "127.0.0.1", "port": 0, "secret": secret_of("of this fleet alone")}
    prefill = make("kv_producer", Shape(extra=extra | {"kv_lease_duration": 1}))
    decode = make("kv_consumer", Shape(blocks=14, extra=extra))
    decode.add("big", list(range(180)), 20)
    decode.step()
    decode.add("d", PROMPT, 3, prefilled(prefill, "p", PROMPT))
    decode.step()
    end = time.monotonic() + 2.5
    run_until([prefill], lambda: time.monotonic() > end)
    assert prefill.free_blocks < prefill.free_at_start
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert decode.tokens("d") == expected_tokens(PROMPT, 3, decode.shape)
    assert_empty(prefill, decode)


def test_preempted_requests_of_both_sides_end_right(make: Make) -> None:
    prefill, decode = make("kv_producer", Shape(blocks=16)), make("kv_consumer", Shape(blocks=12))
    prompts = {f"{number}": list(range(1000 + 100 * number, 1080 + 100 * number)) for number in range(2)}
    params = {name: prefilled(prefill, name, prompt) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        decode.add(name, prompt, 40, params[name])
    run_until([prefill, decode], lambda: all(decode.finish_reason(name) for name in prompts))
    assert max(map(len, decode.scheduled)) == 2
    assert any(max(step.values(), default=0) > 1 for step in decode.scheduled), (
        "at least one prompt must have been computed again"
    )
    for name, prompt in prompts.items():
        assert decode.tokens(name) == expected_tokens(prompt, 40, decode.shape)
    assert_empty(prefill, decode)


def test_a_prefill_that_is_preempted_keeps_its_lease(make: Make) -> None:
    prefill, decode = make("kv_producer", Shape(blocks=12)), make("kv_consumer")
    prefill.add("local", PROMPT[:70], 60)
    prefill.step()
    prefill.step()
    prefill.add("p", PROMPT[::-1][:90], 1, dict(PREFILL))
    run_until([prefill], lambda: prefill.finish_reason("p"))
    tokens = served([prefill, decode], "d", PROMPT[::-1][:90], 4, prefill.params("p"))
    assert tokens == expected_tokens(PROMPT[::-1][:90], 4, decode.shape)
    run_until([prefill], lambda: prefill.finish_reason("local"))
    assert prefill.tokens("local") == expected_tokens(PROMPT[:70], 60, prefill.shape)
    assert_empty(prefill, decode)


def test_a_source_that_restarts_under_its_name_is_not_mistaken_for_the_one_before(make: Make) -> None:
    prefill, decode = make("kv_producer", engine_id="source"), make("kv_consumer", Shape(policy="recompute"))
    before = prefilled(prefill, "p", PROMPT)
    served([prefill, decode], "first", PROMPT[:40], 1, prefilled(prefill, "q", PROMPT[:40]))
    port = before["remote_port"]
    prefill.close()
    again = make("kv_producer", Shape(extra={"host": "127.0.0.1", "port": port}), engine_id="source")
    other = prefilled(again, "p", PROMPT[::-1])
    assert served([again, decode], "old", PROMPT, 3, before) == expected_tokens(PROMPT, 3, decode.shape)
    assert served([again, decode], "new", PROMPT[::-1], 3, other) == expected_tokens(PROMPT[::-1], 3, decode.shape)
    assert_empty(again, decode)


@pytest.mark.parametrize("right", [{}, {"tp_size": 2}, {"block_size": 8, "blocks": 60}], ids=["equal", "TP 2", "8"])
def test_a_hundred_requests_with_aborts_at_any_time(make: Make, right: dict[str, Any]) -> None:
    rng = random.Random(11)
    prefill, decode = make("kv_producer", Shape(blocks=80)), make("kv_consumer", replace(Shape(blocks=40), **right))
    prompts = {f"r{n}": [rng.randrange(4) + 1000 for _ in range(rng.randrange(1, 120))] for n in range(100)}
    waiting, running, aborted, ended = list(prompts), set[str](), set[str](), set[str]()
    while waiting or running:
        if waiting and len(running) < 8:
            name = waiting.pop()
            prefill.add(name, prompts[name], 1, dict(PREFILL))
            running.add(name)
        for name in sorted(running):
            if prefill.finish_reason(name) and name not in decode.scheduler.requests and name not in ended:
                decode.add(name, prompts[name], 4, prefill.params(name))
                ended.add(name)
            if rng.random() < 0.01:
                aborted.add(name)
                (decode if name in decode.scheduler.requests else prefill).abort(name)
            if decode.finish_reason(name) or name in aborted:
                running.discard(name)
        prefill.step()
        decode.step()
    for name in prompts.keys() - aborted:
        assert decode.tokens(name) == expected_tokens(prompts[name], 4, decode.shape), name
    assert aborted
    assert_empty(prefill, decode)


STATES = {
    "Mamba 2": States(),
    "Mamba 2 of 2 groups": States(groups=2),
    "Mamba 2 of 4 groups": States(groups=4),
    "Mamba 1": States("mamba1"),
    "gated delta of 4 key heads": States("gdn", groups=4),
    "short convolution": States("conv"),
}


@pytest.mark.parametrize("sides", [(1, 2), (2, 1), (1, 4)], ids="TP {0[0]} to {0[1]}".format)
@pytest.mark.parametrize("states", STATES.values(), ids=STATES)
@pytest.mark.parametrize("layouts", ["SD to SD", "DS to SD"])
def test_states_go_to_another_tensor_parallelism(
    make: Make, states: States, sides: tuple[int, int], layouts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channels and heads of each rank differ. If the model has one group, each rank has a copy of B and C."""
    if any(ranks > states.groups > 1 for ranks in sides):
        pytest.skip("vLLM divides groups evenly, or has one")
    of_prefill, of_decode = layouts.split(" to ")
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: of_prefill)
    prefill = make("kv_producer", Shape(states=states, tp_size=sides[0]))
    params = prefilled(prefill, "p", PROMPT)
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: of_decode)
    decode = make("kv_consumer", Shape(states=states, tp_size=sides[1]))
    assert served([prefill, decode], "d", PROMPT, 5, params) == expected_tokens(PROMPT, 5, decode.shape)
    assert sum(sum(step.values()) for step in decode.scheduled) == 5, (
        "decode must run one token for each token that it generates"
    )
    assert_empty(prefill, decode)


def test_states_of_another_kind_or_number_of_groups_are_refused(make: Make) -> None:
    source = make("kv_producer", Shape(states=States(groups=2)))
    for number, states in enumerate([States(groups=4), States("mamba1"), States()]):
        decode = make("kv_consumer", Shape(states=states, tp_size=2))
        decode.add("d", PROMPT, 3, prefilled(source, f"p{number}", PROMPT))
        run_until([source, decode], lambda decode=decode: decode.finish_reason("d"))
        assert (decode.finish_reason("d"), decode.tokens("d")) == ("error", [])


@pytest.mark.parametrize("windows", [(0, 40), (33,)], ids=["full and window", "window alone"])
@pytest.mark.parametrize("spoilt", [{}, {"_shortened": True}], ids=["prompt cut short", "all prefilled"])
def test_the_last_token_sees_its_whole_window_wherever_that_begins(
    make: Make, windows: tuple[int, ...], spoilt: dict[str, Any]
) -> None:
    """Decode computes the last token of the prompt again. The beginning of that token's window must therefore be
    present, whatever was prefilled.
    """
    shape = Shape(windows=windows, policy="recompute")
    prefill, decode = make("kv_producer", shape), make("kv_consumer", shape)
    for length in range(79, 101):
        prompt = [length, *range(1001, 1100)]
        name = f"p{length}"
        prefill.add(name, prompt[:length] if spoilt else prompt, 1, PREFILL | spoilt)
        run_until([prefill], lambda name=name: prefill.finish_reason(name))
        tokens = served([prefill, decode], f"d{length}", prompt[:length], 2, prefill.params(name))
        assert tokens == expected_tokens(prompt[:length], 2, shape), length
    assert_empty(prefill, decode)
