"""vLLM's router follows real managers. Its choice for each prompt is compared with their own indexes.

`python -m tests.kvcache.events.routed [--managers 8] [--prompts 1000] [--pd] [--losses] [--seed 0]`

This is the counterpart of `followed` for vLLM's router, without tiers: requests share prefixes and evict each other's
pages, managers die and restart, and a router joins late. The servers in front of the managers only record that they
were asked. A choice is right if no other manager has more pages of the prompt. `--losses` also drops messages. With
`--pd` the router sends prompts to prefill servers, with one server for decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from kvcache import KVEvents, PagedKVCacheManager
from kvcache.replica.hashing import PrefixHasher
from tests.kvcache.build import manager_of
from tests.kvcache.events.followed import PAGE, PAGES, Followed, Worker
from tests.kvcache.events.mirror import indexes_of, settled

ROUTER = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
PATIENCE_S = 60.0
PD_PAGE = 16  # With separate prefill and decode, vllm-router 0.1.17 uses a page size of 16 for all options.
ROUND_S = 15.0  # The time that a router may take to learn all pages.


class Server(ThreadingHTTPServer):
    """An HTTP server with the endpoints of vLLM that a router uses. The text of each completion is the server's name.

    `asked` is the number of completion requests that the server has received.
    """

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.name = name
        self.asked = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        self.say({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked += 1
        choice = {"index": 0, "text": self.server.name, "finish_reason": "length"}
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
        """Prints no line for a request."""


class Router:
    """The router in front of some servers. `events` has the stream and the replay endpoint of each server."""

    def __init__(
        self,
        events: dict[str, tuple[str, str | None]],
        log: Path,
        *,
        decodes: Sequence[str] = (),
        model: str = "m",
        page_size: int = PAGE,
    ) -> None:
        port, metrics = free_ports(2)
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        self.model = model
        self.log = log
        command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        command += ["--kv-event-block-size", str(page_size), "--kv-event-model", model, "--policy", "kv_aware"]
        if not decodes:
            command += ["--worker-urls", *events]
            for url, (endpoint, replay) in events.items():
                command += ["--kv-event-source", f"{url}={endpoint}"]
                command += ["--kv-event-replay-source", f"{url}={replay}"] if replay else []
        else:
            command += ["--vllm-pd-disaggregation", *(each for url in decodes for each in ("--decode", url))]
            command += ["--prefill-policy", "kv_aware", "--decode-policy", "round_robin"]
            for url, (endpoint, _) in events.items():
                command += ["--prefill", url, "--pd-kv-events", f"{url}={endpoint}"]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def complete(self, prompt: list[int] | str, new: int = 1) -> dict[str, Any]:
        """Returns the answer to a prompt. Raises `OSError` if there is no answer."""
        body = json.dumps({"model": self.model, "prompt": prompt, "max_tokens": new}).encode()
        request = urllib.request.Request(self.url, body, {"content-type": "application/json"})  # noqa: S310 - http
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310 - as above
            return json.load(answer)

    def ask(self, tokens: list[int]) -> str:
        """Returns the server that has answered a prompt, or the reason for which no server has answered."""
        try:
            return self.complete(tokens)["choices"][0]["text"]
        except OSError as error:
            return repr(error)

    def begin(self) -> None:
        """Waits until the router serves requests."""
        deadline = time.monotonic() + PATIENCE_S
        while "Error" in (said := self.ask([1, 2, 3])):
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"{said}: {self.log.read_text()[-2000:]}"
            time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class DeviceWorker(Worker):
    """A manager without tiers, and the server in front of it."""

    def __init__(self, number: int, folder: Path, page_size: int) -> None:
        self._page_size = page_size
        super().__init__(number, folder)
        self.server = Server(str(number))

    def _made(self, endpoint: str, replay: str | None) -> PagedKVCacheManager:
        events = KVEvents(endpoint, replay, buffer_steps=20)
        pages = max(PAGES * PAGE, 24 * self._page_size) // self._page_size
        return manager_of(
            pages, page_size=self._page_size, rows=4, checks=False, max_seq_len=160, params={"kv_events": events}
        )

    def pages(self, tokens: list[int]) -> int:
        """Returns the number of pages of the prompt that this manager has cached."""
        size = self._page_size
        digests = PrefixHasher("sha256", size, None, ()).digests(np.array(tokens, np.int32), 0, len(tokens) // size)
        return len(indexes_of(self.manager, 0)[0].match(digests))

    def close(self) -> None:
        super().close()
        self.server.close()


class Routed(Followed):
    """Several managers, and the routers that follow them."""

    workers: list[DeviceWorker]  # type: ignore[assignment]

    def __init__(self, managers: int, seed: int, folder: Path, *, losses: bool, pd: bool) -> None:
        self.page_size = PD_PAGE if pd else PAGE
        super().__init__(managers, seed, folder, lambda number, place: DeviceWorker(number, place, self.page_size))
        self.rates = (0.0, 0.05, 0.5) if losses else (0.0,)
        self.decode = Server("decode") if pd else None
        self.folder = folder
        self.routers: list[Router] = []

    async def join(self) -> None:
        """Starts one more router."""
        events = {
            worker.server.url: (worker.way.address, worker.manager.kv_event_endpoints[0][1]) for worker in self.workers
        }
        log = self.folder / f"router{len(self.routers)}.log"
        decodes = [self.decode.url] if self.decode else []
        router = Router(events, log, decodes=decodes, page_size=self.page_size)
        self.routers.append(router)
        await asyncio.to_thread(router.begin)
        for worker in self.workers:
            await asyncio.to_thread(settled, worker.manager)

    async def compare(self, count: int) -> None:
        """Sends `count` prompts through each router. A router that chooses wrongly gets some time to learn, and is
        asked again.
        """
        # After 2.5 s the publisher has sent two empty batches, so every router knows which messages it has missed.
        await asyncio.sleep(2.5)
        deadline = time.monotonic() + ROUND_S
        for tokens in self.random.choices(self.prompts[1:], k=count):
            prompt = [*tokens[: len(tokens) // self.page_size * self.page_size], 1]
            want = {worker.number: worker.pages(tokens) for worker in self.workers}
            if not max(want.values()):
                self.seen["held by nobody"] += 1
                continue
            for router in self.routers:
                have = await asyncio.to_thread(self.sent, router, prompt)
                while want[have] < max(want.values()) and time.monotonic() < deadline:
                    await asyncio.sleep(0.2)
                    have = await asyncio.to_thread(self.sent, router, prompt)
                self.seen["compared"] += 1
                self.seen["one holder"] += list(want.values()).count(max(want.values())) == 1
                if want[have] < max(want.values()):
                    self.differences.append(f"router {self.routers.index(router)}: to {have}, there {want}")

    def sent(self, router: Router, prompt: list[int]) -> int:
        """Returns the manager to which a prompt is sent."""
        before = [worker.server.asked for worker in self.workers]
        router.ask(prompt)
        asked = [worker.number for worker, was in zip(self.workers, before, strict=True) if worker.server.asked > was]
        assert len(asked) == 1, f"{asked} were asked: {router.log.read_text()[-2000:]}"
        return asked[0]

    def close(self) -> None:
        for router in self.routers:
            router.close()
        super().close()
        if self.decode is not None:
            self.decode.close()


async def route(managers: int, prompts: int, rounds: int, seed: int, requests: int = 120, **options: bool) -> Routed:
    """Runs the rounds. One router exists from the beginning, and a second router joins after half of the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        routed = Routed(managers, seed, Path(folder), **options)
        try:
            await routed.join()
            for number in range(rounds):
                if number == rounds // 2:
                    await routed.join()
                await routed.round(requests, -(-prompts // rounds // len(routed.routers)))
        finally:
            routed.close()
    return routed


def main() -> None:
    """Runs the comparison, and prints what was compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--managers", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("losses", "pd"):
        parser.add_argument(f"--{name}", action="store_true")
    chosen = parser.parse_args()
    options = {name: getattr(chosen, name) for name in ("losses", "pd")}
    routed = asyncio.run(route(chosen.managers, chosen.prompts, chosen.rounds, chosen.seed, **options))
    print(f"{chosen.managers} managers: {dict(routed.seen)}, {len(routed.differences)} sent wrong")  # noqa: T201 - a script
    for difference in routed.differences[:10]:
        print(difference)  # noqa: T201 - as above
    raise SystemExit(bool(routed.differences))


if __name__ == "__main__":
    main()
