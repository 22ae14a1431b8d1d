"""The reading side of one rank: READs of pages, the fence after them, and a record of everything in flight.

A failing pull ends in two steps, which may be far apart. It *fails* as soon as a reason is known. Its pages are *safe*
when none of its READs is in flight: NIXL cannot stop a copy, so bytes may still arrive in the pages until then.

NIXL copies a small READ, and the READ of the lease word after it, within the call that posts it. A small pull has
therefore ended as soon as it is posted, and needs none of the state that other pulls need: see `Puller.pull_at_once`.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress

from transfer.errors import AgentError, PullFailedError, TransferError
from transfer.failures import Failure, FailureKind
from transfer.memory import MemoryType
from transfer.nixl.agent import WORD_BYTES, Handle, is_over
from transfer.pull.lease import CLEARED, LeaseRef, make_words
from transfer.pull.parts import Part
from transfer.pull.pull_state import PullEvent, PullTimes, RankPull, check_opening, how_ended
from transfer.pull.remote import RemoteEngine
from transfer.stats import PullRecord
from transfer.wire.messages import RankMetadata, ReaderNote, encode_message

_GONE = "its process is gone, or has moved or freed its pages; compute the prompt or pull it from another engine: "
_SLICE_S = 0.3e-3
_READ = "was read before, and this process has told the source that it is done with it"
_GIVEN_BACK = "was given back by this process, because an earlier pull had failed: "
_REMEMBERED = 4096
"""How many leases are remembered whose pulls have ended."""
LATELY_S = 1.0
"""In seconds. NIXL may take this long to send a message to a source, and needs polls of its agent during this time."""
_MOST_IN_FLIGHT = 8
"""How many transfers of one pull may be in flight at the same time, if a post returns before its copy ends.

Together they have 32 MiB on the wire, besides the background transfer.
"""


class Puller:
    """The pulls of one rank. Single-threaded: the thread that owns the agents makes all calls.

    `identity` is the engine id, the rank and the number of ranks. Notes to sources carry these values. `words` is the
    largest number of lease words that can be read at the same time.

    Attributes:
        words: uint64 `[words]`, the buffer into which fences read lease words. It must be registered with every agent.
        events: outcomes of pulls. The owner removes them.
        ended: records of successful pulls. The owner removes them.
        num_posted: number of READs (of pages or of lease words) that were still in flight when the call that posted
            them returned.
        is_copying: whether a pull has more bytes to copy, so that the next poll should follow at once.
        timed: whether the events of successful pulls carry the times of their last fence.
    """

    def __init__(
        self,
        identity: tuple[str, int, int],
        *,
        memory_type: MemoryType = MemoryType.DRAM,
        words: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.words = make_words(words)
        self.events: deque[PullEvent] = deque()
        self.ended: deque[PullRecord] = deque(maxlen=4096)
        self._identity = identity
        self._memory_type, self._clock = memory_type, clock
        self._address = self.words.ctypes.data
        self._free = list(range(words))
        self._spoken: dict[RemoteEngine, float] = {}  # by source: when a message was last sent to it
        # How the leases have ended that this rank has lately read or given back, for the message of a later pull.
        self._said: OrderedDict[int, str] = OrderedDict()
        self._pulls: dict[str, RankPull] = {}
        self._moving: dict[str, RankPull] = {}  # the pulls that a poll may advance
        # A heap of times and keys: when the lease of a pull must be renewed, or when the pull times out. A pull may
        # have ended before its time.
        self._due: list[tuple[float, str]] = []
        # For each source, by `id` of its `RemoteEngine`: the transfer that NIXL's thread copies.
        self._behind: dict[int, Handle] = {}
        self.num_posted = 0
        self.is_copying = self.timed = False

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def is_reading(self) -> bool:
        """Whether a READ is in flight or about to be posted.

        A pull that waits until its owner names pages does not count.
        """
        return any(pull.in_flight or pull.waiting for pull in self._moving.values())

    @property
    def is_moving(self) -> bool:
        """Whether a poll may advance a pull."""
        return bool(self._moving)

    def engines_in_use(self) -> set[RemoteEngine]:
        """Returns the engines whose agents need polls: a pull from them may advance, or they got a message recently."""
        before = self._clock() - LATELY_S
        for engine in [engine for engine, at in self._spoken.items() if at <= before]:
            del self._spoken[engine]
        return {*self._spoken, *(pull.engine for pull in self._moving.values())}

    def uses(self, engine: RemoteEngine) -> bool:
        """Whether an open pull reads from an engine."""
        return any(pull.engine is engine for pull in self._pulls.values())

    def open(self, key: str, engine: RemoteEngine, lease: LeaseRef, timeout_s: float) -> RankPull:
        """Opens a pull: from now on its lease is renewed, and `add` may read. No open pull may have this key.

        Raises:
            InvalidTransferError: the source has no such lease word, or a time is invalid.
            PullFailedError: the source is known to be gone.
        """
        check_opening(key, engine, lease, timeout_s)
        now = self._spoken[engine] = self._clock()
        return self._opened(key, engine, lease, now + timeout_s, now)

    def _opened(self, key: str, engine: RemoteEngine, lease: LeaseRef, deadline: float, started: float) -> RankPull:
        pull = RankPull(key, engine, engine.agent, lease, deadline, started, started + lease.duration_s / 3)
        self._pulls[key] = pull
        self._expect(pull)
        return pull

    def _expect(self, pull: RankPull) -> None:
        heapq.heappush(self._due, (min(pull.deadline, pull.renew_at), pull.key))

    def pull_at_once(
        self, key: str, engine: RemoteEngine, lease: LeaseRef, timeout_s: float, part: Part
    ) -> PullEvent | RankPull:
        """Runs a pull of a single part from an engine with one rank. Completes the pull within this call if possible.

        The pull has ended if its READ and its fence ended as soon as they were posted, and the lease word held the
        lease's id. Otherwise the pull continues as a normal pull. Raises the same errors as `open`.

        Returns:
            The event of a successful pull, which is not added to `events`. Otherwise the pull.
        """
        check_opening(key, engine, lease, timeout_s)
        started = self._spoken[engine] = self._clock()
        agent, there, begin = engine.agent, engine.ranks[part.rank], time.perf_counter()
        reading = fencing = error = None
        post_s, word_idx = 0.0, -1
        try:
            reading = agent.read(there.agent_name, part.local, part.remote, (self._memory_type, there.memory_type))
            post_s = time.perf_counter() - begin
            if reading is None and self._free:  # if no word is free, another pull's fence must end first
                word_idx = self._cleared()
                fencing = agent.read_word(there.agent_name, *self._word(word_idx, there, lease), self._done(lease))
        except AgentError as failed:
            error = failed
        if word_idx >= 0 and fencing is None and error is None and self.words.item(word_idx) == lease.lease_id:
            self._free.append(word_idx)
            now = self._clock()
            self._remember(lease, _READ)
            self.ended.append(PullRecord(part.num_bytes, len(part.local), post_s, now - started))
            return PullEvent(key, "", True, 0, PullTimes(started + post_s, now) if self.timed else None)
        pull = self._opened(key, engine, lease, started + timeout_s, started)
        pull.more, pull.added, pull.post_s = False, 1, post_s
        pull.posted(part, len(part.local))
        if reading is not None:
            self._in_flight(pull, reading, part)
        if error is not None:
            self._free += [word_idx] * (word_idx >= 0)
            self._on_error(pull, error)
        elif fencing is not None:
            self._fence_in_flight(pull, fencing, part.rank, word_idx)
        elif word_idx >= 0:
            self._holds(pull, part.rank, word_idx)
        self._advance(pull)
        return pull

    def add(self, pull: RankPull, parts: list[Part], *, last: bool) -> None:
        """Adds parts that a pull must read, and a fence after them. With `last`, this fence ends the pull.

        Raises:
            PullFailedError: the pull has failed, or its last part was already added.
        """
        if pull.error or not pull.more:
            failure = pull.error or Failure(FailureKind.OTHER, "its last part was already added")
            raise PullFailedError(f"request {pull.key!r}: {failure.text}", failure.kind)
        pull.waiting += [part for part in parts if len(part.local)]
        pull.more = not last
        pull.added += 1
        self._advance(pull)

    def fail(self, pull: RankPull, failure: Failure) -> None:
        """Gives up a pull. Does nothing if the pull has ended or failed."""
        if not (pull.is_over or pull.error):
            self._fail(pull, failure)
            self._advance(pull)

    def withdraw(self, pull: RankPull, failure: Failure) -> None:
        """Gives up a pull for an owner that watches the pull's state directly and needs no event.

        If the pull has ended by now, its event is removed, because it could be mistaken for an event of a later pull
        with the same key.
        """
        self.fail(pull, failure)
        if pull.is_over:
            self.events = deque(event for event in self.events if event.key != pull.key)

    def fail_engine(self, engine: RemoteEngine, failure: Failure) -> None:
        """Gives up every pull from an engine, and accepts no further pulls from it."""
        engine.failure = engine.failure or failure
        for pull in [pull for pull in self._pulls.values() if pull.engine is engine]:
            self.fail(pull, failure)

    def poll(self) -> None:
        """Advances every pull. Outcomes are added to `events`."""
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
            text = f"timed out after {now - pull.started:.3g} s, waiting for {stage}"
            self.fail(pull, Failure(FailureKind.TIMEOUT, text))
        elif now >= pull.renew_at:
            pull.renew_at = now + pull.lease.duration_s / 3
            self._tell(pull, range(len(pull.engine.ranks)), "renew")
            self._expect(pull)

    def _advance(self, pull: RankPull) -> None:
        if pull.waiting:
            self._post(pull)
        if pull.reading:
            self._collect_reads(pull)
        if not (pull.error or pull.reading or pull.waiting) and (not pull.more or pull.passed < pull.added):
            self._fence(pull)
        if pull.fencing:
            self._collect_fences(pull)
        if pull.in_flight or not (pull.error or pull.fenced):
            if pull.in_flight or pull.waiting or not pull.more or pull.passed < pull.added:
                self._moving[pull.key] = pull
            else:
                self._moving.pop(pull.key, None)  # polls skip the pull until its owner names more pages
            return
        del self._pulls[pull.key]
        self._moving.pop(pull.key, None)
        pull.is_over = True
        self.events.append(
            self._ended_well(pull) if not pull.error else PullEvent(pull.key, pull.error.text, True, pull.passed)
        )

    def _ended_well(self, pull: RankPull) -> PullEvent:
        if len(pull.told) < len(pull.engine.ranks):
            self._tell(pull, set(range(len(pull.engine.ranks))).difference(pull.told), "done")
        self._remember(pull.lease, _READ)
        now = pull.over_at = self._clock()
        self.ended.append(PullRecord(pull.num_bytes, pull.num_runs, pull.post_s, now - pull.started))
        return PullEvent(pull.key, "", True, 0, PullTimes(pull.fence_at, now) if pull.fence_at else None)

    def _post(self, pull: RankPull) -> None:
        """Posts waiting parts. Stops after a time slice of copying, because peers and other pulls wait to be polled."""
        stop_at, engine = pull.post_s + _SLICE_S, pull.engine
        while pull.waiting:
            part = pull.waiting[0]
            if pull.post_s > stop_at:
                self.is_copying = True
                return
            first = part.posted
            if len(pull.reading) >= _MOST_IN_FLIGHT or not (first or part.is_ready()):
                return
            last, background = part.next_transfer(background=id(engine) not in self._behind)
            there, begin = engine.ranks[part.rank], time.perf_counter()
            try:
                runs, kinds = part.runs(last), (self._memory_type, there.memory_type)
                handle = pull.agent.read(there.agent_name, *runs, kinds)
            except AgentError as error:
                self._on_error(pull, error)
                if not part.in_flight:
                    part.settle()
                return
            pull.post_s += time.perf_counter() - begin
            pull.posted(part, last)
            if last == len(part.local):
                del pull.waiting[0]
            if handle is None:
                self._came(pull, part)
                continue
            self._in_flight(pull, handle, part)
            if background:
                self._behind[id(engine)] = handle

    def _in_flight(self, pull: RankPull, handle: Handle, part: Part) -> None:
        part.in_flight += 1
        pull.reading.append((handle, part))
        self.num_posted += 1

    def _fence_in_flight(self, pull: RankPull, handle: Handle, rank: int, word_idx: int) -> None:
        pull.fencing.append((handle, rank, word_idx))
        self.num_posted += 1

    def _collect_reads(self, pull: RankPull) -> None:
        for entry in list(pull.reading):
            handle, part = entry
            ended, error = is_over(pull.agent, handle)
            if not ended:
                continue
            pull.reading.remove(entry)
            part.in_flight -= 1
            if self._behind.get(id(pull.engine)) is handle:
                del self._behind[id(pull.engine)]
            if error is not None:
                self._on_error(pull, error)
            self._came(pull, part)

    def _came(self, pull: RankPull, part: Part) -> None:
        """Handles the end of one transfer of a part. The transfer's handle has already been released."""
        if part.in_flight:
            return
        if part.is_here and part.arrived and not pull.error:
            self._use(pull, part.arrived)
        if part.is_here or pull.error:
            part.settle()

    def _use(self, pull: RankPull, arrived: Callable[[], Part | None]) -> None:
        try:
            further = arrived()
        except TransferError as error:
            self._fail(pull, error.failure)
            return
        if further is not None:
            pull.waiting.append(further)
            self._post(pull)

    def _fence(self, pull: RankPull) -> None:
        """Reads the lease word of every rank that was read from.

        If more pages will follow, the fence only confirms the pages read so far. The last fence of a pull also carries
        our `done` note.
        """
        if pull.fenced or pull.fencing or len(self._free) < len(pull.read_ranks):
            return  # if too few words are free, another pull's fence must end first
        pull.marking = pull.added if pull.more else 0
        note = b"" if pull.more else self._done(pull.lease)
        if self.timed and pull.read_ranks:
            pull.fence_at = self._clock()
        for rank in sorted(pull.read_ranks):
            word_idx, there = self._cleared(), pull.engine.ranks[rank]
            try:
                handle = pull.agent.read_word(there.agent_name, *self._word(word_idx, there, pull.lease), note)
            except AgentError as error:
                self._free.append(word_idx)
                self._on_error(pull, error)
                return
            if handle is not None:
                self._fence_in_flight(pull, handle, rank, word_idx)
            elif not self._holds(pull, rank, word_idx):
                return
        if not pull.fencing:
            self._passed(pull)

    def _cleared(self) -> int:
        """Takes a free word of the buffer and clears it.

        If the READ of a lease word then delivers nothing, the cleared word holds no lease id, and the pull fails.
        """
        word_idx = self._free.pop()
        self.words[word_idx] = CLEARED
        return word_idx

    def _word(self, word_idx: int, there: RankMetadata, lease: LeaseRef) -> tuple[int, int]:
        """Returns the address of the word `word_idx` of our buffer, and the address of the lease word at the source."""
        return self._address + word_idx * WORD_BYTES, there.words_addr + lease.word_idx * WORD_BYTES

    def _done(self, lease: LeaseRef) -> bytes:
        return encode_message(self._note(lease, "done"))

    def _passed(self, pull: RankPull) -> None:
        """Records that a fence has passed: all pages that were read before it were copied while the lease was open."""
        pull.passed = pull.marking or pull.added
        pull.fenced = not pull.marking

    def _collect_fences(self, pull: RankPull) -> None:
        for entry in list(pull.fencing):
            handle, rank, word_idx = entry
            ended, error = is_over(pull.agent, handle)
            if not ended:
                continue
            pull.fencing.remove(entry)
            if error is not None:
                self._free.append(word_idx)
                self._on_error(pull, error)
            elif self._holds(pull, rank, word_idx) and not pull.fencing and not pull.error:
                self._passed(pull)

    def _holds(self, pull: RankPull, rank: int, word_idx: int) -> bool:
        """Returns whether the lease word that was read from a rank holds the lease's id. If not, fails the pull."""
        word = self.words.item(word_idx)
        self._free.append(word_idx)
        if not pull.marking:
            pull.told.append(rank)
        if word == pull.lease.lease_id:
            return True
        text = (
            f"engine {pull.engine.engine_id!r} rank {rank} no longer held the pages: "
            f"the lease {how_ended(pull.lease, self._said.get(pull.lease.lease_id, ''))}: "
            f"its lease word {pull.lease.word_idx} holds {word:#x} instead of {pull.lease.lease_id:#x}"
        )
        self._fail(pull, Failure(FailureKind.LEASE_OVER, text))
        return False

    def _on_error(self, pull: RankPull, error: AgentError) -> None:
        gone = _GONE if error.peer_lost else ""
        self._fail(pull, Failure(error.kind, f"reading from engine {pull.engine.engine_id!r}: {gone}{error}"))
        if error.peer_lost and not pull.engine.failure:
            pull.engine.failure = error.failure

    def _fail(self, pull: RankPull, failure: Failure) -> None:
        if pull.error:
            return  # the first failure is kept
        pull.error, pull.failed_at = failure, self._clock()
        if pull.waiting and pull.waiting[0].posted and not pull.waiting[0].in_flight:
            pull.waiting[0].settle()
        pull.waiting.clear()
        if failure.kind is not FailureKind.LEASE_OVER:
            self._remember(pull.lease, _GIVEN_BACK + failure.text)
        self._tell(pull, set(range(len(pull.engine.ranks))).difference(pull.told), "refused", failure.text)
        if pull.in_flight:
            self.events.append(PullEvent(pull.key, failure.text, safe=False))

    def _note(self, lease: LeaseRef, verdict: str, reason: str = "") -> ReaderNote:
        engine_id, rank, ranks = self._identity
        return ReaderNote(lease.lease_id, engine_id, rank, ranks, verdict, reason[:200])  # pyright: ignore[reportArgumentType]

    def _tell(self, pull: RankPull, ranks: set[int] | range, verdict: str, reason: str = "") -> None:
        """Sends a note to each rank. If a note is lost, the source only loses time, because the lease expires."""
        if not ranks:
            return
        self._spoken[pull.engine] = self._clock()
        message = encode_message(self._note(pull.lease, verdict, reason))
        for rank in ranks:
            with suppress(AgentError):
                pull.agent.notify(pull.engine.ranks[rank].agent_name, message)

    def _remember(self, lease: LeaseRef, how: str) -> None:
        self._said[lease.lease_id] = how
        if len(self._said) > _REMEMBERED:
            self._said.popitem(last=False)

    def stuck(self, seconds: float) -> list[RemoteEngine]:
        """Returns the engines of pulls that failed at least this many seconds ago and still have copies in flight."""
        before = self._clock() - seconds
        return list({pull.engine for pull in self._moving.values() if pull.error and pull.failed_at < before})

    def abandon(self, engine: RemoteEngine) -> list[RankPull]:
        """Fails an engine's pulls, and releases their handles although the copies may still be in flight.

        Returns all pulls from the engine. The caller destroys the agent and then calls `conclude`.
        """
        self.fail_engine(engine, engine.failure or Failure(FailureKind.SOURCE_GONE, "given up"))
        pulls = [pull for pull in self._pulls.values() if pull.engine is engine]
        for pull in pulls:
            for handle in [entry[0] for entry in (*pull.reading, *pull.fencing)]:
                with suppress(AgentError):
                    engine.agent.release(handle)
        return pulls

    def conclude(self, pulls: list[RankPull]) -> None:
        """Ends the pulls that `abandon` returned. Their agent is destroyed, so no copy writes to their pages."""
        for pull in pulls:
            for _, part in pull.reading:
                part.settle()
            self._free += [entry[2] for entry in pull.fencing]
            self._behind.pop(id(pull.engine), None)
            pull.reading.clear()
            pull.fencing.clear()
            self._advance(pull)
