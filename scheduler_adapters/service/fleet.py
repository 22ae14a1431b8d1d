"""Starts prefill and decode servers on this host, exchanges messages with them, and stops them at the end."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

import msgspec
import zmq

from scheduler_adapters.errors import ServiceError
from scheduler_adapters.interrupts import held
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import Context, received
from transfer.wire.keys import make_keyrings, save_keyring

if TYPE_CHECKING:
    from scheduler_adapters.service.server import ServerConfig

PROGRAM = (sys.executable, "-m", "scheduler_adapters.service.program")
PREFIX = "pagewire-run-"  # prefix of the names of run folders
MEMORY_VARIABLE = "UCX_POSIX_DIR"  # UCX creates the files of its shared memory in this folder
_TRIES = 10
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 10.0
_LAST_WORDS_S = 0.2
_STOP_POLL_MS = 10


class Fleet:
    """Prefill and decode servers, which live from `__enter__` to `__exit__`.

    Args:
        configs: the settings of each server. If `name`, `frontend`, `listen` or `prefills` is empty, the fleet fills it
            in; the name is then the role. If the settings of a server name a `frontend`, the fleet only starts and
            stops that server, which exchanges its messages with the named frontend.
        program: the command that starts a server. The server reads its settings from standard input.
        curve: whether to generate new keys for the servers, so that their sockets are encrypted and admit no other
            process.
        send_timeout_s: how long `send` waits for a server that accepts no message, in seconds.

    Raises:
        ServiceError: any method raises this if a server does not answer, or has died without being killed here.
            `__exit__` then stops all servers.
    """

    def __init__(
        self,
        configs: Sequence[ServerConfig],
        program: Sequence[str] = PROGRAM,
        *,
        curve: bool = False,
        send_timeout_s: float = _SEND_TIMEOUT_S,
    ) -> None:
        self._send_timeout_s = send_timeout_s
        self._program = list(program)
        self._asked = tuple(configs)
        self._curve = curve
        self._heard_elsewhere = any(config.frontend for config in configs)
        self._configs: dict[str, ServerConfig] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, IO[bytes]] = {}
        self._down: set[str] = set()
        self.ready: dict[str, msg.Ready] = {}  # the first `Ready` of each server
        self._made = ExitStack()  # closes everything that was created, in reverse order

    def _configure(self) -> None:
        self._configs = {config.name: config for config in map(self._filled_in, self._asked)}
        listening = tuple(config.listen for config in self._configs.values() if config.role == "prefill")
        for name, config in self._configs.items():
            if config.role == "decode" and not config.prefills:
                self._configs[name] = msgspec.structs.replace(config, prefills=listening)
        if self._curve:
            *keyrings, viewers = make_keyrings(len(self._configs) + 1)
            save_keyring(viewers, self.viewer_keys)
            for config, keyring in zip(list(self._configs.values()), keyrings, strict=True):
                path = self._folder.path / f"{config.name}.keys"
                save_keyring(keyring, path)
                self._configs[config.name] = msgspec.structs.replace(config, keyring=str(path))

    def _filled_in(self, config: ServerConfig) -> ServerConfig:
        name = config.name or config.role
        listen = config.listen or (self._folder.endpoint(name) if config.role == "prefill" else "")
        frontend = config.frontend or self._folder.endpoint("frontend")
        return msgspec.structs.replace(config, name=name, frontend=frontend, listen=listen)

    def __enter__(self) -> Self:
        try:
            self._make()
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._heard_elsewhere:
                self._tell_to_stop()
                self._wait_for_exit(_STOP_TIMEOUT_S)
        finally:
            self._stop()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by server name."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def running(self) -> list[str]:
        """Names of the servers that were not killed."""
        return [name for name in self._configs if name not in self._down]

    @property
    def viewer_keys(self) -> Path:
        """The key file for programs that watch the servers. The file exists only with `curve`."""
        return self._folder.path / "viewer.keys"

    def role(self, name: str) -> msg.Role:
        """The role of a server."""
        return self._configs[name].role

    def send(self, name: str, message: msg.AnyMessage) -> None:
        """Queues a message to one server. Waits while the queue is full.

        The queue fills if the caller does not read the server's answers, because the server then stops reading as well.

        Raises:
            ServiceError: the server is gone, or its queue does not empty in time.
        """
        try:
            self._socket.send_multipart([name.encode(), msg.encode(message)])
        except zmq.Again as error:
            self._check_alive()
            raise ServiceError(
                f"the {name} process has accepted no message for {self._send_timeout_s:g} s: it is stopped, "
                "or waits until its own messages are received"
            ) from error
        except zmq.ZMQError as error:  # raised because of ROUTER_MANDATORY, if the peer no longer exists
            self._check_alive()
            raise ServiceError(f"the {name} process cannot be reached: {error}") from error

    def expect_end(self, name: str) -> None:
        """Declares that this server may exit from now on without causing an error. `restart` starts it again."""
        self._down.add(name)

    def kill(self, name: str) -> None:
        """Kills a server as abruptly as a crash would, and waits until the process has exited."""
        self.expect_end(name)
        self._processes[name].kill()
        self._processes[name].wait()

    def restart(self, name: str) -> None:
        """Restarts a server that has exited, with its old settings. Its `Ready` message says when it serves again."""
        self._close(name)
        self._start_one(name)
        self._down.discard(name)

    def status(self, name: str) -> int | None:
        """Returns the exit status of a server, negative for a signal; None while it runs."""
        return self._processes[name].poll()

    def has_ended(self, name: str) -> bool:
        """Whether the server has exited."""
        return self.status(name) is not None

    def how_ended(self, name: str) -> str:
        """Returns how a server has exited: "ended" or "died", its status or signal, and the last line of its output."""
        status = self.status(name)
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return f"{'died' if status else 'ended'} ({how}){self._last_words(name)}"

    def receive(self, timeout_s: float) -> list[msg.AnyMessage]:
        """Receives messages from the servers. Waits up to `timeout_s` seconds for the first one.

        Raises:
            ServiceError: a server has exited, or reports why it is about to exit.
        """
        messages = self._received(timeout_s)
        if any(map(self.has_ended, self.running)):
            self._received(_LAST_WORDS_S)  # the server may have sent a report on its error that has not arrived yet
            self._check_alive()
        return messages

    def stats(self, timeout_s: float = 30.0) -> dict[str, msg.Stats]:
        """Returns the counters of all servers. Drops other messages, so call it when every request is answered."""
        for name in self.running:
            self.send(name, msg.Ask())
        found: dict[str, msg.Stats] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(self.running):
            found |= {message.name: message for message in self.receive(0.1) if isinstance(message, msg.Stats)}
            self._check_deadline(deadline, set(found), timeout_s)
        return found

    def _received(self, timeout_s: float) -> list[msg.AnyMessage]:
        messages: list[msg.AnyMessage] = []
        self._socket.poll(int(timeout_s * 1000))
        for _, data in received(self._socket):
            message = msg.decode(data)
            if isinstance(message, msg.Fatal):
                raise ServiceError(f"the {message.name} process failed: {message.error}")
            messages.append(message)
        return messages

    def _make(self) -> None:
        """Creates the folder, sockets and processes.

        Signals are delayed until everything that was created has been recorded, so that all of it can be cleaned up.
        """
        with held():
            self._folder = RunFolder()
            self._made.callback(self._folder.close)
            self._memory = RunFolder(memory_root())
            self._made.callback(self._memory.close)
            self._context: Context = zmq.Context()
            self._made.callback(self._context.destroy, linger=0)
            self._socket = self._context.socket(zmq.ROUTER)
            # LINGER must be set before a server connects. When a peer has died, libzmq closes its session with the
            # value that was set when the peer connected. The default value has no limit, so `destroy` could wait for
            # ever until a dead peer takes its messages.
            self._socket.setsockopt(zmq.LINGER, 0)
            self._made.callback(self._close_all)
            self._configure()

    def _start(self) -> None:
        if self._heard_elsewhere:
            for name in self._configs:
                self._start_one(name)
            return
        frontend = self._folder.endpoint("frontend")
        try:
            self._socket.bind(frontend)
        except zmq.ZMQError as error:
            raise ServiceError(f"no socket can be opened at {frontend!r}: {error}") from error
        # Without MANDATORY, a message to a server that is not connected yet would vanish.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted server takes over its old name
        self._socket.setsockopt(zmq.SNDTIMEO, int(self._send_timeout_s * 1000))
        for name in self._configs:
            self._start_one(name)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(self.ready) < len(self._configs):
            self.ready |= {message.name: message for message in self.receive(0.1) if isinstance(message, msg.Ready)}
            self._check_deadline(deadline, set(self.ready), _START_TIMEOUT_S)

    def _start_one(self, name: str) -> None:
        with held():
            self._logs[name] = tempfile.TemporaryFile(dir=self._folder.path)  # noqa: SIM115  (closed with the process)
            try:
                process = self._processes[name] = self._spawn(self._logs[name])
            except OSError as error:
                raise ServiceError(f"the {name} process cannot be started: {error}") from error
        if process.stdin is None:
            raise ServiceError(f"the {name} process has no standard input")
        with suppress(BrokenPipeError):  # the process has already exited; the next `receive` reports how it exited
            process.stdin.write(msgspec.json.encode(self._configs[name]) + b"\n")
            process.stdin.flush()  # the pipe stays open, because its closing tells the process that its parent is gone

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  (ours, or a test's of its own)
            self._program,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=self._environment,
            start_new_session=True,  # Ctrl-C must reach only us
        )

    @property
    def _environment(self) -> dict[str, str]:
        """The environment of a child process.

        The child gets the parent's module search path, so it can import the same modules however the parent was
        started.
        """
        path = os.pathsep.join(filter(None, sys.path))
        return {**os.environ, "PYTHONPATH": path, MEMORY_VARIABLE: str(self._memory.path)}

    def _check_alive(self) -> None:
        for name in self.running:
            if self.has_ended(name):
                raise ServiceError(f"the {name} process {self.how_ended(name)}")

    def _check_deadline(self, deadline: float, answered: set[str], timeout_s: float) -> None:
        if time.monotonic() > deadline:
            silent = ", ".join(name for name in self.running if name not in answered)
            raise ServiceError(f"no answer within {timeout_s:.0f} s from: {silent}")

    def _last_words(self, name: str) -> str:
        log = self._logs[name]
        log.seek(0)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1].strip()[:300]}" if lines else ""

    def _tell_to_stop(self) -> None:
        """Tells every server to stop. Reads the servers' messages at the same time.

        Their messages must be read, because a server with unread answers accepts no message. A server that was told to
        stop may exit. If any other server exits, it has died.

        Raises:
            ServiceError: a server has died, or accepts no message.
        """
        self._check_alive()
        deadline, untold = time.monotonic() + self._send_timeout_s, self.running
        while untold:
            for _ in received(self._socket):
                pass
            for name in list(untold):
                if self._try_to_send(name, msg.Stop()):
                    untold.remove(name)
                elif self.has_ended(name):
                    raise ServiceError(f"the {name} process {self.how_ended(name)}")
            if untold and time.monotonic() > deadline:
                raise ServiceError(
                    f"the {untold[0]} process has accepted no message for {self._send_timeout_s:g} s: it is stopped"
                )
            self._socket.poll(_STOP_POLL_MS if untold else 0)

    def _try_to_send(self, name: str, message: msg.AnyMessage) -> bool:
        """Returns whether the message could be queued without waiting."""
        try:
            self._socket.send_multipart([name.encode(), msg.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # the queue of the server is full, or the server is gone; the caller finds out which
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise ServiceError(f"the {name} process cannot be reached: {error}") from error
        return True

    def _wait_for_exit(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not all(map(self.has_ended, self._processes)) and time.monotonic() < deadline:
            for _ in received(self._socket):
                pass  # a server that waits for its answers to be read will handle `Stop` later
            time.sleep(0.01)

    def _close(self, name: str) -> None:
        process = self._processes[name]
        process.kill()
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # the buffer may still hold settings that the process did not read
                process.stdin.close()
        self._logs[name].close()

    def _close_all(self) -> None:
        for name in self._processes:
            self._close(name)
        for log in self._logs.values():  # includes the logs of processes that could not be started
            log.close()

    def _stop(self) -> None:
        with held():
            self._made.close()


def memory_root() -> Path:
    """Returns the folder in which UCX creates shared memory: `UCX_POSIX_DIR` if that is set, or else `/dev/shm`.

    A process that is killed while it creates shared memory leaves the file there, and nobody removes the file. A server
    therefore creates its shared memory in a `RunFolder` below this folder. Processes find each other's shared memory
    through `/proc`, so the processes of two runs can connect.

    Returns the folder for temporary files if UCX's folder is not writable.
    """
    root = os.environ.get(MEMORY_VARIABLE, "/dev/shm")  # noqa: S108  (UCX's own default)
    return Path(root if os.access(root, os.W_OK) else tempfile.gettempdir())


class RunFolder:
    """A new folder for the files of one run: sockets, key files and logs, or shared memory.

    Only its owner can read it, and the run removes it at the end.

    The run holds a lock on its folder. The kernel releases the lock when the run ends, even if the run is killed. A
    folder that nobody has locked was therefore left by a killed run. Each new run removes such folders of the same
    user.

    Args:
        root: the folder in which the new folder is created; by default the folder for temporary files.

    Raises:
        ServiceError: the folder cannot be created.
    """

    def __init__(self, root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        try:
            _remove_abandoned(root)
            for _ in range(_TRIES):
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
                lock = _lock(self.path)
                if lock is not None:
                    self._lock = lock
                    return
                shutil.rmtree(self.path, ignore_errors=True)
        except OSError as error:
            raise ServiceError(f"no folder for the run can be created: {error}") from error
        raise ServiceError(f"no folder for the run can be locked: tried {_TRIES}, the last was {self.path}")

    def endpoint(self, name: str) -> str:
        """Returns the ZMQ endpoint of a socket in this folder.

        Raises:
            ServiceError: the path of the socket is longer than the operating system allows.
        """
        path, limit = self.path / name, zmq.IPC_PATH_MAX_LEN
        if (num_bytes := len(os.fsencode(path))) > limit:
            raise ServiceError(
                f"the path of a socket may have {limit} bytes, and {str(path)!r} has {num_bytes}: "
                "set TMPDIR to a folder with a shorter path"
            )
        return f"ipc://{path}"

    def close(self) -> None:
        """Removes the folder and everything in it. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _lock(folder: Path) -> int | None:
    """Locks a folder, and returns the descriptor that holds the lock.

    Returns None if another process holds the lock, or if the folder is gone. A folder looks abandoned until it is
    locked, so another run that starts at the same time may have removed it.
    """
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # not inherited by child processes
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(folder.stat(), os.fstat(lock)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _remove_abandoned(root: Path) -> None:
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _is_mine(entry):
                lock = _lock(Path(entry.path))
                if lock is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def _is_mine(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:
        return False
