"""Listens to KV events, as a router does to learn which server has the pages of a prompt.

The manager publishes messages in vLLM's format over ZeroMQ, so this listener works with both. A message has three
frames: the topic, a sequence number and a batch in msgpack. The listener keeps the set of cached pages, and notices a
gap in the sequence numbers. In production, it runs in another process and needs only the endpoint.

    python examples/kv_events.py
"""

from typing import Any

import msgspec
import torch
import zmq

from pagewire import KVCacheParams, KVEvents, PagedKVCacheManager, TextContext

PAGE_SIZE = 16


class Listener:
    """Follows one replica. `cached` maps the hash of each page cached on the device to the tokens of that page."""

    def __init__(self, endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context[Any].instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self.socket.connect(endpoint)
        self.socket.subscribe(b"")
        self.cached: dict[int, list[int]] = {}
        self.sequence: int | None = None

    def take_one(self) -> list[str]:
        """Waits for a message and applies it. Returns the kinds of its events."""
        if not self.socket.poll(10_000):
            raise SystemExit("no message for 10 seconds: the manager sends at least one a second")
        _topic, number, payload = self.socket.recv_multipart()
        sequence = int.from_bytes(number, "big")
        if self.sequence is not None and sequence != self.sequence + 1:
            print(f"{sequence - self.sequence - 1} messages are lost: ask the replay endpoint for them")
        self.sequence = sequence
        _time, events, *_rank = msgspec.msgpack.decode(payload)
        for event in events:
            self.apply(event)
        return [event["type"] for event in events]

    def apply(self, event: dict[str, Any]) -> None:
        """Applies one event to the set of cached pages."""
        match event["type"]:
            case "BlockStored" if event["medium"] == "GPU":  # pages of the pool, even if the pool is in host memory
                size, tokens = event["block_size"], event["token_ids"]
                for at, name in enumerate(event["block_hashes"]):
                    self.cached[name] = tokens[at * size : (at + 1) * size]
            case "BlockRemoved" if event["medium"] == "GPU":
                for name in event["block_hashes"]:
                    self.cached.pop(name, None)
            case "AllBlocksCleared":
                self.cached.clear()
            case _:
                pass  # ignore pages of lower tiers

    def until(self, pages: int) -> None:
        """Takes messages until `pages` pages are cached."""
        while len(self.cached) != pages:
            if kinds := self.take_one():
                print(f"{', '.join(sorted(set(kinds)))}: {len(self.cached)} pages are cached")


def serve(manager: PagedKVCacheManager, prompt: list[int]) -> None:
    """Serves one prompt. A model would run after `fetch`."""
    request = TextContext(prompt, max_length=256)
    with manager.claim(request):
        manager.maybe_reserve(request)
        manager.fetch([request])
        request.update(1)
        manager.step([request])


def main() -> None:
    """Follows the events of a pool of eight pages, some of which are evicted."""
    params = KVCacheParams(
        torch.float32,
        2,
        16,
        enable_prefix_caching=True,
        page_size=PAGE_SIZE,
        kv_events=KVEvents("tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"),  # port 0: any free port
    )
    manager = PagedKVCacheManager(
        params, 4, 128, num_layers=1, devices=["cpu"], available_cache_memory=8 * PAGE_SIZE * params.bytes_per_token(1)
    )
    ((endpoint, _replay),) = manager.kv_event_endpoints
    listener = Listener(endpoint)
    listener.take_one()  # the first message shows that the subscription is active, so no later message is missed

    serve(manager, list(range(64)))
    listener.until(4)
    serve(manager, [*range(32), *range(500, 532)])  # this prompt shares its first two pages with the first prompt
    listener.until(6)
    serve(manager, list(range(900, 996)))  # this prompt needs six pages: two are free, and four are evicted
    listener.until(8)
    print(f"the first page of the last prompt: {list(range(900, 916)) in listener.cached.values()}")
    manager.close()
    listener.until(0)
    listener.socket.close()


if __name__ == "__main__":
    main()
