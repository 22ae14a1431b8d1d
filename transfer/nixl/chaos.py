"""An agent with random faults, as they happen in NIXL and in networks. A seed determines the faults.

Tests and `pagewire demo --chaos` use it. It wraps the real agent: bytes move through NIXL, and faults hit real
transfers. Each fault either has been observed (short reads reported as done, copies that continue after an error,
notifications lost with a stopped peer), or could be caused by a network.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from transfer.errors import AgentError
from transfer.memory import MemoryType
from transfer.nixl.agent import WORD_BYTES, Agent, Handle, RunList

Fault = Literal["delay", "refuse", "break", "short", "corrupt", "drop", "duplicate", "late"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The probability of each fault, for each READ or notification.

    Attributes:
        delay: a READ is posted only after some calls to `done`. It reads what the pages contain at that time.
        refuse: a READ is refused.
        break_: a READ ends in an error after half of its runs have arrived.
        short: a READ reports success although its last run has not arrived.
        corrupt: a READ reports success with one wrong bit.
        drop: a notification is lost.
        duplicate: a notification arrives twice.
        late: a notification arrives some calls to `notifications` later, after notifications that were sent after it.
        polls: the longest delay, in calls to `done` or `notifications`.
    """

    delay: float = 0.2
    refuse: float = 0.02
    break_: float = 0.05
    short: float = 0.0
    corrupt: float = 0.0
    drop: float = 0.05
    duplicate: float = 0.1
    late: float = 0.2
    polls: int = 20

    @property
    def kinds(self) -> list[Fault]:
        """The faults whose probability is above 0."""
        faults: tuple[Fault, ...] = get_args(Fault)
        return [fault for fault in faults if getattr(self, "break_" if fault == "break" else fault) > 0]


_HOST = MemoryType.DRAM, MemoryType.DRAM


@dataclass(eq=False)
class _ChaosRead:
    """A READ as its owner sees it. Its `handle` is None until the READ is posted.

    `flip` is the address of the byte that the fault "corrupt" changes.
    """

    post: Callable[[], Handle]
    polls: int
    fault: Fault | None
    flip: int
    handle: Handle = None


class ChaosAgent(Agent):
    """The real agent, with faults injected.

    The same `seed` gives the same faults for the same series of calls. `faults` counts them.
    """

    def __init__(
        self, name: str, memory_type: MemoryType = MemoryType.DRAM, *, seed: int = 0, rates: Rates | None = None
    ) -> None:
        super().__init__(name, memory_type)
        self.rates = rates or Rates()
        self.faults: Counter[Fault] = Counter()
        self._random = random.Random(seed)  # noqa: S311  (the faults must follow from a seed)
        self._arrived: deque[tuple[int, tuple[str, bytes]]] = deque()
        self._polls = 0

    def _happens(self, fault: Fault, rate: float) -> bool:
        if self._random.random() >= rate:
            return False
        self.faults[fault] += 1
        return True

    def read(
        self, peer: str, local: RunList, remote: RunList, memory_types: tuple[MemoryType, MemoryType] = _HOST
    ) -> Handle | None:
        """Like `Agent.read`, with faults."""
        return self._read(peer, local, remote, b"", memory_types)

    def read_word(self, peer: str, local: int, remote: int, note: bytes) -> Handle | None:
        """Like `Agent.read_word`, with faults."""
        return self._read(peer, [(local, WORD_BYTES, 0)], [(remote, WORD_BYTES, 0)], note, _HOST)

    def _read(
        self, peer: str, local: RunList, remote: RunList, note: bytes, memory_types: tuple[MemoryType, MemoryType]
    ) -> Handle:
        rates = self.rates
        if self._happens("refuse", rates.refuse):
            raise AgentError(f"agent {self.name!r}: chaos refused {len(local)} runs of {peer!r}")
        fault: Fault | None = None
        if self._random.random() < rates.break_:
            fault, local, remote, note = "break", local[: len(local) // 2], remote[: len(remote) // 2], b""
        elif len(local) > 1 and self._happens("short", rates.short):
            fault, local, remote = "short", local[:-1], remote[:-1]
        elif self._random.random() < rates.corrupt:
            fault = "corrupt"
        if note and self._happens("drop", rates.drop):
            note = b""
        polls = self._random.randrange(1, rates.polls + 1) if self._happens("delay", rates.delay) else 0
        row = local[self._random.randrange(len(local))] if len(local) else None
        flip = int(row[0]) + self._random.randrange(int(row[1])) if row is not None else 0

        def post() -> Handle:
            return super(ChaosAgent, self).post("READ", peer, local, remote, note, memory_types)[0]

        read = _ChaosRead(post, polls, fault, flip)
        if not polls and len(local):
            read.handle = post()
        return read

    def done(self, handle: Handle) -> bool:
        """Like `Agent.done`, for a handle from `read`."""
        if handle.polls > 0:
            handle.polls -= 1
            return False
        if handle.handle is None and handle.flip:
            handle.handle = handle.post()
        if handle.handle is not None and not super().done(handle.handle):
            return False
        if handle.fault == "break":
            self.faults["break"] += 1
            raise AgentError(f"agent {self.name!r}: chaos broke a transfer half way")
        if handle.fault == "corrupt":
            handle.fault = None
            self.faults["corrupt"] += 1
            byte = ctypes.c_uint8.from_address(handle.flip)
            byte.value ^= 1 << self._random.randrange(8)
        return True

    def release(self, handle: Handle) -> None:
        """Like `Agent.release`, for a handle from `read`."""
        if handle.handle is not None:
            super().release(handle.handle)

    def notify(self, peer: str, message: bytes) -> None:
        """Like `Agent.notify`, except that the message may be dropped."""
        if not self._happens("drop", self.rates.drop):
            super().notify(peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Like `Agent.notifications`, except that some notifications arrive later or twice."""
        self._polls += 1
        for arrived in super().notifications():
            for _ in range(2 if self._happens("duplicate", self.rates.duplicate) else 1):
                later = self._random.randrange(1, self.rates.polls + 1) if self._happens("late", self.rates.late) else 0
                self._arrived.append((self._polls + later, arrived))
        due = [arrived for at, arrived in self._arrived if at <= self._polls]
        self._arrived = deque(entry for entry in self._arrived if entry[0] > self._polls)
        return due
