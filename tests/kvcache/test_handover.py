"""Wrong uses of leases, copiers and proofs that a manager refuses.

Each refusal names its reason and changes nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvcache import ImportProof, InvalidRequestError, InvariantError, PagedKVCacheManager, TextContext
from tests.kvcache.build import proven
from tests.kvcache.replica.test_imports import prefilled, receiver


def importing(make: Any, name: str = "d") -> tuple[PagedKVCacheManager, TextContext, Any]:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target, name=name)
    return target, context, target.import_block_table(context, table)


def test_an_import_belongs_to_one_manager(make: Any) -> None:
    target, context, pending = importing(make)
    other, theirs, foreign = importing(make)
    for call in (
        lambda: target.commit_import(context, foreign, proven(other, foreign)),
        lambda: target.cancel_import(foreign),
        lambda: target.copier(foreign),
    ):
        with pytest.raises(InvalidRequestError, match="another manager made this import"):
            call()
    assert not foreign.closed
    other.cancel_import(foreign)
    other.release(theirs.request_id)
    target.commit_import(context, pending, proven(target, pending))


def test_an_import_belongs_to_one_request(make: Any) -> None:
    target, _, pending = importing(make)
    _, table = prefilled(make)
    second = receiver(target, name="e")
    theirs = target.import_block_table(second, table)
    with pytest.raises(InvalidRequestError, match="'e': commit_import: this import belongs to another request"):
        target.commit_import(second, pending, proven(target, pending))
    target.commit_import(second, theirs, proven(target, theirs))
    target.cancel_import(pending)
    target.release("d")


@pytest.mark.parametrize("changes", [{"cache_salt": "other"}, {"extra_keys": ((3, b"image"),)}])
def test_salt_and_keys_stay_until_the_commit(make: Any, changes: dict[str, Any]) -> None:
    target, context, pending = importing(make)
    proof = proven(target, pending)
    before = {name: getattr(context, name) for name in changes}
    for name, value in changes.items():
        setattr(context, name, value)
    with pytest.raises(InvalidRequestError, match="changed while it holds pages"):
        target.commit_import(context, pending, proof)
    for name, value in before.items():
        setattr(context, name, value)
    target.commit_import(context, pending, proof)


def test_an_import_accepts_only_its_own_proof_and_no_copy_of_it(make: Any) -> None:
    target, context, pending = importing(make)
    other, _, foreign = importing(make)
    theirs = proven(other, foreign)
    with pytest.raises(InvalidRequestError, match="without a proof"):
        target.commit_import(context, pending)
    for wrong in (theirs, ImportProof("d", pending.num_tokens)):
        with pytest.raises(InvalidRequestError, match="proof"):
            target.commit_import(context, pending, wrong)
    proof = proven(target, pending)
    for wrong in (theirs, copy.copy(proof), ImportProof("d", proof.num_tokens)):
        with pytest.raises(InvalidRequestError, match="proof"):
            target.commit_import(context, pending, wrong)
    target.check()
    target.commit_import(context, pending, proof)


def test_a_copier_is_handed_out_once_and_gets_no_pages_of_a_closed_import(make: Any) -> None:
    target, _, pending = importing(make)
    copier = target.copier(pending)
    with pytest.raises(InvalidRequestError, match="was already handed out"):
        target.copier(pending)
    target.cancel_import(pending)
    with pytest.raises(InvalidRequestError, match="there are no pages left to copy, because its import is closed"):
        copier.take()
    copier.give_up()
    target.release("d")


def test_a_late_end_of_a_cancelled_import_does_not_end_the_next_import(make: Any) -> None:
    target, _, first = importing(make)
    copier = target.copier(first)
    target.release("d")
    target.cancel_import(first)
    again = receiver(target)
    _, table = prefilled(make)
    second = target.import_block_table(again, table)
    copier.give_up()
    assert target._replicas.each[0].imports.of_row == {target._replicas.each[0].rows.row_of["d"]: second}
    target.commit_import(again, second, proven(target, second))


def test_check_finds_an_import_that_is_closed_and_keeps_its_pages(make: Any) -> None:
    target, _, pending = importing(make)
    pending.closed = True
    with pytest.raises(InvariantError, match="its import is closed, but still has its pages"):
        target.check()
    pending.closed = False
    target.cancel_import(pending)
    target.release("d")


def test_a_shorter_table_takes_no_page_back_from_readers(make: Any) -> None:
    """A request makes a shorter table after a longer table. The readers of the longer table keep their pages."""
    manager = make(8, page_size=4)
    context = TextContext(range(10), 64, "r")
    manager.external_claim("r")
    manager.maybe_reserve(context)
    context.update(1)
    manager.step([context])
    manager.lease("r")
    manager.block_table("r")
    manager.block_table("r", full_pages=True)
    context.set_token_indices(start_idx=8)
    with pytest.raises(
        InvalidRequestError, match="would recompute from token 8, but a lease still covers its first 10"
    ):
        manager.maybe_reserve(context, 3)


def test_a_batch_with_one_request_that_would_recompute_leased_tokens_reserves_nothing(make: Any) -> None:
    manager = make(16, page_size=4, rows=2)
    every = [TextContext(range(at, at + 10), 64, f"r{at}") for at in (0, 50)]
    for context in every:
        manager.external_claim(context.request_id)
        manager.maybe_reserve(context)
        context.update(1)
        manager.step([context])
    manager.lease("r50")
    every[1].set_token_indices(start_idx=5)
    with pytest.raises(InvalidRequestError, match="'r50': would recompute"):
        manager.reserve_batch(every, 12)
    assert len(manager.get_req_blocks("r0")) == 3


def test_a_released_row_has_no_room_left(make: Any) -> None:
    manager = make(16, page_size=4, rows=1)
    with manager.claim(long := TextContext(range(30), 64, "long")):
        manager.maybe_reserve(long)
    short = TextContext([7], 64, "short")
    manager.external_claim("short")
    assert manager.reserve_batch([short]).all()
    assert len(manager.get_req_blocks("short")) == 1


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("cache_salt", "\ud800"),
        ("extra_keys", ((-1, b"x"),)),
        ("extra_keys", ((1 << 31, b"x"),)),
        ("extra_keys", ((1, "x"),)),
    ],
)
def test_a_salt_is_text_and_keys_are_positions_and_bytes(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field.removesuffix("s").replace("extra_", "extra ")):
        TextContext([1, 2], 9, "r", **{field: wrong})


def test_a_context_copies_its_keys() -> None:
    key = bytearray(b"image")
    context = TextContext([1, 2], 9, "r", extra_keys=[(1, key)])
    key[0] = 0
    assert context.extra_keys == ((1, b"image"),)
