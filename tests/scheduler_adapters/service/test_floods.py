"""Peers ask for pages again and again, and keep the pages that they get. The service still serves its own requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache import TextContext
from kvcache.layout import kv_kind
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.service.test_faults import OTHER, PROMPT
from tests.scheduler_adapters.serving import own_tokens
from transfer.pull.lease import LENT_WORDS
from transfer.wire.messages import ContentQuery, encode_message

QUESTIONS = 4200  # There are more questions than lease words.


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Any]) -> Any:
    return make_model("llama")


def flood(service: Service, socket: zmq.Socket[bytes], first: int, count: int) -> None:
    """Sends one question for the first page of the prompt from each of `count` readers, over a handshake socket."""
    manager, exchange = service.loops["p0"].manager, service.exchanges["p0"]
    wanted = manager.contents.digests(TextContext(PROMPT, 4096))
    pages = (len(PROMPT) - 1) // wanted.page_size
    for ask_id in range(first, first + count):
        query = ContentQuery(
            query_id=ask_id,
            engine_id=exchange.engine_id(0),
            ask_id=ask_id,
            reader=f"reader {ask_id}",
            kind=kv_kind(manager.layouts),
            page_size=wanted.page_size,
            hash_algorithm=wanted.hash_algorithm,
            digests=wanted.digests[: len(wanted.digests) // pages],
            compatibility=dict(exchange.cards[0].compatibility),
        )
        socket.send(encode_message(query))


@pytest.mark.slow
def test_requests_are_served_while_readers_keep_all_the_pages_that_they_can_get(model: Any, tmp_path: Path) -> None:
    service = Service(model, tmp_path, Side(pages=20_000, page_size=1), Side(pages=500, page_size=1))
    lending = service.exchanges["p0"].lending
    expected = {"before": PROMPT, "during": OTHER, "after": PROMPT[:-3]}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(service.exchanges["p0"].address)
        try:
            service.submit_one("before", PROMPT)
            service.until(lambda: "before" in service.ended, "a request before")
            for first in range(1, QUESTIONS, 40):
                flood(service, socket, first, 40)
                answers = 0
                while answers < 40:
                    service.poll()
                    answers += socket.poll(0) > 0 and len(socket.recv()) > 0
            service.until(lambda: not lending.is_asked, "the last of the questions")
            assert lending.num_leases == LENT_WORDS
            for name in ("during", "after"):
                service.submit_one(name, expected[name])
                flood(service, socket, QUESTIONS + 1000, 60)
                service.until(lambda name=name: name in service.ended, "a request in the flood")
                assert lending.num_leases == LENT_WORDS
            service.collect()
            for name, prompt in expected.items():
                assert service.ended[name].finished == "length", service.ended[name]
                assert service.tokens[name] == own_tokens(model, prompt, NEW)
            assert service.decode.counts["retries"] == 0
        finally:
            service.close()


def test_a_request_for_which_no_lease_word_is_free_fails_by_name_and_another_attempt_follows(
    model: Any, tmp_path: Path
) -> None:
    service = Service(model, tmp_path)
    words = service.exchanges["p0"]._words[0]
    try:
        taken = [lease for _ in words.words if (lease := words.take(1.0)) is not None]
        request = service.submit_one("r", PROMPT)
        service.until(lambda: request.reasons, "the first attempt")
        assert "has no lease word free on replica 0" in request.reasons[0]
        for lease in taken:
            words.give_back(lease)
        service.until(lambda: "r" in service.ended, "another attempt")
        service.collect()
        assert service.tokens["r"] == own_tokens(model, PROMPT, NEW)
        assert service.loops["p0"].manager.num_held_blocks == 0 or service.prefill.open_requests
    finally:
        service.close()
