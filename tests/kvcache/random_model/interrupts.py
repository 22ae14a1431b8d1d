"""Interrupts a call at any bytecode, as a signal handler, Ctrl-C or the interpreter itself may do."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import kvcache
from kvcache import (
    ImportCopier,
    InterruptedCallError,
    PagedKVCacheManager,
    PageLease,
    PendingImport,
    Recovered,
    TextContext,
)
from tests.kvcache.random_model.matrix import Chooser

T = TypeVar("T")
_OURS = str(Path(kvcache.__file__).parent)
RAISED = (KeyboardInterrupt, MemoryError, RecursionError, TimeoutError)
SIGN = "interrupted here"


def interrupted(call: Callable[[], T], at: int, error: type[BaseException]) -> tuple[T | None, int, bool]:
    """Calls `call`, and raises `error` at bytecode number `at` in `kvcache`.

    Returns the result, the number of bytecodes, and whether `error` was raised. Other errors of the call pass through.
    """
    count, done = 0, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count, done
        if event == "call":
            # A finalizer runs whenever garbage is collected. An error in it is printed, and interrupts nothing.
            finalizes = frame.f_back is not None and frame.f_back.f_code.co_filename == weakref.__file__
            if finalizes or not frame.f_code.co_filename.startswith(_OURS):
                return None
            # Since Python 3.12, opcode events need line events, which take time.
            frame.f_trace_opcodes, frame.f_trace_lines = True, sys.version_info >= (3, 12)
        elif event == "opcode":
            count += 1
            if count == at:
                done = True
                raise error(SIGN)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call(), count, done
    except error as raised:
        if not done or raised.args != (SIGN,):
            raise
        return None, count, True
    finally:
        sys.settrace(before)


class Interrupted(Exception):  # noqa: N818 - no error: the move is over
    """Raised after a call was interrupted. The manager's state is then right again, or the caller has to repair it."""


class Interrupts:
    """Draws the bytecode at which a manager's call is interrupted, from the lengths of the last calls of the same
    method.
    """

    def __init__(self, manager: PagedKVCacheManager, choose: Chooser) -> None:
        self.manager, self.choose = manager, choose
        self.lengths: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=20))

    def call(self, name: str, call: Callable[[], T]) -> T:
        """Makes the call. Raises `Interrupted` if it was interrupted, even if the call swallowed the error."""
        choice = self.choose.integer(0, 7)
        if choice > 1:
            return call()
        at = self.choose.integer(1, self.choose.pick([*self.lengths[name]] or [500])) if choice else 0
        result, count, done = interrupted(call, at, self.choose.pick(RAISED))
        if done:
            raise Interrupted(name)
        self.lengths[name].append(count)
        return result  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    def recover(self, live: dict[str, TextContext]) -> Recovered:
        """Repairs the manager's state. The repair may be interrupted, too.

        Before the repair, checks that the manager refuses other calls.
        """
        self.refuses(next(iter(live.values()), TextContext([1, 2], 9)))
        report = None
        while report is None:
            if self.choose.integer(0, 2):
                return self.manager.recover()
            at = self.choose.integer(1, self.choose.pick([*self.lengths["recover"]] or [500]))
            report, count, done = interrupted(self.manager.recover, at, self.choose.pick(RAISED))
            if not done:
                self.lengths["recover"].append(count)
        return report

    def refuses(self, one: TextContext) -> None:
        """Checks that the manager refuses calls while its state may be wrong."""
        manager, other = self.manager, TextContext([1, 2], 9)
        calls: list[Callable[[], object]] = [
            *(lambda: manager.contains("r"), lambda: manager.external_claim("new"), lambda: manager.maybe_reserve(one)),
            *(lambda: manager.reserve_batch([]), lambda: manager.fetch([]), lambda: manager.step([]), manager.check),
            *(lambda: manager.release("r"), lambda: manager.lease("r"), lambda: manager.block_table("r")),
            *(lambda: manager.admission(one), manager.reset_prefix_cache, lambda: manager.batch([])),
            *(lambda: manager.prefetch(one), lambda: manager.fork(one, other), lambda: manager.get_req_blocks("r")),
            *(manager.flush_tiers, lambda: manager.get_replica(one), lambda: manager.get_data_parallel_splits([])),
        ]
        try:
            self.choose.pick(calls)()
        except InterruptedCallError as error:
            assert "recover()" in str(error)  # noqa: PT017 - the moves run without pytest, too
            return
        raise AssertionError("a call continued although the records of the manager may be wrong")


def end_unknown(
    manager: PagedKVCacheManager,
    report: Recovered,
    leases: list[PageLease],
    imports: list[PendingImport],
    copiers: list[ImportCopier],
) -> None:
    """Ends the leases, imports and steps that an interrupted call has made and not returned."""
    for copier in report.copiers:
        if copier not in copiers:
            copier.give_up()
    for lease in report.leases:
        if lease not in leases:
            manager.end_lease(lease)
    for pending in report.imports:
        if pending not in imports:
            manager.cancel_import(pending)
