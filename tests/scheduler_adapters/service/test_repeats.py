"""A message that arrives twice or too late changes no state. Each message is tested alone, in the phases in which it
matters.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.requests import DecodeRequest, Recent
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.service.test_faults import (
    OTHER,
    PROMPT,
    asked,
    decoding,
    empty,
    offered,
    prefill_requests,
    pulling,
)
from tests.scheduler_adapters.serving import own_tokens


@pytest.fixture(scope="module")
def expected(model: Any) -> list[int]:
    return own_tokens(model, PROMPT, NEW)


@pytest.fixture
def service(model: Any, tmp_path: Path) -> Iterator[Service]:
    made = Service(model, tmp_path, Side(pages=20, budget=32), Side(pages=20), lease_s=5.0)
    yield made
    made.close()


class Said:
    """Records the messages that a prefill process sends to its readers. It can send them again."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.every: list[tuple[bytes, msg.ToDecode]] = []
        self._send = send = service.prefill._send

        def kept(reader: bytes, message: msg.ToDecode) -> None:
            self.every.append((reader, message))
            send(reader, message)

        monkeypatch.setattr(service.prefill, "_send", kept)

    @property
    def offers(self) -> list[msg.PagesOffer]:
        return [message for _, message in self.every if isinstance(message, msg.PagesOffer)]

    def again(self, message: msg.ToDecode) -> None:
        self._send(self.every[-1][0], message)


def late(service: Service, count: int) -> None:
    service.until(lambda: service.decode.counts["late"] >= count, "what comes again", poll=service.decode.poll)


def check_serves_to_the_end(service: Service, expected: list[int], new: int = NEW) -> None:
    empty(service)
    service.until(lambda: "r" in service.ended, "the last token")
    assert service.ended["r"].finished == "length"
    assert service.tokens["r"] == expected
    assert len(service.tokens["r"]) == new
    service.assert_nothing_held()


def pulling_the_last(service: Service, monkeypatch: pytest.MonkeyPatch) -> DecodeRequest:
    """Brings decode to the last offer. The READs of decode seem to be in flight, although the few pages arrive at
    once.
    """
    request, exchange = service.submit_one("r", PROMPT), service.decode._exchange
    with monkeypatch.context() as held:
        poll = exchange.poll
        held.setattr(exchange, "poll", lambda: [] if request.has_ended_prefill else poll())
        service.until(lambda: request.phase == "pulling" and request.has_ended_prefill, "the last offer")
    return request


def test_a_last_offer_that_comes_again_while_decode_has_no_pages_puts_out_one_token(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    request = offered(service)
    said.again(said.offers[-1])
    said.again(said.offers[-1])
    late(service, 2)
    service.collect()
    assert (request.phase, service.tokens["r"]) == ("offered", expected[:1])
    check_serves_to_the_end(service, expected)


def test_a_last_offer_that_comes_again_during_the_pull_puts_out_one_token(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    request = pulling_the_last(service, monkeypatch)
    service.decode._on_message(service.decode.connections[0], said.offers[-1])
    assert (request.phase, service.decode.counts["late"]) == ("pulling", 1)
    check_serves_to_the_end(service, expected)


def test_an_offer_that_younger_ones_have_overtaken_is_dropped(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    request = pulling(service)
    # Decode pulls the first chunk.
    service.until(lambda: len(said.offers) > 2, "some chunks", poll=service.prefill.poll)
    service.until(
        lambda: request.offer is not None and request.offer.table.num_tokens > said.offers[0].table.num_tokens,
        "a younger one",
        poll=service.decode.poll,
    )
    offer = request.offer
    service.decode._on_message(service.decode.connections[0], said.offers[0])
    assert (request.phase, request.offer, service.decode.counts["late"]) == ("pulling", offer, 1)
    check_serves_to_the_end(service, expected)
    assert service.decode.counts["retries"] == 0


def test_an_offer_that_comes_again_in_decode_harms_nothing(
    service: Service, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    decoding(service)
    for offer in said.offers:
        said.again(offer)
    late(service, len(said.offers))
    check_serves_to_the_end(service, own_tokens(model, PROMPT, 100), 100)


def test_two_leases_for_one_attempt_fail_it_and_another_follows(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    request = pulling(service)
    service.until(lambda: len(said.offers) > 1, "a second chunk", poll=service.prefill.poll)
    source = said.offers[-1].source
    another = msgspec.structs.replace(said.offers[-1], source=source._replace(lease=source.lease._replace(lease_id=7)))
    service.decode._on_message(service.decode.connections[0], another)
    assert request.reasons == ["prefill process 'p0' has offered two leases for one attempt"]
    check_serves_to_the_end(service, expected)


def test_an_offered_token_that_the_model_does_not_know_fails_the_attempt(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    request = pulling(service)
    unknown = msgspec.structs.replace(said.offers[-1], token=1 << 20)
    service.decode._on_message(service.decode.connections[0], unknown)
    assert request.reasons == [f"prefill process 'p0' sent token {1 << 20}, which the model does not know"]
    check_serves_to_the_end(service, expected)


def test_a_failure_that_comes_again_fails_no_other_attempt(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    request = asked(service)
    service.prefill._end(prefill_requests(service)[0], "says the test")
    service.until(lambda: len(request.reasons) == 1 and request.phase == "asked", "another attempt")
    (failed,) = [message for _, message in said.every if isinstance(message, msg.Failed)]
    said.again(failed)
    late(service, 1)
    assert (request.phase, len(request.reasons)) == ("asked", 1)
    check_serves_to_the_end(service, expected)


@pytest.mark.parametrize("phase", [asked, offered, pulling, decoding])
def test_a_hello_that_comes_again_gives_nothing_up(
    service: Service, model: Any, phase: Callable[[Service], DecodeRequest]
) -> None:
    request = phase(service)
    requests = [(one.key, one.phase) for one in prefill_requests(service)]
    connection = service.decode.connections[0]
    connection.send(connection._hello)
    before = service.decode.counts["retries"]
    for _ in range(3):
        service.prefill.poll()
    assert {key for key, _ in requests} >= {one.key for one in prefill_requests(service)}
    assert not any(one.phase == "ending" for one in prefill_requests(service))
    new = request.spec.max_new_tokens
    check_serves_to_the_end(service, own_tokens(model, PROMPT, new), new)
    assert service.decode.counts["retries"] == before == 0


def test_a_reader_that_is_displaced_by_another_of_its_name_is_told(service: Service, expected: list[int]) -> None:
    """If the displaced reader got no message, it would wait for its abandoned attempt until the deadline, two minutes
    later.
    """
    request = asked(service)
    (identity,) = service.prefill._readers
    service.prefill._readers[b"another"] = service.prefill._readers.pop(identity)
    sent: list[bytes] = []
    service.prefill._send = lambda reader, _: sent.append(reader)  # type: ignore[method-assign]
    service.prefill._welcome_reader(identity, service.decode.connections[0]._hello)
    assert sent == [identity, b"another"]
    del service.prefill._send
    service.decode.connections[0].lose("as `Rejected` makes it")
    service.until(lambda: request.attempt > 1 and request.phase == "asked", "another attempt")
    check_serves_to_the_end(service, expected)


def test_the_hello_of_a_connection_that_is_gone_displaces_nobody(service: Service, expected: list[int]) -> None:
    asked(service)
    readers = dict(service.prefill._readers)
    service.prefill._welcome_reader(b"hung up", service.decode.connections[0]._hello)
    assert service.prefill._readers == readers
    check_serves_to_the_end(service, expected)
    assert service.decode.counts["retries"] == 0


def test_a_prompt_that_comes_after_its_cancellation_is_not_computed(service: Service, expected: list[int]) -> None:
    service.until(lambda: service.connected, "the connection")
    ((identity, reader),) = service.prefill._readers.items()
    request = {"request_id": "gone", "attempt": 1 << 30}
    cancel = msg.encode(msg.Cancel(**request, reason="nobody waits"))
    prefill = msg.encode(msg.Prefill(**request, prompt=tuple(OTHER), within_s=60.0))
    for data in (cancel, prefill, prefill, cancel):
        service.prefill._on_frames([identity, data])
    assert service.prefill.counts["late"] == 4
    assert not reader.requests
    service.submit_one("r", PROMPT)
    check_serves_to_the_end(service, expected)
    assert service.prefill.stats().prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("phase", [asked, offered, pulling])
def test_a_prompt_that_comes_again_is_computed_once(
    service: Service, expected: list[int], phase: Callable[[Service], DecodeRequest]
) -> None:
    request = phase(service)
    (identity,) = service.prefill._readers
    again = msg.Prefill(request_id="r", attempt=request.attempt, prompt=tuple(PROMPT), within_s=60.0)
    service.prefill._on_frames([identity, msg.encode(again)])
    check_serves_to_the_end(service, expected)
    service.prefill._on_frames([identity, msg.encode(again)])
    assert service.prefill.counts["late"] == 2
    assert service.prefill.open_requests == 0
    assert service.prefill.stats().prompt_tokens == len(PROMPT)


def submission(serial: int) -> msg.Submit:
    return msg.Submit(request_id="r", prompt=tuple(PROMPT), max_new_tokens=NEW, serial=serial)


def test_a_submission_that_comes_again_is_served_once_and_its_id_may_be_used_again(
    service: Service, expected: list[int]
) -> None:
    for serial in (1, 2):
        service.tokens["r"], before = [], service.decode.counts["late"]
        service.ended.pop("r", None)
        for _ in range(2):
            service.decode.submit(submission(serial))
        check_serves_to_the_end(service, expected)
        service.decode.submit(submission(serial))
        assert service.decode.open_requests == 0
        assert service.decode.counts["late"] == before + 2
        assert service.ended["r"].serial == serial


def test_a_cancellation_that_overtakes_its_submission_ends_it(service: Service) -> None:
    service.decode.abort("r", 1)
    service.decode.submit(submission(1))
    service.decode.abort("r", 1)
    service.until(lambda: "r" in service.ended, "the end")
    assert (service.ended["r"].finished, service.ended["r"].serial) == ("cancelled", 1)
    service.assert_nothing_held()
    assert service.decode.counts["late"] == 1


def test_a_late_cancellation_of_one_submission_spares_the_next_of_that_id(
    service: Service, expected: list[int]
) -> None:
    service.decode.submit(submission(1))
    service.decode.abort("r", 1)
    service.collect()
    service.ended.clear()
    service.tokens["r"] = []
    service.decode.submit(submission(2))
    service.decode.abort("r", 1)
    service.until(lambda: service.ended.get("r") and service.ended["r"].serial == 2, "the second", poll=service.poll)
    assert service.tokens["r"] == expected


def test_the_memory_of_past_messages_is_bounded() -> None:
    recent: Recent[int] = Recent(most=3)
    assert [recent.add(number) for number in (1, 2, 1, 3, 4, 2, 4, 1)] == [
        *(True, True, False, True, True),
        *(False, False, True),
    ]


@pytest.mark.parametrize("length", [5, 25])
def test_pages_of_another_prompt_fail_the_attempt_and_another_follows(
    service: Service, model: Any, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """The check also works for prompts that fill no page. The block table of such a prompt has no digest."""
    prompts = {"r": PROMPT[:length], "s": OTHER[:length]}
    held: list[tuple[bytes, msg.PagesOffer]] = []
    send = service.prefill._send

    def swapped(reader: bytes, message: msg.ToDecode) -> None:
        if not isinstance(message, msg.PagesOffer) or message.token is None or len(held) == 2:
            send(reader, message)
            return
        held.append((reader, message))
        if len(held) == 2:
            for (sender, mine), (_, theirs) in zip(held, reversed(held), strict=True):
                pages = {"source": theirs.source, "table": theirs.table, "prompt_digest": theirs.prompt_digest}
                send(sender, msgspec.structs.replace(mine, **pages))

    monkeypatch.setattr(service.prefill, "_send", swapped)
    service.decode._chunkwise = False
    requests = [service.submit_one(name, prompt) for name, prompt in prompts.items()]
    service.until(lambda: len(service.ended) == 2, "the last tokens")
    for request, (name, prompt) in zip(requests, prompts.items(), strict=True):
        assert service.tokens[name] == own_tokens(model, prompt, NEW)
        (reason,) = request.reasons
        assert f"has offered the pages of another prompt: the digest of their {length} tokens is" in reason
    assert service.decode.counts["retries"] == 2
    service.assert_nothing_held()
