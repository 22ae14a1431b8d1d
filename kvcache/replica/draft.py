"""The layers of a draft model that runs one token behind the main model, such as EAGLE or MTP.

At the position of a token, such a layer computes its KV from the main model's output there and from the *next* token.
So the last token of a page decides nothing about the page alone: the first token of the next page does, too. Therefore
a draft page is named by the digest of the next page, and is published when that page is full.

    tokens     0–15  16–31  32–47  48–53
    main       [d0]   [d1]   [d2]    -       named by the digest of its own tokens
    draft      [d1]   [d2]    -      -       named by the digest of the next page

A prompt with the first 20 of these tokens finds the main layers' first page, but not the draft layers'. It computes
that page again, and never meets the KV of another next token. vLLM drops the last block of such a hit, too.
"""

from dataclasses import dataclass

import numpy as np

from kvcache.layer_groups import LayerGroup
from kvcache.pool.index import Digests
from kvcache.replica.block_table import NOTHING, BlockTable, ImportPart, PageCopy
from kvcache.replica.kept_pages import ColumnSpan, KeptPages


@dataclass(frozen=True, init=False)
class DraftGroup(LayerGroup):
    """Layers with full attention that run one token behind the main model.

    The KV at the last known token of a request is provisional, because the next token is not known yet: the draft model
    computes it again in the next step, at every manager that holds the request. Therefore a fork has its own page for
    this token, and the next step of the request begins with the token after it, even if later pages are cached.

    Examples:
        >>> DraftGroup(layers=(32,)).name
        'draft'
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        super().__init__("full", layers)  # checks the layers
        object.__setattr__(self, "kind", "draft")

    @property
    def keeps_all(self) -> bool:
        return True


class KeptDraft(KeptPages):
    """The pages of a `DraftGroup`."""

    ahead = 1

    def resumes_beyond(self, row: int, pages: int) -> bool:
        # If the last token of these pages was the last one that its request knew, the next step computes the KV there
        # again. If the request resumed from a later token, this KV would belong to no next token, or to that of a
        # fork's parent.
        computed, known = self._rows.cached.item(row), self._rows.prompt.item(row)
        return computed != pages * self._page_size or computed < known

    def parts(self, row: int, span: ColumnSpan, end: int) -> list[ImportPart]:
        return [DraftImportPart(part.first, part.dst_pages, at_end=True) for part in super().parts(row, span, end)]

    def names(self, digests: Digests) -> Digests:
        # The digest of the page after the last one is not known. No page has the digest 0.
        return np.concatenate((digests[1:], np.zeros_like(digests[:1])))


class DraftImportPart(ImportPart):
    """The part of an import for a table of draft layers.

    It is copied at the end, from the first source alone. In a table that covers fewer tokens than the import, the KV of
    the last token may belong to another next token.
    """

    __slots__ = ()

    def copy_of(self, table: BlockTable, pages: tuple[int, ...], pending: object) -> PageCopy:  # noqa: ARG002 - as above
        return NOTHING
