# chained.c: there once it is compiled (`hatch_build.py`), and nowhere needed. Every buffer is contiguous bytes.

from typing import final

from typing_extensions import Buffer

@final
class Sha256Chain:
    # A running sha256, and its digest after each page so far. It is of one thread at a time.

    def __new__(cls, seed: Buffer, /) -> Sha256Chain: ...

    # The digests, one after another: the same object always, which only grows.
    @property
    def known(self) -> bytearray: ...
    def copy(self) -> Sha256Chain: ...

    # Take what is part of no page.
    def update(self, data: Buffer, /) -> None: ...

    # Take pages of `page_bytes`, one after another. ValueError: they are no whole pages, and nothing has changed.
    def extend(self, pages: Buffer, page_bytes: int, /) -> None: ...

    # Take one page of each chain, which knows `firsts` pages by now: its digests. None: some chain knows more or fewer;
    # ValueError: there are not as many pages, all of one length, as chains; TypeError: one is no chain. In all of these
    # cases nothing has changed.
    @classmethod
    def extend_each(cls, chains: list[Sha256Chain], firsts: list[int], pages: Buffer, /) -> bytes | None: ...
