"""`FileIndex`: page digest → file and place in it, and the order in which files are removed."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvariantError
from kvcache.pool.index import NO_PAGE, Digests, PrefixIndex

Entries = NDArray[np.int32]

NO_ENTRY = NO_PAGE


@dataclass(eq=False, slots=True)
class _File:
    number: int
    entries: Entries  # by place in the file; NO_ENTRY for a page that is no longer found here
    size: int


class FileIndex:
    """The pages of all known files, of `max_bytes` together. An entry is the index of a page in the arrays."""

    def __init__(self, max_bytes: int, page_bytes: int, digest_words: int) -> None:
        capacity = max_bytes // page_bytes
        self._max_bytes = max_bytes
        self.pages = PrefixIndex(capacity, digest_words)
        self._free = np.arange(capacity, 0, -1, dtype=np.int32)
        self._free_count = capacity
        self._file_of = np.zeros(capacity + 1, np.int32)
        self._place_of = np.zeros(capacity + 1, np.int32)
        self._files: OrderedDict[str, _File] = OrderedDict()  # least recently used first
        self._names: dict[int, str] = {}
        self._numbers = 0
        self.bytes = 0  # the size of all files together
        # Set and cleared by the caller; an entry keeps its mark if it is given to another page.
        self.reading = np.zeros(capacity + 1, np.bool_)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def find(self, digests: Digests) -> Entries:
        """The entry of each page, `NO_ENTRY` if there is none."""
        return self.pages.find(digests)

    def whereabouts(self, entries: Entries) -> list[tuple[str, int, NDArray[np.intp]]]:
        """The runs of `entries` that are adjacent in a file: the file, the first place, the indices in `entries`."""
        files, places = self._file_of[entries], self._place_of[entries]
        cuts = np.flatnonzero((np.diff(files) != 0) | (np.diff(places) != 1)) + 1
        runs = np.split(np.arange(len(entries)), cuts)
        return [(self._names[int(files[at[0]])], int(places[at[0]]), at) for at in runs if at.size]

    def use(self, entries: Entries) -> None:
        """Mark the files of these entries as just used, so that they are removed last."""
        for number in np.unique(self._file_of[entries]).tolist():
            self._files.move_to_end(self._names[number])

    def room_for(self, size: int) -> list[str]:
        """Forget the least recently used files until `size` more bytes fit. Returns their names."""
        names: list[str] = []
        while self._files and self.bytes + size > self._max_bytes:
            names.append(next(iter(self._files)))
            self.forget(names[-1])
        return names

    def add(self, name: str, size: int, digests: Digests, tables: NDArray[np.intp] | None = None) -> None:
        """Add a file of these distinct pages, for which there must be room. It replaces a known file of this name.

        `tables`: the block table of each page, if there are several.
        """
        self.forget(name)
        count = len(digests)
        self._free_count -= count
        entries = self._free[self._free_count : self._free_count + count].copy()
        self.pages.say_tables(entries, tables)
        known = self.pages.publish(entries, digests) != entries  # pages that another file has, too
        self._give_back(entries[known])
        self._numbers += 1
        self._file_of[entries], self._place_of[entries] = self._numbers, np.arange(count)
        entries[known] = NO_ENTRY
        self._files[name] = _File(self._numbers, entries, size)
        self._names[self._numbers] = name
        self.bytes += size

    def forget(self, name: str) -> None:
        """Forget a file. A no-op if it is not known."""
        file = self._files.pop(name, None)
        if file is None:
            return
        entries = file.entries[file.entries != NO_ENTRY]
        self.pages.withdraw(entries)
        self._give_back(entries)
        del self._names[file.number]
        self.bytes -= file.size

    def drop(self, entries: Entries) -> None:
        """Forget these pages. The other pages of their files stay."""
        for entry in entries.tolist():
            self._files[self._names[int(self._file_of[entry])]].entries[self._place_of[entry]] = NO_ENTRY
        self.pages.withdraw(entries)
        self._give_back(entries)

    def clear(self) -> None:
        """Forget all files. Notifies no reader."""
        capacity = len(self._free)
        self.pages.clear()
        self._free[:] = np.arange(capacity, 0, -1, dtype=np.int32)
        self._free_count = capacity
        self._files.clear()
        self._names.clear()
        self.bytes = 0
        self.reading[:] = False

    def check(self) -> None:
        self.pages.check()
        listed = [file.entries[file.entries != NO_ENTRY] for file in self._files.values()]
        entries = np.concatenate([*listed, np.zeros(0, np.int32)])
        if not np.array_equal(np.sort(entries), np.flatnonzero(self.pages.published)):
            raise InvariantError(f"file tier: the {len(entries)} entries of its files are not those that can be found")
        free = self._free[: self._free_count]
        if not np.array_equal(np.sort(np.concatenate((entries, free))), np.arange(1, len(self._free) + 1)):
            raise InvariantError(
                f"file tier: {len(entries)} used and {len(free)} free entries do not add up to all entries"
            )
        size = sum(file.size for file in self._files.values())
        if not size == self.bytes <= self._max_bytes:
            raise InvariantError(
                f"file tier: its files have {size} bytes; {self.bytes} are counted and {self._max_bytes} allowed"
            )
        for name, file in self._files.items():
            there = np.flatnonzero(file.entries != NO_ENTRY)
            mine = file.entries[there]
            if self._names.get(file.number) != name or (self._file_of[mine] != file.number).any():
                raise InvariantError(f"file tier: {name} and its entries do not refer to each other")
            if not np.array_equal(self._place_of[mine], there):
                raise InvariantError(f"file tier: {name} has its pages in other places than its entries say")

    def _give_back(self, entries: Entries) -> None:
        self._free[self._free_count : self._free_count + len(entries)] = entries
        self._free_count += len(entries)
