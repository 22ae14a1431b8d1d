"""Objects of pages: their layout, how pages are packed into them, and how they are checked. This module moves no bytes.

An object holds `count` consecutive pages of a prompt. Each page is followed by a record, as in a file of pages:

    page 0 │ row 0 │ page 1 │ row 1 │ …
             digest, checksum

The first `count` pages of a prompt are one object, the next `count` pages are another one, and so on. If fewer than
`count` pages are left at the end, they are in no object. With `tails`, they form a shorter object, a tail. Tails are
used for recurrent states, because another request resumes only where a run ends, which may be after any page. An object
is named by the digest of its last page, which covers the tokens of all its pages. So the objects that a lookup asks for
follow from the prompt alone, and no list of objects has to be kept or read. Consecutive pages of an object can be read
as one range.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvcache.pool.index import Digests
from kvcache.tiers.page_files import FileFormat, FileRefusal
from kvcache.types import Part

_EPOCH = re.compile(rb"[0-9a-f]{16}")
_EPOCH_BYTES = 16


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """The layout of all objects of one namespace. `count` is a part of the namespace."""

    page: FileFormat
    count: int  # the number of pages in an object
    # whether the last pages of a run form an object of their own even if they are fewer than `count`
    tails: bool = False

    @property
    def record_bytes(self) -> int:
        """The size of a page together with its record, in bytes."""
        return self.page.page_bytes + self.page.row_bytes

    @property
    def object_bytes(self) -> int:
        return self.count * self.record_bytes

    def bounds(self, pages: int) -> list[tuple[int, int]]:
        """Returns the objects of a run of `pages` pages, each as its first page and the page after its last one."""
        ends = [*range(self.count, pages + 1, self.count)]
        if self.tails and pages % self.count:
            ends.append(pages)
        return [*zip([0, *ends], ends, strict=False)]

    def key(self, epoch: str, name: bytes) -> str:
        return f"{self.page.namespace.hex()}/{epoch}/{name.hex()}"

    @property
    def epoch_key(self) -> str:
        """The key of the object that names the epoch."""
        return f"{self.page.namespace.hex()}/current"

    def epoch_object(self, epoch: str) -> bytes:
        text = epoch.encode()
        return text + xxhash.xxh3_128_digest(self.page.namespace + text)

    def epoch_of(self, content: bytes) -> str | None:
        """Returns the name of the epoch in the `content` of the object at `epoch_key`.

        Returns None if the content is broken, or belongs to another namespace.
        """
        text = content[:_EPOCH_BYTES]
        right = _EPOCH.fullmatch(text) and content == self.epoch_object(text.decode())
        return text.decode() if right else None

    def pack(self, records: Part, digests: Digests, pages: Sequence[Sequence[Part]]) -> None:
        """Write pages and their records into the buffer `records`, one page after another."""
        for digest, parts, page, row in self._records(records, digests, pages):
            np.concatenate(parts, out=page)
            row[:] = np.frombuffer(self.page.row(digest, parts), np.uint8)

    def blank(self, records: Part) -> None:
        """Clear the digest and checksum of each page in `records` before a read.

        `unpack` then refuses every page that was not read.
        """
        records.reshape(-1, self.record_bytes)[:, self.page.page_bytes :] = 0

    def unpack(self, records: Part, digests: Digests, pages: Sequence[Sequence[Part]]) -> list[FileRefusal | None]:
        """Copy pages from the buffer `records` to `pages`. Returns for each page the reason why it is refused, or None.

        If a page is refused, its bytes in `pages` are undefined.
        """
        found: list[FileRefusal | None] = []
        for digest, parts, page, row in self._records(records, digests, pages):
            at = 0
            for part in parts:
                part[:] = page[at : at + len(part)]
                at += len(part)
            found.append(self.page.judge(row.tobytes(), digest, parts) if row.any() else FileRefusal.CUT)
        return found

    def _records(
        self, records: Part, digests: Digests, pages: Sequence[Sequence[Part]]
    ) -> list[tuple[bytes, Sequence[Part], Part, Part]]:
        """Returns a tuple for each page: its digest, its parts in `pages`, its bytes in `records`, and its record."""
        rows = records.reshape(-1, self.record_bytes)
        cut = self.page.page_bytes
        return [
            (digest.tobytes(), parts, record[:cut], record[cut:])
            for digest, parts, record in zip(digests, pages, rows, strict=True)
        ]
