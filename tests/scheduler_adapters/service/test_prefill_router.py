"""Tests which prefill process a decode process asks for a prompt, and the load that it records for each prefill
process. The sockets are real, and the test answers them.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from scheduler_adapters.loop import Request
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service import prefill_router
from scheduler_adapters.service.prefill_router import (
    CHUNK,
    OwnPages,
    PrefillConnection,
    PromptHistory,
    chunks_of,
)
from scheduler_adapters.service.requests import DecodeRequest
from scheduler_adapters.service.sockets import bind_router, received

PROMPT = list(range(5 * CHUNK + 7))
_names = itertools.count()
Fleet = tuple[list[PrefillConnection], list[Any]]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Returns connections to two prefill processes, and the ROUTER sockets on which the processes would listen."""
    context: zmq.Context[Any] = zmq.Context()
    at = [f"inproc://prefills-{next(_names)}" for _ in range(2)]
    routers = [bind_router(context, endpoint) for endpoint in at]
    hello = msg.Hello(reader="d", incarnation="1")
    connections = [PrefillConnection(context, endpoint, hello) for endpoint in at]
    yield connections, routers
    for one in connections:
        one.close()
    context.destroy(linger=0)


def heard(connections: list[PrefillConnection], router: Any, answers: int = 0) -> list[msg.AnyMessage]:
    """Returns the messages that have arrived at a ROUTER. Answers the first `answers` messages with `Welcome`."""
    found = []
    deadline = time.monotonic() + 20
    while not found and time.monotonic() < deadline:
        for identity, data in received(router):
            found.append(msg.decode(data))
            if len(found) <= answers:
                welcome = msg.Welcome(
                    name=f"p{id(router)}", incarnation="1", engines=("e",), address=f"at {id(router)}", page_size=16
                )
                router.send_multipart([identity, msg.encode(welcome)])
    for _ in range(50 * answers):
        for connection in connections:
            list(connection.poll())
        time.sleep(0.001)
    return found


def request_of(name: str, length: int, first: int = 0) -> DecodeRequest:
    return DecodeRequest(name, 1, "waiting", 0.0, spec=Request(name, [first, *range(length - 1)], 4))


def test_no_prefill_process_is_asked_before_it_has_answered(fleet: Fleet) -> None:
    connections, routers = fleet
    request = request_of("r", 10)
    assert not request.ask(connections, 1.0, chunkwise=True)
    assert (request.prefill, request.load) == (None, 0)
    assert heard(connections, routers[1], 1) == [msg.Hello(reader="d", incarnation="1")]
    assert request.ask(connections, 2.5, chunkwise=False)
    assert request.prefill is connections[1]
    (message,) = heard(connections, routers[1])
    assert message == msg.Prefill(
        request_id="r", attempt=1, prompt=tuple(request.tokens), within_s=2.5, chunkwise=False, new_pages=True
    )


def test_load_counts_until_it_is_removed_once(fleet: Fleet) -> None:
    connections, routers = fleet
    for router in routers:
        heard(connections, router, 1)
    requests = [request_of(f"r{number}", 100 + number, number) for number in range(3)]
    assert all(request.ask(connections, 1.0, chunkwise=True) for request in requests)
    first, second, third = (request.prefill for request in requests)
    assert first is not second
    assert third is first  # The first process has the least load.
    assert sorted(connection.load for connection in connections) == [101, 202]
    for _ in range(2):
        requests[0].relieve()
    assert sorted(connection.load for connection in connections) == [101, 102]


def test_a_process_that_was_lost_is_not_thought_to_have_anything_cached(fleet: Fleet) -> None:
    connections, routers = fleet
    for router in routers:
        heard(connections, router, 1)
    request = request_of("r", 3 * CHUNK)
    assert request.ask(connections, 1.0, chunkwise=True)
    chosen = request.prefill
    assert chosen is not None
    assert (len(chosen.history), chosen.load) == (3, 3 * CHUNK)
    chosen.lose("it was killed")
    assert (len(chosen.history), chosen.load, chosen.takes_requests) == (0, 0, False)
    assert chosen.lost == ["it was killed"]


def test_cancelling_names_the_attempt(fleet: Fleet) -> None:
    connections, routers = fleet
    heard(connections, routers[0], 1)
    connections[0].cancel("r", 7, "x" * 5000)
    (message,) = heard(connections, routers[0])
    assert isinstance(message, msg.Cancel)
    assert (message.request_id, message.attempt, len(message.reason)) == ("r", 7, 2000)


def test_a_process_that_was_asked_for_more_of_a_prompt_is_named_as_a_source(fleet: Fleet) -> None:
    connections, routers = fleet
    for router in routers:
        heard(connections, router, 1)
    names = [connection.name for connection in connections]

    def sources(prefill: str, **message: Any) -> tuple[msg.KVSource, ...]:
        asked = msg.Prefill(request_id="r", attempt=1, prompt=tuple(PROMPT), within_s=1.0, **message)
        found = prefill_router.route(connections, asked, set(), prefill)
        assert found is not None
        (heard_of,) = heard(connections, routers[names.index(prefill)])
        assert isinstance(heard_of, msg.Prefill)
        return heard_of.kv_sources

    assert sources(names[0]) == ()  # Decode has sent this prompt to no process yet.
    assert sources(names[0]) == ()  # Decode has sent this prompt only to this process.
    assert sources(names[1]) == (msg.KVSource(f"at {id(routers[0])}", ("e",), 5 * CHUNK),)
    # Decode has now sent equally many tokens of the prompt to both processes.
    assert sources(names[1]) == ()
    named = (msg.KVSource("elsewhere", ("x",)),)
    assert sources(names[1], kv_sources=named) == named  # Decode keeps the sources that the client names.


def test_the_asking_process_names_itself_if_it_has_more_of_the_prompt(fleet: Fleet) -> None:
    connections, routers = fleet
    for router in routers:
        heard(connections, router, 1)
    first, second = (connection.name for connection in connections)

    def sources(prefill: str, chunks: int, tokens: int, page_size: int = 16) -> list[str]:
        asked = msg.Prefill(request_id="r", attempt=1, prompt=tuple(PROMPT[: chunks * CHUNK]), within_s=1.0)
        own = OwnPages(msg.KVSource("here", ("d/0",), tokens), page_size)
        assert prefill_router.route(connections, asked, set(), prefill, own) is not None
        (heard_of,) = heard(connections, routers[0 if prefill == first else 1])
        assert isinstance(heard_of, msg.Prefill)
        return [source.address for source in heard_of.kv_sources]

    assert sources(first, 2, 0) == []
    assert sources(first, 4, 3 * CHUNK) == ["here"]
    # Decode has more of the prompt than it has sent to this prefill process. The difference is less than one chunk.
    assert sources(first, 5, 4 * CHUNK + 8) == []
    assert sources(second, 5, 2 * CHUNK) == [f"at {id(routers[0])}", "here"]
    assert sources(second, 5, 5 * CHUNK) == []
    connections[1].history.clear()
    assert sources(second, 5, 5 * CHUNK, page_size=32) == [f"at {id(routers[0])}"]


def test_the_name_of_a_chunk_depends_on_all_tokens_before_it_and_on_the_tenant() -> None:
    chunks = chunks_of(PROMPT, None)
    assert len(chunks) == 5
    assert chunks_of(PROMPT[: 3 * CHUNK], None) == chunks[:3]
    assert chunks_of(PROMPT[CHUNK:], None)[0] not in chunks
    assert not set(chunks_of(PROMPT, "tenant")) & set(chunks)
    assert chunks_of(PROMPT[: CHUNK - 1], None) == []


def test_tokens_count_up_to_the_first_chunk_that_was_not_asked_for() -> None:
    history = PromptHistory()
    history.add(chunks_of(PROMPT[: 3 * CHUNK], None))
    assert history.tokens_of(chunks_of(PROMPT, None)) == 3 * CHUNK
    assert history.tokens_of(chunks_of([*PROMPT[:CHUNK], 1, *PROMPT[CHUNK:]], None)) == CHUNK
    assert history.tokens_of(chunks_of([1, *PROMPT], None)) == 0
    history.clear()
    assert history.tokens_of(chunks_of(PROMPT, None)) == 0


def test_a_history_forgets_the_oldest_prompts_first_beginning_with_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_router, "_MOST_CHUNKS", 6)
    history, other = PromptHistory(), [-token for token in PROMPT]
    history.add(chunks_of(PROMPT, None))
    history.add(chunks_of(other[: 4 * CHUNK], None))
    assert len(history) == 6
    assert history.tokens_of(chunks_of(PROMPT, None)) == 2 * CHUNK
    assert history.tokens_of(chunks_of(other, None)) == 4 * CHUNK
