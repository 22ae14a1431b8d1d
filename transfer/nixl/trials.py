"""Tries the metadata of peers that nothing vouches for in another process, where a crash costs nothing.

One helper process for each process that reads, started at the first contact without a key where transports reach other
hosts, and never where metadata is sealed with a key. On one host nothing has to be tried: who has made the metadata
vouches for it, or it is refused (`vouchers`).

Nothing here waits: `poll` moves everything on, and whoever polls finds the verdict in its `Attempt`.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from transfer.memory import MemoryType
from transfer.nixl.settings import agreed_settings, reaches_other_hosts
from transfer.nixl.vouchers import is_vouched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transfer.wire.messages import RankMetadata

_TRIAL_S = 10
_START_S = 60.0
_MAX_KNOWN = 4096
_EDGE_BYTES = 8
_PROGRAM = Path(__file__).with_name("trial_program.py")

FRAME = struct.Struct(">I")
"""In front of each request to the helper: its length in bytes."""
VERDICT = struct.Struct(">II")
"""In front of each verdict: the number of the request, and the length of the text that says what is wrong."""

UNVOUCHED = "no process of this user on this host says that it is its own"
"""The verdict on metadata that was not tried, since a trial would have contacted whom it names."""

Outcome = Literal["passed", "refused", "died", "late", "vouched", "unvouched"]


class TriedRank(msgspec.Struct, frozen=True, array_like=True):
    """A rank of a peer: its agent, NIXL's description of it, and runs (address, bytes) of host memory to read there."""

    agent_name: str
    metadata: bytes
    runs: tuple[tuple[int, int], ...]


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of all ranks of a peer, to be tried within some seconds by an agent for this type of memory."""

    number: int
    seconds: int
    memory_type: MemoryType
    ranks: tuple[TriedRank, ...]


@dataclass(slots=True, eq=False)
class Attempt:
    """A trial that was asked for.

    Attributes:
        verdict: what is wrong with the metadata; empty where nothing is, None while it is not known.
    """

    number: int
    digest: bytes
    frame: bytes
    deadline: float
    verdict: str | None = None
    again: bool = False


class Trials:
    """The helper process, what it was asked, and what is known of it. Any thread may call anything.

    Args:
        clock: seconds, monotonic.
        trial_s: seconds that a trial may take.
        vouchers: what an agent on this host vouches for needs no trial, and agents that can be on this host only must
            vouch. False where it is to be seen what becomes of lies.

    Attributes:
        owner: the process that this belongs to; a fork of it has none.
        counts: how trials ended: "passed", "refused" by NIXL, "died", which is with the process, or "late"; and how
            many were not begun, as the metadata was "vouched" for, or "unvouched" and refused.
    """

    _lock_shared = threading.Lock()
    _shared: Trials | None = None

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, trial_s: int = _TRIAL_S, *, vouchers: bool = True
    ) -> None:
        self.counts: Counter[Outcome] = Counter()
        self._clock = clock
        self._trial_s = trial_s
        self._vouchers = vouchers
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._numbers = count()
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._open: dict[int, Attempt] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._out = bytearray()
        self._in = bytearray()

    @classmethod
    def shared(cls) -> Trials:
        """Returns that of this process; a fork gets one of its own."""
        with cls._lock_shared:
            if cls._shared is None or cls._shared.owner != os.getpid():
                cls._shared = cls()
                atexit.register(cls._shared.close)
            return cls._shared

    @property
    def pid(self) -> int | None:
        """Process id of the helper; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the helper if it does not run: it takes a second or two, in which a peer can be asked."""
        with self._lock:
            self._ensure()

    def may_try(self, memory_type: MemoryType) -> bool:
        """Whether something can need a trial: on one host what is vouched for is right, and the rest is refused."""
        return not self._vouchers or reaches_other_hosts(agreed_settings(memory_type))

    def begin(self, ranks: Sequence[RankMetadata], memory_type: MemoryType) -> Attempt:
        """Asks for a trial of all ranks of a peer. The same bytes are tried once.

        Args:
            ranks: checked in every way that needs no NIXL.
            memory_type: of the agent that will load them.
        """
        tried = tuple(TriedRank(rank.agent_name, rank.agent_metadata, _runs(rank)) for rank in ranks)
        digest = hashlib.blake2b(msgspec.msgpack.encode((memory_type, tried)), digest_size=32).digest()
        with self._lock:
            number = next(self._numbers) & 0xFFFFFFFF
            data = msgspec.msgpack.encode(Trial(number, self._trial_s, memory_type, tried))
            deadline = self._clock() + _START_S + self._trial_s
            attempt = Attempt(number, digest, FRAME.pack(len(data)) + data, deadline, self._known.get(digest))
            if attempt.verdict is None:
                attempt.verdict = self._without_trial(tried, memory_type)
            if attempt.verdict is None:
                self._open[number] = attempt
                self._out += attempt.frame
                self._ensure()
                self._flush()
        return attempt

    def _without_trial(self, ranks: Sequence[TriedRank], memory_type: MemoryType) -> str | None:
        """The verdict on metadata that its own agent vouches for, or must; None: only a trial can tell."""
        if self._vouchers and all(is_vouched(rank.metadata) for rank in ranks):
            self.counts["vouched"] += 1
            return ""
        if self.may_try(memory_type):
            return None
        self.counts["unvouched"] += 1
        return UNVOUCHED

    def poll(self) -> None:
        """Writes what is to be written, and puts verdicts that have come where they belong."""
        with self._lock:
            if not self._open:
                return
            self._ensure()
            self._flush()
            self._receive()
            now = self._clock()
            for attempt in [attempt for attempt in self._open.values() if now >= attempt.deadline]:
                self._conclude(attempt, "the process that tries metadata did not answer in time", "late")

    def run(self, ranks: Sequence[RankMetadata], memory_type: MemoryType) -> str:
        """As `begin`, and waits for the verdict. For set-up, not for a thread that serves."""
        return self.wait(self.begin(ranks, memory_type))

    def wait(self, attempt: Attempt) -> str:
        """Waits for the verdict of a trial, which comes in any case. For set-up, not for a thread that serves."""
        while attempt.verdict is None:
            self.poll()
            time.sleep(1e-3)
        return attempt.verdict

    def close(self) -> None:
        """Ends the helper; the next trial starts another. Safe to call twice."""
        with self._lock:
            self._stop()

    def _ensure(self) -> None:
        if self._process is not None:
            return
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-P", str(_PROGRAM), str(os.getpid())]
        try:
            # A session of its own: what a terminal sends to this process is not for the helper, which ends with us.
            self._process = subprocess.Popen(  # noqa: S603  (our own module)
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
        except OSError as error:
            for attempt in list(self._open.values()):
                self._conclude(attempt, f"the process that tries metadata cannot be started: {error}", "late")
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    def _stop(self) -> None:
        process, self._process = self._process, None
        self._in.clear()
        self._out.clear()
        if process is None or self.owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _flush(self) -> None:
        if self._process is None or self._process.stdin is None or not self._out:
            return
        try:
            del self._out[: os.write(self._process.stdin.fileno(), self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._restart()

    def _receive(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        try:
            data = os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._restart()
            return
        self._in += data
        while len(self._in) >= VERDICT.size:
            number, size = VERDICT.unpack_from(self._in)
            if len(self._in) < VERDICT.size + size:
                return
            text = bytes(self._in[VERDICT.size : VERDICT.size + size]).decode(errors="replace")
            del self._in[: VERDICT.size + size]
            if (attempt := self._open.get(number)) is not None:
                died, late = text.startswith("it ended"), text.startswith("it did not end")
                self._conclude(attempt, text, "died" if died else "late" if late else "refused" if text else "passed")

    def _restart(self) -> None:
        """The helper is gone: it was idle, or somebody ended it. What it was asked it is asked once more."""
        self._stop()
        for attempt in list(self._open.values()):
            if attempt.again:
                self._conclude(attempt, "the process that tries metadata ended twice", "late")
            else:
                attempt.again = True
                self._out += attempt.frame

    def _conclude(self, attempt: Attempt, verdict: str, outcome: Outcome) -> None:
        del self._open[attempt.number]
        attempt.verdict, attempt.frame = verdict, b""
        self.counts[outcome] += 1
        if outcome in ("passed", "died"):  # the others may end otherwise the next time
            self._known[attempt.digest] = verdict
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)


def _runs(rank: RankMetadata) -> tuple[tuple[int, int], ...]:
    """The first and last bytes of each region of host memory."""
    regions = [(rank.words_addr, 8 * rank.words)] if rank.words > 0 else []
    regions += [(base, 8 * group.num_pages) for base, group in zip(rank.checks_addrs, rank.layout.groups, strict=False)]
    if rank.memory_type is MemoryType.DRAM:
        regions += zip(rank.bases, rank.layout.region_bytes, strict=True)
    runs: list[tuple[int, int]] = []
    for base, size in regions:
        edge = min(_EDGE_BYTES, size)
        runs += {(base, edge): None, (base + size - edge, edge): None}
    return tuple(runs)
