"""A reader gets exactly its source's pages: neither a client nor timing can change that."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from scheduler_adapters.vllm.scheduler import prompt_of
from tests.vllm_engine.engine import Engine, Shape, expected_tokens, make_request, run_until
from tests.vllm_engine.states import States
from tests.vllm_engine.test_engine import PREFILL, PROMPT, assert_empty, prefilled, served
from transfer.connector import worker as connector_worker
from transfer.errors import InvalidLeaseError
from transfer.pull.lease import LeaseBook
from transfer.pull.thread import TransferThread

Make = Callable[..., Engine]
OTHER = [*PROMPT[:99], 7]  # The two prompts differ only in their last token.
SHAPES = {
    "one group": ({}, {}),
    "TP 1 to 2": ({}, {"tp_size": 2}),
    "two groups": ({"windows": (0, 40)}, {"windows": (0, 40)}),
    "states": ({"states": States()}, {"states": States()}),
}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(("left", "right"), SHAPES.values(), ids=SHAPES)
def test_params_of_another_prompt_bring_none_of_its_pages(
    make: Make, left: dict[str, Any], right: dict[str, Any], policy: str
) -> None:
    """Later requests must not find these pages in the prefix cache. Prefill frees the pages."""
    prefill, decode = make("kv_producer", Shape(**left)), make("kv_consumer", Shape(policy=policy, **right))
    prompts = {"a": PROMPT, "b": PROMPT[50:] + PROMPT[:50]}
    params = {name: prefilled(prefill, f"p{name}", prompt) for name, prompt in prompts.items()}
    for name, other in (("a", "b"), ("b", "a")):  # swapped
        decode.add(name, prompts[name], 3, params[other])
        run_until([prefill, decode], lambda name=name: decode.finish_reason(name))
        right_tokens = expected_tokens(prompts[name], 3, decode.shape)
        assert decode.tokens(name) == ([] if policy == "fail" else right_tokens)
    run_until([prefill, decode], lambda: prefill.free_blocks == prefill.free_at_start)
    for name, prompt in prompts.items():  # No block of these prompts is in the cache.
        wanted = expected_tokens(prompt, 3, decode.shape)
        again = prefilled(prefill, f"p{name} again", prompt)
        assert served([prefill, decode], f"{name} again", prompt, 3, again) == wanted
        assert served([prefill, decode], f"{name} alone", prompt, 3, None) == wanted
    assert_empty(prefill, decode)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]]},
        {"remote_block_ids": [[-1]] * 9, "remote_incarnation": "before"},
        {"lease_slot": 3, "lease_duration_s": 1e9, "tp_size": 99, "pp_size": "x"},
        {"remote_request_id": "another"},
    ],
    ids=str,
)
def test_params_that_say_where_the_pages_are_have_no_effect(make: Make, change: dict[str, Any]) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    prefilled(prefill, "q", OTHER[::-1])
    params = prefilled(prefill, "p", PROMPT) | change
    assert served([prefill, decode], "d", PROMPT, 3, params) == expected_tokens(PROMPT, 3, decode.shape)
    assert decode.connector._scheduling.take_counts() == {}


@pytest.mark.parametrize("tokens", [1, 40, 99])
def test_params_that_name_fewer_tokens_load_fewer(make: Make, tokens: int) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    params = prefilled(prefill, "p", PROMPT) | {"remote_num_tokens": tokens}
    assert served([prefill, decode], "d", PROMPT, 3, params) == expected_tokens(PROMPT, 3, decode.shape)
    assert_empty(prefill, decode)


def test_a_prompt_that_differs_in_one_token_fails_with_both_digests(make: Make, caplog: Any) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    decode.add("d", OTHER, 3, prefilled(prefill, "p", PROMPT))
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert (decode.finish_reason("d"), decode.tokens("d")) == ("error", [])
    ours, theirs = (prompt_of(made(prompt), 100).digest(100).hex()[:16] for prompt in (OTHER, PROMPT))
    assert f"the digest of its first 100 tokens is {theirs}, but the request's is {ours}" in caplog.text
    assert "request 'd'" in caplog.text


def test_a_tenant_reads_no_pages_of_another_one(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    salts = {"a": "one tenant", "b": "another"}
    for name, salt in salts.items():
        prefill.scheduler.add_request(made(PROMPT, f"p{name}", 1, PREFILL, salt))
        run_until([prefill], lambda name=name: prefill.finish_reason(f"p{name}"))
    decode.scheduler.add_request(made(PROMPT, "a", 3, prefill.params("pb"), salts["a"]))
    run_until([prefill, decode], lambda: decode.finish_reason("a"))
    assert decode.finish_reason("a") == "error"
    # the lease of "pb" was given back, so the prompt is prefilled again
    prefill.scheduler.add_request(made(PROMPT, "pb again", 1, PREFILL, salts["b"]))
    run_until([prefill], lambda: prefill.finish_reason("pb again"))
    decode.scheduler.add_request(made(PROMPT, "b", 3, prefill.params("pb again"), salts["b"]))
    run_until([prefill, decode], lambda: decode.finish_reason("b"))
    assert decode.tokens("b") == expected_tokens(PROMPT, 3, decode.shape)


def made(
    prompt: list[int], request_id: str = "r", count: int = 1, params: Any = None, salt: str | None = None
) -> Request:
    request = make_request(request_id, prompt, count, 16, None if params is None else dict(params))
    request.cache_salt = salt
    return request


def test_a_lease_that_has_ended_cannot_be_read_although_its_blocks_are_still_there(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    params = prefilled(prefill, "p", PROMPT)
    served([prefill, decode], "first", PROMPT, 2, params)
    run_until([prefill], lambda: prefill.free_blocks == prefill.free_at_start)
    late = make("kv_consumer")
    late.add("late", PROMPT, 2, params)
    run_until([prefill, late], lambda: late.finish_reason("late"))
    assert (late.finish_reason("late"), late.tokens("late")) == ("error", [])


def test_two_readers_of_one_lease_both_get_right_tokens_or_none(make: Make) -> None:
    prefill, readers = make("kv_producer"), [make("kv_consumer"), make("kv_consumer")]
    params = prefilled(prefill, "p", PROMPT)
    for decode in readers:
        decode.add("d", PROMPT, 2, params)
    run_until([prefill, *readers], lambda: all(decode.finish_reason("d") for decode in readers))
    found = [decode.tokens("d") for decode in readers]
    assert expected_tokens(PROMPT, 2, prefill.shape) in found
    assert all(tokens in ([], expected_tokens(PROMPT, 2, prefill.shape)) for tokens in found)
    assert_empty(prefill, *readers)


def slow_grants(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Delays the grants of leases. Such a delay occurs if the transfer thread has to wait for a core."""
    grant = LeaseBook.grant

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(seconds())
        return grant(*args, **options)

    monkeypatch.setattr(LeaseBook, "grant", late)
    monkeypatch.setattr(TransferThread, "_run_here", lambda *_: False)


def test_params_are_sent_only_when_every_rank_has_granted_the_lease(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine makes no further step, so it would never learn of a later grant."""
    prefill = make("kv_producer", Shape(tp_size=2))
    slow_grants(monkeypatch, lambda: 0.3)
    prefilled(prefill, "p", PROMPT[:10])
    assert prefill.connector._scheduling._connector.is_offered("p")


@pytest.mark.parametrize(("left", "right"), [({}, {}), ({"tp_size": 2}, {}), ({}, {"tp_size": 2})], ids=str)
def test_a_reader_that_is_quicker_than_the_worker_that_grants_waits(
    make: Make, monkeypatch: pytest.MonkeyPatch, left: dict[str, Any], right: dict[str, Any]
) -> None:
    monkeypatch.setattr(connector_worker, "_GRANT_S", 0.0)
    prefill, decode = make("kv_producer", Shape(**left)), make("kv_consumer", Shape(**right))
    draw = random.Random(5)
    slow_grants(monkeypatch, lambda: draw.choice((0.02, 0.1, 0.4)))
    for number in range(5):
        prompt = PROMPT[number:40]
        tokens = served([prefill, decode], f"d{number}", prompt, 2, prefilled(prefill, f"p{number}", prompt))
        assert tokens == expected_tokens(prompt, 2, decode.shape)
    assert decode.connector._scheduling.take_counts() == {}
    assert_empty(prefill, decode)


def refused(*args: Any, **options: Any) -> Any:
    raise InvalidLeaseError(f"the test refuses a lease with {len(args) + len(options)} arguments")


def test_a_lease_that_is_not_granted_fails_its_reader_and_no_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_worker, "_GRANT_S", 0.0)
    prefill, decode = make("kv_producer"), make("kv_consumer")
    with monkeypatch.context() as patched:
        patched.setattr(LeaseBook, "grant", refused)
        # The prompt runs in one step. The step ends before the grant is known.
        params = prefilled(prefill, "p", PROMPT[:40])
        run_until([prefill], lambda: prefill.free_blocks == prefill.free_at_start)
    decode.add("d", PROMPT[:40], 2, params)
    run_until([prefill, decode], lambda: decode.finish_reason("d"))
    assert decode.finish_reason("d") == "error"
    good = PROMPT[::-1]
    assert served([prefill, decode], "good", good, 2, prefilled(prefill, "q", good)) == expected_tokens(
        good, 2, decode.shape
    )


def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 8))


def test_the_digest_includes_everything_besides_tokens_that_the_kv_depends_on() -> None:
    def digest(tokens: int = 100, **changes: Any) -> bytes:
        request = made(PROMPT)
        for name, value in changes.items():
            setattr(request, name, value)
        return prompt_of(request, 100).digest(tokens)

    rows = torch.arange(400.0).view(100, 4)
    other = rows.clone()
    other[60, 1] += 1
    different = [
        digest(),
        digest(99),
        digest(cache_salt="s"),
        digest(cache_salt="\ud800"),  # The JSON of a client may contain a lone surrogate.
        digest(mm_features=[image("\ud800", 30)]),
        digest(lora_request=LoRARequest("poet", 1, "/here")),
        digest(lora_request=LoRARequest("clerk", 1, "/here")),
        digest(mm_features=[image("cat", 30)]),
        digest(mm_features=[image("dog", 30)]),
        digest(mm_features=[image("cat", 31)]),
        digest(mm_features=[image("cat", 30), image("dog", 60)]),
        digest(prompt_embeds=rows),
        digest(prompt_embeds=other),
        digest(prompt_embeds=rows.bfloat16()),
    ]
    assert len(set(different)) == len(different)
    assert digest(lora_request=LoRARequest("poet", 2, "/there")) == digest(
        lora_request=LoRARequest("poet", 1, "/here")
    )  # The number and path of an adapter differ between the two sides.
    first = {"mm_features": [image("cat", 30), image("dog", 60)]}
    assert digest(60, **first) == digest(60, mm_features=[image("cat", 30)]) != digest(61, **first)
    assert digest(60, prompt_embeds=rows) == digest(60, prompt_embeds=other)
