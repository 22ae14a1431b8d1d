"""An import has one copier, which names the pages to copy. The copier may continue to write after the import was given
up.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcache import InvalidRequestError, InvariantError, LayerGroup, NotReservedError
from tests.kvcache.replica.test_imports import beginning, prefilled, receiver

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


@pytest.mark.parametrize("imports_again", [False, True])
def test_after_an_interrupted_cancel_a_request_does_not_run_in_pages_that_others_may_share(
    make: Any, monkeypatch: pytest.MonkeyPatch, imports_again: bool
) -> None:
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    _, table = prefilled(make, **TWO_TABLES)
    target = make(40, page_size=4, **TWO_TABLES)
    context = receiver(target)
    pending = target.import_block_table(context, table)
    with monkeypatch.context() as patched:
        patched.setattr(target._replicas.each[0].imports, "_give_back", stops)
        with pytest.raises(KeyboardInterrupt):
            target.cancel_import(pending)
    assert target.recover().call == "cancel_import"
    with pytest.raises(NotReservedError, match="'d': fetch would write to pages of its cancelled import"):
        target.fetch([context])
    if imports_again:
        assert target.import_block_table(context, table).needs_copy
        return
    assert target.maybe_reserve(context)
    target.fetch([context])


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
