"""Offers of new pages are handled in the order of their pages, whatever the order of their arrival is. An import uses
the block tables of all offers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcache.replica.block_table import BlockTable
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.offers import Offers
from tests.scheduler_adapters.service.processes import NEW, Service, Side
from tests.scheduler_adapters.service.test_faults import OTHER, PROMPT, offered, pulling
from tests.scheduler_adapters.service.test_messages import SOURCE
from tests.scheduler_adapters.service.test_repeats import Said, check_serves_to_the_end
from tests.scheduler_adapters.serving import own_tokens

WIDTH = 32


@pytest.fixture(scope="module")
def expected(model: Any) -> list[int]:
    return own_tokens(model, PROMPT, NEW)


@pytest.fixture
def service(model: Any, tmp_path: Path) -> Iterator[Service]:
    made = Service(model, tmp_path, Side(pages=20, budget=32), Side(pages=20), lease_s=5.0)
    yield made
    made.close()


def offer_of(tokens: int, first: int = 0, token: int | None = None, **fields: Any) -> msg.PagesOffer:
    """Returns an offer with pages of 4 tokens. Page 0 has id 10, page 1 has id 11, and so on."""
    end = -(-tokens // 4)
    table = BlockTable(
        request_id="r",
        replica_idx=0,
        num_tokens=tokens,
        page_size=4,
        groups=(tuple(range(10 + first, 10 + end)), (7,)),
        fingerprint="f",
        hash_algorithm="sha256",
        digests=b"".join(bytes([page] * WIDTH) for page in range(first, tokens // 4)),
        first_page=first,
    )
    table = msgspec.structs.replace(table, **fields)
    return msg.PagesOffer(request_id="r", attempt=1, source=SOURCE, table=table, prompt_digest=b"d", token=token)


PARTS = [offer_of(4), offer_of(12, 1), offer_of(16, 3), offer_of(18, 4, 5)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (0, 3, 1, 2)])
@pytest.mark.parametrize("imported", [True, False])
def test_offers_are_taken_in_turn_whatever_the_order_in_which_they_come(order: tuple[int, ...], imported: bool) -> None:
    offers, taken, tables = Offers(), list[msg.PagesOffer](), list[BlockTable]()
    for at in order:
        assert not offers.has_had(PARTS[at])
        offers.add(PARTS[at])
        while (offer := offers.take()) is not None:
            assert offers.newest == offer
            taken.append(offer)
            if imported:
                tables += offers.tables
                offers.imported()
        assert all(offers.has_had(PARTS[before]) for before in order[: order.index(at) + 1])
    assert taken == PARTS
    assert tables + offers.tables == [part.table for part in PARTS]


def test_a_complete_table_replaces_the_tables_before_it() -> None:
    offers = Offers()
    for offer, count in ((offer_of(12), 1), (offer_of(16, 1), 2), (offer_of(18, 0, 5), 1)):
        offers.add(offer)
        assert offers.take() == offer
        assert len(offers.tables) == count
    assert offers.tables == [offer_of(18).table]


@pytest.mark.parametrize(
    "before",
    [
        None,
        offer_of(8),
        offer_of(11),
        offer_of(24, page_size=8),
        offer_of(12, page_size=0),
        offer_of(12, num_tokens=-12),
    ],
)
def test_an_offer_waits_for_the_offers_of_the_pages_before_it(before: msg.PagesOffer | None) -> None:
    offers = Offers()
    if before is not None:
        offers.add(before)
        assert offers.take() == before
    offers.add(offer_of(30, 3))
    assert offers.take() is None
    assert offers.newest == before


def names(offer: msg.PagesOffer) -> tuple[int, int]:
    return offer.table.first_page, len(offer.table.groups[0])


def test_a_prompt_s_offers_name_each_page_once(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    pulling(service)
    check_serves_to_the_end(service, expected)
    assert len(said.offers) > 3
    named = [names(offer) for offer in said.offers]
    assert [first for first, _ in named] == [sum(count for _, count in named[:at]) for at in range(len(named))]
    assert sum(count for _, count in named) == -(-len(PROMPT) // 16)
    assert [len(offer.table.digests) // WIDTH for offer in said.offers][:-1] == [count for _, count in named][:-1]
    assert service.decode.counts["retries"] == 0


def test_a_request_without_room_keeps_all_offers(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said(service, monkeypatch)
    request = offered(service)
    assert names(said.offers[-1])[0] > 0
    tables = request.offers.tables
    assert [table.first_page for table in tables] == [
        sum(len(one.groups[0]) for one in tables[:at]) for at in range(len(tables))
    ]
    assert sum(len(table.groups[0]) for table in tables) == -(-len(PROMPT) // 16)
    check_serves_to_the_end(service, expected)
    assert service.decode.counts["retries"] == 0


def test_a_reader_of_an_earlier_version_gets_all_pages_in_each_offer(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, start = Said(service, monkeypatch), service.prefill._start
    monkeypatch.setattr(
        service.prefill,
        "_start",
        lambda sender, reader, message: start(sender, reader, msgspec.structs.replace(message, new_pages=False)),
    )
    pulling(service)
    check_serves_to_the_end(service, expected)
    assert len(said.offers) > 3
    assert {offer.table.first_page for offer in said.offers} == {0}


@pytest.mark.parametrize("keep", [0, 1])
def test_the_last_token_waits_for_an_offer_that_arrives_late(
    service: Service, expected: list[int], monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """The last offer has a token. The token is sent once, after all earlier tokens."""
    held: list[tuple[bytes, Any]] = []
    send, sent = service.prefill._send, list[Any]()

    def overtaken(reader: bytes, message: Any) -> None:
        sent.append(message)
        if isinstance(message, msg.PagesOffer) and len(sent) == 2 + keep:
            held.append((reader, message))
        else:
            send(reader, message)

    monkeypatch.setattr(service.prefill, "_send", overtaken)
    service.until(lambda: service.connected, "the connection")
    request = service.submit_one("r", PROMPT)
    service.until(lambda: sent and getattr(sent[-1], "token", None) is not None, "the last offer")
    for _ in range(20):
        service.poll()
    service.collect()
    assert (service.tokens["r"], request.has_ended_prefill) == ([], False)
    send(*held[0])
    check_serves_to_the_end(service, expected)
    assert service.decode.counts["retries"] == 0


def test_no_page_is_lost_if_a_reader_disappears_as_its_prompt_ends(
    service: Service, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulling(service)
    lose, send = service.prefill._lose, service.prefill._send

    def gone(reader: bytes, message: Any) -> None:
        if getattr(message, "token", None) is not None:
            lose(reader, "a decode process cannot be reached")
        else:
            send(reader, message)

    with monkeypatch.context() as patched:
        patched.setattr(service.prefill, "_send", gone)
        service.until(lambda: not service.prefill._readers, "the end of the prompt", poll=service.prefill.poll)
    service.decode.connections[0].lose("as its monitor would tell")
    check_serves_to_the_end(service, own_tokens(model, PROMPT, NEW))
    service.submit_one("s", OTHER)
    service.until(lambda: "s" in service.ended, "another request")
    service.assert_nothing_held()
    assert service.tokens["s"] == own_tokens(model, OTHER, NEW)
