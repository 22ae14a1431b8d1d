"""A call that is interrupted at any bytecode, as a signal handler, Ctrl-C or the interpreter itself may."""

from __future__ import annotations

import sys
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
    """The result of the call, the bytecodes of `kvcache` that it ran, and whether `error` was raised at the `at`-th
    one.

    Any other error of the call is raised.
    """
    count, done = 0, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count, done
        if event == "call":
            if not frame.f_code.co_filename.startswith(_OURS):
                return None
            # Since Python 3.12 there are no events of opcodes without those of lines, which take time.
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
    """A call was interrupted, and the books are right again or about to be mended."""


class Interrupts:
    """Draws where a call of a manager is interrupted: of its last calls of that name it knows how long they were."""

    def __init__(self, manager: PagedKVCacheManager, choose: Chooser) -> None:
        self.manager, self.choose = manager, choose
        self.lengths: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=20))

    def call(self, name: str, call: Callable[[], T]) -> T:
        """The call; raises `Interrupted` where it was, now or in its swallowed middle."""
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
        """Mend the books, whatever interrupts that; before, any call says that they may not be right."""
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
        """Any call says that the books may not be right."""
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
        raise AssertionError("a call went on over books that may not be right")


def end_unknown(
    manager: PagedKVCacheManager,
    report: Recovered,
    leases: list[PageLease],
    imports: list[PendingImport],
    copiers: list[ImportCopier],
) -> None:
    """What an interrupted call has made, and nobody was given, is given back."""
    for copier in report.copiers:
        if copier not in copiers:
            copier.give_up()
    for lease in report.leases:
        if lease not in leases:
            manager.end_lease(lease)
    for pending in report.imports:
        if pending not in imports:
            manager.cancel_import(pending)
