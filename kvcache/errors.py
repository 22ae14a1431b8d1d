"""The one error tree: every error names the request, the value and the limit that it broke.

Each error also subclasses the built-in that code written for the documented API catches (`ValueError`, `KeyError`,
`RuntimeError`). None is an `AssertionError`: an assert is for our own mistakes, these errors are for a caller's.
"""

from typing import ClassVar


class KVCacheError(Exception):
    """Base of every error that pagewire raises on purpose.

    Attributes:
        nothing_changed: whether no change is half done when it is raised. Only two errors do not promise that.
    """

    nothing_changed: ClassVar[bool] = True

    def __str__(self) -> str:
        # KeyError would print the repr of its argument; these messages are sentences.
        return str(self.args[0]) if self.args else ""


class InvalidParamsError(KVCacheError, ValueError):
    """A parameter, or a combination of parameters, that no cache can be built from."""


class UnknownArgumentError(InvalidParamsError, TypeError):
    """A keyword that nothing uses. Accepting it would silently ignore what the caller wanted to change."""


class InvalidRequestError(KVCacheError, ValueError):
    """An argument of a call that does not fit the request or the manager that it names."""


class AlreadyClaimedError(KVCacheError, ValueError):
    """The request id already has a row."""


class NoFreeRowError(KVCacheError, ValueError):
    """Every row of the block table (one per running request) is claimed."""


class NoFreeStatePageError(NoFreeRowError):
    """Every state page is held by a running request, or written by a transfer."""


class StatePageError(KVCacheError, ValueError):
    """A recurrent state cannot be used: it covers other tokens, is leased or drafted, or a transfer writes it."""


class UnknownRequestError(KVCacheError, KeyError):
    """The request id was never claimed, or was released."""


class PoolTooSmallError(KVCacheError, RuntimeError):
    """The memory budget, a device or the host is too small for what the cache needs at least."""


class SequenceTooLongError(KVCacheError, RuntimeError):
    """A request would grow past the longest sequence that the block table has columns for."""


class PromptTooLongError(SequenceTooLongError):
    """A request needs more pages than the whole pool has, so waiting cannot help it."""


class NotReservedError(KVCacheError, RuntimeError):
    """`fetch` or `step` met a request that `maybe_reserve` has not given enough pages."""


class BlockTableMismatchError(KVCacheError, ValueError):
    """A block table from another manager that does not fit this manager's pages or the request's tokens."""


class InterruptedCallError(KVCacheError, RuntimeError):
    """A call was interrupted while it changed the manager's state: other calls fail until `recover()` mends it."""

    nothing_changed = False


class ManagerClosedError(KVCacheError, RuntimeError):
    """The manager was closed, and only an open manager can answer this call."""


class InvariantError(KVCacheError, RuntimeError):
    """`check()` found an inconsistency in the manager's state. It is always a bug of ours: please report it."""

    nothing_changed = False


class WatchError(KVCacheError, ValueError):
    """A watched process sent something that is not a look, or its address cannot be watched."""
