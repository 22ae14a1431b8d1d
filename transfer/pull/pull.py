"""The reading side of one rank: READs of pages, the fence after them, and what is in flight until it is not.

A pull is over in two steps that may be far apart. It *fails* as soon as the reason is known. Its pages are *safe* when
nothing of it is in flight: NIXL cannot stop a copy, so until then bytes may still land in them.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from transfer.errors import AgentError, PullFailedError, TransferError
from transfer.memory import MemoryType
from transfer.nixl.agent import WORD_BYTES, Handle
from transfer.pull.at_once import AtOnce, read_and_fence
from transfer.pull.lately import SpokenTo
from transfer.pull.lease import CLEARED, LeaseRef, make_words
from transfer.pull.parts import Part, is_over, release_ended
from transfer.pull.pull_state import PullEvent, PullTimes, RankPull, check_opening, how_ended
from transfer.pull.remote import RemoteEngine
from transfer.stats import PullRecord
from transfer.wire.messages import ReaderNote, encode_message

_SLICE_S = 0.3e-3
_MOST_IN_FLIGHT = 8
"""Transfers of a pull at a time, where posts return before all is copied: 32 MiB on the wire, and the background."""


class Puller:
    """The pulls of one rank. Single-threaded: the thread that owns the agents calls everything.

    `identity` is the engine id, the rank and the number of ranks, as sources are told; `slots` are fences at a time.

    Attributes:
        words: uint64 `[slots]`, where fences put the lease words that they read. To be registered with every agent.
        events: what became of pulls, until the owner takes it.
        ended: figures of pulls that ended well, likewise.
        is_copying: there is more to copy, and who polls does it: the next poll should come at once.
        timed: the events of pulls that pass say when their fence was posted.
    """

    def __init__(
        self,
        identity: tuple[str, int, int],
        *,
        memory_type: MemoryType = MemoryType.DRAM,
        slots: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.words = make_words(slots)
        self.events: deque[PullEvent] = deque()
        self.ended: deque[PullRecord] = deque(maxlen=4096)
        self._identity = identity
        self._memory_type, self._clock = memory_type, clock
        self._address = self.words.ctypes.data
        self._free, self._spoken = list(range(slots)), SpokenTo(clock)
        self._pulls: dict[str, RankPull] = {}
        self._moving: dict[str, RankPull] = {}  # of these, those that a poll may move on
        self._due: list[tuple[float, str]] = []  # a heap: when one is to be renewed, or times out, if it is still there
        self._behind: dict[int, Handle] = {}  # by id of the source: what NIXL's thread copies from it
        self.is_copying = self.timed = False

    def __len__(self) -> int:
        return len(self._pulls)

    def __contains__(self, key: str) -> bool:
        return key in self._pulls

    @property
    def is_reading(self) -> bool:
        """Whether something is in flight, or about to be: a pull that waits for further pages does not count."""
        return any(pull.in_flight or pull.waiting for pull in self._moving.values())

    @property
    def is_moving(self) -> bool:
        """Whether a poll may move anything on."""
        return bool(self._moving)

    def engines_in_use(self) -> set[RemoteEngine]:
        """Those whose agents need polls: something is in flight of them, or was said to them lately."""
        return self._spoken.lately() | {pull.engine for pull in self._moving.values()}

    def uses(self, engine: RemoteEngine) -> bool:
        """Tells whether a pull still has to do with an engine."""
        return any(pull.engine is engine for pull in self._pulls.values())

    def open(self, key: str, engine: RemoteEngine, lease: LeaseRef, timeout_s: float) -> RankPull:
        """Begins a pull: the lease is renewed from now on, and `add` may read. Its name is free after its last event.

        Raises:
            InvalidTransferError: the key is taken, or the source has no such lease word.
            PullFailedError: the source is known to be gone.
        """
        check_opening(key, engine, lease, timeout_s, is_open=key in self._pulls)
        pull = self._pulls[key] = self._opened(key, engine, lease, timeout_s)
        self._expect(pull)
        return pull

    def _opened(self, key: str, engine: RemoteEngine, lease: LeaseRef, timeout_s: float) -> RankPull:
        now = self._spoken.add(engine)
        return RankPull(key, engine, lease, now + timeout_s, now, renew_at=now + lease.duration_s / 3)

    def _expect(self, pull: RankPull) -> None:
        heapq.heappush(self._due, (min(pull.deadline, pull.renew_at), pull.key))

    def get(self, key: str) -> RankPull:
        """Returns a pull that can still be added to; a PullFailedError says why there is none."""
        pull = self._pulls.get(key)
        if pull is None or pull.error or not pull.more:
            reason = "no such pull" if pull is None else pull.error or "its last part was added before"
            raise PullFailedError(f"request {key!r}: {reason}")
        return pull

    def look_up(self, key: str) -> RankPull | None:
        """Returns a pull, whatever has become of it. Any thread may ask."""
        return self._pulls.get(key)

    def add(self, key: str, parts: list[Part], *, last: bool) -> None:
        """Reads further parts of a pull, and fences it after the last. Raises as `get`."""
        pull = self.get(key)
        pull.waiting.extend([part for part in parts if len(part.local)])
        pull.more = not last
        pull.added += 1
        self._advance(pull)

    def pull_at_once(
        self, key: str, engine: RemoteEngine, lease: LeaseRef, timeout_s: float, part: Part
    ) -> PullEvent | None:
        """A whole pull of one part that is posted in one transfer, from an engine of one rank.

        Few pages are copied by the post itself, and so is the lease word after them: where both have ended as they were
        posted, and the word is the lease's, the pull is over here, without all that others need. Raises as `open`.

        Returns:
            The event of a pull that has ended well, which is not among `events`; None where it goes on as any other.
        """
        check_opening(key, engine, lease, timeout_s, is_open=key in self._pulls)
        if not self._free:  # another pull's fence ends first
            self.open(key, engine, lease, timeout_s)
            self.add(key, [part], last=True)
            return None
        started, slot = self._spoken.add(engine), self._free.pop()
        self.words[slot] = CLEARED  # as before every fence
        note = encode_message(self._note(lease, "done"))
        found = read_and_fence(engine, part, self._memory_type, lease, self._address + slot * WORD_BYTES, note)
        if found.fenced and found.fencing is None and self.words.item(slot) == lease.lease_id:
            self._free.append(slot)
            now = self._clock()
            self.ended.append(PullRecord(part.num_bytes, len(part.local), found.post_s, now - started))
            times = PullTimes(started + found.post_s, now) if self.timed else None
            return PullEvent(key, "", True, 0, times)
        pull = self._pulls[key] = self._opened(key, engine, lease, timeout_s)
        self._go_on(pull, part, slot, found)
        return None

    def _go_on(self, pull: RankPull, part: Part, slot: int, found: AtOnce) -> None:
        """A pull that was to be over at once is one as any other, from where it is."""
        pull.more, pull.added, pull.post_s = False, 1, found.post_s
        pull.num_bytes, pull.num_runs, part.posted = part.num_bytes, len(part.local), len(part.local)
        pull.read_ranks.add(part.rank)
        if found.fenced:
            pull.fencing.append((found.fencing, part.rank, slot, found.fencing is None))
        else:
            self._free.append(slot)
        if found.reading is not None:
            part.in_flight = 1
            pull.reading.append((found.reading, part))
        if found.error is not None:
            self._on_error(pull, found.error)
        self._expect(pull)
        self._advance(pull)

    def fail(self, key: str, reason: str) -> None:
        """Gives a pull up. A no-op for an unknown pull, and for one that has failed already."""
        if (pull := self._pulls.get(key)) is not None and not pull.error:
            self._fail(pull, reason)
            self._advance(pull)

    def withdraw(self, key: str, reason: str) -> tuple[int, bool]:
        """Gives a pull up for its owner, who learns here what has become of it.

        Returns:
            How many calls of `add` a fence has passed, and whether nothing of it is in flight: then its name is free,
            and no event of it is left, which would be taken for one of the next pull of this name.
        """
        passed = max([self.passed(key), *(event.passed for event in self.events if event.key == key)])
        self.fail(key, reason)
        if key in self._pulls:
            return passed, False
        self.events = deque(event for event in self.events if event.key != key)
        return passed, True

    def passed(self, key: str) -> int:
        """How many calls of `add` a fence has passed; 0 where there is no such pull."""
        return 0 if (pull := self._pulls.get(key)) is None else pull.passed

    def fail_engine(self, engine: RemoteEngine, reason: str) -> None:
        """Gives up every pull from an engine, and takes no further one from it."""
        engine.failure = engine.failure or reason
        for key in [pull.key for pull in self._pulls.values() if pull.engine is engine]:
            self.fail(key, reason)

    def poll(self) -> None:
        """Moves every pull on. Their outcomes are in `events`."""
        self.is_copying = False
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            pull = self._pulls.get(heapq.heappop(self._due)[1])
            if pull is not None and not pull.error:
                self._on_time(pull, now)
        for pull in list(self._moving.values()):
            self._advance(pull)

    def _on_time(self, pull: RankPull, now: float) -> None:
        if now >= pull.deadline:
            stage = "the fence" if pull.fencing else f"{len(pull.reading)} READs" if pull.reading else "more pages"
            self.fail(pull.key, f"timed out after {now - pull.started:.3g} s, waiting for {stage}")
        elif now >= pull.renew_at:
            pull.renew_at = now + pull.lease.duration_s / 3
            self._tell(pull, range(len(pull.engine.ranks)), "renew")
            self._expect(pull)

    def _advance(self, pull: RankPull) -> None:
        if not pull.error:
            self._post(pull)
        if pull.reading:
            self._collect_reads(pull)
        if not pull.error and not pull.reading and not pull.waiting and (not pull.more or pull.passed < pull.added):
            self._fence(pull)
        if pull.fencing:
            self._collect_fences(pull)
        if pull.in_flight or (not pull.error and not pull.fenced):
            if pull.in_flight or pull.waiting or not pull.more or pull.passed < pull.added:
                self._moving[pull.key] = pull
            else:
                self._moving.pop(pull.key, None)  # until there is more to read
            return
        if not pull.error:
            if len(pull.told) < len(pull.engine.ranks):
                self._tell(pull, set(range(len(pull.engine.ranks))) - pull.told, "done")
            self.events.append(self._ended_well(pull))
            return
        self._forget(pull)
        self.events.append(PullEvent(pull.key, pull.error, safe=True, passed=pull.passed))

    def _ended_well(self, pull: RankPull) -> PullEvent:
        self._forget(pull)
        now = self._clock()
        self.ended.append(PullRecord(pull.num_bytes, pull.num_runs, pull.post_s, now - pull.started))
        return PullEvent(pull.key, "", safe=True, times=PullTimes(pull.fence_at, now) if pull.fence_at else None)

    def _forget(self, pull: RankPull) -> None:
        del self._pulls[pull.key]
        self._moving.pop(pull.key, None)

    def _post(self, pull: RankPull) -> None:
        """Posts what is waiting; of what the posts themselves copy only a little, for others wait to be polled."""
        stop_at = pull.post_s + _SLICE_S
        while pull.waiting:
            part = pull.waiting[0]
            if pull.post_s > stop_at:
                self.is_copying = True
                return
            if len(pull.reading) >= _MOST_IN_FLIGHT or (not part.posted and not part.is_ready()):
                return
            last, background = part.next_transfer(background=id(pull.engine) not in self._behind)
            handle, done = self._read(pull, part, last)
            if handle is None:
                return
            if last == len(part.local):
                pull.waiting.popleft()
            if done:
                release_ended(pull.engine.agent, handle)
                self._came(pull, part, None)
                continue
            pull.reading.append((handle, part))
            if background:
                self._behind[id(pull.engine)] = handle

    def _read(self, pull: RankPull, part: Part, last: int) -> tuple[Handle | None, bool]:
        """Posts a part's runs up to `last`. Returns no handle where that failed."""
        first, there = part.posted, pull.engine.ranks[part.rank]
        whole = last - first == len(part.local)
        local, remote = (part.local, part.remote) if whole else (part.local[first:last], part.remote[first:last])
        begin = time.perf_counter()
        try:
            kinds = (self._memory_type, there.memory_type)
            handle, done = pull.engine.agent.read(there.agent_name, local, remote, b"", kinds)
        except AgentError as error:
            self._on_error(pull, error)
            if not part.in_flight:
                part.settle()
            return None, False
        pull.post_s += time.perf_counter() - begin
        if not first:
            pull.read_ranks.add(part.rank)
            pull.num_bytes += part.num_bytes
        pull.num_runs += last - first
        part.posted, part.in_flight = last, part.in_flight + 1
        return handle, done

    def _collect_reads(self, pull: RankPull) -> None:
        for entry in list(pull.reading):
            handle, part = entry
            ended, error = is_over(pull.engine.agent, handle)
            if not ended:
                continue
            pull.reading.remove(entry)
            if self._behind.get(id(pull.engine)) is handle:
                del self._behind[id(pull.engine)]
            self._came(pull, part, error)

    def _came(self, pull: RankPull, part: Part, error: AgentError | None) -> None:
        """A transfer of a part has ended, its handle is released."""
        part.in_flight -= 1
        if error is not None:
            self._on_error(pull, error)
        if part.is_here and part.arrived and not pull.error:
            self._use(pull, part.arrived)
        if not part.in_flight and (pull.error or part.is_here):
            part.settle()

    def _use(self, pull: RankPull, arrived: Callable[[], Part | None]) -> None:
        try:
            further = arrived()
        except TransferError as error:
            self._fail(pull, str(error))
            return
        if further is not None:
            pull.waiting.append(further)
            self._post(pull)

    def _fence(self, pull: RankPull) -> None:
        """Reads the lease word of every rank that was read from.

        While more is to come, that only marks what is here as good. The last time, our `done` rides on it.
        """
        if pull.fenced or pull.fencing:
            return
        if len(self._free) < len(pull.read_ranks):
            return  # another pull's fence ends first
        pull.marking = pull.added if pull.more else 0
        note = b"" if pull.more else encode_message(self._note(pull.lease, "done"))
        for rank in sorted(pull.read_ranks):
            slot = self._free.pop()
            self.words[slot] = CLEARED  # no lease: a fence that delivers nothing must not find an old word
            there = pull.engine.ranks[rank]
            word, address = self._address + slot * WORD_BYTES, there.words_addr + pull.lease.slot * WORD_BYTES
            try:
                handle = pull.engine.agent.read_word(there.agent_name, word, address, note)
            except AgentError as error:
                self._free.append(slot)
                self._on_error(pull, error)
                return
            pull.fencing.append((handle, rank, slot, handle is None))
        if not pull.fencing:
            self._passed(pull)
        elif self.timed:
            pull.fence_at = self._clock()

    def _passed(self, pull: RankPull) -> None:
        """All that was read before the fence was under the lease."""
        pull.passed = pull.marking or pull.added
        pull.fenced = not pull.marking

    def _collect_fences(self, pull: RankPull) -> None:
        for entry in list(pull.fencing):
            handle, rank, slot, done = entry
            ended, error = is_over(pull.engine.agent, handle, done=done)
            if not ended:
                continue
            pull.fencing.remove(entry)
            word = int(self.words[slot])
            self._free.append(slot)
            if error is not None:
                self._on_error(pull, error)
                continue
            if not pull.marking:
                pull.told.add(rank)
            if word != pull.lease.lease_id and not pull.error:
                self._fail(
                    pull,
                    f"engine {pull.engine.engine_id!r} rank {rank} had given the pages away: "
                    f"the lease {how_ended(pull.lease)}: "
                    f"its lease word {pull.lease.slot} holds {word:#x}, the lease is {pull.lease.lease_id:#x}",
                )
            elif not pull.fencing and not pull.error:
                self._passed(pull)

    def _on_error(self, pull: RankPull, error: AgentError) -> None:
        gone = "its process is gone, so its pages are to be computed, or had elsewhere: " if error.peer_lost else ""
        self._fail(pull, f"reading from engine {pull.engine.engine_id!r}: {gone}{error}")
        if error.peer_lost and not pull.engine.failure:
            pull.engine.failure = str(error)

    def _fail(self, pull: RankPull, reason: str) -> None:
        if pull.error:
            return  # the first reason is kept
        pull.error, pull.failed_at = reason, self._clock()
        if pull.waiting and pull.waiting[0].posted and not pull.waiting[0].in_flight:
            pull.waiting[0].settle()
        pull.waiting.clear()
        self._tell(pull, set(range(len(pull.engine.ranks))) - pull.told, "refused", reason)
        if pull.in_flight:
            self.events.append(PullEvent(pull.key, reason, safe=False))

    def _note(self, lease: LeaseRef, verdict: str, reason: str = "") -> ReaderNote:
        engine_id, rank, ranks = self._identity
        return ReaderNote(lease.lease_id, engine_id, rank, ranks, verdict, reason[:200])  # pyright: ignore[reportArgumentType]

    def _tell(self, pull: RankPull, ranks: set[int] | range, verdict: str, reason: str = "") -> None:
        """Sends a note to each rank. One that is lost costs the source time, not pages: its lease runs out."""
        if not ranks:
            return
        self._spoken.add(pull.engine)
        message = encode_message(self._note(pull.lease, verdict, reason))
        for rank in ranks:
            with suppress(AgentError):
                pull.engine.agent.notify(pull.engine.ranks[rank].agent_name, message)

    def stuck(self, seconds: float) -> list[RemoteEngine]:
        """Engines of pulls that failed so long ago, and whose copies NIXL still has not called ended."""
        before = self._clock() - seconds
        return list({pull.engine for pull in self._moving.values() if pull.error and pull.failed_at < before})

    def abandon(self, engine: RemoteEngine) -> list[RankPull]:
        """Fails an engine's pulls, and releases what is in flight of them without its end being known.

        Returns those that were in flight: the caller destroys the agent, and then calls `conclude`.
        """
        self.fail_engine(engine, engine.failure or "given up")
        pulls = [pull for pull in self._pulls.values() if pull.engine is engine]
        for pull in pulls:
            for handle in [entry[0] for entry in (*pull.reading, *pull.fencing)]:
                with suppress(AgentError):
                    engine.agent.release(handle)
        return pulls

    def conclude(self, pulls: list[RankPull]) -> None:
        """Ends abandoned pulls: their agent is gone, so nothing writes to their pages any more."""
        for pull in pulls:
            for _, part in pull.reading:
                part.settle()
            self._free += [entry[2] for entry in pull.fencing]
            self._behind.pop(id(pull.engine), None)
            pull.reading.clear()
            pull.fencing.clear()
            self._advance(pull)
