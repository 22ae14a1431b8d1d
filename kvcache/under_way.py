"""`UnderWay`: the one word that says which call of a manager is changing its books.

A call sets the word before its first change and clears it after its last. What interrupts it in between (Ctrl-C, a
signal handler that raises, no memory, no stack) leaves the word set, whatever its handlers did or did not do: so every
later call sees that the books may be half done, and refuses. `PagedKVCacheManager.recover` mends them, then clears it.
"""

from typing import NoReturn

from kvcache.errors import InterruptedCallError, InvariantError, KVCacheError


class UnderWay:
    """The word of one manager, which everything that changes its books shares.

    Attributes:
        call: the call that changes the books, and whose requests or objects it is about; None: the books are right.
        leaving: requests whose `with claim` block ended while the word was set: `recover` releases them.
    """

    __slots__ = ("call", "leaving")

    def __init__(self) -> None:
        self.call: tuple[str, object] | None = None
        self.leaving: list[str] = []

    def refuse(self, call: str) -> NoReturn:
        """Raise `InterruptedCallError`, as the word is set."""
        before = "a call" if self.call is None else self.call[0]
        raise InterruptedCallError(
            f"{call}: {before} was interrupted while it changed the manager's books (or it still runs): "
            "call recover() first"
        )

    def check(self, call: str) -> None:
        """Raise `InterruptedCallError` if the word is set."""
        if self.call is not None:
            self.refuse(call)

    def begin(self, call: str, about: object = None) -> None:
        """Set the word, or refuse."""
        if self.call is not None:
            self.refuse(call)
        self.call = (call, about)

    def fail(self, error: BaseException, *, refused: bool = False) -> None:
        """A marked call has raised: one of our own errors says that everything is as it was.

        `refused`: so does another error, which a caller's own context has raised before anything was changed.
        """
        if not refused:
            refused = isinstance(error, KVCacheError) and not isinstance(error, InvariantError | InterruptedCallError)
        if refused:
            self.call = None
