"""Fixtures for engines in this process, and for workers in child processes. Every worker is ended and waited for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from tests.forked import start
from tests.transfer import worker

if TYPE_CHECKING:
    from transfer import KVTransferEngine

TRANSPORTS = {"shm": {}, "tcp": {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}}


class RaisedError(Exception):
    """An error that a call of a worker has raised. `kinds` holds the names of the error's class and of its bases."""

    def __init__(self, kinds: list[str], message: str, trace: str) -> None:
        super().__init__(message, trace)
        self.kinds, self.message = kinds, message

    def __str__(self) -> str:
        return f"{self.kinds[0]}: {self.message}"


class Worker:
    """A child process that runs `worker.py`. Each call has a deadline."""

    Raised = RaisedError

    def __init__(self, env: dict[str, str]) -> None:
        self.process, self.conn = start(worker.serve, settings=env)
        self.busy = True

    def send(self, name: str, *args: object) -> None:
        if self.busy:
            self.wait(60)
        self.conn.send((name, args))
        self.busy = True

    def wait(self, timeout: float = 30) -> object:
        assert self.conn.poll(timeout), f"worker {self.process.pid} did not answer within {timeout} s"
        kind, value = self.conn.recv()
        self.busy = False
        if kind == "raised":
            raise RaisedError(*value)
        return value

    def __call__(self, name: str, *args: object) -> object:
        self.send(name, *args)
        return self.wait()

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.process.kill()
            self.process.join(10)
        else:
            os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGCONT)
            try:
                self.send("quit")
                self.wait(10)
                self.process.join(10)
            except (OSError, EOFError, AssertionError, RaisedError):
                pass
        self.process.kill()
        self.process.join(10)
        self.conn.close()


@contextmanager
def hired() -> Generator[Callable[..., Worker]]:
    """Yields a function that starts workers, and ends all of them at the end of the block. Each worker polls its engine
    all the time, so a test should keep only few workers alive.
    """
    workers: list[Worker] = []

    def hire(env: dict[str, str] | None = None) -> Worker:
        workers.append(Worker(env or {}))
        return workers[-1]

    try:
        yield hire
    finally:
        for one in workers:
            one.close()


@pytest.fixture
def hire() -> Iterator[Callable[..., Worker]]:
    """Returns `hire(env)`, which starts a worker for the test."""
    with hired() as start_one:
        yield start_one


@pytest.fixture(scope="module")
def couples() -> Iterator[Callable[[dict[str, str]], tuple[Worker, Worker]]]:
    """Returns `couples(env)`, which returns two workers with this environment. All tests of a module get the same two
    workers for the same environment.
    """
    found: dict[tuple[tuple[str, str], ...], tuple[Worker, Worker]] = {}
    with hired() as start_one:

        def get(env: dict[str, str]) -> tuple[Worker, Worker]:
            key = tuple(sorted(env.items()))
            if key not in found:
                found[key] = (start_one(env), start_one(env))
            return found[key]

        yield get


@pytest.fixture
def make_engine():
    """Returns `make(name, dp, tp, pages, bytes_per_page)`: an engine over random bytes, cleaned up after the test."""
    from transfer import KVTransferEngine

    engines = []

    def make(name: str, dp: int = 1, tp: int = 1, pages: int = 8, bytes_per_page: int = 1024) -> KVTransferEngine:
        tensors = [
            [torch.randint(0, 256, (pages, bytes_per_page), dtype=torch.uint8) for _ in range(tp)] for _ in range(dp)
        ]
        engines.append(KVTransferEngine(name, tensors, total_num_pages=pages))
        return engines[-1]

    yield make
    for engine in engines:
        engine.cleanup()


@pytest.fixture
def pair(make_engine: Callable[..., KVTransferEngine]):
    """Two engines of one replica with two shards, connected to each other. `left` has 8 pages, and `right` has 6
    pages.
    """
    left, right = make_engine("left", tp=2), make_engine("right", tp=2, pages=6)
    left.connect(right.metadata)
    right.connect(left.metadata)
    return left, right


@pytest.fixture
def until():
    """Returns `until(condition, seconds)`, which waits for a condition or fails."""

    def wait(condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened within {seconds} s"
            time.sleep(0.0005)

    return wait


@pytest.fixture
def transports():
    """Maps the name of each transport to the environment variables of a worker that uses it."""
    return TRANSPORTS
