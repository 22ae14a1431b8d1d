"""`KVEvents`: the addresses and limits of the events with which a manager reports its cached pages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcache.arguments import shown, whole
from kvcache.errors import InvalidParamsError

_TRANSPORTS = ("tcp://", "ipc://", "inproc://")


@dataclass(frozen=True, slots=True)
class KVEvents:
    """KV events in the wire format of vLLM 0.33: `KVCacheParams(..., kv_events=KVEvents())`.

    Each replica is a data-parallel rank with its own stream. Its port is that of the endpoint plus the rank (0: any
    free port); an address of another kind gets `_dp<rank>` appended. `PagedKVCacheManager.kv_event_endpoints` has the
    bound addresses.

    Events contain the tokens of prompts in clear, and a replay reveals everything that is cached. So the endpoints are
    of this host by default. Use `secure` for others.

    Raises `InvalidParamsError` (a ValueError) for a value that cannot work.
    """

    endpoint: str = "tcp://127.0.0.1:5557"  # bound by a PUB socket
    replay_endpoint: str | None = None  # bound by a ROUTER socket, for subscribers that missed a batch; None: no replay
    topic: str = ""  # the first frame of every message; some routers want `kv@<pod>@<model>`
    buffer_steps: int = 10_000  # batches kept for replays; a request for older ones is answered with the whole state
    hwm: int = 1_000  # batches that may wait for a slow subscriber; it misses later ones, and sees the gap
    # Prepares each socket before it is bound: `Keyring.secure_server` of `transfer` turns CURVE on.
    secure: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            address: object = getattr(self, name)
            if address is None and name == "replay_endpoint":
                continue
            if not isinstance(address, str) or "\0" in address or not address.startswith(_TRANSPORTS):
                raise InvalidParamsError(
                    f"kv_events: {name} is {shown(address)}: an address of {', '.join(_TRANSPORTS)} is needed"
                )
            if address.startswith("tcp://") and not address.rpartition(":")[2].isdecimal():
                raise InvalidParamsError(
                    f"kv_events: {name} is {shown(address)}: a port is needed (0 picks a free one)"
                )
        if not isinstance(self.topic, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers need no types
            raise InvalidParamsError(f"kv_events: topic is {shown(self.topic)}: text is needed")
        whole("kv_events: buffer_steps", self.buffer_steps, 1)
        whole("kv_events: hwm", self.hwm, 1)

    def addresses(self, rank: int) -> tuple[str, str | None]:
        """The addresses of a rank's events and of its replays."""
        return _of_rank(self.endpoint, rank), self.replay_endpoint and _of_rank(self.replay_endpoint, rank)


def _of_rank(address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    if not address.startswith("tcp://"):
        return f"{address}_dp{rank}" if rank else address
    return f"{host}:{int(port) + rank}" if int(port) else address
