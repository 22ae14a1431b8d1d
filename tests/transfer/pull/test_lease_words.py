"""New leases have distinct ids and words, up to the number of words."""

from __future__ import annotations

from transfer.pull.lease import LEASE_WORDS, LeaseWords


def test_leases_have_ids_and_slots_of_their_own_until_all_words_are_taken() -> None:
    words = LeaseWords()
    leases = [words.take(7.0) for _ in range(LEASE_WORDS)]
    assert {lease.word_idx for lease in leases} == set(range(LEASE_WORDS))
    assert len({lease.lease_id for lease in leases}) == LEASE_WORDS
    assert {lease.duration_s for lease in leases} == {7.0}
    assert words.take(7.0) is None


def test_a_slot_that_was_given_back_is_used_again_under_another_id() -> None:
    words = LeaseWords()
    leases = [words.take(7.0) for _ in range(9)]
    words.give_back(leases[5])
    words.give_back(leases[2])
    again = [words.take(7.0) for _ in range(3)]
    assert [lease.word_idx for lease in again] == [2, 5, 9]
    assert not {lease.lease_id for lease in again} & {lease.lease_id for lease in leases}
