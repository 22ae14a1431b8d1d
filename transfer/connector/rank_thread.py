"""A rank over registered memory, and the thread that runs its transfers: what a connector worker drives."""

from __future__ import annotations

import torch

from transfer.connector.cache_layout import CacheMemory
from transfer.connector.config import WorkerConfig
from transfer.errors import InvalidEngineError
from transfer.memory import MemoryType
from transfer.pull.rank import RankIdentity, RankTransfer
from transfer.pull.replica import ReplicaTransfer
from transfer.pull.thread import TransferThread
from transfer.wire.allowed_peers import AllowedPeers
from transfer.wire.handshake import HandshakeClient
from transfer.wire.keys import Keyring

_MEMORY_OF = {"cpu": MemoryType.DRAM, "cuda": MemoryType.VRAM}


def needs_host_buffer(config: WorkerConfig, device: torch.device) -> bool:
    """Whether pages on a device have to go through host memory.

    Raises:
        InvalidEngineError: they have to, and the config does not say that they may.
    """
    registrable = device.type in config.registrable and device.type in _MEMORY_OF
    if not registrable and config.kv_buffer_device != "cpu":
        raise InvalidEngineError(
            f"engine {config.engine_id!r} rank {config.rank}: memory of {device.type!r} cannot be registered, that of "
            f"{config.registrable} can; kv_buffer_device is {config.kv_buffer_device!r}, 'cpu' is needed"
        )
    return not registrable or (config.kv_buffer_device == "cpu" and device.type != "cpu")


def make_rank(config: WorkerConfig, memory: CacheMemory) -> RankTransfer:
    """Registers memory with NIXL.

    Raises:
        AgentError: NIXL cannot be used, or refuses the memory.
    """
    secret = config.shared_secret()
    identity = RankIdentity(
        engine_id=config.engine_id,
        incarnation=config.incarnation,
        rank=config.rank,
        ranks=config.ranks,
        compatibility=config.fingerprint(),
        key=config.key if secret is None else secret.metadata_key,
    )
    return RankTransfer(
        identity,
        memory.layout,
        memory.bases,
        _MEMORY_OF[memory.device.type],
        memory.device.index or 0,
        checks=config.page_checks,
        verify=config.verify,
    )


def start_thread(
    config: WorkerConfig, rank: RankTransfer, device: torch.device, keyring: Keyring | None
) -> TransferThread:
    """Starts the thread that owns a rank from now on."""
    timing = config.timing
    replica = ReplicaTransfer(
        [rank],
        HandshakeClient(None if keyring is None else keyring.secure_client, allowed=AllowedPeers(config.allowed_peers)),
        handshake_timeout_s=timing.handshake,
        heartbeat_s=timing.heartbeat,
        dead_after_s=timing.dead_after,
        idle_s=timing.idle,
    )
    thread = TransferThread(replica)
    if device.type == "cuda":  # without a context in the thread that posts, UCX does without the GPU's own paths
        thread.call(lambda _: torch.cuda.set_device(device))
    return thread
