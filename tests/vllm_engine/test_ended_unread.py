"""If decode's request ends before its pages are read, prefill's blocks are freed at once, without waiting for the end
of the lease.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from vllm.v1.request import RequestStatus

from tests.vllm_engine.engine import Engine, Shape, expected_tokens, make_request, run_until
from tests.vllm_engine.states import States
from tests.vllm_engine.test_engine import PROMPT, assert_empty, prefilled, served

Make = Callable[..., Engine]
LEASE = 600.0
"""In seconds. This is far longer than a test may take, so no lease in this file expires."""
EXTRA = {"host": "127.0.0.1", "port": 0, "kv_lease_duration": LEASE}
REJECTED = [0]
"""The prompt under which vLLM's API server tells the engine of a request that it has answered with 400."""
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one group": ({}, {}),
    "TP 1 to 2": ({}, {"tp_size": 2}),
    "TP 2 to 1": ({"tp_size": 2}, {}),
    "two groups": ({"windows": (0, 40)}, {"windows": (0, 40)}),
    "states": ({"states": States()}, {"states": States()}),
}


class Ended(NamedTuple):
    """A request at decode whose params name a lease of prefill."""

    prefill: Engine
    decode: Engine
    params: dict[str, Any]

    @property
    def is_free(self) -> bool:
        """Returns whether prefill holds no blocks any more."""
        return self.prefill.free_blocks == self.prefill.free_at_start

    def add(self, prompt: list[int], request_id: str = "d", **changes: Any) -> None:
        self.decode.add(request_id, prompt, 3, self.params | changes)

    def reject(self, request_id: str = "d", prompt: list[int] | None = None, **changes: Any) -> None:
        """Rejects a request as `EngineCore.add_request` does if the request must be aborted at once."""
        request = make_request(request_id, prompt or REJECTED, 1, 16, self.params | changes)
        request.abort_immediately = True
        self.decode.scheduler.add_request(request)
        self.decode.abort(request_id)

    def until(self, done: Callable[[], object]) -> None:
        run_until([self.prefill, self.decode], done)


@pytest.fixture
def named(make: Make) -> Callable[..., Ended]:
    def build(sides: str = "one group", policy: str = "fail", prompt: list[int] = PROMPT, **changes: Any) -> Ended:
        left, right = SHAPES[sides]
        prefill = make("kv_producer", Shape(extra=EXTRA, **left))
        decode = make("kv_consumer", Shape(extra=EXTRA, policy=policy, **right, **changes))
        found = Ended(prefill, decode, prefilled(prefill, "p", prompt))
        assert not found.is_free, "prefill keeps what decode is to read"
        return found

    return build


def rejected(found: Ended) -> None:
    found.reject()


def rejected_while_paused(found: Ended) -> None:
    """A request arrives during a pause. vLLM 0.33 reports such a request with its own prompt."""
    found.reject(prompt=PROMPT)


def aborted_at_once(found: Ended) -> None:
    found.add(PROMPT)
    found.decode.abort("d")


def aborted_after_a_step(found: Ended) -> None:
    """The request's blocks wait for the load while the connector asks the source."""
    found.add(PROMPT)
    found.decode.step()
    found.decode.abort("d")


def failed_before_it_started(found: Ended) -> None:
    found.add(PROMPT)
    found.decode.scheduler.finish_requests("d", RequestStatus.FINISHED_ERROR)


def of_another_prompt(found: Ended) -> None:
    found.add([7, *PROMPT[1:]])


def of_more_tokens_than_there_are(found: Ended) -> None:
    found.add([*PROMPT, 5, 5, 5], remote_num_tokens=103)


def without_a_number_of_tokens(found: Ended) -> None:
    found.add(PROMPT, remote_num_tokens=0)


def in_both_directions(found: Ended) -> None:
    found.add(PROMPT, do_remote_decode=True)


def twice_under_one_name(found: Ended) -> None:
    """Rejected requests keep the names that the client has chosen, so two requests may have the same name."""
    other = prefilled(found.prefill, "q", PROMPT[::-1])
    found.reject()
    found.reject(**other)


def under_the_name_of_one_that_loads(found: Ended) -> None:
    other = prefilled(found.prefill, "q", PROMPT[::-1])
    found.reject()
    found.decode.step()
    found.reject(**other)


ENDS: list[Callable[[Ended], None]] = [
    rejected, rejected_while_paused, aborted_at_once, aborted_after_a_step, failed_before_it_started,
    of_another_prompt, of_more_tokens_than_there_are, without_a_number_of_tokens, in_both_directions,
    twice_under_one_name, under_the_name_of_one_that_loads,
]  # fmt: skip


@pytest.mark.parametrize(
    ("sides", "policy"), [("one group", "recompute"), *((sides, "fail") for sides in SHAPES)], ids=str
)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_prefills_blocks_come_back_at_once(
    named: Callable[..., Ended], end: Callable[[Ended], None], sides: str, policy: str
) -> None:
    found = named(sides, policy)
    end(found)
    found.until(lambda: found.is_free)
    found.until(lambda: not found.decode.scheduler.requests)
    good = PROMPT[30:]
    assert served([found.prefill, found.decode], "good", good, 3, prefilled(found.prefill, "r", good)) == (
        expected_tokens(good, 3, found.decode.shape)
    )
    assert_empty(found.prefill, found.decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("sides", ["one group", "TP 1 to 2", "TP 2 to 1"])
def test_a_refused_handshake_gives_the_blocks_back(make: Make, sides: str, policy: str) -> None:
    """Decode has not loaded prefill, so no note about the lease can go through NIXL."""
    left, right = SHAPES[sides]
    prefill = make("kv_producer", Shape(extra=EXTRA, **left))
    decode = make("kv_consumer", Shape(extra=EXTRA | {"model_id": "another model"}, policy=policy, **right))
    found = Ended(prefill, decode, prefilled(prefill, "p", PROMPT))
    assert not found.is_free
    found.add(PROMPT)
    found.until(lambda: decode.finish_reason("d") and found.is_free)
    assert decode.tokens("d") == ([] if policy == "fail" else expected_tokens(PROMPT, 3, decode.shape))
    assert not prefill.connector.has_pending_block_frees()
    assert_empty(prefill, decode)


@pytest.mark.parametrize("sides", ["one group", "two groups", "states"])
def test_a_prompt_shorter_than_prefills_gives_the_blocks_back(named: Callable[..., Ended], sides: str) -> None:
    """If a state covers more tokens than the request has, the state is useless. The pages of a prefix can still be
    read.
    """
    found = named(sides, "recompute")
    found.add(PROMPT[:50])
    found.until(lambda: found.decode.finish_reason("d"))
    assert found.decode.tokens("d") == expected_tokens(PROMPT[:50], 3, found.decode.shape)
    found.until(lambda: found.is_free)
    assert_empty(found.prefill, found.decode)


def test_aborting_a_request_that_waits_for_room_gives_the_blocks_back(named: Callable[..., Ended]) -> None:
    found = named(rows=1)
    found.decode.add("before", PROMPT[:20], 200, None)
    found.decode.step()
    found.add(PROMPT)
    for _ in range(5):
        found.decode.step()
    assert found.decode.status("d") is RequestStatus.WAITING
    found.decode.abort("d")
    found.until(lambda: found.is_free)
    assert not found.decode.finish_reason("before")


def test_rejected_requests_leave_the_pool_to_an_honest_one(make: Make) -> None:
    """The pool has 59 blocks. Two prompts of 29 blocks each fill it. The third prompt can begin only when one of them
    is freed.
    """
    prefill = make("kv_producer", Shape(extra=EXTRA))
    decode = make("kv_consumer", Shape(extra=EXTRA))
    found = Ended(prefill, decode, {})
    prompts = [[number + 1, *range(2000, 2460)] for number in range(3)]
    held = [prefilled(prefill, f"p{number}", prompts[number]) for number in range(2)]
    assert prefill.free_blocks < 5
    for number, params in enumerate(held):
        found.reject(f"d{number}", **params)
    prefill.add("honest", prompts[2], 1, {"do_remote_decode": True})
    found.until(lambda: prefill.finish_reason("honest"))
    assert served([prefill, decode], "honest", prompts[2], 3, prefill.params("honest")) == expected_tokens(
        prompts[2], 3, decode.shape
    )
    assert_empty(prefill, decode)


@pytest.mark.parametrize(
    "changes", [{"lease_id": "0x1234"}, {"lease_id": 5}, {"remote_port": 1}, {"remote_host": "a b"}], ids=str
)
def test_a_wrong_pointer_gives_back_no_other_blocks(named: Callable[..., Ended], changes: dict[str, Any]) -> None:
    found = named()
    found.reject("d", **changes)
    found.add(PROMPT[::-1], "e", **changes)
    found.until(lambda: found.decode.finish_reason("e"))
    assert not found.is_free
    assert served([found.prefill, found.decode], "good", PROMPT, 3, found.params) == expected_tokens(
        PROMPT, 3, found.decode.shape
    )
    assert_empty(found.prefill, found.decode)
