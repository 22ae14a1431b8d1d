"""`EventBook`: what subscribers should know about the caches, in arrays. The book builds the events for each change.

The book stores each *content* once, under the hash of the content. A content is what a page holds: the page's tokens,
and the content that they continue. The book also records which sources have each content now, so it can announce the
whole state at any time. If a page moves to another medium, the serving loop need not supply the page's tokens again.

Events do not name the version of the weights. So subscribers know only the contents of the current version, which any
request may find. After a switch, everything is cleared for them, and the contents of the new version are announced. The
removal of a content of another version is no event.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.events.log import FILES, HOST, Entry, Hashed, Ints, PageTokens
from kvcache.events.wire import (
    CPU,
    GPU,
    STORAGE,
    BlockKeys,
    BlockRemoved,
    BlockStored,
    CacheSpec,
    Hashes,
    KVEvent,
    adapter_of,
    hashes_of,
    keys_of_block,
    specs_for,
)
from kvcache.params import KVEventsReader
from kvcache.pool.index import NO_PAGE, Digests, PrefixIndex
from kvcache.weights import Weights, first_own_page

Ids = NDArray[np.int32]
"""Contents of pages, as numbers that this book has given them. 0 means no content."""

_TOKENS_AN_EVENT = 1 << 14
_NOBODYS = -1
"""Stands for the version of a content that only some requests can find, because its pages are of several versions."""
_SHARED = {HOST: CPU, FILES: STORAGE}


class _Names(NamedTuple):
    """What a block's events name besides its tokens."""

    adapter: str | None = None
    keys: BlockKeys | None = None
    salt: str | None = None  # set only if the stream's reader knows the field


_NOTHING = _Names()


class Told(NamedTuple):
    """An event, and the source whose change it reports."""

    source: int
    event: KVEvent


class EventBook:
    """The contents of the pages of `ranks` replicas, and of the tiers that the replicas share.

    There is room for `capacity` pages in all media together. Not thread-safe. `specs` describes each block table. The
    position of a table in `specs` is its group number in events. A *source* holds pages: it is one block table of a
    rank, or one block table of a shared tier. `weights` are those of the manager. The serving loop may change them at
    any time.

    Attributes:
        has_switched: whether the weights have changed, so that the whole state must be announced next.
    """

    def __init__(
        self,
        ranks: int,
        capacity: int,
        page_size: int,
        *specs: CacheSpec,
        reader: KVEventsReader = "vllm",
        weights: Weights | None = None,
    ) -> None:
        self.begun_anew = functools.partial(
            EventBook, ranks, capacity, page_size, *specs, reader=reader, weights=weights
        )
        self.has_switched = False
        self._weights = weights or Weights()
        self._version = self._weights.version  # the version whose contents subscribers know
        self._numbers = {self._version: 0}  # for each version of a content, a number
        self._now = 0  # the number of `_version`
        # There is room for present pages, for the page that each present page continues, and for removed pages, which
        # are forgotten only when the current call ends.
        most = 4 * capacity
        self._sources = sources = ranks * len(specs)
        self._page_size = page_size
        self._specs = specs_for(reader, specs)
        self._hides = not all(spec.is_told for spec in self._specs)
        self._names_salt = reader == "dynamo"
        self._index = PrefixIndex(most, 1)  # hash → content
        self._tokens = np.zeros((most + 1, page_size), np.int32)
        self._parent = np.zeros(most + 1, np.int32)
        self._depth = np.zeros(most + 1, np.int32)  # for each content, the index of its page in the prompt
        # For each content, whether its tokens and its parent are known. If not, only its hash is known.
        self._described = np.zeros(most + 1, np.bool_)
        self._versions = np.zeros(most + 1, np.int32)  # for each described content, the number of its version
        # For each content, its adapter, extra keys and salt. Contents without any of these have no entry.
        self._keys: dict[int, _Names] = {}
        # Sources that ranks share have negative numbers. As indices, these select the last rows of the arrays by
        # source.
        self._shared = range(-len(_SHARED) * len(specs), 0)
        self._present = np.zeros((sources + len(self._shared), most + 1), np.bool_)
        # for each source and content, how many present pages of the source continue the content
        self._kids = np.zeros((sources, most + 1), np.int32)
        self._refs = np.zeros(most + 1, np.int32)  # for each content, how many known contents continue it
        self._free = np.arange(most, 0, -1, dtype=np.int32)
        self._free_count = most
        self._left: list[Ids] = []  # contents that a source has lost, so that perhaps no source has them any more
        self._told: list[Told] = []

    def apply(self, entries: Sequence[Entry]) -> list[Told]:
        """Returns the events that report these entries of the log, in order."""
        self._told = []
        if (version := self._weights.version) != self._version:
            self._version, self._now, self.has_switched = version, self._number_of(version), True
        for entry in entries:
            if entry is None:
                self._forget_left()
            elif len(entry) == 4:
                self._describe(*entry)
            else:
                source, come, digests = entry
                hashes = hashes_of(digests if isinstance(digests, np.ndarray) else np.array([[digests]], np.uint64))
                change = self._come if come else self._go
                # an entry with pages of several block tables has an array of sources, one for each page
                if isinstance(source, np.ndarray):
                    for one in np.unique(source).tolist():
                        change(one, hashes[source == one])
                else:
                    change(int(source), hashes)
        return [told for told in self._told if self._is_told(told.source)] if self._hides else self._told

    def is_of(self, source: int, rank: int) -> bool:
        """Whether the event stream of this rank reports this source."""
        return source < 0 or source // len(self._specs) == rank

    def state(self, rank: int) -> Iterator[BlockStored]:
        """Returns events that report everything that a rank has. A page comes after the page that it continues."""
        tables = len(self._specs)
        for source in filter(self._is_told, (*range(rank * tables, (rank + 1) * tables), *reversed(self._shared))):
            ids = np.flatnonzero(self._present[source]).astype(np.int32)
            known = self._described[ids]
            for run in self._chains(ids[known & self._is_current(ids)]):
                yield from self._stored(source, run)
            if not known.all():
                yield self._bare(source, ids[~known])

    def hashes(self, source: int) -> Hashes:
        """Returns the hashes of all pages that a source has."""
        return self._index.words_of(np.flatnonzero(self._present[source]))

    def differences(self, source: int, digests: Digests) -> list[Entry]:
        """Returns log entries that report the difference between this book and an index.

        `digests` are the digests of all pages in the index of this source.
        """
        have, want = self.hashes(source), hashes_of(digests)
        gone, come = have[~np.isin(have, want)], digests[~np.isin(want, have)]
        return [
            *([(source, False, gone.byteswap()[:, None])] if gone.size else ()),
            *([(source, True, come)] if len(come) else ()),
        ]

    # ---- entries

    def _describe(self, hashers: Sequence[Hashed], firsts: Ints, lasts: Ints, tokens: PageTokens) -> None:
        width = hashers[0].width
        # For each request: the digest of the page before its new pages (zeros before page 0), then the digests of its
        # new pages. The digests are copied, because the loop appends to `hasher.known`.
        known = b"".join(
            hasher.known[(first - 1) * width : last * width] if first else bytes(width) + hasher.known[: last * width]
            for hasher, first, last in zip(hashers, firsts.tolist(), lasts.tolist(), strict=True)
        )
        chains = hashes_of(np.frombuffer(known, np.uint64).reshape(-1, width // 8))
        counts = lasts - firsts
        owners = np.repeat(np.arange(len(counts)), counts)
        depths = np.arange(len(owners)) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
        at = np.arange(len(owners)) + owners
        hashes, before = chains[at + 1], chains[at]
        ids = self._index.find(hashes[:, None])
        new = np.flatnonzero((ids == NO_PAGE) | ~self._described[ids])
        if not new.size:
            return
        new = new[np.sort(np.unique(hashes[new], return_index=True)[1])]
        raw = tokens if isinstance(tokens, np.ndarray) else np.frombuffer(b"".join(tokens), np.int32)
        ids = self._ids(hashes[new])
        self._tokens[ids] = raw.reshape(-1, self._page_size)[new]
        self._depth[ids] = depths[new]
        self._described[ids] = True
        self._versions[ids] = self._versions_of(hashers, owners[new], depths[new])
        begins = depths[new] == 0
        self._parent[ids[begins]] = 0
        self._parent[ids[~begins]] = self._ids(before[new][~begins])
        np.add.at(self._refs, self._parent[ids], 1)
        self._left.append(ids)
        for which in [at for at, hasher in enumerate(hashers) if hasher.salt or hasher.extra_keys]:
            salt, keys = hashers[which].salt, hashers[which].extra_keys or ()
            mine = owners[new] == which
            for one, depth in zip(ids[mine].tolist(), depths[new][mine].tolist(), strict=True):
                of_block = keys_of_block(salt, keys, depth, self._page_size)
                self._keys[one] = _Names(adapter_of(keys), of_block, salt if self._names_salt else None)
        self._tell_known(ids)

    def _versions_of(self, hashers: Sequence[Hashed], owners: Ints, depths: Ints) -> Ints:
        """Returns the number of the version of each page: the page at depth `depths[i]` of `hashers[owners[i]]`."""
        of_each = [self._number_of(one.segments[0].version) for one in hashers]
        ends = np.array([first_own_page(one.segments) for one in hashers])
        return np.where(depths < ends[owners], np.array(of_each)[owners], _NOBODYS)

    def _number_of(self, version: bytes | None) -> int:
        return self._numbers.setdefault(version, len(self._numbers))

    def _is_current(self, ids: Ids) -> NDArray[np.bool_]:
        """Returns a mask of the described contents `ids` that any request under the current weights may find."""
        return self._versions[ids] == self._now

    def _tell_known(self, ids: Ids) -> None:
        """Announce present pages whose tokens have just become known. Until now, only their hashes were announced."""
        for source in (*range(self._sources), *reversed(self._shared)):
            there = ids[self._present[source, ids]]
            if source >= 0:
                np.add.at(self._kids[source], self._parent[there], 1)
            self._tell(source, there)

    def _come(self, source: int, hashes: Hashes) -> None:
        ids = self._ids(hashes)
        self._present[source, ids] = True
        known = self._described[ids]
        if not known.all():
            self._told.append(Told(source, self._bare(source, ids[~known])))
            ids = ids[known]
        if source < 0:
            self._tell(source, ids)
            return
        orphaned = ids[self._kids[source, ids] > 0]
        np.add.at(self._kids[source], self._parent[ids], 1)
        if not orphaned.size:
            self._tell(source, ids)
            return
        # When Dynamo's index removes a page, it also drops all pages that continue this page, and it accepts no page
        # whose parent it does not know. So when a page comes back, all pages that continue it are announced again after
        # it.
        below = self._below(source, orphaned)
        self._tell(source, ids[~np.isin(ids, below)])
        for run in self._chains(below):
            self._tell(source, run)

    def _go(self, source: int, hashes: Hashes) -> None:
        found = ids = self._index.find(hashes[:, None])
        ids = ids[self._present[source, ids]]
        self._present[source, ids] = False
        hashes = hashes[~self._described[found] | self._is_current(found)]
        if source >= 0:
            np.subtract.at(self._kids[source], self._parent[ids[self._described[ids]]], 1)
        self._left.append(ids)
        if not (gone := hashes.tolist()):
            return
        last = self._told[-1] if self._told else None
        if last is not None and last.source == source and isinstance(last.event, BlockRemoved):
            last.event.block_hashes += gone
        else:
            self._told.append(Told(source, BlockRemoved(gone, self._medium(source), group_idx=self._group(source))))

    # ---- contents

    def _ids(self, hashes: Hashes) -> Ids:
        """Returns the contents with these hashes.

        Adds a content for each unknown hash. Only the hash of a new content is known so far.
        """
        ids = self._index.find(hashes[:, None])
        if (ids == NO_PAGE).any():
            new = np.unique(hashes[ids == NO_PAGE])
            if len(new) > self._free_count:
                self._forget_left()
            self._free_count -= len(new)
            made = self._free[self._free_count : self._free_count + len(new)]
            self._index.publish(made.copy(), new[:, None])
            ids = self._index.find(hashes[:, None])
        return ids

    def _forget_left(self) -> None:
        """Forget the contents that no source has any more.

        If other contents continue a forgotten content, its hash stays.
        """
        left = np.unique(np.concatenate(self._left)) if self._left else np.zeros(0, np.int32)
        self._left = []
        while (left := left[~self._present[:, left].any(axis=0)]).size:
            parents = self._parent[left]
            np.subtract.at(self._refs, parents, 1)
            self._parent[left] = 0
            self._described[left] = False
            for one in left.tolist() if self._keys else ():
                self._keys.pop(one, None)
            free = left[self._refs[left] == 0]
            self._index.withdraw(free)
            self._free[self._free_count : self._free_count + len(free)] = free
            self._free_count += len(free)
            parents = np.unique(parents[parents > 0])
            left = parents[(self._refs[parents] == 0) & ~self._described[parents] & self._index.published[parents]]

    def _below(self, source: int, ids: Ids) -> Ids:
        """Returns the present pages that continue the contents `ids`, directly or through other pages."""
        there = np.flatnonzero(self._present[source] & self._described).astype(np.int32)
        there = there[np.argsort(self._parent[there], kind="stable")]
        parents, below = self._parent[there], np.zeros(len(self._parent), np.bool_)
        while ids.size:
            firsts, lasts = np.searchsorted(parents, ids), np.searchsorted(parents, ids, "right")
            ids = np.concatenate([there[first:last] for first, last in zip(firsts, lasts, strict=True)])
            ids = ids[~below[ids]]
            below[ids] = True
        return np.flatnonzero(below).astype(np.int32)

    def _chains(self, ids: Ids) -> Iterator[Ids]:
        """Split `ids` into runs of pages. Each page of a run continues the previous page of the run.

        If run A continues a page of run B, run A comes after run B.
        """
        follows, parents = np.zeros(len(self._parent), np.int32), self._parent[ids]
        # if several pages continue the same page, one of them stays in that page's run, and the others begin runs of
        # their own
        follows[parents] = ids
        heads = ids[(follows[parents] != ids) | ~np.isin(parents, ids)]
        for head in heads[np.argsort(self._depth[heads], kind="stable")].tolist():
            run = [head]
            while after := int(follows[run[-1]]):
                run.append(after)
            yield np.array(run, np.int32)

    # ---- events

    def _tell(self, source: int, ids: Ids) -> None:
        self._told += [Told(source, event) for event in self._stored(source, ids[self._is_current(ids)])]

    def _stored(self, source: int, ids: Ids) -> Iterator[BlockStored]:
        """Returns events that report stored pages: one for each run of consecutive pages of a prompt.

        Very long runs are split.
        """
        size, most = self._page_size, max(1, _TOKENS_AN_EVENT // self._page_size)
        for start in range(0, len(ids), most):
            some = ids[start : start + most]
            parents = self._parent[some]
            hashes, before = self._index.words_of(some).tolist(), self._index.words_of(parents).tolist()
            tokens = self._tokens[some].ravel().tolist()
            names = [self._keys.get(one, _NOTHING) for one in some.tolist()] if self._keys else [_NOTHING] * len(some)
            group = self._group(source)
            spec = self._specs[group]
            begins = [0, *(np.flatnonzero(parents[1:] != some[:-1]) + 1).tolist()]
            for first, last in zip(begins, [*begins[1:], len(some)], strict=True):
                yield BlockStored(
                    block_hashes=hashes[first:last],
                    parent_block_hash=before[first] if parents[first] else None,
                    token_ids=tokens[first * size : last * size],
                    block_size=size,
                    lora_id=None,
                    medium=self._medium(source),
                    lora_name=names[first].adapter,
                    extra_keys=[one.keys for one in names[first:last]],
                    group_idx=group,
                    kv_cache_spec_kind=spec.kind,
                    kv_cache_spec_sliding_window=spec.window,
                    cache_salt=names[first].salt,
                )

    def _bare(self, source: int, ids: Ids) -> BlockStored:
        """Returns an event for blocks without known tokens, such as blocks of files that were found at startup.

        vLLM's offloading reports such blocks in the same way.
        """
        group, hashes = self._group(source), self._index.words_of(ids).tolist()
        event = BlockStored(hashes, None, [], 0, None, self._medium(source), None, group_idx=group)
        if len(self._specs) > 1:  # vLLM never sends this event with several groups, so these fields are set only here
            spec = self._specs[group]
            event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = spec.kind, spec.window
        return event

    def _is_told(self, source: int) -> bool:
        return self._specs[self._group(source)].is_told

    def _group(self, source: int) -> int:
        return source % len(self._specs)

    def _medium(self, source: int) -> str:
        return _SHARED.get(source // len(self._specs), GPU)
