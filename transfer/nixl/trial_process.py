"""The process in which a stranger's metadata is tried. `trials` starts it, through `trial_program`.

NIXL parses what it loads without looking where it reads: 1 to 4 wrong bytes end the process. So this process imports
NIXL once, and forks for each trial a child that does with the metadata what a reader would do: it loads every rank,
reads a few bytes of each region, and unloads. What becomes of the child is the verdict. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import uuid

import msgspec
import numpy as np

from transfer.errors import AgentError
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent, import_nixl
from transfer.nixl.trials import FRAME, VERDICT, Trial, TriedRank

MAX_TEXT = 2000
_AT_ONCE = 8
_IDLE_S = 300.0
_PR_SET_PDEATHSIG = 1
_DATA_BYTES = 8 << 30
_READ = 1 << 20


def try_ranks(trial: Trial) -> str:
    """Does with the ranks what a reader does. Returns what is wrong with them; mostly it does not return then."""
    name = f"trial/{uuid.uuid4().hex}"
    try:
        agent = Agent(name, trial.memory_type)
        memory = np.zeros(max(sum(size for _, size in rank.runs) for rank in trial.ranks), np.uint8)
        agent.register([(memory.ctypes.data, memory.nbytes, 0)], MemoryType.DRAM)
        for rank in trial.ranks:
            agent.add_peer(rank.agent_name, rank.metadata)
        for rank in trial.ranks:
            _read(agent, rank, memory.ctypes.data)
        for rank in trial.ranks:
            agent.remove_peer(rank.agent_name)
        agent.close()
    except AgentError as error:
        return str(error).replace(name, "trial")
    return ""


def _read(agent: Agent, rank: TriedRank, base: int) -> None:
    local: list[tuple[int, int, int]] = []
    for _, size in rank.runs:
        local.append((base, size, 0))
        base += size
    remote = [(address, size, 0) for address, size in rank.runs]
    handle, done = agent.read(rank.agent_name, local, remote, b"", (MemoryType.DRAM, MemoryType.DRAM))
    while not done:  # the alarm ends it
        done = agent.done(handle)
    agent.release(handle)


def _in_child(data: bytes, verdicts: int, requests: int) -> None:
    """A trial. The verdict goes out in one write, which a pipe keeps whole."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what NIXL and UCX say of strangers' bytes is in the verdict
    os.close(requests)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trial = msgspec.msgpack.decode(data, type=Trial)
    if trial.memory_type is MemoryType.DRAM:
        resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES, _DATA_BYTES))
    signal.alarm(trial.seconds)
    text = try_ranks(trial).encode()[:MAX_TEXT]
    os.write(verdicts, VERDICT.pack(trial.number, len(text)) + text)


class Helper:
    """Reads requests from one pipe, forks for each, and writes verdicts into another.

    Args:
        requests: file descriptor. Its end is the end of the process.
        verdicts: file descriptor.
        parent: process id.
    """

    def __init__(self, requests: int, verdicts: int, parent: int) -> None:
        self._requests = requests
        self._verdicts = verdicts
        self._parent = parent
        self._buffer = bytearray()
        self._children: dict[int, int] = {}

    def run(self) -> None:
        """Until the parent is gone, or has asked nothing for long."""
        idle_s = 0.0
        while idle_s < _IDLE_S and os.getppid() == self._parent:
            wait_s = 0.01 if self._children else 1.0
            full = len(self._children) >= _AT_ONCE
            ready, _, _ = select.select([] if full else [self._requests], [], [], wait_s)
            idle_s = 0.0 if ready or self._children else idle_s + wait_s
            if ready:
                data = os.read(self._requests, _READ)
                if not data:
                    break
                self._buffer += data
            self._begin()
            self._reap()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _begin(self) -> None:
        while len(self._children) < _AT_ONCE and len(self._buffer) >= FRAME.size:
            (size,) = FRAME.unpack_from(self._buffer)
            if len(self._buffer) < FRAME.size + size:
                return
            data = bytes(self._buffer[FRAME.size : FRAME.size + size])
            del self._buffer[: FRAME.size + size]
            number = msgspec.msgpack.decode(data, type=Trial).number
            pid = os.fork()
            if not pid:
                try:
                    _in_child(data, self._verdicts, self._requests)
                finally:
                    os._exit(0)
            self._children[pid] = number

    def _reap(self) -> None:
        for pid, number in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self._children[pid]
            if os.WIFSIGNALED(status):
                by = signal.Signals(os.WTERMSIG(status)).name
                text = b"it did not end in time" if by == "SIGALRM" else f"it ended the process by {by}".encode()
                os.write(self._verdicts, VERDICT.pack(number, len(text)) + text)


def prepare() -> int:
    """Imports NIXL, once for all trials. Returns the file descriptor for verdicts."""
    verdicts = os.dup(1)
    os.dup2(2, 1)  # our pipe is for verdicts: NIXL and its plugins may print
    os.environ["UCX_HANDLE_ERRORS"] = "none"  # a death here is an answer, and no reason for a page in the log
    import_nixl()
    return verdicts
