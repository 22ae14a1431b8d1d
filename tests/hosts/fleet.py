"""`pagewire serve` on three hosts: a front, a prefill and a decode process, and prompts for them."""

import itertools
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.hosts.network import IPV4, PEERS, Family, Host, network
from tests.hosts.pair import SECRET
from tests.scheduler_adapters.front.served import COMMON, Served, encoded
from tests.scheduler_adapters.serving import own_tokens

HEAD = "What a page holds, who may write to it, and when it may be used again. " * 4
NEW = 64
_numbers = itertools.count()
KEYS = ("--secret", "env:PAGEWIRE_TEST_SECRET", "--allowed-peers", ",".join(PEERS))


class OnHosts(Served):
    """A fleet whose processes run on several hosts. The client runs on the host of the front."""

    def __init__(self, folder: Path, front: Host) -> None:
        super().__init__(folder)
        self.front = front

    def start_on(self, host: Host, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "pagewire", "serve", *arguments, "--host", host.address, *KEYS]
        if (before := self._logs.pop(name, None)) is not None:
            before.close()
        self._logs[name] = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = host.start(command, SECRET, self._logs[name])  # type: ignore[assignment]

    def join_on(self, host: Host, role: str, name: str) -> None:
        self.start_on(host, name, role, "--name", name, "--address-file", str(self.addresses), *COMMON)

    def get(self, path: str) -> Any:
        with self.front.inside():
            return super().get(path)

    def complete(self, prompt: str) -> tuple[int, Any]:
        """Returns the HTTP status and the answer to one prompt."""
        asked = {"model": "pagewire", "prompt": prompt, "max_tokens": NEW, "return_token_ids": True}
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with self.front.inside():
            try:
                with urllib.request.urlopen(request, timeout=200) as answer:  # noqa: S310
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

    def close(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                process.kill()
            process.wait()
            self._logs[name].close()


@dataclass
class Answered:
    """An answer to a prompt, and the time of its arrival."""

    prompt: str
    status: int
    answer: Any
    at: float

    def assert_right(self, model: Any) -> None:
        """Asserts that the tokens are right, or that the answer gives a reason for missing tokens."""
        if self.status != 200:
            assert self.status in (500, 502, 503, 504), self.answer
            assert self.answer["error"]["message"], self.answer
            return
        tokens = self.answer["choices"][0]["token_ids"]
        assert tokens == own_tokens(model, encoded(self.prompt), NEW)


class Fleet(NamedTuple):
    served: OnHosts
    front: Host
    prefill: Host
    decode: Host

    def asked(self, prompts: Sequence[str]) -> list["Future[Answered]"]:
        """Sends each prompt from a thread of its own."""
        pool = ThreadPoolExecutor(len(prompts))
        futures = [pool.submit(self.answered, prompt) for prompt in prompts]
        pool.shutdown(wait=False)
        return futures

    def answered(self, prompt: str) -> Answered:
        status, answer = self.served.complete(prompt)
        return Answered(prompt, status, answer, time.monotonic())

    def asked_until(self, phase: str, head: str) -> list["Future[Answered]"]:
        """Sends prompts until the request of one of them is in this phase."""
        asked = list[Future[Answered]]()
        for _ in range(10):
            some = self.asked(prompts(4, head))
            asked += some
            while not all(one.done() for one in some):
                if any(phase in one["phases"] for one in self.served.get("/fleet").values()):
                    return asked
        pytest.fail(f"none of {len(asked)} prompts was seen in phase {phase}")

    def assert_serves(self, model: Any) -> None:
        """Asserts that the fleet gives a right answer, and holds no page after the answer."""
        self.served.until_nothing_is_held()
        (last,) = self.asked(prompts(1))
        assert last.result().status == 200, last.result().answer
        last.result().assert_right(model)
        self.served.until_nothing_is_held()

    def shape(self, rate: str) -> None:
        for host in (self.front, self.prefill, self.decode):
            host.shape(rate)


def prompts(count: int, head: str = HEAD) -> list[str]:
    """Prompts without a common prefix."""
    return [f"{next(_numbers)}: {head}" for _ in range(count)]


@contextmanager
def fleet_on_hosts(folder: Path, *, relayed: bool = False, family: Family = IPV4) -> Iterator[Fleet]:
    """Starts a fleet on several hosts, and waits until all of its processes have joined."""
    with network("front", "prefill", "decode", relayed=relayed, families=(family,)) as (front, prefill, decode):
        served = OnHosts(folder, front)
        try:
            where = ("--front", f"tcp://{front.address}:7000", "--address-file", str(served.addresses))
            served.start_on(front, "front", "front", *where, "--http-port", "0")
            served.join_on(prefill, "prefill", "p")
            served.join_on(decode, "decode", "d")
            served.until_there(1, 1)
            yield Fleet(served, front, prefill, decode)
        finally:
            served.close()
