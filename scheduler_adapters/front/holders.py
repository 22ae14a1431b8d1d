"""The pages of each process, by KV events: the front names sources (`kv_sources`) for requests that name none.

Kept are eight bytes of each page's digest, so this is a guess that now and then costs a question: a source is asked by
whole digests, and says what it has. Where not every process publishes events, decode guesses by what it has asked for.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

from kvcache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, hashes_of
from kvcache.replica.hashing import PrefixHasher
from kvcache.sockets import keep_alive
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.sockets import received

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvcache.events.wire import Hashes
    from kvcache.params import HashAlgorithm
    from scheduler_adapters.service.sockets import Context, Socket

MOST_PAGES = 1 << 22
"""The most pages kept for one process (32 MiB). Pages beyond this limit are ignored."""
_MOST_NAMED = 3
_MOST_UNREAD = 10_000  # batches; a reader that misses some receives the whole state again
_decoder = msgspec.msgpack.Decoder(EventBatch)


class PageSet:
    """Pages, by the low 64 bits of their digests: a sorted array, and what has changed since it was made."""

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most = most
        self._sorted: Hashes = np.zeros(0, np.uint64)
        self._come: set[int] = set()
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._come) - len(self._gone)

    def add(self, hashes: Sequence[int]) -> None:
        """These are there now."""
        self._gone.difference_update(hashes)
        array = np.array(hashes, np.uint64)
        new = array[~self._in_sorted(array)].tolist()
        self._come.update(new[: max(0, self._most - len(self))])
        self._settle()

    def remove(self, hashes: Sequence[int]) -> None:
        """These are there no more."""
        self._come.difference_update(hashes)
        array = np.array(hashes, np.uint64)
        self._gone.update(array[self._in_sorted(array)].tolist())
        self._settle()

    def clear(self) -> None:
        """Forget all pages: the process has none any more."""
        self._sorted = np.zeros(0, np.uint64)
        self._come.clear()
        self._gone.clear()

    def has(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Which of these are there."""
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
        """A number in a set takes some ten times what it takes in the array."""
        if len(self._come) + len(self._gone) > 64 + len(self._sorted) // 32:
            gone = np.fromiter(self._gone, np.uint64, len(self._gone))
            kept = np.delete(self._sorted, np.searchsorted(self._sorted, gone)) if len(gone) else self._sorted
            come = np.sort(np.fromiter(self._come, np.uint64, len(self._come)))
            self._sorted = np.insert(kept, np.searchsorted(kept, come), come)
            self._come.clear()
            self._gone.clear()


class _ProcessPages:
    """One process, and what its stream has told: a page is in any of several media."""

    def __init__(self, context: Context, ready: msg.Ready) -> None:
        self.ready = ready
        self.media: dict[str | None, PageSet] = {}
        self._context = context
        self._last: int | None = None
        self._socket = self._subscribed()

    def poll(self) -> None:
        """Take in what has come."""
        for frames in received(self._socket):
            if len(frames) != 3 or len(frames[1]) != 8:
                continue
            number = int.from_bytes(frames[1], "big")
            if self._last is not None and number != self._last + 1:  # who subscribes anew is told everything
                self.close()
                self.media.clear()
                self._last, self._socket = None, self._subscribed()
                return
            self._last = number
            with suppress(msgspec.DecodeError, UnicodeDecodeError, OverflowError):
                for event in _decoder.decode(frames[2]).events:
                    self._take(event)

    def tokens_of(self, hashes: Hashes) -> int:
        """How many tokens of a prompt it has, from the first on, in whatever medium."""
        missing = np.ones(len(hashes) + 1, np.bool_)
        for some in self.media.values():
            missing[:-1] &= ~some.has(hashes)
        return int(missing.argmax()) * self.ready.page_size

    def close(self) -> None:
        """Listen no more."""
        self._socket.close(0)

    def _take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """Apply one event. The first layer group stands for all: a window's pages leave while the others stay."""
        if not isinstance(event, AllBlocksCleared) and event.group_idx:
            return
        match event:
            case BlockStored():
                self.media.setdefault(event.medium, PageSet()).add(event.block_hashes)
            case BlockRemoved():
                self.media.setdefault(event.medium, PageSet()).remove(event.block_hashes)
            case AllBlocksCleared():
                self.media.clear()

    def _subscribed(self) -> Socket:
        socket: Socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _MOST_UNREAD)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        keep_alive(socket)
        socket.connect(self.ready.kv_events)
        return socket


class PageHolders:
    """The cached pages of those processes of a fleet that publish KV events. For use by one thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._followed: dict[str, _ProcessPages] = {}
        self._are_all = False

    def follow(self, members: Iterable[msg.Ready]) -> None:
        """Follow the processes that are there now, and read their events since the last call."""
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

    def sources(self, prompt: Sequence[int], salt: str | None, prefill: str) -> msg.KVSources:
        """The processes that have more of a prompt than the prefill process that is to compute it, most first.

        If `prefill` is empty, that process counts as having nothing. Returns no source unless every process is
        followed.
        """
        if not self._are_all:
            return ()
        self._poll()
        kinds: set[tuple[HashAlgorithm, int]] = set()
        kinds.update((one.ready.hash_algorithm, one.ready.page_size) for one in self._followed.values())
        hashes = {kind: _hashes(prompt, salt, *kind) for kind in kinds}
        tokens = {
            name: one.tokens_of(hashes[one.ready.hash_algorithm, one.ready.page_size])
            for name, one in self._followed.items()
        }
        least = tokens.get(prefill, 0)
        best = sorted((name for name in tokens if tokens[name] > least), key=tokens.__getitem__, reverse=True)
        known = [(self._followed[name].ready, tokens[name]) for name in best[:_MOST_NAMED]]
        return tuple(msg.KVSource(ready.pulse, ready.engines, count) for ready, count in known)

    def close(self) -> None:
        """Stop following all processes."""
        self.follow(())

    def _poll(self) -> None:
        for one in self._followed.values():
            one.poll()


def _hashes(prompt: Sequence[int], salt: str | None, algorithm: HashAlgorithm, page_size: int) -> Hashes:
    """Hashes of the full pages of a prompt without its last token."""
    hasher = PrefixHasher(algorithm, page_size, salt)
    return hashes_of(hasher.digests(np.array(prompt, np.int32), 0, (len(prompt) - 1) // page_size))
