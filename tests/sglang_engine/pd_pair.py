"""The test's side of `pd_server` processes. It sends one request to both, as a router would."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

START_S, ANSWER_S = 120.0, 60.0
NEW = 12
# Importing SGLang takes many seconds, so one process does it and all others are forked from it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.sglang_engine.pd_server"])


@dataclass(frozen=True)
class Options:
    """The options of a server. `more` has SGLang's own options, and `ports` has the ports of rank 0."""

    role: str
    model: str
    page_size: int
    log: str
    port: int = 0
    tp: int = 1
    rank: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    ports: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def run(options: Options, connection: Any) -> None:
    """Runs in the process of a server."""
    from tests.sglang_engine import pd_server

    pd_server.main(options, connection)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A server with one process for each rank. It collects the reports of these processes about each request."""

    def __init__(self, options: Options) -> None:
        self.options, self.role, self.log = options, options.role, Path(options.log)
        self.log.touch()
        self.processes: list[Any] = []
        self._connection, self._theirs = FORKS.Pipe()
        self._start(options)
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answers: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._hear, daemon=True).start()

    def _start(self, options: Options) -> None:
        process = FORKS.Process(target=run, args=(options, self._theirs), daemon=True)
        process.start()
        self.processes.append(process)
        if not options.rank:
            self._theirs.close()
            self._theirs = None

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                said = self._connection.recv()
                if "ports" in said:
                    for rank in range(1, self.options.tp):
                        self._start(replace(self.options, rank=rank, ports=said["ports"]))
                else:
                    self._said.put(said)
        self._said.put({"ended": True})

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            said = self._said.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.role} has sent nothing for {timeout_s} s:\n{self.tail()}") from None
        assert "ended" not in said, f"{self.role} has ended:\n{self.tail()}"
        if "name" in said and said["finished"]:
            self.answers[said["name"]] = said
        return said

    def _until(self, key: str, timeout_s: float) -> Any:
        end = time.monotonic() + timeout_s
        while True:
            said = self._next(max(0.1, end - time.monotonic()))
            if key in said:
                return said[key]

    def tail(self, chars: int = 3000) -> str:
        return self.log.read_text()[-chars:]

    def wait_ready(self) -> Server:
        self._until("ready", START_S)
        return self

    def ask(self, op: str, **fields: Any) -> None:
        self._connection.send({"op": op, **fields})

    def answer(self, name: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Returns the result of a request: its tokens, and how it ended."""
        end = time.monotonic() + timeout_s
        while name not in self.answers:
            self._next(max(0.1, end - time.monotonic()))
        return self.answers.pop(name)

    def usage(self) -> dict[str, int]:
        self.ask("usage")
        return self._until("usage", ANSWER_S)

    def wait_usage(self, timeout_s: float = 20.0, **wanted: int) -> None:
        """Waits until the server holds as much as `wanted` says. Without `wanted`, waits until all pages are given
        back.
        """
        end = time.monotonic() + timeout_s
        while True:
            usage = self.usage()
            checked = wanted or dict.fromkeys(usage, 0)
            if all(usage[name] == value for name, value in checked.items()):
                return
            assert time.monotonic() < end, f"{self.role} holds {usage}, {checked} expected:\n{self.tail()}"
            time.sleep(0.05)

    def wait_reads(self, timeout_s: float = ANSWER_S) -> None:
        """Waits until a held READ was posted."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            self.ask("reads")
            if self._until("reads", ANSWER_S):
                return
            time.sleep(0.02)
        raise AssertionError(f"{self.role} reads nothing:\n{self.tail()}")

    def wait_phase(self, room: int, phase: str, timeout_s: float = ANSWER_S) -> None:
        """Waits until SGLang's state of a room has this name."""
        end, found = time.monotonic() + timeout_s, ""
        while time.monotonic() < end:
            self.ask("phase", room=room)
            if (found := self._until("phase", ANSWER_S)) == phase:
                return
            time.sleep(0.02)
        raise AssertionError(f"{self.role}: room {room} is in phase {found!r}, expected {phase!r}:\n{self.tail()}")

    def unmeasure(self) -> None:
        """Makes the server ask peers even where it has measured that computing is quicker."""
        self.ask("unmeasure")
        assert self._until("unmeasured", ANSWER_S)

    def exchange(self) -> dict[str, Any]:
        """Returns how many pages the server has lent, what came of its questions to peers, and how peers name it."""
        self.ask("exchange")
        return self._until("exchange", ANSWER_S)

    def update(
        self, model: Path, version: str | None = None, *, flush: bool = True, between_chunks: bool = False
    ) -> str:
        """Loads other weights while the server runs. Returns SGLang's message."""
        self.ask("update", model=str(model), version=version, flush=flush, between_chunks=between_chunks)
        return self._until("updated", ANSWER_S)

    def flush(self) -> None:
        self.ask("flush")
        assert self._until("flushed", ANSWER_S)

    def hold(self, on: bool) -> None:
        self.ask("hold", on=on)
        self._until("held", ANSWER_S)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.ask("stop")
        for process in self.processes:
            process.join(15)
        self.kill()


class Pair:
    """A prefill process and a decode process. The pair also chooses room numbers, as a router does."""

    def __init__(
        self, model: Path, logs: Path, pages: tuple[int, int], ranks: tuple[int, int] = (1, 1), **more: Any
    ) -> None:
        port = free_port()
        environment = more.pop("environment", {})
        self.options = {
            role: Options(
                str(role), str(model), page_size, str(logs / f"{role}.log"), port, tp, 0, environment, {}, more
            )
            for role, page_size, tp in zip(("prefill", "decode"), pages, ranks, strict=True)
        }
        self.port = port
        self.rooms = iter(range(1 << 40, 1 << 41))
        self.prefill, self.decode = self.start("prefill"), self.start("decode")
        try:
            self.prefill.wait_ready()
            self.decode.wait_ready()
        except AssertionError:
            self.prefill.kill()
            self.decode.kill()
            raise

    def start(self, role: str) -> Server:
        return Server(self.options[role])

    def send(self, name: str, prompt: list[int], new: int, to: str = "both") -> int:
        """Sends a request to both processes, as a router does, or to only one of them."""
        room = next(self.rooms)
        for role, server in (("prefill", self.prefill), ("decode", self.decode)):
            if to in ("both", role):
                self.send_half(server, name, prompt, new, room)
        return room

    def send_held(self, name: str, prompt: list[int]) -> None:
        """Sends a request to both processes, and waits until decode reads.

        The READ lasts until `decode.hold(on=False)`.
        """
        self.decode.hold(on=True)
        self.send(name, prompt, NEW)
        self.decode.wait_reads()

    def send_half(self, server: Server, name: str, prompt: list[int], new: int, room: int) -> None:
        server.ask("generate", name=name, prompt=prompt, new=new, room=room, host="127.0.0.1", port=self.port)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def reason(answer: dict[str, Any]) -> str:
    """Returns why a request was ended."""
    assert answer["finished"]["type"] == "abort", answer
    return str(answer["finished"]["message"])


def check_works(pair: Pair, expected: Any) -> None:
    """Checks that the next request gets right tokens, and that no pages are held after it."""
    prompt = list(range(40, 100))
    pair.send("next", prompt, NEW)
    assert pair.decode.answer("next")["tokens"] == expected(prompt)
    pair.prefill.answer("next")
    pair.prefill.wait_usage()
    pair.decode.wait_usage()
