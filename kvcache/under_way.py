"""`UnderWay`: a mark that says which call of a manager is changing its state.

A call sets the mark before its first change, and clears the mark after its last change. If the call is interrupted in
between (Ctrl-C, a signal handler that raises, too little memory or stack), the mark stays set, whatever exception
handlers do. Every later call then sees that the state may be half changed, and refuses to run.
`PagedKVCacheManager.recover` builds the state anew and clears the mark. A closed manager has a different mark, which is
never cleared; calls that only release or read something still work.
"""

from collections.abc import Callable
from typing import NoReturn, Protocol, Self

from kvcache.errors import InterruptedCallError, KVCacheError, ManagerClosedError


class Call:
    """A call that changes a manager's state, and what `recover` does about it.

    Attributes:
        name: what errors and `Recovered` call it.
        complete: called by `recover` when the state is right again. It ends what the call has made and its caller has
            not received, or does the rest of what the caller wanted. It may be called twice.
    """

    __slots__ = ("complete", "name")

    def __init__(self, name: str, complete: Callable[[], object] = lambda: None) -> None:
        self.name, self.complete = name, complete


CLOSE = Call("close")
_CLOSED = Call("close")  # the mark of a manager that is closed
_CLOSING = (CLOSE, _CLOSED)


class Refusing(Protocol):
    """An object that may raise its own error while a call changes state: the context of a request."""

    @property
    def refused(self) -> bool:
        """Whether the object has raised an error, and neither the object nor the manager's state has changed."""
        ...


class UnderWay:
    """The mark of one manager. Everything that changes the manager's state shares it.

    Attributes:
        call: the call that is changing the state. None means that the state is consistent.
        context: the request context that the call changes, whose own code may raise; None if there is none. It is set
            only while `call` is set.
    """

    __slots__ = ("_rest", "call", "context")

    def __init__(self) -> None:
        self._rest: Call | None = None  # the value that `call` has while no call changes the state
        self.call: Call | None = None
        self.context: Refusing | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether the state may be half changed."""
        return self.call is not self._rest

    def end(self) -> None:
        """Mark the state as consistent."""
        self.call = self._rest

    def close(self) -> None:
        """Mark the manager as closed: from now on `check` raises.

        The state is consistent, unless a call was interrupted.
        """
        if not self.is_interrupted:
            self.call = _CLOSED
        self._rest = _CLOSED

    def check_books(self, call: str) -> None:
        """Raise `InterruptedCallError` if a call was interrupted. Does not raise if the manager is only closed."""
        if self.is_interrupted:
            self.refuse(call)

    def refuse(self, call: str) -> NoReturn:
        """Raise `ManagerClosedError` if the mark is that of a closed manager, otherwise `InterruptedCallError`."""
        if self.call is _CLOSED:
            raise ManagerClosedError(
                f"{call}: the manager is closed: it only gives back what is held (release, end_lease, cancel_import)"
            )
        before = self.call or Call("a call")
        raise InterruptedCallError(
            f"{call}: {before.name} was interrupted while it changed the manager's state (or it still runs): "
            "call recover() first"
        )

    def check(self, call: str) -> None:
        """Raise `InterruptedCallError` if a call was interrupted, or `ManagerClosedError` if the manager is closed."""
        if self.call:
            self.refuse(call)

    def changing(self, call: Call, context: Refusing | None = None) -> Self:
        """Returns a context manager. In its block, `call` changes the manager's state, and may change `context`.

        The mark is set during the block. It is cleared at the end of the block, and after an error that guarantees that
        nothing has changed: an error of this package, or an error of the context before any change. After any other
        error, the mark stays set.
        """
        self.call = call
        self.context = context
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.context, self.call = None, self._rest
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Handle an error of a call that changes the state and may change `context`: see `changing`."""
        if isinstance(error, KVCacheError):
            nothing_changed = error.nothing_changed
        else:
            nothing_changed = isinstance(error, Exception) and self.context is not None and self.context.refused
        self.context = None
        if nothing_changed:
            self.call = self._rest


class CheckedUnderWay(UnderWay):
    """A mark that also checks the state before the first change of each call, and after the last.

    Whatever changes the state sets the mark: calls of the manager, and of objects that it has handed out. So no call
    can be forgotten. A manager with `enable_runtime_checks` has this mark.

    Attributes:
        recount: raises an error if the state is wrong.
    """

    __slots__ = ("recount",)

    def __init__(self) -> None:
        self.recount: Callable[[], None] = lambda: None
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        if name != "call" or not hasattr(self, "call"):
            super().__setattr__(name, value)
            return
        was_changing = self.is_interrupted
        # A manager whose state is wrong can still be closed.
        closes = self.call in _CLOSING or value in _CLOSING
        if not (was_changing or closes) and value is not self._rest:
            self.recount()
        super().__setattr__(name, value)
        if was_changing and not closes and value is self._rest:
            self.recount()
