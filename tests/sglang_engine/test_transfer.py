"""SGLang's prefill and decode schedulers in two processes over our transfer, compared with its plain engine in a third.

SGLang's own code: both event loops and their queues, sockets, the HTTP rendezvous, allocators, model and attention.
Substitutes: the tokenizer (`pd_server.Tokenizer`), the router (`pd_pair.Pair.send`: not in the wheel), packages that
are not used here (`stand_ins`), and a READ that takes long (`pd_server.hold_reads`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sglang_engine.pd_pair import NEW, Pair, check_works, reason
from tests.sglang_engine.test_engine import PROMPTS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def pair(the_pair: Pair) -> Iterator[Pair]:
    """The pair of processes. After the test, neither process may hold pages."""
    yield the_pair
    the_pair.prefill.wait_usage()
    the_pair.decode.wait_usage()


def test_a_request_gets_the_plain_engines_tokens(pair: Pair, expected: Any) -> None:
    pair.send("first", PROMPTS[0], NEW)
    answer = pair.decode.answer("first")
    assert answer["tokens"] == expected(PROMPTS[0])
    assert pair.prefill.answer("first")["tokens"] == expected(PROMPTS[0])[:1]


def test_requests_at_once_in_chunks_and_with_shared_beginnings(pair: Pair, expected: Any) -> None:
    prompts = {f"r{place}": prompt for place, prompt in enumerate((*PROMPTS, PROMPTS[0] * 2, [7] * 5, [9] * 130))}
    for name, prompt in prompts.items():
        pair.send(name, prompt, NEW)
    found = {name: pair.decode.answer(name)["tokens"] for name in prompts}
    assert found == {name: expected(prompt) for name, prompt in prompts.items()}


def test_a_room_under_which_prefill_computed_another_prompt_is_refused(pair: Pair, expected: Any) -> None:
    room = next(pair.rooms)
    pair.send_half(pair.prefill, "theirs", PROMPTS[0], NEW, room)
    pair.send_half(pair.decode, "ours", [*PROMPTS[0][:-1], 5], NEW, room)
    assert "the pages of another prompt" in reason(pair.decode.answer("ours"))
    assert reason(pair.prefill.answer("theirs"))
    check_works(pair, expected)


def test_an_abort_at_prefill_that_decode_never_asked(pair: Pair, expected: Any) -> None:
    room = pair.send("alone", PROMPTS[0], NEW, to="prefill")
    pair.prefill.wait_phase(room, "Bootstrapping")
    pair.prefill.ask("abort", name="alone")
    assert "Abort" in reason(pair.prefill.answer("alone"))
    check_works(pair, expected)


def test_decode_that_asks_after_prefill_gave_up_is_told_why(pair: Pair, expected: Any) -> None:
    room = pair.send("early", PROMPTS[0], NEW, to="prefill")
    pair.prefill.wait_phase(room, "Bootstrapping")
    pair.prefill.ask("abort", name="early")
    pair.prefill.answer("early")
    pair.prefill.wait_usage()
    pair.send_half(pair.decode, "late", PROMPTS[0], NEW, room)
    assert "prefill: " in reason(pair.decode.answer("late"))
    check_works(pair, expected)


def test_an_abort_at_decode_that_waits_for_prefill(pair: Pair, expected: Any) -> None:
    room = pair.send("alone", PROMPTS[0], NEW, to="decode")
    pair.decode.wait_phase(room, "WaitingForInput")
    pair.decode.ask("abort", name="alone")
    assert "Abort" in reason(pair.decode.answer("alone"))
    pair.send_half(pair.prefill, "late", PROMPTS[0], NEW, room)
    assert "decode: aborted" in reason(pair.prefill.answer("late"))
    check_works(pair, expected)


def test_an_abort_at_decode_keeps_the_pages_until_the_read_is_over(pair: Pair, expected: Any) -> None:
    pair.send_held("cut", PROMPTS[0])
    pair.decode.ask("abort", name="cut")
    assert "Abort" in reason(pair.decode.answer("cut"))
    assert pair.decode.usage()["tokens"] >= len(PROMPTS[0]) - len(PROMPTS[0]) % 16
    assert "decode: aborted" in reason(pair.prefill.answer("cut"))
    pair.prefill.wait_usage()  # The pages become free at once, before the READ has ended.
    pair.decode.hold(on=False)
    check_works(pair, expected)


def test_an_abort_at_prefill_while_decode_reads_is_seen_by_the_fence(pair: Pair, expected: Any) -> None:
    pair.send_held("cut", PROMPTS[0])
    pair.prefill.ask("abort", name="cut")
    pair.prefill.answer("cut")
    pair.prefill.wait_usage()  # prefill's pages become free while decode reads them
    pair.decode.hold(on=False)
    assert "no longer held the pages" in reason(pair.decode.answer("cut"))
    check_works(pair, expected)
