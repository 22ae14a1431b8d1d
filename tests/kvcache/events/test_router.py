"""vLLM's router sends a prompt to whoever holds its pages, as our streams tell it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import KVEvents, PagedKVCacheManager, TextContext
from kvcache.events.log import HOST
from tests.kvcache.build import manager_of
from tests.kvcache.events.mirror import indexes_of, settled

ROUTER = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
ANY = "tcp://127.0.0.1:0"
PATIENCE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ROUTER is None, reason="needs vllm-router")]


class Server(ThreadingHTTPServer):
    """As much of vLLM's HTTP as a router asks of a server: it says who it is."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.name = name
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.say({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        choice = {"index": 0, "text": self.server.name, "finish_reason": "length"}  # type: ignore[attr-defined]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.say(
            {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        )

    def say(self, body: dict[str, Any]) -> None:
        said = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Routed:
    """Two managers, a server for each, and the router in front of them."""

    def __init__(self, log: Path) -> None:
        self.managers = [manager_of(64, params={"kv_events": KVEvents(ANY, ANY)}, host_slots=64) for _ in range(2)]
        self.servers = [Server(f"w{number}") for number in range(2)]
        port, metrics = free_ports(2)
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        command += ["--policy", "kv_aware", "--kv-event-block-size", "4", "--kv-event-model", "m"]
        command += ["--worker-urls", *(server.url for server in self.servers)]
        for server, manager in zip(self.servers, self.managers, strict=True):
            endpoint, replay = manager.kv_event_endpoints[0]
            command += ["--kv-event-source", f"{server.url}={endpoint}"]
            command += ["--kv-event-replay-source", f"{server.url}={replay}"]
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def ask(self, tokens: list[int]) -> str:
        """Who answers a prompt; why nobody does."""
        body = json.dumps({"model": "m", "prompt": tokens, "max_tokens": 1}).encode()
        request = urllib.request.Request(self.url, body, {"content-type": "application/json"})  # noqa: S310 - http
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310 - as above
                return json.load(answer)["choices"][0]["text"]
        except OSError as error:
            return repr(error)

    def until(self, tokens: list[int], who: str) -> None:
        """Wait until prompts that begin so go there."""
        deadline = time.monotonic() + PATIENCE_S
        while any(self.ask([*tokens, 7, nth]) != who for nth in range(3)):
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"{self.ask(tokens)}: {self.log.read_text()[-2000:]}"
            time.sleep(0.1)

    def run(self, number: int, tokens: list[int]) -> None:
        manager: PagedKVCacheManager = self.managers[number]
        context = TextContext(tokens, 256)
        with manager.claim(context):
            assert manager.maybe_reserve(context)
            manager.fetch([context])
            context.update(1)
            manager.step([context])
        settled(manager)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for server in self.servers:
            server.shutdown()
            server.server_close()
        for manager in self.managers:
            manager.close()


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Routed]:
    made = Routed(tmp_path / "router.log")
    yield made
    made.close()


def held(manager: PagedKVCacheManager, tier: int) -> set[bytes]:
    """The digests that can be found in a tier: 0 is the pool of the first replica."""
    index = indexes_of(manager, 0)[tier]
    return {one.tobytes() for one in index.digests_of(np.flatnonzero(index.published).astype(np.int32))}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_prompts_go_to_the_holder_also_when_it_has_them_in_its_host_tier(routed: Routed) -> None:
    prompts = [[*range(1000, 1064)], [*range(2000, 2064)]]
    for number, tokens in enumerate(prompts):
        routed.run(number, tokens)
    pages = held(routed.managers[0], 0)
    assert len(pages) == 16
    for number, tokens in enumerate(prompts):
        routed.until(tokens, f"w{number}")
        assert Counter(routed.ask([*tokens, 9, nth]) for nth in range(10)) == {f"w{number}": 10}
    # The first prompt leaves the pool of the first manager, and stays in its host tier.
    routed.managers[0].flush_tiers()
    for start in range(3000, 3400, 100):
        routed.run(0, [*range(start, start + 64)])
    assert not pages & held(routed.managers[0], 0), "evicted"
    assert pages <= held(routed.managers[0], HOST)
    routed.until(prompts[0], "w0")
    assert Counter(routed.ask([*prompts[0], 11, nth]) for nth in range(10)) == {"w0": 10}
