"""Tracks which pages each process has cached, from its KV events, to choose the sources (`kv_sources`) of a request.

Only the low eight bytes of each digest are kept, so the tracker can name a wrong source. A wrong source costs one
useless query, because the queried process compares whole digests and answers which of the pages it has. If a process
publishes no events, the frontend names no source. The decode process then guesses the sources from the prompts that it
has sent to each prefill process.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

from kvcache.endpoints.sockets import connect, keep_alive
from kvcache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, hashes_of
from kvcache.layer_groups import LayerGroup, TableGroup
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.resume import resume
from kvcache.weights import Segment
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import received

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvcache.events.wire import Hashes
    from kvcache.params import HashAlgorithm
    from scheduler_adapters.service.sockets import Context, Socket

MOST_PAGES = 1 << 22
"""The most pages kept for one process, layer group and medium (32 MiB). Pages beyond this limit are ignored."""
_MOST_NAMED = 3
# The most unread batches of a subscriber. A subscriber that misses batches receives the whole state again.
_MOST_UNREAD = 10_000
_decoder = msgspec.msgpack.Decoder(EventBatch)


class PageSet:
    """A set of pages, identified by the low 64 bits of their digests.

    The set is a sorted array, and the pages that were added or removed since the array was sorted.
    """

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most = most
        self._sorted: Hashes = np.zeros(0, np.uint64)
        self._come: set[int] = set()
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._come) - len(self._gone)

    def add(self, hashes: Sequence[int]) -> None:
        """Adds pages."""
        self._gone.difference_update(hashes)
        array = np.array(hashes, np.uint64)
        new = array[~self._in_sorted(array)].tolist()
        self._come.update(new[: max(0, self._most - len(self))])
        self._settle()

    def remove(self, hashes: Sequence[int]) -> None:
        """Removes pages."""
        self._come.difference_update(hashes)
        array = np.array(hashes, np.uint64)
        self._gone.update(array[self._in_sorted(array)].tolist())
        self._settle()

    def clear(self) -> None:
        """Removes all pages."""
        self._sorted = np.zeros(0, np.uint64)
        self._come.clear()
        self._gone.clear()

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Returns whether the set has each page, as bool `[hashes]`."""
        there, numbers = self._in_sorted(hashes), hashes.tolist()
        if self._gone:
            there &= [one not in self._gone for one in numbers]
        if self._come:
            there |= [one in self._come for one in numbers]
        return there

    def _in_sorted(self, hashes: Hashes) -> NDArray[np.bool_]:
        if not self._sorted.size:
            return np.zeros(len(hashes), np.bool_)
        at = np.searchsorted(self._sorted, hashes)
        return self._sorted[np.minimum(at, len(self._sorted) - 1)] == hashes

    def _settle(self) -> None:
        """Merges the changes into the sorted array once there are many.

        A number in a Python set takes ten times as much memory.
        """
        if len(self._come) + len(self._gone) > 64 + len(self._sorted) // 32:
            gone = np.fromiter(self._gone, np.uint64, len(self._gone))
            kept = np.delete(self._sorted, np.searchsorted(self._sorted, gone)) if len(gone) else self._sorted
            come = np.sort(np.fromiter(self._come, np.uint64, len(self._come)))
            self._sorted = np.insert(kept, np.searchsorted(kept, come), come)
            self._come.clear()
            self._gone.clear()


class _ProcessPages:
    """The pages of one process, as its event stream reports them.

    `pages` has them by group and medium. Each block table is a group, and recurrent states are the last one. A page may
    be in several media at once.
    """

    def __init__(self, context: Context, ready: msg.Ready) -> None:
        self.ready = ready
        self.pages: dict[tuple[int, str | None], PageSet] = {}
        groups = ready.layer_groups or (LayerGroup("full", (0,)),)
        self._tables = [TableGroup(group, slice(at, at + 1)) for at, group in enumerate(groups)]
        self._context = context
        self._last: int | None = None
        self._socket = self._subscribed()

    def poll(self) -> None:
        """Applies the events that have arrived."""
        for frames in received(self._socket):
            if len(frames) != 3 or len(frames[1]) != 8:
                continue
            number = int.from_bytes(frames[1], "big")
            # batches were lost; a new subscriber gets the whole state
            if self._last is not None and number != self._last + 1:
                self.close()
                self.pages.clear()
                self._last, self._socket = None, self._subscribed()
                return
            self._last = number
            with suppress(msgspec.DecodeError, UnicodeDecodeError, OverflowError):
                for event in _decoder.decode(frames[2]).events:
                    self._take(event)

    def tokens_of(self, hashes: Hashes) -> int:
        """Returns the tokens of the longest prefix of a prompt after which the process could resume a request.

        Every layer group must have the pages that a query there sees, each in any medium. A window has freed the pages
        before it. `hashes` are those of the prompt's full pages.
        """
        there = np.zeros((len(self._tables) + 1, len(hashes)), np.bool_)  # the last row is for recurrent states
        for (group, _), some in self.pages.items():
            there[group] |= some.has(hashes)
        ends = there[-1] if self.ready.has_states else None
        return resume(there[:-1], self._tables, self.ready.page_size, ends=ends) * self.ready.page_size

    def close(self) -> None:
        """Stops following the process."""
        self._socket.close(0)

    def _take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """Applies one event. Events of groups that the process has not named are ignored."""
        if isinstance(event, AllBlocksCleared):
            self.pages.clear()
        elif 0 <= (group := event.group_idx or 0) < len(self._tables) + self.ready.has_states:
            some = self.pages.setdefault((group, event.medium), PageSet())
            (some.add if isinstance(event, BlockStored) else some.remove)(event.block_hashes)

    def _subscribed(self) -> Socket:
        socket: Socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _MOST_UNREAD)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        keep_alive(socket)
        connect(socket, self.ready.kv_events)
        return socket


class PageHolders:
    """The cached pages of the processes that publish KV events. Single-threaded."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._followed: dict[str, _ProcessPages] = {}
        self._are_all = False

    def follow(self, members: Iterable[msg.Ready]) -> None:
        """Sets the processes to follow, and applies the events since the last call."""
        members = list(members)
        there = {one.name: one for one in members if one.kv_events and one.engines}
        self._are_all = len(there) == len(members)
        for name, known in list(self._followed.items()):
            if name not in there or there[name].incarnation != known.ready.incarnation:
                self._followed.pop(name).close()
        for name, ready in there.items():
            if name not in self._followed:
                self._followed[name] = _ProcessPages(self._context, ready)
        self._poll()

    def sources(self, prompt: Sequence[int], salt: str | None, prefill: str, weights: str = "") -> msg.KVSources:
        """Returns the processes that have more tokens of a prompt cached than `prefill`, which computes the prompt.

        Only pages of these `weights` count, whichever weights a process has now.

        Returns at most three processes, the process with the most cached tokens first. If `prefill` is empty, every
        process with cached pages is eligible. Returns no process unless all processes publish events.
        """
        if not self._are_all:
            return ()
        self._poll()
        kinds: set[tuple[HashAlgorithm, int]] = set()
        kinds.update((one.ready.hash_algorithm, one.ready.page_size) for one in self._followed.values())
        hashes = {kind: _hashes(prompt, salt, *kind, weights) for kind in kinds}
        tokens = {
            name: one.tokens_of(hashes[one.ready.hash_algorithm, one.ready.page_size])
            for name, one in self._followed.items()
        }
        least = tokens.get(prefill, 0)
        best = sorted((name for name in tokens if tokens[name] > least), key=tokens.__getitem__, reverse=True)
        known = [(self._followed[name].ready, tokens[name]) for name in best[:_MOST_NAMED]]
        return tuple(msg.KVSource(ready.pulse, ready.engines, count) for ready, count in known)

    def close(self) -> None:
        """Stops following all processes."""
        self.follow(())

    def _poll(self) -> None:
        for one in self._followed.values():
            one.poll()


def _hashes(
    prompt: Sequence[int], salt: str | None, algorithm: HashAlgorithm, page_size: int, weights: str = ""
) -> Hashes:
    """Returns the hashes of the prompt's full pages. The last token is left out, because it must always be computed."""
    hasher = PrefixHasher(algorithm, page_size, salt, segments=(Segment(0, bytes.fromhex(weights) or None),))
    return hashes_of(hasher.digests(np.array(prompt, np.int32), 0, (len(prompt) - 1) // page_size))
