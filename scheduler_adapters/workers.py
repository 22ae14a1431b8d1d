"""Starts a prefill and a decode process, talks to them, and sees to it that neither outlives us."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

import msgspec
import zmq

from scheduler_adapters import messages as msg
from scheduler_adapters.disagg import received
from scheduler_adapters.errors import WorkerError

if TYPE_CHECKING:
    from types import TracebackType

    from scheduler_adapters.worker import WorkerConfig

ROLES: tuple[msg.Role, msg.Role] = ("prefill", "decode")
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_LAST_WORDS_S = 0.2


class Workers:
    """A prefill and a decode process, from `__enter__` to `__exit__`.

    Args:
        config: for both; `role`, `front` and `prefill` are filled in.

    Raises:
        WorkerError: from any method, when a process has died or does not answer. `__exit__` ends both then.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._processes: dict[msg.Role, subprocess.Popen[bytes]] = {}
        self._logs: dict[msg.Role, IO[bytes]] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="pagewire-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for role in ROLES:
                    self.send(role, msg.Stop())
                self._wait_for_exit(_STOP_TIMEOUT_S)
        finally:
            self._stop()

    @property
    def pids(self) -> dict[msg.Role, int]:
        """Process ids by role."""
        return {role: process.pid for role, process in self._processes.items()}

    def send(self, role: msg.Role, message: msg.AnyMessage) -> None:
        """Queue a message to one process.

        Raises:
            WorkerError: it is gone.
        """
        try:
            self._socket.send_multipart([role.encode(), msg.encode(message)])
        except zmq.ZMQError as error:  # ROUTER_MANDATORY: there is no such peer any more
            self._check_alive()
            raise WorkerError(f"the {role} process cannot be reached: {error}") from error

    def receive(self, timeout_s: float) -> list[msg.AnyMessage]:
        """What the processes have sent, waiting up to `timeout_s` for the first of it.

        Raises:
            WorkerError: a process has ended, or says why it is about to.
        """
        messages = self._received(timeout_s)
        if any(process.poll() is not None for process in self._processes.values()):
            self._received(_LAST_WORDS_S)  # its own account of the end may still be under way
            self._check_alive()
        return messages

    def stats(self, timeout_s: float = 30.0) -> dict[msg.Role, msg.Stats]:
        """The counters of both processes. Other messages that come meanwhile are dropped: ask when all is served."""
        for role in ROLES:
            self.send(role, msg.Ask())
        found: dict[msg.Role, msg.Stats] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(ROLES):
            found |= {message.role: message for message in self.receive(0.1) if isinstance(message, msg.Stats)}
            self._check_deadline(deadline, set(found), timeout_s)
        return found

    def _received(self, timeout_s: float) -> list[msg.AnyMessage]:
        messages: list[msg.AnyMessage] = []
        self._socket.poll(int(timeout_s * 1000))
        for _, data in received(self._socket):
            message = msg.decode(data)
            if isinstance(message, msg.Fatal):
                raise WorkerError(f"the {message.role} process failed: {message.error}")
            messages.append(message)
        return messages

    def _start(self) -> None:
        directory = Path(self._directory.name)
        front = f"ipc://{directory}/front"
        try:
            self._socket.bind(front)
        except zmq.ZMQError as error:
            raise WorkerError(f"no socket can be made at {front!r}: {error}") from error
        # Without MANDATORY a message to a process that is not connected yet would vanish.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for role in ROLES:
            prefill = f"ipc://{directory}/prefill"
            config = msgspec.structs.replace(self._config, role=role, front=front, prefill=prefill)
            self._processes[role] = self._spawn(role, msgspec.json.encode(config))
        ready: set[msg.Role] = set()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(ready) < len(ROLES):
            ready |= {message.role for message in self.receive(0.1) if isinstance(message, msg.Ready)}
            self._check_deadline(deadline, ready, _START_TIMEOUT_S)

    def _spawn(self, role: msg.Role, config: bytes) -> subprocess.Popen[bytes]:
        log = self._logs[role] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        process = subprocess.Popen(
            [sys.executable, "-m", "scheduler_adapters.worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Our own search path: the child finds what we found, however we were started.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        if process.stdin is None:
            raise WorkerError(f"the {role} process has no standard input")
        process.stdin.write(config + b"\n")
        process.stdin.flush()  # and it stays open: its end tells the process that we are gone
        return process

    def _check_alive(self) -> None:
        for role, process in self._processes.items():
            if process.poll() is not None:
                raise WorkerError(f"the {role} process died ({_how(process.returncode)}){self._last_words(role)}")

    def _check_deadline(self, deadline: float, answered: set[msg.Role], timeout_s: float) -> None:
        if time.monotonic() > deadline:
            silent = ", ".join(role for role in ROLES if role not in answered)
            raise WorkerError(f"no answer within {timeout_s:.0f} s from: {silent}")

    def _last_words(self, role: msg.Role) -> str:
        log = self._logs[role]
        log.seek(0)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()[:300]}" if lines else ""

    def _wait_for_exit(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for log in self._logs.values():
            log.close()
        self._context.destroy(linger=0)
        self._directory.cleanup()


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
