"""Errors of transfers between engines. Each is also the built-in error that code for the documented API catches.

If a call raises an error, it did nothing, and the engine and its other peers keep working.
"""

from __future__ import annotations

from kvcache.errors import KVCacheError


class TransferError(KVCacheError, RuntimeError):
    """Base of every error of this package."""


class InvalidEngineError(TransferError, ValueError):
    """Tensors or sizes that no engine can be built over."""


class InvalidTransferError(TransferError, ValueError):
    """Pages, replicas or a request that do not fit the two engines they name."""


class MetadataError(TransferError, ValueError):
    """Metadata that is damaged, of another version, or does not fit our engine. NIXL has seen none of it."""


class SettingsMismatchError(MetadataError):
    """The peer's UCX or NIXL settings differ from ours. Connecting all the same crashes the source process."""


class AlreadyConnectedError(TransferError, ValueError):
    """An engine of this name is connected, or its earlier connection is still draining."""


class UnknownPeerError(TransferError, KeyError, ValueError):
    """No engine of this name is connected."""


class UnknownTransferError(TransferError, KeyError, ValueError):
    """The transfer was cleaned up or given up, or this engine never started it."""


class TransferIncompleteError(TransferError, ValueError):
    """The transfer still moves bytes, so it cannot be cleaned up."""


class TransferTimeoutError(TransferError, TimeoutError):
    """The transfer did not end in time. It was given up; its local pages are in quarantine until it has ended."""


class AgentError(TransferError):
    """NIXL refused a call or failed in it.

    Attributes:
        peer_lost: NIXL says that the other process is gone, so the connection to it is dead as well.
    """

    def __init__(self, message: str, *, peer_lost: bool = False) -> None:
        super().__init__(message)
        self.peer_lost = peer_lost


class TransferFailedError(TransferError):
    """NIXL ended a transfer with an error. None of its destination pages may be used."""


class PeerFailedError(TransferFailedError, ConnectionError):
    """The peer is gone. Its transfers fail, other peers go on; `disconnect` it before its successor connects."""


class EngineClosedError(TransferError):
    """The engine was cleaned up."""


class NoFreePortError(TransferError):
    """Every port that was tried is taken."""


class InvalidLeaseError(TransferError, ValueError):
    """A lease that cannot be granted as asked, or that is booked wrongly."""


class HandshakeError(TransferError, ConnectionError):
    """A peer did not answer, refused, or told of itself what does not go with us. Only its requests fail."""


class PullFailedError(TransferError):
    """A pull came to nothing. Its destination pages hold anything and must not be read."""


class TransferParamsError(TransferError, ValueError):
    """`kv_transfer_params` that cannot be used. Names the request, the key, its value and what may be there."""
