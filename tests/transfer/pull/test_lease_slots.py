"""New leases have distinct ids and slots, up to the number of words."""

from __future__ import annotations

from transfer.pull.lease import LEASE_SLOTS, LeaseSlots


def test_leases_have_ids_and_slots_of_their_own_until_all_words_are_taken() -> None:
    slots = LeaseSlots()
    leases = [slots.take(7.0) for _ in range(LEASE_SLOTS)]
    assert {lease.slot for lease in leases} == set(range(LEASE_SLOTS))
    assert len({lease.lease_id for lease in leases}) == LEASE_SLOTS
    assert {lease.duration_s for lease in leases} == {7.0}
    assert slots.take(7.0) is None


def test_a_slot_that_was_given_back_is_used_again_under_another_id() -> None:
    slots = LeaseSlots()
    leases = [slots.take(7.0) for _ in range(9)]
    slots.give_back(leases[5])
    slots.give_back(leases[2])
    again = [slots.take(7.0) for _ in range(3)]
    assert [lease.slot for lease in again] == [2, 5, 9]
    assert not {lease.lease_id for lease in again} & {lease.lease_id for lease in leases}
