"""`PeerBlocks`: fetches blocks of a waiting prompt that other engines have cached.

A request waits in its engine's queue while a source is asked and its blocks are pulled. The blocks are pulled into free
blocks of the engine's pool and then published under the request's own hashes, so the engine finds them as if it had
computed them. Whatever fails, the blocks are given up, and the engine computes the prompt. No failure reaches the
engine, so vLLM's `kv_load_failure_policy` does not apply.

    new ──ask──► asking ──lent──► fenced ──► pulling ──► over: the request runs
         ask again ◄─┴── refused ◄─────────────┴── failed
                     └── no source is left, or the time is over ──► over
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvcache.replica.block_table import PageDigests
from scheduler_adapters.peers.hints import Hint, hints_of
from scheduler_adapters.pull_or_compute import PullOrCompute
from transfer.connector.metadata import Progress
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.errors import TransferError
from transfer.pull.asking import Lent, PageAsks
from transfer.pull.source import Contact, Source
from transfer.wire.messages import MAX_DIGEST_BYTES, Wanted
from transfer.wire.prompt import HashedPages

logger = logging.getLogger("pagewire.peers")

# Sources may take longer than `ask_timeout` to answer, up to this fraction of the time that computing would take.
_PATIENCE = 0.25
_PULL_S = 5.0  # in seconds: the longest time that a request waits for a pull
# In seconds: for how long a source that did not answer is not asked again. The time doubles with each failure.
_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_MOST_PAUSED = 4096
# How many queries to one source may wait for its answer. A source refuses more of one reader.
_MOST_ASKED = 32
_DROPPED = "its request has ended"


class HashedRequest(Protocol):
    """A request of an engine, whose full blocks the engine names by hashes."""

    @property
    def request_id(self) -> str: ...  # noqa: D102
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hash of each full block. It covers all that the block's KV depends on, except for `PeerPool.named`."""
        ...

    @property
    def num_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_output_tokens(self) -> int: ...  # noqa: D102
    @property
    def skip_reading_prefix_cache(self) -> bool | None: ...  # noqa: D102


R = TypeVar("R", bound=HashedRequest)
R_contra = TypeVar("R_contra", bound=HashedRequest, contravariant=True)


class TakenBlocks(NamedTuple):
    """Blocks that a pull fills, for the pages of a prompt from `firsts` up to `end`.

    Attributes:
        firsts: for each group, the first page that has a block.
        end: the page after the last one.
        block_ids: the blocks of each group.
    """

    firsts: tuple[int, ...]
    end: int
    block_ids: tuple[tuple[int, ...], ...]


class PeerPool(Protocol[R_contra]):
    """An engine's pool, in which pulled blocks are cached. Only the engine's thread may use it."""

    @property
    def page_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def hashed_by(self) -> str:
        """Names how blocks are hashed. Two engines with the same name have the same hashes."""
        ...

    @property
    def hash_bytes(self) -> int:
        """Bytes of a hash."""
        ...

    def number(self, block_hash: bytes) -> int:
        """Returns the number, below 2**64, by which routers know the block."""
        ...

    def named(self, request: R_contra) -> tuple[tuple[str, str], ...]:
        """Returns what the KV of a request depends on, and its hashes do not cover, as in a `Prompt`."""
        ...

    def take(self, first: int, end: int) -> TakenBlocks | None:
        """Takes free blocks for the pages from `first` to `end`. Returns None if too few are free."""
        ...

    def publish(self, request: R_contra, taken: TakenBlocks) -> None:
        """Makes filled blocks findable by the hashes of a request, and gives them up."""
        ...

    def give_up(self, taken: TakenBlocks) -> None:
        """Gives up taken blocks. Nothing may still write to them."""
        ...


@dataclass(slots=True, eq=False)
class _BlockFetch(Generic[R]):
    """The blocks that a request waits for.

    Attributes:
        request: the engine's request.
        hints: the sources that are still to be asked.
        key: names the current query, and then the pull.
        wanted: the pages that are asked for.
        named: as in a `Prompt`.
        since: when the first source was asked; 0 before.
        ask_s: how long its sources may take to answer, in seconds.
        until: when the request no longer waits, unless its next source answers.
        last: when the request no longer waits.
        lent: the source whose blocks are pulled, and the prompt's pages that it has lent.
        taken: the blocks that the pull fills.
        marker: the step that must have returned before the pull may write to them.
        is_pulling: whether the workers were told to pull.
    """

    request: R
    hints: deque[Hint]
    key: str = ""
    wanted: PageDigests | None = None
    named: tuple[tuple[str, str], ...] = ()
    since: float = 0.0
    ask_s: float = 0.0
    until: float = 0.0
    last: float = 0.0
    lent: Wanted | None = None
    taken: TakenBlocks | None = None
    marker: int = 0
    is_pulling: bool = False


class _Paused:
    """The sources that have not answered, and until when they are not asked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._until = clock, dict[Contact, tuple[float, float]]()

    def __contains__(self, contact: Contact) -> bool:
        return self._until.get(contact, (0.0, 0.0))[0] > self._clock()

    def failed(self, contact: Contact) -> None:
        pause = min(2 * self._until.pop(contact, (0.0, _PAUSE_S / 2))[1], _MAX_PAUSE_S)
        self._until[contact] = self._clock() + pause, pause
        if len(self._until) > _MOST_PAUSED:
            del self._until[next(iter(self._until))]

    def answered(self, contact: Contact) -> None:
        self._until.pop(contact, None)


class PeerBlocks(Generic[R]):
    """The prompts whose blocks are requested from other engines. Only the engine's thread may call it. No call waits.

    Args:
        connector: pulls the blocks.
        blocks: the engine's blocks.
        asks: asks the sources.
        ask_s: how long the sources of a request may take to answer, all together, in seconds.
        clock: a monotonic clock, in seconds.

    Attributes:
        estimate: the measured times of pulls and prompts.
        counts: prompts by outcome, and "peer_prefix_tokens", the tokens that were pulled.
    """

    def __init__(
        self,
        connector: NixlConnectorScheduler,
        blocks: PeerPool[R],
        asks: PageAsks,
        ask_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.estimate = PullOrCompute()
        self.counts = Counter[str]()
        self._connector, self._blocks, self._asks = connector, blocks, asks
        self._ask_s, self._clock = ask_s, clock
        self._waiting: dict[str, _BlockFetch[R]] = {}  # by request: those that have not been given up
        self._asking: dict[str, _BlockFetch[R]] = {}  # by key
        self._pulls: dict[str, _BlockFetch[R]] = {}  # by key: those that hold blocks
        self._leaders: dict[bytes, _BlockFetch[R]] = {}  # by the hash of the first page that is missing
        self._failed: set[str] = set()  # keys of pulls that have failed, until none of their READs is in flight
        self._paused = _Paused(clock)
        self._met: set[str] = set()  # the engines that were pulled from; a first contact is not measured
        self._serial = itertools.count()
        self._markers, self._returned = 0, 0
        self._computing: dict[str, tuple[R, float, int]] = {}  # by request: when it began, after which token

    @property
    def is_busy(self) -> bool:
        """Whether steps must run although no request does.

        Only the report of a step frees the blocks of a pull. A source that is still asked may lend blocks, which only a
        step gives back.
        """
        return bool(self._pulls) or self._asks.is_asking

    @property
    def holds_blocks(self) -> bool:
        """Whether a pull may still write to blocks."""
        return bool(self._pulls)

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request waits for blocks of other engines."""
        return request_id in self._waiting

    def begin(self, request: R) -> None:
        """Takes the hints of a new request."""
        hints = deque(hint for hint in hints_of(request) if hint.contact[1] != self._connector.config.engine_id)
        if hints and not request.skip_reading_prefix_cache:
            self._waiting[request.request_id] = _BlockFetch(request, hints)

    def waits(self, request: R, computed: int) -> bool:
        """Whether a request should wait for blocks of other engines. This engine has cached `computed` tokens of it."""
        request_id = request.request_id
        if (fetch := self._waiting.get(request_id)) is not None:
            if not fetch.since:
                self._start(fetch, computed)
            self.poll()
        if request_id in self._waiting:
            return True
        if request.num_prompt_tokens - computed >= self._blocks.page_size and not request.num_output_tokens:
            # the engine runs it now, or asks again
            self._computing[request_id] = request, self._clock(), computed
        return False

    def poll(self) -> None:
        """Takes the answers of sources, and gives up what takes too long."""
        for _, lent in self._asks.poll():
            if (fetch := self._asking.pop(lent.key, None)) is not None:
                self._on_lent(fetch, lent)
            elif lent.source is not None:
                give_back(self._connector)(0, lent.source, _DROPPED)
        now = self._clock()
        for fetch in [fetch for fetch in self._waiting.values() if fetch.until and now >= fetch.until]:
            self._paused.failed(fetch.hints[0].contact)
            self.drop(fetch.request.request_id, "it takes longer than it may")

    @property
    def marker(self) -> int:
        """The number that the next step must carry; 0 if none."""
        return max((fetch.marker for fetch in self._pulls.values() if not fetch.is_pulling), default=0)

    def returned(self, marker: int) -> None:
        """Starts the pulls that have waited for the step with this number to return."""
        self._returned = max(self._returned, marker)
        for fetch in [fetch for fetch in self._pulls.values() if not fetch.is_pulling]:
            if fetch.marker <= self._returned:
                self._pull(fetch)

    def update(self, progress: Progress) -> None:
        """Takes pulls that have failed or ended out of a report. Publishes the blocks of those that were successful."""
        for key in progress.failed.keys() & self._pulls.keys():
            self._failed.add(key)
            fetch, reason = self._pulls[key], progress.failed.pop(key)
            logger.info("request %r: %s", fetch.request.request_id, reason)
            self._go_on(fetch)
        for key in progress.received & self._pulls.keys():
            progress.received.remove(key)
            is_good = key not in self._failed and not progress.unwritten.pop(key, None)
            self._failed.discard(key)
            self._on_pulled(self._pulls.pop(key), is_good=is_good)

    def measure(self) -> None:
        """Measures the prompts that have been computed by now."""
        for request_id, (request, since, computed) in list(self._computing.items()):
            if request.num_output_tokens:
                del self._computing[request_id]
                self.estimate.compute.add(request.num_prompt_tokens - computed, self._clock() - since, computed)

    def drop(self, request_id: str, reason: str = _DROPPED) -> None:
        """Gives up the blocks of a request. A no-op if it waits for none."""
        self._computing.pop(request_id, None)
        if (fetch := self._waiting.get(request_id)) is not None:
            self._end(fetch, "unanswered" if fetch.lent is None else "failed")
            self._asking.pop(fetch.key, None)  # if the source still lends, the query gives its blocks back
        for key, pull in list(self._pulls.items()):
            if pull.request.request_id == request_id:
                self._cancel(key, reason)

    def forget(self, reason: str) -> None:
        """Gives up everything."""
        for request_id in {*self._waiting, *(fetch.request.request_id for fetch in self._pulls.values())}:
            self.drop(request_id, reason)

    def _cancel(self, key: str, reason: str) -> None:
        self._failed.add(key)
        self._connector.cancel(key, reason)

    def _start(self, fetch: _BlockFetch[R], computed: int) -> None:
        """Asks the first source for the pages that the engine lacks, if a pull is estimated to be quicker."""
        request, size = fetch.request, self._blocks.page_size
        first, last = computed // size, min(len(request.block_hashes), (request.num_tokens - 1) // size)
        hashes = [bytes(one) for one in request.block_hashes[first:last]][: MAX_DIGEST_BYTES // self._blocks.hash_bytes]
        leader = self._leaders.setdefault(hashes[0], fetch) if hashes else fetch
        if leader is not fetch:
            return  # another request waits for the same pages, so this one will find them
        fetch.since = self._clock()
        fetch.hints = deque(hint for hint in fetch.hints if hint.contact not in self._paused)
        numbers = [self._blocks.number(one) for one in hashes]
        pages = max((hint.pages(numbers) for hint in fetch.hints), default=0)
        rest = request.num_tokens - (first + pages) * size
        if not pages or not self.estimate.pays(first * size, pages * size, rest):
            self._end(fetch, "computed" if pages else "stale")
            return
        takes_s = self.estimate.compute.seconds(pages * size, first * size) or 0.0
        fetch.ask_s = max(self._ask_s, _PATIENCE * takes_s)
        fetch.until = fetch.since + fetch.ask_s
        fetch.last = fetch.until + _PULL_S
        named = self._blocks.named(request)
        fetch.wanted = PageDigests(size, self._blocks.hashed_by, b"".join(hashes[:pages]), first, named)
        self._ask(fetch)

    def _ask(self, fetch: _BlockFetch[R]) -> None:
        """Asks the next source that is not too busy. All sources of a request share its time."""
        left, is_busy = fetch.until - self._clock(), False
        while fetch.hints and self._asked(fetch.hints[0].contact) >= _MOST_ASKED:
            fetch.hints.popleft()
            is_busy = True
        if not fetch.hints or fetch.wanted is None or left <= 0:
            self._end(fetch, "busy" if is_busy else "stale")
            return
        fetch.key = f"{fetch.request.request_id}?{next(self._serial)}"
        self._asking[fetch.key] = fetch
        self._asks.ask(0, fetch.key, fetch.hints[0].contact, fetch.wanted, left / len(fetch.hints))

    def _asked(self, contact: Contact) -> int:
        return sum(one.hints[0].contact == contact for one in self._asking.values())

    def _go_on(self, fetch: _BlockFetch[R]) -> None:
        """Asks the next source after one whose blocks could not be pulled. Without one, the request runs.

        The failed pull keeps the blocks that it may still write to, so the next one gets others.
        """
        request, now = fetch.request, self._clock()
        if self._waiting.get(request.request_id) is not fetch:
            return
        self._paused.failed(fetch.hints[0].contact)
        hints, until = deque(list(fetch.hints)[1:]), min(now + fetch.ask_s, fetch.last)
        if not hints:
            self._end(fetch, "failed")
            return
        again = replace(fetch, hints=hints, since=now, until=until, lent=None, taken=None, marker=0, is_pulling=False)
        self._waiting[request.request_id] = again
        self._leaders.update({one: again for one, leader in self._leaders.items() if leader is fetch})
        self._ask(again)

    def _on_lent(self, fetch: _BlockFetch[R], lent: Lent) -> None:
        contact = fetch.hints[0].contact
        if lent.error:
            self._paused.failed(contact)
            logger.info("request %r: %s", fetch.request.request_id, lent.error)
        else:
            self._paused.answered(contact)
        if lent.source is None or lent.table is None or fetch.wanted is None:
            fetch.hints.popleft()
            self._ask(fetch)
            return
        first, end = fetch.wanted.first_page, lent.table.num_tokens // self._blocks.page_size
        wanted = self._lease(fetch.wanted, lent.source, end)
        if len(lent.table.digests) != (end - first) * self._blocks.hash_bytes:
            self._connector.refuse(wanted, "it holds more pages than this engine asked for")
            self._go_on(fetch)
            return
        if (taken := self._blocks.take(first, end)) is None:
            self._connector.refuse(wanted, "too few blocks are free at the reader")
            self._end(fetch, "no_room")
            return
        self._markers += 1
        fetch.lent, fetch.taken, fetch.marker = wanted, taken, self._markers
        fetch.until = min(self._clock() + _PULL_S, fetch.last)
        self._pulls[fetch.key] = fetch
        self._connector.hold(fetch.key, wanted)

    def _lease(self, wanted: PageDigests, source: Source, end: int) -> Wanted:
        """Returns the lease to read from, with the digest that its pages must have."""
        size, algorithm, digests, first, named = wanted
        pages = HashedPages(size, algorithm, digests, self._blocks.hash_bytes, first, named)
        tokens = end * size
        return Wanted(source.address, source.engine_id, source.lease.lease_id, tokens, pages.digest(tokens), named)

    def _pull(self, fetch: _BlockFetch[R]) -> None:
        fetch.is_pulling = True
        taken, lent, wanted = fetch.taken, fetch.lent, fetch.wanted
        if taken is None or lent is None or wanted is None or fetch.key in self._failed:
            return  # it was cancelled, and ends when no rank holds the lease any more
        first = wanted.first_page * self._blocks.page_size
        try:
            self._connector.load(fetch.key, lent, taken.block_ids, lent.num_tokens, first, first_blocks=taken.firsts)
        except TransferError as error:
            logger.info("request %r: %s", fetch.request.request_id, error)
            self._cancel(fetch.key, str(error))
            self._go_on(fetch)

    def _on_pulled(self, fetch: _BlockFetch[R], *, is_good: bool) -> None:
        taken, lent, wanted = fetch.taken, fetch.lent, fetch.wanted
        if taken is None or lent is None or wanted is None:
            return
        if not is_good:
            self._blocks.give_up(taken)
            self._go_on(fetch)
            return
        self._blocks.publish(fetch.request, taken)
        tokens = lent.num_tokens - wanted.first_page * self._blocks.page_size
        self.counts["peer_prefix_tokens"] += tokens
        if lent.engine_id in self._met:
            self.estimate.pull.add(tokens, self._clock() - fetch.since)
        self._met.add(lent.engine_id)
        self._end(fetch, "pulled")

    def _end(self, fetch: _BlockFetch[R], outcome: str) -> None:
        """Lets the request run."""
        if self._waiting.get(fetch.request.request_id) is fetch:
            del self._waiting[fetch.request.request_id]
            self.counts[outcome] += 1
        for leading in [one for one, leader in self._leaders.items() if leader is fetch]:
            del self._leaders[leading]

    def close(self) -> None:
        """Drops all queries. Safe to call twice."""
        self._asks.close()


def give_back(connector: NixlConnectorScheduler) -> Callable[[int, Source, str], None]:
    """Returns the function by which a `PageAsks` gives back leases that cannot be used."""

    def refuse(_: int, source: Source, reason: str) -> None:
        connector.refuse(Wanted(source.address, source.engine_id, source.lease.lease_id, 0, b""), reason)

    return refuse


def kinds_of(windows: Sequence[int]) -> tuple[str, ...]:
    """Returns the kinds of groups with these windows, as in a `BlockTable`. Empty if none has a window."""
    return tuple("window" if window else "full" for window in windows) if any(windows) else ()
