# chained.c is optional: it exists once it is compiled (`hatch_build.py`). Every buffer is contiguous bytes.

from typing import final

from typing_extensions import Buffer

@final
class Sha256Chain:
    # A running sha256, and its digest after each page so far. One thread at a time may use it.

    def __new__(cls, seed: Buffer, /) -> Sha256Chain: ...

    # The digests, one after another. It is always the same object, which only grows.
    @property
    def known(self) -> bytearray: ...
    def copy(self) -> Sha256Chain: ...

    # Hash bytes that belong to no page.
    def update(self, data: Buffer, /) -> None: ...

    # Hash pages of `page_bytes`, one after another. Raises ValueError, and changes nothing, if they are not whole
    # pages.
    def extend(self, pages: Buffer, page_bytes: int, /) -> None: ...

    # Hash one page for each chain and return the digests. Returns None if a chain does not have exactly as many pages
    # as `firsts` says. Raises ValueError unless there is a page of equal length for each chain, and TypeError if an
    # item is no chain. In all of these cases nothing has changed.
    @classmethod
    def extend_each(cls, chains: list[Sha256Chain], firsts: list[int], pages: Buffer, /) -> bytes | None: ...
