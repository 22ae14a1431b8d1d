"""The requests that vLLM makes of one client's request: samples of a prompt, and several prompts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_adapters.vllm.samples import is_later_prompt, parent_of
from tests.vllm_engine.engine import Engine, Shape, expected_tokens, make_request, run_until
from tests.vllm_engine.states import States
from tests.vllm_engine.test_bad_params import closed_port
from tests.vllm_engine.test_engine import PREFILL, PROMPT, assert_empty, prefilled

Make = Callable[..., Engine]
EXTRA = {"host": "127.0.0.1", "port": 0, "kv_lease_duration": 600.0}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one group": ({}, {}),
    "TP 1 to 2": ({}, {"tp_size": 2}),
    "TP 2 to 1": ({"tp_size": 2}, {}),
    "two groups": ({"windows": (0, 40)}, {"windows": (0, 40)}),
    "states": ({"states": States()}, {"states": States()}),
}
PARENT = "cmpl-client-0-0a1b2c3d"
SAMPLES = [f"{index}_{PARENT}" for index in range(3)]


@pytest.fixture
def engines(make: Make) -> Callable[..., tuple[Engine, Engine]]:
    def build(sides: str = "one group", policy: str = "fail") -> tuple[Engine, Engine]:
        left, right = SHAPES[sides]
        prefill = make("kv_producer", Shape(extra=EXTRA, **left))
        return prefill, make("kv_consumer", Shape(extra=EXTRA, policy=policy, **right))

    return build


def params_of_samples(prefill: Engine, samples: list[str] = SAMPLES) -> list[dict[str, Any]]:
    for sample in samples:
        prefill.add(sample, PROMPT, 1, dict(PREFILL))
    run_until([prefill], lambda: all(prefill.finish_reason(sample) for sample in samples))
    return [prefill.params(sample) for sample in samples]


def assert_right(engines: tuple[Engine, Engine], samples: list[str] = SAMPLES) -> None:
    run_until(engines, lambda: all(engines[1].finish_reason(sample) for sample in samples))
    for sample in samples:
        assert engines[1].tokens(sample) == expected_tokens(PROMPT, 3, engines[1].shape)


def failures(decode: Engine) -> Counter[str]:
    found: Counter[str] = Counter()
    for stats in decode.reported:
        found.update({key: stats[key] for key in ("failed_pulls", "malformed_params")})
    return +found


@pytest.mark.parametrize("sides", SHAPES)
def test_the_samples_of_a_prompt_share_one_lease_and_one_load(
    engines: Callable[..., tuple[Engine, Engine]], sides: str
) -> None:
    prefill, decode = pair = engines(sides)
    before = prefilled(prefill, "alone", PROMPT)
    held = prefill.free_at_start - prefill.free_blocks
    named = params_of_samples(prefill)
    assert len({params["lease_id"] for params in named} | {before["lease_id"]}) == 2
    run_until([prefill], lambda: prefill.free_at_start - prefill.free_blocks <= 2 * held)
    for sample in SAMPLES:
        decode.add(sample, PROMPT, 3, dict(named[-1]))
    assert_right(pair)
    assert not failures(decode)
    computed = sum(sum(step.values()) for step in decode.scheduled)
    if sides != "states":  # with states, vLLM's prefix cache is off
        assert computed <= 3 * (3 + decode.shape.block_size), (
            "only one sample is loaded, and the others find its blocks"
        )
    decode.add("alone", PROMPT, 3, before)
    assert_right(pair, ["alone"])
    assert_empty(*pair)


@pytest.mark.parametrize("gap", [0, 1, 3, 30])
def test_a_sample_that_arrives_late_shares_the_lease(engines: Callable[..., tuple[Engine, Engine]], gap: int) -> None:
    """vLLM sends the samples to its engine one after another, so an engine may take steps in between."""
    prefill, decode = pair = engines()
    for sample in SAMPLES:
        prefill.add(sample, PROMPT, 1, dict(PREFILL))
        for _ in range(gap):
            prefill.step()
    run_until([prefill], lambda: all(prefill.finish_reason(sample) for sample in SAMPLES))
    named = [prefill.params(sample) for sample in SAMPLES]
    assert len({params["lease_id"] for params in named}) == 1
    for sample in SAMPLES:
        decode.add(sample, PROMPT, 3, dict(named[-1]))
        for _ in range(gap):
            decode.step()
    assert_right(pair)
    late = f"7_{PARENT}"
    decode.add(late, PROMPT, 3, dict(named[-1]))
    assert_right(pair, [late])
    assert not failures(decode)
    assert_empty(*pair)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_end_of_the_sample_that_loads_does_not_end_the_others(
    engines: Callable[..., tuple[Engine, Engine]], steps: int
) -> None:
    prefill, decode = pair = engines()
    named = params_of_samples(prefill)
    for sample in SAMPLES:
        decode.add(sample, PROMPT, 3, dict(named[-1]))
    for _ in range(steps):
        decode.step()
    decode.abort(SAMPLES[0])
    assert_right(pair, SAMPLES[1:])
    assert_empty(*pair)


@pytest.mark.parametrize("aborted", [SAMPLES[:1], SAMPLES[1:2], SAMPLES])
def test_samples_that_end_early_at_prefill_hold_no_blocks(
    engines: Callable[..., tuple[Engine, Engine]], aborted: list[str]
) -> None:
    prefill, decode = pair = engines()
    for sample in SAMPLES:
        prefill.add(sample, PROMPT, 1, dict(PREFILL))
    prefill.step()
    for sample in aborted:
        prefill.abort(sample)
    left = [sample for sample in SAMPLES if sample not in aborted]
    run_until([prefill], lambda: all(prefill.finish_reason(sample) for sample in left))
    named = [output.kv_transfer_params for output in prefill.outputs if output.kv_transfer_params]
    for params in named[-1:]:
        decode.add("d", PROMPT, 3, dict(params))
        assert_right(pair, ["d"])
    assert_empty(*pair)
    if len(aborted) == 1:
        again = params_of_samples(prefill, [f"{index}_again" for index in range(3)])
        decode.add("again", PROMPT, 3, again[0])
        assert_right(pair, ["again"])
        assert_empty(*pair)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("changes", [{"remote_num_tokens": 0}, {"lease_id": "0x1234"}], ids=str)
def test_samples_that_cannot_be_loaded_count_once(
    engines: Callable[..., tuple[Engine, Engine]], caplog: pytest.LogCaptureFixture, changes: Any, policy: str
) -> None:
    prefill, decode = engines(policy=policy)
    params = params_of_samples(prefill)[-1] | changes
    with caplog.at_level(logging.WARNING, "pagewire.vllm"):
        for sample in SAMPLES:
            decode.add(sample, PROMPT, 3, dict(params))
        if policy == "recompute":
            assert_right((prefill, decode))
        run_until([prefill, decode], lambda: all(decode.finish_reason(sample) for sample in SAMPLES))
        reject(decode, params)
        for _ in range(20):
            decode.step()
    assert policy == "recompute" or {decode.finish_reason(sample) for sample in SAMPLES} == {"error"}
    assert failures(decode) == +Counter(failed_pulls=1, malformed_params="remote_num_tokens" in changes)
    told = [text for record in caplog.records if PARENT in (text := record.getMessage())]
    assert len([text for text in told if "its pages were freed" not in text]) == 1, told


def reject(decode: Engine, params: dict[str, Any]) -> None:
    """Tells the engine of a request that the API has answered with an error, as vLLM's API server does."""
    request = make_request("client", [0], 1, 16, params)
    request.abort_immediately = True
    decode.scheduler.add_request(request)
    decode.abort("client")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_only_the_first_prompt_of_a_request_is_handed_over(
    engines: Callable[..., tuple[Engine, Engine]], policy: str
) -> None:
    prefill, decode = pair = engines(policy=policy)
    prompts = {f"cmpl-client-{at}-0a1b2c3d": PROMPT[at:] for at in range(3)}
    first, *others = prompts
    for request_id, prompt in prompts.items():
        prefill.add(request_id, prompt, 1, dict(PREFILL))
    run_until([prefill], lambda: all(prefill.finish_reason(request_id) for request_id in prompts))
    assert [bool(output.kv_transfer_params) for output in prefill.outputs if output.finished] == [True, False, False]
    assert not any(request_id in prefill.scheduler.requests for request_id in others)
    for request_id, prompt in prompts.items():
        decode.add(request_id, prompt, 3, prefill.params(first))
    run_until(pair, lambda: all(decode.finish_reason(request_id) for request_id in prompts))
    for request_id, prompt in prompts.items():
        assert decode.tokens(request_id) == expected_tokens(prompt, 3, decode.shape)
    assert not failures(decode)
    assert_empty(*pair)


def test_requests_are_recognised_by_vllms_names() -> None:
    assert [parent_of(name) for name in ("0_a", "17_a_3", "a", "_a", "x1_a")] == ["a", "a_3", "a", "_a", "x1_a"]
    later = ["cmpl-a-1-0a1b2c3d", "3_cmpl-a-1-0a1b2c3d", "cmpl-a-0-12-01234567"]
    first = ["cmpl-a-0-0a1b2c3d", "cmpl-a-1-0-0a1b2c3d", "chatcmpl-a-1-0a1b2c3d", "cmpl-a-1", "a-1-0a1b2c3d"]
    assert [name for name in later + first if is_later_prompt(name)] == later


def test_vllm_waits_for_blocks_that_are_about_to_be_freed_instead_of_preempting(make: Make) -> None:
    """The pool has 11 blocks: 7 for a load that is given up, and 4 for a request that needs a fifth one."""
    decode = make("kv_consumer", Shape(blocks=12))
    prefill = make("kv_producer", Shape(extra=EXTRA))
    other = PROMPT[::-1]
    params = prefilled(prefill, "p", other) | {"remote_port": closed_port()}
    decode.add("runs", PROMPT[:40], 40)
    decode.add("loads", other, 3, params)
    runs = decode.scheduler.requests["runs"]
    while runs.num_computed_tokens < 64:
        decode.step()
    assert decode.free_blocks == 0
    decode.abort("loads")
    assert decode.connector.has_pending_block_frees()
    waited = 0
    while not decode.finish_reason("runs"):
        decode.step()
        waited += "runs" not in decode.scheduled[-1]
        assert not decode.preempted
    assert waited
    assert decode.tokens("runs") == expected_tokens(PROMPT[:40], 40, decode.shape)
    assert not decode.connector.has_pending_block_frees()


def test_a_lease_that_waits_for_its_reader_is_no_reason_to_wait(make: Make) -> None:
    prefill = make("kv_producer", Shape(extra=EXTRA))
    prefilled(prefill, "p", PROMPT)
    prefill.step()
    assert not prefill.connector.has_pending_block_frees()
    prefill.add("q", PROMPT[::-1], 1, dict(PREFILL))
    prefill.step()
    prefill.abort("q")
    assert prefill.connector.has_pending_block_frees()
    run_until([prefill], lambda: not prefill.connector.has_pending_block_frees())
