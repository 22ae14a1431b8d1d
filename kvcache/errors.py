"""The exceptions of pagewire. Every message names the request, the value and the limit that was broken.

Each error also subclasses the built-in error that code for the documented API catches (`ValueError`, `KeyError`,
`RuntimeError`). No error is an `AssertionError`, because asserts are for mistakes inside this package.
"""

from typing import ClassVar


class KVCacheError(Exception):
    """Base of every error that pagewire raises on purpose.

    Attributes:
        nothing_changed: True if the error is raised before any change. Only two errors set it to False.
    """

    nothing_changed: ClassVar[bool] = True

    def __str__(self) -> str:
        # KeyError would print the repr of its argument, but these messages are sentences.
        return str(self.args[0]) if self.args else ""


class InvalidParamsError(KVCacheError, ValueError):
    """A parameter or a combination of parameters is invalid: no cache can be built from it."""


class UnknownArgumentError(InvalidParamsError, TypeError):
    """A keyword is unknown. It is refused, because the option that the caller wanted would silently have no effect."""


class InvalidRequestError(KVCacheError, ValueError):
    """An argument of a call is invalid, or does not fit the request or the manager."""


class WeightsChangedError(InvalidRequestError):
    """The weights changed while the request ran, and `set_weights` was told to stop such requests."""


class AlreadyClaimedError(KVCacheError, ValueError):
    """The request id already has a row."""


class NoFreeRowError(KVCacheError, ValueError):
    """Every row of the block table (one per running request) is claimed."""


class NoFreeStatePageError(NoFreeRowError):
    """Every state page is held by a running request, or written by a transfer."""


class StatePageError(KVCacheError, ValueError):
    """A recurrent state cannot be used: it includes the wrong tokens, is leased or drafted, or is being written."""


class UnknownRequestError(KVCacheError, KeyError):
    """The request id was never claimed, or was released."""


class PoolTooSmallError(KVCacheError, RuntimeError):
    """The memory budget, a device or the host is too small for the cache."""


class SequenceTooLongError(KVCacheError, RuntimeError):
    """A request would become longer than `max_seq_len`, for which the block table has columns."""


class PromptTooLongError(SequenceTooLongError):
    """A request needs more pages than the whole pool has, so it can never run here."""


class NotReservedError(KVCacheError, RuntimeError):
    """`fetch` or `step` was given a request for which `maybe_reserve` has not reserved enough pages."""


class BlockTableMismatchError(KVCacheError, ValueError):
    """A block table of another manager does not fit this manager's pages or the request's tokens."""


class InterruptedCallError(KVCacheError, RuntimeError):
    """An earlier call was interrupted while it changed the manager's state.

    Other calls fail until `recover()` has built the state anew.
    """

    nothing_changed = False


class ManagerClosedError(KVCacheError, RuntimeError):
    """The manager was closed, and this call needs an open one."""


class InvariantError(KVCacheError, RuntimeError):
    """`check()` found a contradiction in the manager's state.

    This is always a bug in this package: please report it.
    """

    nothing_changed = False


class MovedMemoryError(KVCacheError, RuntimeError):
    """Memory whose address is registered or known elsewhere has moved, or torch was asked to move it.

    If it has moved, the manager or the transfer engine that owns the address cannot be used any more.
    """


class WatchError(KVCacheError, ValueError):
    """A watched process sent something that is not a valid snapshot, or its address cannot be watched."""
