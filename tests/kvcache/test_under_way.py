"""Tests the manager's flag of a call in progress: the calls that the flag lets in, and the refusal of other calls."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.errors import InterruptedCallError, InvalidRequestError, InvariantError, ManagerClosedError
from kvcache.under_way import Call, UnderWay
from tests.kvcache.random_model.interrupts import interrupted as interrupted_at

FORK = Call("fork")


def interrupted() -> UnderWay:
    mark = UnderWay()
    mark.call = FORK
    return mark


def test_a_call_in_progress_keeps_all_other_calls_out_until_it_ends() -> None:
    mark = interrupted()
    assert (mark.is_interrupted, mark.call) == (True, FORK)
    for refused in (mark.check, mark.check_books, mark.refuse):
        with pytest.raises(
            InterruptedCallError, match=r"^step: fork was interrupted while it changed .* call recover\(\) first$"
        ):
            refused("step")
    assert mark.call is FORK
    mark.end()
    assert not mark.is_interrupted
    mark.check("step")
    mark.check_books("release")


def test_a_call_that_another_thread_ends_meanwhile_is_refused_without_its_name() -> None:
    mark = UnderWay()
    with mark.changing(FORK) as same:
        assert same is mark
    with pytest.raises(InterruptedCallError, match="^step: a call was interrupted while it changed"):
        mark.refuse("step")


def test_a_closed_manager_takes_back_what_is_held_and_refuses_every_other_call() -> None:
    mark = UnderWay()
    mark.close()
    mark.close()
    assert not mark.is_interrupted
    mark.check_books("release")
    with pytest.raises(ManagerClosedError, match="^step: the manager is closed: it only gives back what is held"):
        mark.check("step")
    with mark.changing(Call("release")):
        pass
    with pytest.raises(ManagerClosedError, match="^step: the manager is closed"):
        mark.check("step")
    mark.end()
    with pytest.raises(ManagerClosedError, match="step: the manager is closed"):
        mark.check("step")


def test_a_close_hides_no_interruption_and_a_recovery_opens_nothing_that_was_closed() -> None:
    mark = interrupted()
    mark.close()
    mark.close()
    assert mark.is_interrupted
    assert mark.call is FORK, "recover has to complete it"
    with pytest.raises(InterruptedCallError, match="^release: fork was interrupted"):
        mark.check_books("release")
    mark.end()  # recovered
    assert not mark.is_interrupted
    mark.check_books("release")
    with pytest.raises(ManagerClosedError, match="step: the manager is closed"):
        mark.check("step")


@pytest.mark.parametrize(
    ("error", "refused", "open_again"),
    [
        (InvalidRequestError("no"), False, True),  # The manager raises this error before it changes anything.
        (InvariantError("no"), False, False),
        (InterruptedCallError("no"), False, False),
        (KeyboardInterrupt(), False, False),
        (ValueError("no"), None, False),
        (ValueError("no"), False, False),
        (ValueError("no"), True, True),  # The caller's own context raises this error.
        (KeyboardInterrupt(), True, False),
    ],
)
def test_a_call_that_fails_leaves_the_word_set_unless_nothing_can_have_changed(
    error: BaseException, refused: bool | None, open_again: bool
) -> None:
    mark = UnderWay()
    context: Any = None if refused is None else SimpleNamespace(refused=refused)
    with pytest.raises(type(error)), mark.changing(FORK, context):
        raise error
    assert mark.is_interrupted != open_again
    assert mark.context is None


@pytest.mark.parametrize("error", [None, InvalidRequestError("no"), ValueError("no")])
def test_a_mark_that_is_interrupted_anywhere_keeps_a_context_only_while_it_is_set(error: Exception | None) -> None:
    at, done = 0, True
    while done:
        at, mark = at + 1, UnderWay()

        def block(mark: UnderWay = mark) -> None:
            with contextlib.suppress(ValueError), mark.changing(FORK, SimpleNamespace(refused=True)):
                if error is not None:
                    raise error

        _, _, done = interrupted_at(block, at, KeyboardInterrupt)
        assert mark.is_interrupted or mark.context is None, f"interrupted at bytecode {at}"
    assert at > 20
