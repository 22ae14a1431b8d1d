"""The environment variables of UCX and NIXL that agents need in order to connect safely.

UCX reads the environment once, when the first agent is created. These settings choose CMA between processes of one
host: data moves by `process_vm_readv`, while notifications and the detection of a dead peer use shared memory. CMA has
a tenth of the latency of TCP and needs no listening socket.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from functools import cache

import msgspec

from transfer.errors import AgentError
from transfer.memory import MemoryType

_DEFAULTS = {
    "UCX_DEBUG_SIGNO": "0",  # by default UCX takes over SIGHUP for its debugger, even in a program that handles it
    # with the default of 20 s, a message to a dead peer would be accepted silently for that long
    "UCX_KEEPALIVE_INTERVAL": "1s",
    # By default TCP gives up a connection only after many minutes, and retries less and less often: after a minute
    # without a link, the first READ waited for another minute.
    "UCX_TCP_USER_TIMEOUT": "15s",
    "UCX_TCP_SYN_CNT": "3",  # after the first attempt to connect, three more; together they take 15 s
    "UCX_LOG_LEVEL": "error",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "NIXL_LOG_LEVEL": "ERROR",  # NIXL writes INFO lines to stdout
}
# The largest message, in bytes, that answers a READ over TCP. With the default of 8 KiB, system calls would cost a
# quarter of the rate or more. A message that is longer than the receiver's buffer is written beyond that buffer, so
# both sides must agree.
_TCP_SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
# No data moves by cuda_copy. But on a host with a GPU, NIXL refuses a list of transports without it, even for pages in
# host memory.
_HOST_TRANSPORTS = "posix,sysv,cma,cuda_copy"
_SHARED_MEMORY = ("posix", "sysv")
# Without NVLink, UCX would use cuda_ipc only for WRITEs, and emulate READs over TCP: on one H200, 2,048 pages of 128
# KiB took 468 ms instead of 78 ms.
_OF_GPUS = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
_THIS_HOST_ONLY = {"posix", "sysv", "cma", "self", "sm", "shm", "mm", "xpmem", "knem", "cuda_ipc", "cuda_copy"}
_TRUE = {"y", "yes", "1", "on", "true"}


def effective_settings(
    memory_type: MemoryType = MemoryType.DRAM, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the environment variables for agents: variables that are already set, and our defaults for all others.

    A variable that is set is never changed. Transports are chosen only for host memory; a GPU needs the transports that
    UCX finds itself. By default, shared-memory transports report a dead peer. `environ` defaults to the process's
    environment.
    """
    environ = os.environ if environ is None else environ
    settings = {key: environ.get(key, value) for key, value in _DEFAULTS.items()}
    # UCX refuses to send more than it can receive. If one of the two variables is set, neither gets our default.
    settings |= {} if _TCP_SEGMENTS.keys() & environ.keys() else _TCP_SEGMENTS
    transports = environ.get("UCX_TLS", _HOST_TRANSPORTS if memory_type is MemoryType.DRAM else None)
    if transports is not None:
        settings["UCX_TLS"] = transports
    if memory_type is MemoryType.VRAM:
        settings |= {key: environ.get(key, value) for key, value in _OF_GPUS.items()}
    chosen = set(_SHARED_MEMORY) if transports is None else set(_SHARED_MEMORY) & _transports(transports)
    for transport in chosen:
        variable = f"UCX_{transport.upper()}_ERROR_HANDLING"
        settings[variable] = environ.get(variable, "y")
    return settings


def agreed_settings(
    memory_type: MemoryType = MemoryType.DRAM, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the settings that two processes must share, normalised: transports, protocols and NIXL's version.

    If these settings differ, the first contact between the two processes crashes one of them or never ends. Between
    hosts, the TCP segment sizes must be equal, too: a READ of segments that are longer than the reader's buffer
    corrupts the reader's memory.
    """
    environ = os.environ if environ is None else environ
    effective = dict(environ) | effective_settings(memory_type, environ)
    agreed = {"nixl": _nixl_version(), "UCX_TLS": ",".join(sorted(_transports(effective.get("UCX_TLS", "all"))))}
    of_tcp = _TCP_SEGMENTS if reaches_other_hosts(effective) else ()
    for key in ("UCX_PROTO_ENABLE", "UCX_ADDRESS_VERSION", *of_tcp):
        if key in effective:
            agreed[key] = effective[key].lower()
    for key, value in effective.items():
        if key.startswith("UCX_") and key.endswith("_ERROR_HANDLING") and value.lower() in _TRUE:
            agreed[key] = "y"
    return dict(sorted(agreed.items()))


def settings_fingerprint(memory_type: MemoryType = MemoryType.DRAM, environ: Mapping[str, str] | None = None) -> str:
    """Returns a digest of `agreed_settings`. Two processes may connect only if their digests are equal."""
    data = msgspec.msgpack.encode(agreed_settings(memory_type, environ))
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def reaches_other_hosts(settings: Mapping[str, str]) -> bool:
    """Whether a transport in `settings` reaches other hosts."""
    return not _transports(settings.get("UCX_TLS", "all")) <= _THIS_HOST_ONLY


def _transports(value: str) -> set[str]:
    return {transport.strip().lower() for transport in value.split(",") if transport.strip()}


@cache
def _nixl_version() -> str:
    try:
        return importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError as error:
        raise AgentError("a transfer needs NIXL, which is not installed: pip install 'pagewire[transfer]'") from error
