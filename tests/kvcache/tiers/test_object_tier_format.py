"""Objects of pages: the pages of a prompt that form an object, the keys of objects, and the check that each page is
read back unchanged or is refused.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.pool.index import Digests
from kvcache.tiers.object_tier import ObjectFormat
from kvcache.tiers.page_files import FileFormat, FileRefusal
from kvcache.types import Part

PAGE_BYTES, COUNT, EPOCH = 24, 3, "0123456789abcdef"
PAGE = FileFormat(bytes(range(16)), PAGE_BYTES, 16)
FORMAT = ObjectFormat(PAGE, COUNT)
OTHER = ObjectFormat(FileFormat(bytes(16), PAGE_BYTES, 16), COUNT)


@pytest.mark.parametrize(
    ("pages", "whole", "with_tails"),
    [
        (0, [], []),
        (1, [], [(0, 1)]),
        (3, [(0, 3)], [(0, 3)]),
        (5, [(0, 3)], [(0, 3), (3, 5)]),
        (6, [(0, 3), (3, 6)], [(0, 3), (3, 6)]),
        (7, [(0, 3), (3, 6)], [(0, 3), (3, 6), (6, 7)]),
    ],
)
def test_pages_of_a_run_form_whole_objects_and_with_tails_a_shorter_one(
    pages: int, whole: list[tuple[int, int]], with_tails: list[tuple[int, int]]
) -> None:
    assert FORMAT.bounds(pages) == whole
    assert ObjectFormat(PAGE, COUNT, tails=True).bounds(pages) == with_tails


def test_an_object_has_its_pages_and_a_row_for_each() -> None:
    assert FORMAT.record_bytes == PAGE_BYTES + 16 + 16
    assert FORMAT.object_bytes == COUNT * FORMAT.record_bytes


def test_keys_name_the_namespace_the_epoch_and_the_last_page() -> None:
    name = b"\x01\xff"
    assert FORMAT.key(EPOCH, name) == f"{bytes(range(16)).hex()}/{EPOCH}/01ff"
    assert FORMAT.epoch_key == f"{bytes(range(16)).hex()}/current"
    assert len({FORMAT.key(EPOCH, name), FORMAT.key("f" * 16, name), OTHER.key(EPOCH, name), FORMAT.epoch_key}) == 4


def test_an_epoch_is_read_from_its_own_object_and_from_no_other() -> None:
    content = FORMAT.epoch_object(EPOCH)
    assert FORMAT.epoch_of(content) == EPOCH
    assert OTHER.epoch_of(content) is None, "of another namespace"
    for at in range(len(content)):
        for bit in range(8):
            wrong = bytearray(content)
            wrong[at] ^= 1 << bit
            assert FORMAT.epoch_of(bytes(wrong)) is None
    for length in range(len(content)):
        assert FORMAT.epoch_of(content[:length]) is None
    assert FORMAT.epoch_of(content + b"0") is None
    for name in ("0123456789ABCDEF", "0123456789abcde", "0123456789abcde/"):
        assert FORMAT.epoch_of(FORMAT.epoch_object(name)) is None, "no name that we give"


class Packed:
    """An object of three pages in two parts each, as two shards have them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.content = rng.integers(0, 256, (COUNT, PAGE_BYTES), np.uint8)
        self.digests: Digests = rng.integers(1, 1 << 63, (COUNT, 2), np.uint64)
        self.records: Part = np.zeros(FORMAT.object_bytes, np.uint8)
        FORMAT.pack(self.records, self.digests, parts_of(self.content))

    def unpack(self, digests: Digests | None = None) -> list[FileRefusal | None]:
        """Unpacks the object. Returns the fault of each page, or None for a page without a fault, which must equal the
        original.
        """
        read = np.full_like(self.content, 0xAA)
        found = FORMAT.unpack(self.records, self.digests if digests is None else digests, parts_of(read))
        for at, fault in enumerate(found):
            assert fault or np.array_equal(read[at], self.content[at])
        return found


def parts_of(pages: np.ndarray) -> list[list[Part]]:
    return [[page[:10], page[10:]] for page in pages]


def test_each_page_is_read_from_its_own_part_of_the_object() -> None:
    packed = Packed()
    assert packed.unpack() == [None] * COUNT
    record = packed.records.reshape(COUNT, -1)[1]
    assert np.array_equal(record[:PAGE_BYTES], packed.content[1])
    assert record[PAGE_BYTES:].tobytes() == PAGE.row(packed.digests[1].tobytes(), [packed.content[1]])


def test_a_flipped_byte_makes_only_its_own_page_refused() -> None:
    packed = Packed()
    for at in range(FORMAT.object_bytes):
        packed.records[at] ^= 0x10
        page, within = divmod(at, FORMAT.record_bytes)
        wrong = FileRefusal.FOREIGN if PAGE_BYTES <= within < PAGE_BYTES + 16 else FileRefusal.CORRUPTED
        assert packed.unpack() == [wrong if other == page else None for other in range(COUNT)]
        packed.records[at] ^= 0x10


def test_a_page_under_another_digest_is_refused_as_foreign() -> None:
    packed = Packed()
    assert packed.unpack(packed.digests[[1, 0, 2]]) == [FileRefusal.FOREIGN, FileRefusal.FOREIGN, None]


def test_a_page_missing_from_a_read_is_refused_as_cut() -> None:
    packed = Packed()
    written = packed.records.copy()
    FORMAT.blank(packed.records)
    assert packed.unpack() == [FileRefusal.CUT] * COUNT
    packed.records[: FORMAT.record_bytes] = written[: FORMAT.record_bytes]
    assert packed.unpack() == [None, FileRefusal.CUT, FileRefusal.CUT]
    assert np.array_equal(packed.records.reshape(COUNT, -1)[:, :PAGE_BYTES], packed.content), "pages stay as they are"
