"""The configuration of a small process of a service. Each test starts the process with some changes."""

from typing import Any

from scheduler_adapters.service.server import ServerConfig

_SMALL: dict[str, Any] = {
    "model": None,
    "seed": 0,
    "page_size": 16,
    "cache_bytes": 8 << 20,
    "max_seq_len": 256,
    "max_requests": 4,
    "token_budget": 64,
    "tp": 1,
    "device": "cpu",
}


def server_config(**changes: Any) -> ServerConfig:
    return ServerConfig(**{**_SMALL, **changes})
