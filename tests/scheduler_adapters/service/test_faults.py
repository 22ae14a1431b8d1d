"""A fault in any phase ends one request, and affects no other request."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from scheduler_adapters.hf.tiny import ByteTokenizer
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.requests import DecodeRequest, DecodeTimes, PrefillRequest
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.serving import own_tokens
from tests.transfer.clock import Clock

pytestmark = pytest.mark.slow

PROMPT = ByteTokenizer().encode("What a page holds, who may write to it, and when it may be used again. " * 2)
OTHER = ByteTokenizer().encode("Something else, and short.")
# A budget of 32 divides PROMPT into five chunks. A pool of 20 pages holds PROMPT and has 5 pages to spare.
PREFILL, DECODE = Side(pages=20, budget=32), Side(pages=20)


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[int]]:
    return {"r": own_tokens(model, PROMPT, NEW), "other": own_tokens(model, OTHER, NEW)}


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services = []

    def make(prefill: Side = PREFILL, decode: Side = DECODE, **options: Any) -> Service:
        services.append(Service(model, tmp_path, prefill, decode, **options))
        return services[-1]

    yield make
    for service in services:
        service.close()


def fill(service: Service, name: str) -> None:
    """Takes all pages of a process, so that no request gets a page."""
    manager = service.loops[name].manager
    tokens = manager.num_free_blocks * manager.page_size
    manager.external_claim("hog")
    from kvcache.replica.context import TextContext

    assert manager.maybe_reserve(TextContext([1] * tokens, tokens, "hog"))


def empty(service: Service) -> None:
    for loop in service.loops.values():
        if loop.manager.contains("hog"):
            loop.manager.release("hog")


def prefill_requests(service: Service) -> list[PrefillRequest]:
    return [request for prefill in service.prefills.values() for request in prefill._requests.values()]


def phase_of_prefill(service: Service) -> str:
    return prefill_requests(service)[0].phase if prefill_requests(service) else ""


# Functions that bring a request into each phase, and the processes that are polled while it stays there.
def waiting(service: Service) -> DecodeRequest:
    for name in list(service.prefills):
        service.stop_prefill(name)
    service.poll()
    return service.submit_one("r", PROMPT)


def asked(service: Service) -> DecodeRequest:
    """Sends a request to a prefill process without free pages, and waits until the request is queued there."""
    fill(service, "p0")
    request = service.submit_one("r", PROMPT)
    service.until(lambda: phase_of_prefill(service) == "queued", "the question")
    return request


def offered(service: Service) -> DecodeRequest:
    """Brings a request into the state "offered": prefill holds its pages, because decode has no free pages."""
    fill(service, "d0")
    request = service.submit_one("r", PROMPT)
    service.until(lambda: phase_of_prefill(service) == "held" and request.has_ended_prefill, "the offer")
    return request


def step_but_while_leasing(prefill: Any, step: Callable[[], Any]) -> Any:
    return [] if any(one.phase == "leasing" for one in prefill._requests.values()) else step()


def pulling(service: Service) -> DecodeRequest:
    """Prefill has computed only the first chunk of the prompt. Decode reads the pages of this chunk."""
    request = service.submit_one("r", PROMPT)
    with pytest.MonkeyPatch.context() as held:
        # A busy machine may delay the lease. Even then the lease must cover only one chunk.
        for prefill in service.prefills.values():
            held.setattr(prefill._loop, "step", partial(step_but_while_leasing, prefill, prefill._loop.step))
        service.until(lambda: phase_of_prefill(service) == "offered", "the first chunk")
    # From here on the test does not poll prefill. A poll might compute the rest of the prompt before prefill learns
    # that decode pulls.
    service.until(lambda: request.phase == "pulling", "the word of it", poll=service.decode.poll)
    assert phase_of_prefill(service) == "offered"
    return request


def decoding(service: Service) -> DecodeRequest:
    request = service.submit_one("r", PROMPT, 100)
    service.until(lambda: request.phase == "decoding" and len(service.tokens["r"]) > 3, "some tokens")
    return request


def cancel(service: Service) -> None:
    service.decode.abort("r")
    service.decode.abort("r")  # A second cancellation must be harmless.
    service.until(lambda: "r" in service.ended, "the end", poll=lambda: None)
    assert service.ended["r"].finished == "cancelled"


PHASES = {"waiting": waiting, "asked": asked, "offered": offered, "pulling": pulling, "decoding": decoding}


def assert_serves_on(service: Service, expected: dict[str, list[int]]) -> None:
    """Asserts that all pages and leases are given back, and that the next request is served."""
    empty(service)
    for name in ("p0", "p1")[: service.sides["prefill"].count]:
        if name not in service.prefills:
            service.start_prefill(name)
    service.assert_nothing_held()
    for request_id, prompt in (("other", OTHER), ("r", PROMPT)):
        service.submit_one(request_id, prompt)
        service.until(lambda request_id=request_id: request_id in service.ended, "the next request")
        assert (service.ended[request_id].finished, service.ended[request_id].error) == ("length", "")
        assert service.tokens[request_id] == expected[request_id]
    service.assert_nothing_held()


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_request_ends_in_every_phase(
    start: Callable[..., Service], expected: dict[str, list[int]], phase: str
) -> None:
    service = start(lease_s=1000.0)  # The lease is so long that only a message from decode ends the request at prefill.
    request = PHASES[phase](service)
    assert request.phase == phase
    cancel(service)
    assert request.phase == "over"
    # The test waits for this before pages are free again, because prefill must not compute an unwanted prompt.
    service.until(lambda: not prefill_requests(service), "the end at prefill")
    assert not any(one._untold for one in service.prefills.values())
    assert_serves_on(service, expected)


DEADLINES = {
    "waiting": {"wait_s": 0.2},
    "asked": {"prefill_s": 0.2},
    "offered": {"room_s": 0.2},
    "pulling": {"prefill_s": 0.2},
    "decoding": {"decode_s": 0.01},
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_request_that_stays_in_a_phase_for_too_long_fails_with_the_reason(
    start: Callable[..., Service], expected: dict[str, list[int]], phase: str
) -> None:
    service = start(times=DecodeTimes())
    request = PHASES[phase](service)
    service.decode._times = DecodeTimes(**DEADLINES[phase])
    request.deadline = 0.0
    # In phase "pulling" the test does not poll prefill until the deadline of the pull has passed. In the other phases
    # the request cannot continue.
    service.until(lambda: "r" in service.ended, "the end", poll=service.decode.poll if phase == "pulling" else None)
    end = service.ended["r"]
    assert end.finished == "error"
    assert f"timed out in phase {phase!r} on decode process 'd0'" in end.error
    service.decode._times = DecodeTimes()
    assert_serves_on(service, expected)


def test_the_next_attempt_avoids_the_prefill_process_of_the_one_that_failed(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    """Without this rule decode would ask the first process again, because it has most of the prompt cached. The other
    process has none of the prompt.
    """
    service = start(PREFILL._replace(count=2))
    service.until(lambda: all(one.welcome for one in service.decode.connections), "both prefill processes")
    request = PHASES["asked"](service)
    asked, attempt = request.prefill, request.attempt
    request.deadline = 0.0
    service.until(lambda: request.attempt != attempt and request.prefill, "the next attempt", poll=service.decode.poll)
    assert request.prefill is not asked
    service.until(lambda: "r" in service.ended, "the end")
    assert service.tokens["r"] == expected["r"]


@pytest.mark.parametrize("phase", ["asked", "offered", "pulling"])
def test_a_prefill_process_that_dies_is_replaced_by_another(
    start: Callable[..., Service], expected: dict[str, list[int]], phase: str
) -> None:
    service = start(PREFILL._replace(count=2))
    connection = service.decode.connections[0]
    service.until(lambda: connection.welcome, "the first prefill process")
    service.decode.connections[1].lose("not yet")  # Decode must ask the first process.
    service.decode.connections[1]._again_at = time.monotonic() + 60
    request = PHASES[phase](service)
    assert request.prefill is connection
    service.stop_prefill("p0")
    service.decode.connections[1]._again_at = 0.0
    empty(service)
    service.until(lambda: "r" in service.ended, "the other prefill process")
    assert service.tokens["r"] == expected["r"]
    assert service.ended["r"].finished == "length"
    assert service.decode.counts["retries"] >= 1
    assert_serves_on(service, expected)


@pytest.mark.parametrize("phase", ["asked", "offered", "pulling"])
def test_a_prefill_process_that_comes_back_is_asked_again(
    start: Callable[..., Service], expected: dict[str, list[int]], phase: str
) -> None:
    service = start()
    PHASES[phase](service)
    before = service.exchanges["p0"].incarnation
    service.stop_prefill("p0")
    service.start_prefill("p0")
    empty(service)
    service.until(lambda: "r" in service.ended, "the second attempt")
    assert service.tokens["r"] == expected["r"]
    assert service.decode.connections[0].welcome is not None
    assert service.decode.connections[0].welcome.incarnation != before
    assert_serves_on(service, expected)


@pytest.mark.parametrize("phase", ["asked", "offered", "pulling"])
def test_prefill_gives_back_what_a_dead_decode_process_had_asked_for(
    start: Callable[..., Service], expected: dict[str, list[int]], phase: str
) -> None:
    service = start(lease_s=4.0)
    PHASES[phase](service)
    service.stop_decode("d0")
    empty(service)
    service.until(lambda: not service.prefill.open_requests, "the end of its lease")
    assert service.prefill.stats().pages_held == 0
    service.start_decode("d0")
    assert_serves_on(service, expected)


@pytest.mark.parametrize("phase", ["asked", "pulling"])
def test_prefill_notices_a_dead_decode_process_when_it_has_something_to_say(
    start: Callable[..., Service], expected: dict[str, list[int]], phase: str
) -> None:
    service = start(lease_s=1000.0)
    PHASES[phase](service)
    service.stop_decode("d0")
    (reader,) = service.prefill._readers

    def is_gone() -> bool:
        try:
            service.prefill._socket.send_multipart([reader, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EHOSTUNREACH
        return False

    service.until(is_gone, "the end of the connection", poll=lambda: time.sleep(1e-3))
    empty(service)
    service.until(lambda: not service.prefill.open_requests, "the failed message", timeout_s=10)
    assert not service.prefill._readers
    service.start_decode("d0")
    assert_serves_on(service, expected)


def test_requests_of_a_decode_process_that_connects_anew_are_dropped(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start()
    request = asked(service)
    before = prefill_requests(service)[0]
    service.decode.connections[0].lose("a hiccup of the network")
    service.until(lambda: before.phase == "over", "the new connection")
    assert before.silent
    assert request.attempt > 1
    empty(service)
    service.until(lambda: "r" in service.ended, "the second attempt")
    assert service.tokens["r"] == expected["r"]
    assert_serves_on(service, expected)


@pytest.mark.parametrize("phase", ["offered", "pulling"])
def test_pages_stay_held_until_their_lease_word_is_cleared(
    start: Callable[..., Service], expected: dict[str, list[int]], phase: str
) -> None:
    service = start()
    PHASES[phase](service)
    (request,) = prefill_requests(service)
    held = service.prefill.stats().pages_held
    words = service.exchanges["p0"].threads[0].call(lambda replica: replica.ranks[0].words)
    assert request.source is not None
    lease_id, word_idx, _ = request.source.lease
    assert words[word_idx] == lease_id
    told = -(-request.told // 16)
    service.prefill._end(request, "says the test")
    assert request.phase == "ending"
    assert not service.loops["p0"].manager.contains(request.key)
    # The pages of an unfinished prompt that were not offered are already free.
    held = service.prefill.stats().pages_held if phase == "pulling" else held
    assert held >= told > 0
    assert service.prefill.stats().pages_held == held
    service.until(lambda: words[word_idx] != lease_id, "the word", poll=lambda: None)
    assert service.prefill.stats().pages_held == held
    service.until(lambda: request.phase == "over", "the end of the lease", poll=service.prefill.poll)
    assert service.prefill.stats().pages_held == 0
    empty(service)
    service.until(lambda: "r" in service.ended, "the second attempt")
    assert service.tokens["r"] == expected["r"]
    assert_serves_on(service, expected)


def test_a_lease_that_runs_out_fails_the_attempt_and_none_of_its_pages_is_accepted(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start(lease_s=30.0)
    request = offered(service)
    # The reader's thread renews the lease by itself. The test therefore ends the lease at the source, as if the reader
    # had been stopped.
    prefill = prefill_requests(service)[0]
    assert prefill.source is not None
    service.exchanges["p0"].revoke(prefill.source, "expired, says the test")
    service.until(lambda: prefill.phase == "over", "the end of the lease")
    empty(service)
    service.until(lambda: "r" in service.ended, "the second attempt")
    assert service.tokens["r"] == expected["r"]
    assert request.reasons == ["expired, says the test"]
    assert_serves_on(service, expected)


def test_the_time_of_a_lease_runs_from_the_last_offer_on(start: Callable[..., Service]) -> None:
    service = start()
    request = service.submit_one("r", PROMPT)
    service.until(lambda: bool(prefill_requests(service)), "prefill to begin")
    prefill = prefill_requests(service)[0]
    service.until(lambda: prefill.phase == "held", "the last offer", poll=service.prefill.poll)
    assert prefill.source is not None
    lease, thread = prefill.source.lease, service.exchanges["p0"].threads[0]
    assert (
        thread.call(lambda replica: replica.leases.find(lease.lease_id).deadline)
        < time.monotonic() + lease.duration_s + 1
    )
    assert request.phase != "decoding"


def test_a_lease_is_renewed_while_decode_has_no_room(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start(lease_s=5.0)  # On a busy machine the reader's thread may have to wait for some seconds.
    request = offered(service)
    until = time.monotonic() + 7
    service.until(lambda: time.monotonic() > until, "more than the lease")
    assert (request.phase, phase_of_prefill(service), request.reasons) == ("offered", "held", [])
    empty(service)
    service.until(lambda: "r" in service.ended, "the last token")
    assert service.tokens["r"] == expected["r"]
    assert service.decode.counts["retries"] == 0
    assert_serves_on(service, expected)


def test_the_deadline_that_decode_names_holds_at_prefill(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    clock = Clock()
    service = start(clock=clock)
    service.decode._times = DecodeTimes(prefill_s=0.3)
    fill(service, "p0")
    service.submit_one("r", PROMPT)
    service.until(lambda: phase_of_prefill(service) == "queued", "the question")
    (request,) = prefill_requests(service)
    clock.now += 0.3
    service.until(lambda: request.phase == "over", "the deadline", poll=service.prefill.poll)
    assert "timed out in phase 'queued' on prefill process 'p0'" in request.reason

    def later() -> None:
        clock.now += 0.01
        service.poll()

    service.until(lambda: "r" in service.ended, "the last attempt", poll=later)
    assert service.ended["r"].error.startswith("3 attempts: timed out in phase")
    service.decode._times = DecodeTimes()
    assert_serves_on(service, expected)


def test_a_prompt_that_can_never_be_prefilled_is_not_tried_again(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start(PREFILL._replace(count=2), DECODE._replace(pages=40))
    service.submit_one("long", [1] * 400)
    service.until(lambda: "long" in service.ended, "the refusal")
    assert service.ended["long"].finished == "error"
    assert service.ended["long"].error.startswith("request 'long': 400 prompt tokens")
    assert service.decode.counts["retries"] == 0
    assert_serves_on(service, expected)


def test_offers_of_an_attempt_that_is_over_are_refused_and_their_pages_come_back(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start(lease_s=1000.0)
    service.submit_one("r", PROMPT)
    service.until(lambda: phase_of_prefill(service) == "held", "the pages", poll=_prefill_and_messages(service))
    request = service.decode._requests["r"]
    # The test simulates that this attempt has failed and that the message about its failure is still on its way.
    request.attempt += 1
    service.until(lambda: not prefill_requests(service), "the refusal")
    assert service.decode.counts["late"] >= 1
    assert request.phase == "asked"
    request.attempt -= 1
    cancel(service)
    assert_serves_on(service, expected)


def _prefill_and_messages(service: Service) -> Callable[[], None]:
    """Polls prefill. Also polls decode until decode has sent its request."""

    def poll() -> None:
        service.prefill.poll()
        if service.decode._requests["r"].phase == "waiting":
            service.decode.poll()

    return poll


class Stranger:
    """A client that can send arbitrary messages to a prefill process."""

    def __init__(self, service: Service, socket: Any) -> None:
        self.service, self.socket = service, socket
        self.socket.connect(f"ipc://{service.directory}/p0")

    def ask(self, *frames: bytes) -> msg.AnyMessage:
        self.socket.send_multipart(frames)
        self.service.until(lambda: self.socket.poll(1), "an answer")
        return msg.decode(self.socket.recv())


def test_rubbish_is_counted_and_answered_and_does_no_harm(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start()
    with service.context.socket(zmq.DEALER) as socket:
        say_rubbish(service, Stranger(service, socket))
    assert_serves_on(service, expected)


def say_rubbish(service: Service, stranger: Stranger) -> None:
    request = {"request_id": "x", "attempt": 1}
    for frames in ((b"",), (b"\xff" * 100,), (b"a", b"b"), (msg.encode(msg.Stop()),)):
        answer = stranger.ask(*frames)
        assert isinstance(answer, msg.Rejected)
        assert not answer.stranger
    assert service.prefill.stats().malformed == 4
    asking = msg.Prefill(**request, prompt=(1, 2), within_s=5.0)
    answer = stranger.ask(msg.encode(asking))
    assert isinstance(answer, msg.Rejected)
    assert answer.stranger
    stranger.ask(msg.encode(msg.Hello(reader="x", incarnation="i")))
    offer = stranger.ask(msg.encode(asking))
    assert isinstance(offer, msg.PagesOffer)
    stranger.socket.send(msg.encode(asking))  # The stranger repeats its request after prefill has served it.
    stranger.socket.send(msg.encode(msg.Cancel(request_id="nobody", attempt=1, reason="?")))
    service.until(lambda: service.prefill.counts["late"] == 2, "what is late")
    answer = stranger.ask(msg.encode(msg.Prefill(request_id="y", attempt=2, prompt=(1,) * 400, within_s=5.0)))
    assert isinstance(answer, msg.Failed)
    assert answer.final
    stranger.socket.send(msg.encode(msg.Cancel(**request, reason="enough")))
    service.until(lambda: not service.prefill.open_requests, "the end of what was asked for")


def test_rubbish_from_prefill_is_counted_and_answered_and_does_no_harm(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start()
    service.until(lambda: service.connected, "the connection")
    (identity,) = service.prefill._readers
    offer = msg.Failed(request_id="nobody", attempt=7, reason="?")
    for frames in ([b"\xff"], [b"a", b"b"], [msg.encode(msg.Stop())], [msg.encode(offer)]):
        service.routers["p0"].send_multipart([identity, *frames])
    service.until(lambda: service.decode.stats().malformed == 3 and service.decode.counts["late"] == 1, "the rubbish")
    assert_serves_on(service, expected)


def test_the_same_id_may_come_again_while_its_first_pull_still_ends(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start()
    pulling(service)
    for _ in range(3):
        cancel(service)
        service.submit_one("r", PROMPT)
    service.until(lambda: "r" in service.ended and service.ended["r"].finished == "length", "the last of them")
    assert service.tokens["r"] == expected["r"]
    assert_serves_on(service, expected)


def test_a_token_that_the_model_does_not_know_fails_only_its_request(
    start: Callable[..., Service], expected: dict[str, list[int]]
) -> None:
    service = start()
    service.decode.submit(msg.Submit(request_id="odd", prompt=(1, 1 << 20), max_new_tokens=2))
    service.until(lambda: "odd" in service.ended, "the refusal")
    assert "token 1048576 is not in the vocabulary" in service.ended["odd"].error
    service.ended.pop("odd")
    assert_serves_on(service, expected)
