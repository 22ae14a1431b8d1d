"""The start of an engine: its keys, a rank over each shard, and the thread that runs their transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from transfer.errors import InvalidEngineError
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.plan.boxes import ShardLayout
from transfer.pull.rank import RankIdentity, RankTransfer
from transfer.pull.replica import ReplicaTransfer
from transfer.pull.thread import TransferThread
from transfer.wire.keys import Keyring
from transfer.wire.secret import read_secret


class ShardMemory(NamedTuple):
    """What a rank registers: the layout of its shard, the address of each region of it, and the device of them all."""

    layout: ShardLayout
    bases: Sequence[int]
    device: torch.device


def fleet_keys(
    where: str, secret: str, key: bytes = b"", keyring: Keyring | None = None
) -> tuple[bytes, Keyring | None]:
    """Returns the key of metadata and the keys of sockets: those of the fleet's secret, or else those given."""
    shared = read_secret(secret)
    if shared is None:
        return key, keyring
    if key or keyring is not None:
        raise InvalidEngineError(f"{where}: a {'key' if key else 'keyring'} beside a shared secret; one is needed")
    return shared.metadata_key, shared.keyring


def make_rank(
    identity: RankIdentity,
    memory: ShardMemory,
    *,
    checks: bool = False,
    verify: float = 0.0,
    stuck_s: float = 30.0,
    agent: Callable[[str, MemoryType], Agent] = Agent,
) -> RankTransfer:
    """Registers the memory of a rank with NIXL. Options and errors are those of `RankTransfer`."""
    kind = MemoryType.VRAM if memory.device.type == "cuda" else MemoryType.DRAM
    index = memory.device.index or 0
    return RankTransfer(
        identity, memory.layout, memory.bases, kind, index, checks=checks, verify=verify, stuck_s=stuck_s, agent=agent
    )


def start_thread(replica: ReplicaTransfer, ring: Callable[[], None] = lambda: None) -> TransferThread:
    """Starts the thread that owns a replica from now on; on a GPU one that has it as its device."""
    thread = TransferThread(replica, ring)
    rank = replica.ranks[0]
    if rank.memory_type is MemoryType.VRAM:  # without a context in the thread, UCX does without the GPU's own paths
        thread.call(lambda _: torch.cuda.set_device(rank.device))
    return thread
