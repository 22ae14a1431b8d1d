"""The metadata that engines exchange: structs, their encoding, and every check that does not need a second engine.

A single wrong bit in NIXL's own bytes can crash the process that loads them. Therefore an engine's metadata carries a
digest, and `check_metadata` checks everything before NIXL sees any of it.
"""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec
from msgspec import Meta

from transfer.errors import InvalidTransferError, MetadataError
from transfer.memory import MemoryType
from transfer.plan.boxes import ADDRESS_LIMIT, MAX_PAGES
from transfer.wire.messages import digest_of

WIRE_VERSION = 2
"""Version of the structs below. It increases with each change that an older reader would misread."""

_KEYED_BYTES = 32

_Text = Annotated[str, Meta(min_length=1)]


class _Sent(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="type"):
    """Base of the structs that are sent between processes."""


class TensorAgentMetadata(_Sent, frozen=True, kw_only=True, tag="agent_metadata"):
    """Describes one tensor of an engine to a peer. Safe to send between processes.

    Attributes:
        agent_name: name of the NIXL agent. It includes the incarnation, so it is never used twice.
        metadata: NIXL's own description of the agent, opaque.
        base_addr: address of the first byte of page 0 in the owner's address space.
        device_id: index of the device; 0 for host memory.
    """

    agent_name: _Text
    metadata: Annotated[bytes, Meta(min_length=1)]
    base_addr: Annotated[int, Meta(gt=0)]
    device_id: Annotated[int, Meta(ge=0)]


class KVTransferEngineMetadata(_Sent, frozen=True, kw_only=True, tag="engine_metadata"):
    """Describes one engine, with all its replicas, to a peer. Safe to send between threads and processes.

    Attributes:
        name: name of the engine. A restarted engine may have the name of its predecessor.
        total_num_pages: pages of each tensor.
        bytes_per_page: bytes per page of one tensor.
        memory_type: kind of memory that all tensors are in.
        hostname: name of the host that the engine runs on.
        agents_meta: metadata of each tensor and its agent, `[replica][tp_shard]`.
        incarnation: a random name, new for each engine object.
        settings: the effective UCX and NIXL settings on which two processes must agree, and the version of NIXL.
        version: the sender's `WIRE_VERSION`. 0 means that no engine created the metadata, which is then refused.
        digest: digest over all other fields. `sealed` fills it in.
    """

    name: _Text
    total_num_pages: Annotated[int, Meta(ge=1, le=MAX_PAGES)]
    bytes_per_page: Annotated[int, Meta(ge=1)]
    memory_type: MemoryType
    hostname: str
    agents_meta: list[list[TensorAgentMetadata]]
    incarnation: str = ""
    settings: dict[str, str] = {}
    version: int = 0
    digest: bytes = b""


class TransferReqData(_Sent, frozen=True, kw_only=True, tag="transfer_request"):
    """The request of one transfer, by which both engines identify the transfer. Safe to send between processes.

    Attributes:
        dst_name: engine whose pages are written.
        src_name: engine whose pages are read.
        transfer_name: unique, 32 hexadecimal digits. It is also the text of the notification.
        transfer_ids: one number for each shard of the replica. Only the engine that started the transfer uses them.
        src_idxs: pages of the source, one for each of `dst_idxs`. The same pages in every shard.
        dst_idxs: pages of the destination.
        src_replica_idx: replica of the source.
        dst_replica_idx: replica of the destination.
        is_read: True if the destination started the transfer with a READ, False if the source started it with a WRITE.
        version: the sender's `WIRE_VERSION`; 0 if no engine created the request.
    """

    dst_name: str
    src_name: str
    transfer_name: str
    transfer_ids: list[int]
    src_idxs: list[int]
    dst_idxs: list[int]
    src_replica_idx: int
    dst_replica_idx: int
    is_read: bool = False
    version: int = 0

    @property
    def initiator(self) -> str:
        """Name of the engine that started the transfer."""
        return self.dst_name if self.is_read else self.src_name

    def side_of(self, engine: str) -> tuple[int, list[int]]:
        """Returns the replica index and the page ids on the side of `engine`, one of the transfer's two engines."""
        if engine == self.dst_name:
            return self.dst_replica_idx, self.dst_idxs
        return self.src_replica_idx, self.src_idxs


def sealed(metadata: KVTransferEngineMetadata) -> KVTransferEngineMetadata:
    """Returns `metadata` with its digest filled in."""
    return msgspec.structs.replace(metadata, digest=digest_of(metadata))


def encode(struct: KVTransferEngineMetadata | TransferReqData, key: bytes = b"") -> bytes:
    """Returns the msgpack bytes of `struct`. With a key, a digest of 32 bytes under that key comes first."""
    data = msgspec.msgpack.encode(struct)
    return hmac.digest(key, data, "sha256") + data if key else data


def decode_metadata(data: bytes, key: bytes = b"") -> KVTransferEngineMetadata:
    """Decodes and fully checks the engine metadata in `data`, the result of `encode`.

    Without a key, the checks show that the bytes are undamaged, but not who made them. `KVTransferEngine.connect`
    passes part of them to NIXL, and a single wrong byte there can crash NIXL.

    Raises:
        MetadataError: the bytes are truncated or changed, were encoded with another key, are of another kind or
            version, or hold an invalid value.
    """
    if key:
        digest, data = data[:_KEYED_BYTES], data[_KEYED_BYTES:]
        if not hmac.compare_digest(digest, hmac.digest(key, data, "sha256")):
            raise MetadataError(f"{len(data)} bytes are not engine metadata encoded with this key")
    try:
        metadata = msgspec.msgpack.decode(data, type=KVTransferEngineMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MetadataError(f"{len(data)} bytes are not engine metadata: {error}") from error
    _check(metadata)
    return metadata


def decode_request(data: bytes) -> TransferReqData:
    """Decodes the transfer request in `data`, the result of `encode`.

    Raises:
        InvalidTransferError: the bytes are truncated or changed, or of another kind or version.
    """
    try:
        request = msgspec.msgpack.decode(data, type=TransferReqData)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidTransferError(f"{len(data)} bytes are not a transfer request: {error}") from error
    if request.version not in (0, WIRE_VERSION):
        raise InvalidTransferError(
            f"transfer {request.transfer_name!r} has wire version {request.version}; this engine speaks {WIRE_VERSION}"
        )
    return request


def check_metadata(metadata: KVTransferEngineMetadata) -> KVTransferEngineMetadata:
    """Checks a peer's metadata as far as that is possible without NIXL, and returns a copy."""
    if not isinstance(metadata, KVTransferEngineMetadata):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
        raise MetadataError(f"expected KVTransferEngineMetadata, got {type(metadata).__name__}")
    try:
        data = msgspec.msgpack.encode(metadata)
    except (TypeError, ValueError, OverflowError) as error:
        raise MetadataError(f"metadata of engine {metadata.name!r} cannot be encoded: {error}") from error
    # Encoding and decoding checks the type of every field, and copies lists that the caller may change later.
    return decode_metadata(data)


def _check(metadata: KVTransferEngineMetadata) -> None:
    engine = f"metadata of engine {metadata.name!r}"
    if metadata.version != WIRE_VERSION:
        raise MetadataError(f"{engine} has wire version {metadata.version}; this engine speaks {WIRE_VERSION}")
    if metadata.digest != digest_of(metadata):
        raise MetadataError(f"{engine} was changed in transit: its digest does not match")
    if not metadata.incarnation:
        raise MetadataError(f"{engine} lacks an incarnation")
    replicas = metadata.agents_meta
    if not replicas or not replicas[0] or any(len(replica) != len(replicas[0]) for replica in replicas):
        raise MetadataError(
            f"{engine} has shard counts {[len(r) for r in replicas]}: each replica needs the same number, at least 1"
        )
    agents = [agent for replica in replicas for agent in replica]
    if len({agent.agent_name for agent in agents}) != len(agents):
        raise MetadataError(f"{engine} uses one agent name twice")
    region_bytes = metadata.total_num_pages * metadata.bytes_per_page
    for agent in agents:
        if agent.base_addr + region_bytes > ADDRESS_LIMIT:
            raise MetadataError(
                f"{engine}, agent {agent.agent_name!r}, has {region_bytes} bytes at {agent.base_addr:#x}, outside of "
                "any address space"
            )
