"""Tests the lease book: the messages that end a lease, the times at which a lease ends without a message, and the
content of its word.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from tests.transfer.clock import Clock
from transfer.errors import InvalidLeaseError
from transfer.pull.lease import CLEARED, LeaseBook, make_words, new_lease_id
from transfer.wire.messages import ReaderNote


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> LeaseBook:
    return LeaseBook([make_words(8)], clock)


def note(lease_id: int, rank: int = 0, ranks: int = 1, verdict: str = "done", engine: str = "d", reason: str = ""):
    return ReaderNote(lease_id, engine, rank, ranks, verdict, reason)


def test_a_lease_word_holds_the_id_while_the_lease_lasts_and_is_empty_afterwards(book: LeaseBook) -> None:
    book.grant(7, "r", 3, 10.0)
    assert book.words[0].tolist() == [0, 0, 0, 7, 0, 0, 0, 0]
    assert (len(book), book.ids()) == (1, [7])
    ended = book.hear(note(7))
    assert (ended.request_id, ended.ended) == ("r", "read")
    assert not book.words[0].any()
    assert not len(book)
    book.check()


def test_words_lie_in_pages_of_their_own() -> None:
    assert make_words(4).ctypes.data % 4096 == 0
    assert make_words(4).tolist() == [CLEARED] * 4


def test_ids_are_random_words_and_never_the_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {new_lease_id() for _ in range(1000)}
    assert len(drawn) == 1000
    assert max(drawn) >> 60  # The ids use all 64 bits.
    monkeypatch.setattr("secrets.randbelow", lambda below: 0)
    assert new_lease_id() == 1
    monkeypatch.setattr("secrets.randbelow", lambda below: below - 1)
    assert new_lease_id() == (1 << 64) - 1


@pytest.mark.parametrize(
    ("lease", "message"),
    [
        ((0, "r", 0, 1.0), "lease 0x0000000000000000: its id is taken, or is not a 64-bit number above 0"),
        ((1 << 64, "r", 0, 1.0), "its id is taken, or is not a 64-bit number above 0"),
        ((9, "r", 0, 1.0), "lease 0x0000000000000009: its id is taken"),
        ((1, "r", 8, 1.0), "word 8 is taken, or outside of 0 to 7"),
        ((1, "r", -1, 1.0), "word -1 is taken, or outside of 0 to 7"),
        ((1, "r", 4, 1.0), "word 4 is taken"),
        ((1, "r", 0, 0.0), "0.0 s for 1 engines; both must be above 0"),
        ((1, "r", 0, float("inf")), "inf s for 1 engines"),
        ((1, "r", 0, float("nan")), "nan s for 1 engines"),
    ],
)
def test_a_lease_that_cannot_be_granted_changes_nothing(book: LeaseBook, lease: tuple, message: str) -> None:
    book.grant(9, "other", 4, 1.0)
    words = book.words[0].copy()
    with pytest.raises(InvalidLeaseError, match=f"request 'r': .*{message}"):
        book.grant(*lease)
    assert np.array_equal(book.words[0], words)
    assert book.ids() == [9]
    book.check()


def test_a_lease_without_a_reading_engine_is_refused(book: LeaseBook) -> None:
    with pytest.raises(InvalidLeaseError, match="for 0 engines"):
        book.grant(1, "r", 0, 1.0, engines=0)


def test_every_rank_of_the_reader_must_have_spoken(book: LeaseBook) -> None:
    book.grant(5, "r", 0, 10.0)
    assert book.hear(note(5, 0, 4)) is None
    assert book.hear(note(5, 3, 4)) is None
    assert book.hear(note(5, 1, 4)) is None
    assert book.words[0][0] == 5
    assert book.hear(note(5, 2, 4)) is not None
    assert book.counts == {"accepted": 4}


def test_each_rank_of_ours_must_have_heard_from_every_rank_of_the_reader(clock: Clock) -> None:
    book = LeaseBook([make_words(8), make_words(8)], clock)
    book.grant(5, "r", 3, 10.0)
    assert [int(words[3]) for words in book.words] == [5, 5]
    for at, rank in ((0, 0), (0, 1), (1, 1)):
        assert book.hear(note(5, rank, 2), at) is None
    assert book.hear(note(5, 1, 2), 1) is None
    assert book.counts == {"accepted": 3, "duplicate": 1}
    assert [int(words[3]) for words in book.words] == [5, 5]
    assert book.hear(note(5, 0, 2), 1) is not None
    assert not np.any(book.words)
    book.check()


def test_a_count_of_messages_does_not_end_a_lease(book: LeaseBook) -> None:
    book.grant(5, "r", 0, 10.0)
    for _ in range(5):
        assert book.hear(note(5, 0, 2)) is None
    assert book.words[0][0] == 5
    assert book.counts == {"accepted": 1, "duplicate": 4}


def test_two_engines_that_both_read_must_both_have_ended(book: LeaseBook) -> None:
    book.grant(5, "r", 0, 10.0, engines=2)
    assert book.hear(note(5, 0, 1, engine="a")) is None
    assert book.hear(note(5, 0, 2, engine="b")) is None
    assert book.hear(note(5, 1, 2, engine="b")) is not None


def test_notes_of_no_lease_and_of_one_that_is_over_are_told_apart_and_dropped(book: LeaseBook) -> None:
    book.grant(5, "r", 0, 10.0)
    assert book.hear(note(6)) is None
    assert book.hear(note(5)) is not None
    assert book.hear(note(5)) is None
    assert book.hear(note(5, verdict="renew")) is None
    assert book.counts == {"accepted": 1, "unknown": 1, "late": 2}


def test_a_reader_that_changes_its_number_of_ranks_is_ignored(book: LeaseBook) -> None:
    book.grant(5, "r", 0, 10.0)
    assert book.hear(note(5, 0, 2)) is None
    assert book.hear(note(5, 0, 1)) is None
    assert book.hear(note(5, 1, 1)) is None
    assert book.counts == {"accepted": 1, "malformed": 2}
    assert book.words[0][0] == 5


def test_a_refusal_ends_a_lease_like_a_read_and_the_first_reason_is_kept(book: LeaseBook) -> None:
    book.grant(5, "r", 0, 10.0)
    assert book.hear(note(5, 0, 3, "refused", reason="no room")) is None
    assert book.hear(note(5, 1, 3, "refused", reason="because of rank 0")) is None
    assert book.hear(note(5, 2, 3)).ended == "no room"


def test_a_renewal_extends_never_shortens_and_has_an_end(book: LeaseBook, clock: Clock) -> None:
    book = LeaseBook([make_words(8)], clock, longest=3)
    lease = book.grant(5, "r", 0, 10.0)
    assert lease.deadline == 110
    clock.now = 104
    book.hear(note(5, verdict="renew"))
    assert lease.deadline == 114
    clock.now = 103  # The earlier time simulates a message that was long on its way.
    book.hear(note(5, verdict="renew"))
    assert lease.deadline == 114
    for clock.now in (113, 121, 129):
        book.hear(note(5, verdict="renew"))
    assert lease.deadline == 130
    clock.now = 130
    (over,) = book.expire()
    assert over is lease
    assert over.ended == "expired after 10.0 s without hearing from its readers"


def test_a_rank_that_is_done_does_not_renew_the_lease_for_the_others(book: LeaseBook, clock: Clock) -> None:
    lease = book.grant(5, "r", 0, 10.0)
    book.hear(note(5, 0, 2))
    clock.now = 105
    book.hear(note(5, 0, 2, "renew"))
    assert lease.deadline == 110
    book.hear(note(5, 1, 2, "renew"))
    assert lease.deadline == 115


def test_leases_expire_by_their_deadline_whatever_their_order(book: LeaseBook, clock: Clock) -> None:
    book.grant(1, "long", 0, 50.0)
    book.grant(2, "short", 1, 5.0)
    book.grant(3, "middle", 2, 20.0)
    clock.now = 104.9
    assert book.expire() == []
    clock.now = 105.0
    assert [lease.request_id for lease in book.expire()] == ["short"]
    assert book.words[0].tolist()[:3] == [1, 0, 3]
    book.grant(4, "shorter", 1, 1.0)
    clock.now = 120
    assert sorted(lease.request_id for lease in book.expire()) == ["middle", "shorter"]
    clock.now = 150
    assert [lease.request_id for lease in book.expire()] == ["long"]
    assert not book.words[0].any()


def test_the_time_of_a_request_that_is_still_computed_does_not_run(book: LeaseBook, clock: Clock) -> None:
    lease = book.grant(5, "r", 0, 10.0, running=True)
    assert book.words[0][0] == 5
    clock.now += 1e6
    book.hear(note(5, verdict="renew"))
    assert book.expire() == []
    book.start_clock(5)
    assert lease.deadline == clock.now + 10
    clock.now += 9
    book.start_clock(5)  # The clock of lease 5 already runs.
    book.start_clock(6)
    assert book.expire() == []
    clock.now += 1
    assert book.expire() == [lease]


def test_a_request_that_is_still_computed_can_be_read_or_aborted(book: LeaseBook) -> None:
    book.grant(5, "r", 0, 10.0, running=True)
    book.grant(6, "s", 1, 10.0, running=True)
    assert book.hear(note(5)).ended == "read"
    assert book.end(6, "aborted").ended == "aborted"
    book.check()


def test_the_word_is_cleared_before_anyone_learns_of_the_end(book: LeaseBook, clock: Clock) -> None:
    seen: list[int] = []

    class Watched(dict):
        def __delitem__(self, key: int) -> None:
            seen.append(int(book.words[0][2]))
            super().__delitem__(key)

    book._by_id = Watched()

    def expire() -> None:
        clock.now = 1e6
        book.expire()

    for end in (lambda: book.hear(note(5)), lambda: book.end(5, "abort"), expire):
        book.grant(5, "r", 2, 1.0)
        end()
    assert seen == [CLEARED] * 3


def test_an_owner_ends_its_lease_once(book: LeaseBook) -> None:
    book.grant(5, "r", 0, 10.0)
    assert book.end(5, "aborted").ended == "aborted"
    assert book.end(5, "again") is None
    assert book.find(5) is None
    book.grant(6, "next", 0, 10.0)
    assert book.find(6).request_id == "next"


def test_the_memory_of_ended_leases_is_bounded(book: LeaseBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.pull.lease._MAX_ENDED", 10)
    for lease_id in range(1, 101):
        book.grant(lease_id, "r", 0, 1.0)
        book.end(lease_id, "x")
    assert list(book._ended) == [*range(91, 101)]  # The book has forgotten the oldest leases.
    for lease_id in range(91, 101):
        assert book.hear(note(lease_id)) is None
    assert book.counts == {"late": 10}
    assert book.hear(note(90)) is None
    assert book.counts == {"late": 10, "unknown": 1}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("word", r"lease words \[3\] do not hold the ids of their leases"),
        ("word_idx", "request 'r': lease 0x0000000000000005 is recorded inconsistently"),
        ("ended", "request 'r': lease 0x0000000000000005 is recorded inconsistently"),
        ("forgotten", "request 'r': lease 0x0000000000000005 is recorded inconsistently"),
        ("another's id", "request 'r': lease 0x0000000000000005 is recorded inconsistently"),
    ],
)
def test_check_finds_wrong_books(book: LeaseBook, damage: str, message: str) -> None:
    lease = book.grant(5, "r", 0, 10.0)
    other = book.grant(6, "s", 1, 10.0)
    book.check()
    if damage == "word":
        book.words[0][3] = 1
    elif damage == "word_idx":
        lease.word_idx = 1
    elif damage == "ended":
        lease.ended = "read"
    elif damage == "forgotten":
        del book._by_id[5]
    else:
        book._by_id[5] = other
    with pytest.raises(InvalidLeaseError, match=message):
        book.check()


def test_the_times_of_a_lease_are_since_its_time_began_and_to_its_deadline(clock: Clock) -> None:
    book = LeaseBook([make_words(8)], clock, longest=3)
    lease, runs = book.grant(5, "r", 0, 10.0), book.grant(6, "s", 1, 10.0, running=True)
    assert book.times(runs) == (0.0, None)
    clock.now += 4
    assert book.times(lease) == (4.0, 6.0)
    book.hear(note(5, verdict="renew"))
    clock.now += 1
    assert book.times(lease) == (5.0, 9.0)
    assert book.times(runs) == (0.0, None)
    book.start_clock(6)
    clock.now += 2
    assert book.times(runs) == (2.0, 8.0)
    book.end(5, "read")
    while not book.expire() and clock.now < 1000:
        clock.now += 4
        book.hear(note(6, verdict="renew"))
    # Readers may renew a lease for at most three of its durations after its clock was started.
    assert 105 + 30 <= clock.now < 105 + 34


def test_only_ids_of_64_bits_are_granted() -> None:
    book = LeaseBook([make_words(8)])
    book.grant((1 << 64) - 1, "r", 7, 10.0)
    assert book.words[0][7] == (1 << 64) - 1
    with pytest.raises(InvalidLeaseError, match="not a 64-bit number above 0"):
        book.grant(1 << 64, "r", 0, 10.0)


def test_a_fork_finds_no_lease() -> None:
    """If a fork has got the old pid of its parent, a reader may read lease words from the fork. The reader must find no
    lease there.
    """
    book = LeaseBook([make_words(8)])
    book.grant(5, "r", 0, 10.0)
    child = os.fork()
    if child == 0:
        os._exit(int(book.words[0].any()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert book.words[0][0] == 5


def test_any_sequence_of_moves_leaves_the_words_as_the_leases_are(clock: Clock) -> None:
    rng = random.Random(3)
    book = LeaseBook([make_words(6)], clock)
    granted = ended = 0
    for _ in range(4000):
        move = rng.choice(["grant", "hear", "hear", "hear", "end", "tick"])
        known = [*book.ids(), 999]
        over = []
        if move == "grant":
            try:
                book.grant(rng.randrange(1, 40), "r", rng.randrange(7), rng.uniform(0.5, 9), engines=rng.choice([1, 2]))
                granted += 1
            except InvalidLeaseError:
                pass
        elif move == "hear":
            verdict, engine = rng.choice(["done", "refused", "renew"]), rng.choice("ab")
            over = [book.hear(note(rng.choice(known), rng.randrange(3), rng.choice([2, 3]), verdict, engine))]
        elif move == "end":
            over = [book.end(rng.choice(known), "x")] if rng.random() < 0.2 else []
        else:
            clock.now += rng.uniform(0, 1)
            over = book.expire()
        over = [lease for lease in over if lease is not None]
        ended += len(over)
        assert all(lease.ended and book.words[0][lease.word_idx] == CLEARED for lease in over)
        book.check()
    assert granted - ended == len(book)
    assert min(book.counts.values()) > 10, book.counts
    assert granted > 200
