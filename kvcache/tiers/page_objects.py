"""Objects of pages: their pages, layout, packing and checks. This module moves no bytes.

An object holds `count` consecutive pages of a prompt, each with its record as in a file of pages:

    page 0 │ row 0 │ page 1 │ row 1 │ …
             digest, checksum

The first `count` pages of a prompt are one object, the next `count` pages another. If fewer pages are left at the end,
they form no object, or with `tails` a shorter one. Tails are for states: other requests resume only at the end of a
run, which may be any page. An object is named by the digest of its last page, which covers the tokens of all its pages.
So a prompt alone determines which objects to ask for, and no list of them is kept or read. Adjacent pages of an object
can be read as one range.
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
    """The layout of all objects of one namespace. `count` is part of the namespace."""

    page: FileFormat
    count: int  # the number of pages in an object
    tails: bool = False  # whether the last pages of a run form an object even if they are fewer than `count`

    @property
    def record_bytes(self) -> int:
        """The size of a page and its record, in bytes."""
        return self.page.page_bytes + self.page.row_bytes

    @property
    def object_bytes(self) -> int:
        return self.count * self.record_bytes

    def bounds(self, pages: int) -> list[tuple[int, int]]:
        """Returns the first page of each object of a run of `pages` pages, and the page after its last."""
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
        """Returns the epoch that an object names by its content.

        None if the content is broken, or of another namespace.
        """
        text = content[:_EPOCH_BYTES]
        right = _EPOCH.fullmatch(text) and content == self.epoch_object(text.decode())
        return text.decode() if right else None

    def pack(self, records: Part, digests: Digests, pages: Sequence[Sequence[Part]]) -> None:
        """Write pages and their names into `records`, one after another."""
        for digest, parts, page, row in self._records(records, digests, pages):
            np.concatenate(parts, out=page)
            row[:] = np.frombuffer(self.page.row(digest, parts), np.uint8)

    def blank(self, records: Part) -> None:
        """Clear each page's digest and checksum before a read, so that `unpack` refuses pages that were not read."""
        records.reshape(-1, self.record_bytes)[:, self.page.page_bytes :] = 0

    def unpack(self, records: Part, digests: Digests, pages: Sequence[Sequence[Part]]) -> list[FileRefusal | None]:
        """Copy pages out of `records`. Returns for each page why it is refused, or None.

        The bytes of a refused page are undefined.
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
        """Yields for each page: its digest, its parts in memory, and the parts of `records` that belong to it."""
        rows = records.reshape(-1, self.record_bytes)
        cut = self.page.page_bytes
        return [
            (digest.tobytes(), parts, record[:cut], record[cut:])
            for digest, parts, record in zip(digests, pages, rows, strict=True)
        ]
