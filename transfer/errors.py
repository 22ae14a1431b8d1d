"""Errors of transfers between engines. Each one also derives from the built-in error that existing callers catch.

Unless the description of an error says otherwise, a call that raises it has changed nothing. The engine and its other
peers keep working.
"""

from __future__ import annotations

from kvcache.errors import KVCacheError
from transfer.failures import Failure, FailureKind


class TransferError(KVCacheError, RuntimeError):
    """Base of every error of this package.

    Attributes:
        kind: the kind under which the failure of a pull is recorded if this error ends the pull.
    """

    kind: FailureKind = FailureKind.OTHER

    @property
    def failure(self) -> Failure:
        """The failure to report for a pull if this error ends the pull."""
        return Failure(self.kind, str(self))


class InvalidEngineError(TransferError, ValueError):
    """No engine can be built from these tensors, sizes or settings."""


class InvalidTransferError(TransferError, ValueError):
    """The pages, tokens, replicas or times given for a transfer are invalid, or do not fit its two engines."""


class MetadataError(TransferError, ValueError):
    """A peer's metadata is damaged, has another version, or does not fit our engine. It was not passed to NIXL."""

    kind = FailureKind.HANDSHAKE


class SettingsMismatchError(MetadataError):
    """The peer's UCX or NIXL settings differ from ours. Connecting nevertheless would crash the source process."""


class AlreadyConnectedError(TransferError, ValueError):
    """An engine of this name is already connected, or copies over its previous connection are still in flight."""


class UnknownPeerError(TransferError, KeyError, ValueError):
    """No engine of this name is connected."""


class UnknownTransferError(TransferError, KeyError, ValueError):
    """The transfer was cleaned up or given up, or this engine never started it."""


class TransferIncompleteError(TransferError, ValueError):
    """The transfer still moves bytes, so it cannot be cleaned up."""


class TransferTimeoutError(TransferError, TimeoutError):
    """The transfer did not end in time and was given up. Its local pages stay in quarantine until its copies end."""

    kind = FailureKind.TIMEOUT


class AgentError(TransferError):
    """NIXL refused a call, or the call failed.

    Attributes:
        peer_lost: True if NIXL reports that the other process is gone. The connection to it is then dead as well.
    """

    def __init__(self, message: str, *, peer_lost: bool = False) -> None:
        super().__init__(message)
        self.peer_lost = peer_lost
        self.kind = FailureKind.SOURCE_GONE if peer_lost else FailureKind.TRANSPORT


class TransferFailedError(TransferError):
    """NIXL ended a transfer with an error. None of its destination pages may be used."""

    kind = FailureKind.TRANSPORT


class PeerFailedError(TransferFailedError, ConnectionError):
    """The peer is gone, so transfers with it fail. Call `disconnect` for it before its successor connects."""

    kind = FailureKind.SOURCE_GONE


class EngineClosedError(TransferError):
    """The engine was cleaned up."""

    kind = FailureKind.SHUTDOWN


class NoFreePortError(TransferError):
    """Every port that was tried is taken."""


class InvalidLeaseError(TransferError, ValueError):
    """A lease cannot be granted as requested, or the records of leases are inconsistent."""


class HandshakeError(TransferError, ConnectionError):
    """A peer did not answer, refused, or has metadata that does not match ours. Only requests for that peer fail."""

    kind = FailureKind.HANDSHAKE


class PullFailedError(TransferError):
    """A pull failed. The contents of its destination pages are undefined and must not be read."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.OTHER) -> None:
        super().__init__(message)
        self.kind = kind


class TransferParamsError(TransferError, ValueError):
    """`kv_transfer_params` cannot be used. The message names the request, the key, its value and what is allowed."""
