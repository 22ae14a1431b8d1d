"""`UnderWay`: the one word that says which call of a manager is changing its books.

A call sets the word before its first change and clears it after its last. An interruption in between (Ctrl-C, a signal
handler that raises, no memory, no stack) leaves the word set, whatever the call's handlers did. Every later call then
sees that the books may be half done, and refuses. `PagedKVCacheManager.recover` mends the books and clears the word.
A closed manager has its own word, which is never cleared. Calls that give something back, or only read, still work.
"""

from typing import NoReturn, Protocol, Self

from kvcache.errors import InterruptedCallError, InvariantError, KVCacheError, ManagerClosedError

_CLOSED: tuple[str, object] = ("close", "is over")


class Refusing(Protocol):
    """An object that may raise its own error while a call changes the books: the context of a request."""

    @property
    def refused(self) -> bool:
        """Whether it has, and nothing has changed: neither it nor, so far, the books."""
        ...


class UnderWay:
    """The word of one manager, which everything that changes its books shares.

    Attributes:
        call: the call that changes the books, and whose requests or objects it is about; None: the books are right.
        context: what the call moves, and may refuse that; None: nothing.
        leaving: requests whose `with claim` block ended while the word was set: `recover` releases them.
    """

    __slots__ = ("_rest", "call", "context", "leaving")

    def __init__(self) -> None:
        self.call: tuple[str, object] | None = None
        self._rest: tuple[str, object] | None = None  # what the word is while no call changes the books
        self.context: Refusing | None = None
        self.leaving: list[str] = []

    @property
    def is_interrupted(self) -> bool:
        """Whether the books may be half done."""
        return self.call is not self._rest

    def end(self) -> None:
        """The books are right."""
        self.call = self._rest

    def close(self) -> None:
        """From now on `check` refuses. The books are right, unless a call was interrupted before."""
        if not self.is_interrupted:
            self.call = _CLOSED
        self._rest = _CLOSED

    def check_books(self, call: str) -> None:
        """Raise `InterruptedCallError` if a call was interrupted; a closed manager answers such a call."""
        if self.is_interrupted:
            self.refuse(call)

    def refuse(self, call: str) -> NoReturn:
        """Raise `InterruptedCallError`, or `ManagerClosedError`, as the word is set."""
        if self.call is _CLOSED:
            raise ManagerClosedError(
                f"{call}: the manager is closed: it only gives back what is held (release, end_lease, cancel_import)"
            )
        before = "a call" if self.call is None else self.call[0]
        raise InterruptedCallError(
            f"{call}: {before} was interrupted while it changed the manager's books (or it still runs): "
            "call recover() first"
        )

    def check(self, call: str) -> None:
        """Raise `InterruptedCallError`, or `ManagerClosedError`, if the word is set."""
        if self.call is not None:
            self.refuse(call)

    def changing(self, call: str, about: object = None, context: Refusing | None = None) -> Self:
        """In the `with` block of this the call changes the books, and may move `context`.

        The word is cleared at the end of the block, and where an error leaves it that says that everything is as it
        was: one of our own, or one of the context's before anything was changed. Any other leaves it set.
        """
        self.context = context
        self.call = (call, about)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.call, self.context = self._rest, None
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """A call that changes the books, and may move `context`, has raised: see `changing`."""
        if isinstance(error, KVCacheError):
            nothing_changed = not isinstance(error, InvariantError | InterruptedCallError)
        else:
            nothing_changed = isinstance(error, Exception) and self.context is not None and self.context.refused
        if nothing_changed:
            self.call = self._rest
        self.context = None
