"""An import has one copier, which names the pages to copy. The copier may continue to write after the import was given
up.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcache import InterruptedCallError, InvalidRequestError, InvariantError, LayerGroup
from kvcache.replica.block_table import PendingImport
from kvcache.under_way import Call
from tests.kvcache.build import proven
from tests.kvcache.replica.test_imports import PROMPT, beginning, prefilled, receiver

TWO_TABLES: dict[str, Any] = {
    "layers": 2,
    "params": {"groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 100))},
}


def test_a_copier_names_each_table_when_its_pages_are_taken(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    pending = target.import_block_table(context, beginning(table, 4), partial=True)
    copier = target.copier(pending)
    copier.take(last=False)
    assert copier.tables == (beginning(table, 4),)
    target.extend_import(context, pending, beginning(table, 8), last=False)
    target.extend_import(context, pending, table, last=True)
    copier.take(last=True)
    assert copier.tables == (beginning(table, 8), table), "the first one was named before"


def test_a_late_cancel_does_not_touch_the_pages_of_the_next_request_of_the_name(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    late = target.import_block_table(receiver(target), table)
    target.release("d")
    context = receiver(target)  # The same row was given to another request.
    assert target.maybe_reserve(context)
    target.cancel_import(late)
    pages = target.get_req_blocks("d")
    with pytest.raises(InvalidRequestError, match="'d': already holds 5 pages; import its block table"):
        target.import_block_table(context, table)
    assert target.get_req_blocks("d") == pages


def test_an_interrupted_cancel_can_be_made_again_and_its_request_starts_anew(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(pending: PendingImport) -> None:
        pending.closed = True
        raise KeyboardInterrupt

    _, table = prefilled(make, **TWO_TABLES)
    target = make(40, page_size=4, **TWO_TABLES)
    context = receiver(target)
    pending = target.import_block_table(context, table)
    with monkeypatch.context() as patched:
        patched.setattr(target._replicas.each[0].imports, "cancel", stops)
        with pytest.raises(KeyboardInterrupt):
            target.cancel_import(pending)
    assert target.recover().call == "cancel_import"
    target.cancel_import(pending)
    assert target.num_free_blocks == 40
    target.external_claim(context.request_id)
    assert target.import_block_table(context, table).needs_copy


def test_an_import_has_one_copier_which_proves_nothing_before_it_has_taken_all_pages(make: Any) -> None:
    _, table = prefilled(make)
    target = make(40, page_size=4)
    context = receiver(target)
    pending = target.import_block_table(context, table)
    copier = target.copier(pending)
    with pytest.raises(InvalidRequestError, match="'d': the copier of its pages took tokens up to 0, but not yet the"):
        copier.prove()
    with pytest.raises(InvalidRequestError, match="'d': the copier of this import was already handed out"):
        target.copier(pending)
    other = proven(target, target.import_block_table(receiver(target, name="other"), table))
    with pytest.raises(InvalidRequestError, match="'d': commit_import with the proof of another import"):
        target.commit_import(context, pending, other)
    copier.take()
    proof = copier.prove(8)
    with pytest.raises(InvalidRequestError, match="'d': the copier of its pages has ended"):
        copier.prove()
    target.commit_import(context, pending, proof)
    assert context.start_idx == 8


def test_a_row_that_may_run_in_pages_that_others_may_share_is_a_discrepancy(make: Any) -> None:
    _, table = prefilled(make, **TWO_TABLES)
    target = make(40, page_size=4, **TWO_TABLES)
    target.cancel_import(target.import_block_table(receiver(target), table))
    target.check()
    replica = target._replicas.each[0]
    row = replica.rows.row_of["d"]
    replica.rows.measure(row)
    with pytest.raises(InvariantError, match=f"row {row} may run in the pages of a cancelled import"):
        target.check()
    replica.rows.measure(row, usable=False)


@pytest.mark.parametrize("first", [None, 4, 8])
@pytest.mark.parametrize("proves", [0, 4, 16])
def test_a_copier_proves_the_tokens_that_it_has_taken_or_fewer(make: Any, first: int | None, proves: int) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    begun = table if first is None else beginning(table, first)
    pending = target.import_block_table(context, begun, partial=first is not None)
    copier = target.copier(pending)
    taken = list[int]()
    if first is not None:
        (copy,) = copier.take(last=False)
        taken += copy.dst_pages[: len(copy.src_pages)].tolist()
        assert copier.take(last=False)[0].src_pages.size == 0
        with pytest.raises(InvalidRequestError, match=f"took tokens up to {first}, but not yet the last ones"):
            copier.prove()
        target.extend_import(context, pending, table, last=True)
    (copy,) = copier.take()
    taken += copy.dst_pages[: len(copy.src_pages)].tolist()
    assert taken == list(target.get_req_blocks("d"))[:5], "each page is taken once, in the order of the tokens"
    with pytest.raises(InvalidRequestError, match="no pages left to copy, because its copier has already taken the la"):
        copier.take()
    proof = copier.prove(proves)
    assert (proof.request_id, proof.num_tokens) == ("d", proves or 18)
    assert copier.proof is proof
    assert copier.is_over
    with pytest.raises(InvalidRequestError, match="no pages left to copy"):
        copier.take()
    target.commit_import(context, pending, proof)
    assert context.start_idx == (proves or 18)
    assert pending.closed
    with pytest.raises(InvalidRequestError, match="'d': commit_import: this import was already finished or cancelled"):
        target.commit_import(context, pending, proof)
    target.cancel_import(pending)
    target.check()


def test_a_copier_names_what_each_other_source_has(make: Any) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    others = beginning(table, 8), beginning(table, 16)
    pending = target.import_block_table(context, table, others=others)
    copier = target.copier(pending)
    copier.take()
    found = copier.from_others()
    assert [one for one, _ in found] == [*others]
    assert [[copy.tokens for copy in copies] for _, copies in found] == [[(0, 8)], [(0, 16)]]
    assert [copies[0].src_pages.tolist() for _, copies in found] == [
        list(table.groups[0][:2]),
        list(table.groups[0][:4]),
    ]
    target.cancel_import(pending)
    copier.give_up()


@pytest.mark.parametrize("ends", ["gives up", "proves"])
@pytest.mark.parametrize("when", ["before the cancel", "after the cancel"])
def test_the_pages_of_a_cancelled_import_are_free_once_its_copier_has_ended(make: Any, ends: str, when: str) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    context = receiver(target)
    pending = target.import_block_table(context, table)
    copier = target.copier(pending)
    end = copier.give_up
    if ends == "proves":
        copier.take()
        end = copier.prove
    if when == "before the cancel":
        end()
        with pytest.raises(InvalidRequestError, match="no pages left to copy"):
            copier.take()
        assert target._replicas.each[0].imports.written_besides == []
        target.cancel_import(pending)
    else:
        target.cancel_import(pending)
        with pytest.raises(InvalidRequestError, match="no pages left to copy, because its import is closed"):
            copier.take()
        target.release("d")
        target.check()
        assert target.num_free_blocks == 11, "the copier may still write"
        end()
    copier.give_up()
    target.check()
    target.release("d") if when == "before the cancel" else None
    assert target.num_free_blocks == 16
    assert not target._replicas.each[0].imports.copiers


def test_a_copier_that_ends_after_an_import_without_copies_was_committed_frees_nothing(make: Any) -> None:
    _, table = prefilled(make, PROMPT[:16])
    target = make(16, page_size=4)
    for name in ("d", "e"):
        context = receiver(target, PROMPT[:16], name)
        pending = target.import_block_table(context, table)
        copier = target.copier(pending)
        copier.take()
        target.commit_import(context, pending, copier.prove() if pending.needs_copy else None)
    assert not pending.needs_copy
    held = target.num_held_blocks
    copier.give_up()
    target.check()
    assert target.num_held_blocks == held


def released(make: Any) -> tuple[Any, Any]:
    """Returns a manager, and the copier of an import whose request was cancelled and released."""
    _, table = prefilled(make)
    target = make(16, page_size=4)
    pending = target.import_block_table(receiver(target), table)
    copier = target.copier(pending)
    target.cancel_import(pending)
    target.release("d")
    return target, copier


def test_a_copier_that_ends_while_the_manager_needs_recovery_leaves_the_pages_to_it(make: Any) -> None:
    target, copier = released(make)
    with pytest.raises(KeyboardInterrupt), target._replicas.each[0].imports._mark.changing(Call("fetch")):
        raise KeyboardInterrupt
    copier.give_up()
    assert copier.is_over
    assert target.num_free_blocks == 11
    with pytest.raises(InterruptedCallError, match="fetch was interrupted"):
        target.fetch([])
    assert target.recover().call == "fetch"
    target.check()
    assert target.num_free_blocks == 16


@pytest.mark.parametrize("copier", ["none", "handed out", "given up"])
def test_an_open_import_keeps_its_pages_through_a_recovery_until_it_is_cancelled(make: Any, copier: str) -> None:
    _, table = prefilled(make)
    target = make(16, page_size=4)
    pending = target.import_block_table(receiver(target), table)
    made = None if copier == "none" else target.copier(pending)
    if made is not None and copier == "given up":
        made.give_up()
    with pytest.raises(KeyboardInterrupt), target._mark.changing(Call("fetch")):
        raise KeyboardInterrupt
    assert target.recover().imports == (pending,)
    assert target.num_free_blocks == 11
    target.cancel_import(pending)
    if made is not None:
        made.give_up()
    target.check()
    assert target.num_free_blocks == 16


def test_a_recovery_from_an_interrupted_import_cancels_no_other_import(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    _, table = prefilled(make)
    target = make(20, page_size=4)
    known = [target.import_block_table(receiver(target, name=name), table) for name in ("open", "cancelled")]
    copier = target.copier(known[1])
    target.cancel_import(known[1])
    last = receiver(target)
    with monkeypatch.context() as patched:
        patched.setattr(target._claims, "bind", stops)
        with pytest.raises(KeyboardInterrupt):
            target.import_block_table(last, table)
    assert target.num_free_blocks == 5
    recovered = target.recover()
    assert (recovered.call, recovered.imports) == ("import_block_table", tuple(known))
    assert [pending.closed for pending in known] == [False, True]
    assert target.num_free_blocks == 10
    target.cancel_import(known[0])
    copier.give_up()
    assert target.num_free_blocks == 20
    target.check()


def test_a_copier_that_is_interrupted_when_it_ends_is_over_and_its_pages_are_free(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    target, copier = released(make)
    with monkeypatch.context() as patched:
        patched.setattr(target._replicas.each[0].imports, "_give_back", stops)
        with pytest.raises(KeyboardInterrupt):
            copier.give_up()
    assert copier.is_over
    assert target.recover().call == "give_up"
    target.check()
    assert target.num_free_blocks == 16
    assert not target._replicas.each[0].imports.copiers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("closed", "request 'd': its import is closed, but still has its pages"),
        ("unknown row", "row 3 may run in the pages of a cancelled import, which other requests may share"),
        ("not listed", "row 0 waits for an import of 'd' that is not its own"),
        ("other row", "row 1 waits for an import of 'd' that is not its own"),
    ],
)
def test_a_check_finds_imports_that_do_not_fit_their_rows(make: Any, change: str, message: str) -> None:
    _, table = prefilled(make)
    target = make(40, page_size=4)
    pending = target.import_block_table(receiver(target), table)
    receiver(target, name="other")
    imports = target._replicas.each[0].imports
    assert [target._replicas.each[0].rows.row_of[name] for name in ("d", "other")] == [0, 1]
    imports.check()
    each, of_row = [*imports.each], {**imports.of_row}
    if change == "closed":
        pending.closed = True
    elif change == "unknown row":
        imports.to_give_back.add(3)
    elif change == "not listed":
        imports.each.clear()
    else:
        imports.of_row[1] = pending
    with pytest.raises(InvariantError, match=message):
        imports.check()
    pending.closed, imports.each[:], imports.of_row = False, each, of_row
    imports.to_give_back.clear()
    imports.check()


def test_a_row_without_room_that_waits_for_its_return_is_a_contradiction_too(make: Any) -> None:
    _, table = prefilled(make, **TWO_TABLES)
    target = make(40, page_size=4, **TWO_TABLES)
    target.cancel_import(target.import_block_table(receiver(target), table))
    imports = target._replicas.each[0].imports
    (row,) = imports.to_give_back
    imports.check()
    before, imports._rows.capacity[row] = imports._rows.capacity.item(row), 0
    with pytest.raises(InvariantError, match=f"row {row} may run in the pages of a cancelled import"):
        imports.check()
    imports._rows.capacity[row] = before
