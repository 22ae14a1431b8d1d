"""The one error tree: every error names the request, the value and the limit it broke.

Each error also subclasses the built-in that code written for the documented API catches (`ValueError`, `KeyError`,
`RuntimeError`). None is an `AssertionError`: an assert is for our own mistakes, these are for a caller's.
"""


class KVCacheError(Exception):
    """Base of every error that pagewire raises on purpose. No change is half done when one is raised."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument; these messages are sentences.
        return str(self.args[0]) if self.args else ""


class InvalidParamsError(KVCacheError, ValueError):
    """A parameter, or a combination of parameters, that no cache can be built from."""


class UnknownArgumentError(InvalidParamsError, TypeError):
    """A keyword that nothing uses: what it was meant to change would silently stay as it is."""


class InvalidRequestError(KVCacheError, ValueError):
    """An argument of a call that does not fit the request or the manager it names."""


class AlreadyClaimedError(KVCacheError, ValueError):
    """The request id holds a row already."""


class NoFreeRowError(KVCacheError, ValueError):
    """Every row of the block table (one per running request) is claimed."""


class NoFreeStatePageError(NoFreeRowError):
    """Every state page is held by a running request, or written by a transfer."""


class StatePageError(KVCacheError, ValueError):
    """A state page that is not at the token where its request goes on, or that a transfer writes."""


class UnknownRequestError(KVCacheError, KeyError):
    """The request id was never claimed, or was released."""


class PoolTooSmallError(KVCacheError, RuntimeError):
    """The memory budget does not hold a single page."""


class SequenceTooLongError(KVCacheError, RuntimeError):
    """A request would grow past the longest sequence that the block table has columns for."""


class PromptTooLongError(SequenceTooLongError):
    """A request needs more pages than the whole pool has: waiting cannot help it."""


class NotReservedError(KVCacheError, RuntimeError):
    """`fetch` or `step` met a request that `maybe_reserve` has not given enough pages."""


class BlockTableMismatchError(KVCacheError, ValueError):
    """A block table from elsewhere that does not fit this manager's pages, or this request's tokens."""


class InterruptedCallError(KVCacheError, RuntimeError):
    """A call was interrupted while it changed the manager's books: nothing else runs until `recover()` mends them."""


class ManagerClosedError(KVCacheError, RuntimeError):
    """A call that only an open manager answers, after `close`."""


class InvariantError(KVCacheError, RuntimeError):
    """`check()` found the first place where the manager's books do not agree. Always a bug of ours: report it."""


class WatchError(KVCacheError, ValueError):
    """A watched process sent something that is not a look, or its address cannot be watched."""
