"""While the source answers "not yet", the reader repeats its question with growing pauses. It asks no question after
its deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvcache.replica.block_table import PageDigests
from transfer.errors import HandshakeError
from transfer.pull import asking
from transfer.pull.asking import PageAsks
from transfer.pull.lease import LeaseRef
from transfer.pull.source import Source
from transfer.wire.messages import Answer, ContentQuery, LeasedPages, LeaseReply, sealed_pages

PLACE = ("tcp://10.0.0.1:9", "p/0")
WANTED = PageDigests(4, "sha256", bytes(range(64)), first_page=2)


class Client:
    """A client whose source is controlled by the test: the test chooses the answers and their times."""

    def __init__(self) -> None:
        self.asked: list[tuple[ContentQuery, float]] = []
        self.open: list[Callable[[Answer | HandshakeError], None]] = []
        self.is_closed = False

    def ask(self, address: str, query: ContentQuery, done: Any, timeout_s: float) -> None:
        assert address == PLACE[0]
        self.asked.append((query, timeout_s))
        self.open.append(done)

    def poll(self) -> None: ...

    def answer(self, **said: Any) -> None:
        self.open.pop()(LeaseReply(query_id=0, **said))

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.client: Any = Client()
        self.given_back: list[tuple[int, Source, str]] = []
        give_back = lambda *given: self.given_back.append(given)  # noqa: E731
        self.asks = PageAsks(self.client, "d", b"", {"model": "m"}, "a kind", give_back=give_back)

    def ask(self, key: str = "r", timeout_s: float = 1.0) -> None:
        self.asks.ask(3, key, PLACE, WANTED, timeout_s)

    def polled(self) -> list[tuple[int, str, str]]:
        return [(replica, lent.key, lent.error) for replica, lent in self.asks.poll()]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_after_not_yet_the_question_is_repeated_with_doubling_pauses_until_the_deadline(rig: Rig) -> None:
    rig.ask()
    begin, times = rig.now, [0.0]
    found = rig.polled()
    while not found and rig.now < begin + 10:
        if rig.client.open:
            rig.client.answer(waits_for="the first page")
        rig.now += 0.05e-3
        asked = len(rig.client.asked)
        found = rig.polled()
        if len(rig.client.asked) > asked:
            times.append(rig.now - begin)
    assert found == [(3, "r", "engine 'p/0' at tcp://10.0.0.1:9: waited in vain for the first page")]
    assert rig.now - begin == pytest.approx(1.0, abs=1e-3)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    expected = [min(1e-4 * 2**at, 0.05) for at in range(len(pauses))]
    assert pauses == pytest.approx(expected, abs=0.06e-3)
    assert len(pauses) > 20
    lefts = [left for _, left in rig.client.asked]
    assert lefts == pytest.approx([1.0 - at for at in times], abs=1e-6)
    assert not rig.polled(), "once"


def test_only_the_first_question_carries_the_digests_and_all_have_the_same_id(rig: Rig) -> None:
    rig.ask()
    for _ in range(2):
        rig.client.answer()
        rig.now += 0.1
        assert rig.polled() == []
    queries = [query for query, _ in rig.client.asked]
    assert [query.digests for query in queries] == [WANTED.digests, b"", b""]
    assert len({query.ask_id for query in queries}) == 1
    assert {(query.engine_id, query.kind, query.page_size, query.first_page) for query in queries} == {
        ("p/0", "a kind", 4, 2)
    }
    assert {query.reader for query in queries} == {"r of d"}


def test_a_silent_source_is_waited_for_and_not_asked_again(rig: Rig) -> None:
    rig.ask()
    rig.ask("other", timeout_s=5.0)
    rig.now += 0.999
    assert rig.polled() == []
    rig.now += 0.001
    assert rig.polled() == [(3, "r", "engine 'p/0' at tcp://10.0.0.1:9: waited in vain for its answer")]
    assert len(rig.client.asked) == 2
    assert rig.client.asked[0][0].ask_id != rig.client.asked[1][0].ask_id


TWO_PAGES = LeasedPages(
    engine_id="p/0",
    incarnation="i",
    lease_id=77,
    word_idx=3,
    duration_s=10.0,
    num_tokens=8,
    block_ids=((5, 6),),
    prompt_digest=WANTED.digests[32:],
)
NO_PAGES = replace(TWO_PAGES, lease_id=0, num_tokens=0, block_ids=((),), prompt_digest=b"")


def test_a_lease_that_is_granted_after_the_end_of_its_question_is_given_back(rig: Rig) -> None:
    rig.ask()
    rig.now += 1.0
    assert len(rig.polled()) == 1
    rig.client.answer(waits_for="the first page")
    rig.now += 0.06
    assert rig.polled() == []
    assert len(rig.client.asked) == 2, "the source may still grant a lease, so the reader must ask again"
    rig.client.answer(pages=sealed_pages(TWO_PAGES))
    source = Source(*PLACE, LeaseRef(77, 3, 10.0), "i")
    assert rig.given_back == [(3, source, "r of d no longer waits for these pages")]
    rig.now += 1.0
    assert rig.polled() == []
    assert len(rig.client.asked) == 2
    rig.ask("open")
    rig.ask("again")
    rig.client.answer(pages=sealed_pages(TWO_PAGES))
    assert [lent.source for _, lent in rig.asks.poll()] == [source]
    assert len(rig.given_back) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "other", [{"num_tokens": 7}, {"block_ids": ((5,),)}, {"block_ids": ((5, 6), (7,))}, {"prompt_digest": bytes(32)}]
)
def test_a_lease_of_other_pages_is_given_back_once(rig: Rig, other: dict[str, Any], late: bool) -> None:
    rig.ask("open", timeout_s=9.0)
    rig.ask()
    if late:
        rig.now += 1.0
        assert len(rig.polled()) == 1
    rig.client.answer(pages=sealed_pages(replace(TWO_PAGES, **other)))
    ((replica, source, reason),) = rig.given_back
    assert (replica, source) == (3, Source(*PLACE, LeaseRef(77, 3, 10.0), "i"))
    errors = [error for _, _, error in rig.polled()]
    assert errors == ([] if late else [f"engine 'p/0' at {PLACE[0]}: lease 0x000000000000004d {reason}"])
    assert [ask.key for ask in rig.asks._open.values()] == ["open"]


def test_late_answers_of_a_source_are_read_for_a_while(rig: Rig) -> None:
    rig.ask()
    assert rig.asks.is_asking
    rig.now += 1.0
    assert len(rig.polled()) == 1
    assert not rig.asks.is_asking
    rig.now += 9.99
    assert rig.polled() == []
    assert rig.asks._open
    rig.now += 0.02
    assert rig.polled() == []
    assert not rig.asks._open
    rig.client.answer(pages=sealed_pages(TWO_PAGES))
    assert rig.given_back == []


@pytest.mark.parametrize("late", [{"error": "too late"}, {"pages": sealed_pages(NO_PAGES)}, {"pages": b"rubbish"}])
def test_a_refusal_after_the_end_of_a_question_has_no_effect(rig: Rig, late: dict[str, Any]) -> None:
    rig.ask()
    rig.now += 1.0
    assert len(rig.polled()) == 1
    rig.client.answer(**late)
    rig.now += 1.0
    assert rig.polled() == []
    assert len(rig.client.asked) == 1
    assert rig.given_back == []


def test_an_error_is_reported_once_with_its_source_and_ends_only_that_question(rig: Rig) -> None:
    for key in ("a", "b", "c", "d"):
        rig.ask(key, timeout_s=9.0)
    answer_d, answer_c, answer_b, answer_a = reversed(rig.client.open)
    answer_a(LeaseReply(query_id=0, error="lends no more"))
    answer_b(HandshakeError("no answer"))
    answer_c(LeaseReply(query_id=0, pages=b"rubbish"))
    found = {key: error for _, key, error in rig.polled()}
    where = "engine 'p/0' at tcp://10.0.0.1:9: "
    assert found.keys() == {"a", "b", "c"}
    assert (found["a"], found["b"]) == (where + "lends no more", where + "no answer")
    assert found["c"].startswith(where + "7 bytes cannot be read as the pages of a lease")
    answer_d(LeaseReply(query_id=0))
    rig.now += 1.0
    assert rig.polled() == []
    assert len(rig.client.asked) == 5
    rig.asks.close()
    assert rig.client.is_closed
    assert rig.polled() == []
