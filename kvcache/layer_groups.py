"""`LayerGroup`: layers that keep the same tokens. Groups of different sizes share pages of one size.

As in vLLM, all groups take pages of the same size in bytes from one pool. A page holds the KV of `page_size` tokens in
`layers_per_page` layers of any group. So no memory is reserved for a group, and any free page fits any group. A group
with more than `layers_per_page` layers has several block tables. If a table has fewer layers, a part of each of its
pages is unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from kvcache.arguments import of_kind, one_of, refusal, whole
from kvcache.errors import InvalidParamsError

LayerKind = Literal["full", "window", "chunked"]

Positions = TypeVar("Positions", int, NDArray[np.int64])

_NEEDED = "one or more layer numbers"
MOST_LOST = 0.05  # the largest share of a request's pages that may be unused


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind, as indices among the cache's layers, from 0.

    A query of a `full` layer sees every token before it. A query of a `window` layer sees the last `window` tokens,
    including its own. A query of a `chunked` layer sees the tokens from the last multiple of `window` on. Pages that no
    later query sees are freed while the request runs.

    Examples:
        >>> LayerGroup("window", (0, 1), window=24).first_seen(40)
        17
        >>> LayerGroup("chunked", (2,), window=32).first_seen(40)
        32
    """

    kind: LayerKind
    layers: tuple[int, ...]
    window: int = 0  # the length of the window or chunk in tokens, 1 or more; 0 for full attention

    def __post_init__(self) -> None:
        one_of("kind", self.kind, get_args(LayerKind))
        if self.kind == "full" and self.window != 0:
            raise refusal("window", self.window, "0 (a group with full attention has no window)")
        if self.kind != "full":
            object.__setattr__(self, "window", whole("window", self.window, 1))
        layers = cast("Sequence[object]", of_kind("layers", self.layers, (tuple, list, range), _NEEDED))
        object.__setattr__(self, "layers", tuple(whole("layers", layer, 0) for layer in layers))
        if not layers:
            raise refusal("layers", self.layers, _NEEDED)

    @property
    def name(self) -> str:
        """The kind in `BlockTable.kinds`: "full", or the kind and its number of tokens, such as "window 1024"."""
        return self.kind if self.keeps_all else f"{self.kind} {self.window}"

    @property
    def keeps_all(self) -> bool:
        """Whether every query sees all tokens before it. A request then needs pages for all known tokens."""
        return self.kind == "full"

    def first_seen(self, position: Positions) -> Positions:
        """Returns the first token that a query at each position sees."""
        if not self.window:
            return position * 0
        if self.kind == "chunked":
            return position - position % self.window
        first = position - (self.window - 1)
        return first * (first > 0)

    def good_ends(self, there: NDArray[np.bool_], first: int, page_size: int) -> NDArray[np.bool_]:
        """Returns a mask, bool `[pages]`, of the pages after which a request can resume in this group.

        `there` says which pages of each table can be had, from page `first` on: bool `[tables, pages]`. All earlier
        pages can be had.
        """
        pages = np.arange(first, first + there.shape[1], dtype=np.int64)
        last_missing = np.maximum.accumulate(np.where(there.all(axis=0), -1, pages))
        good: NDArray[np.bool_] = last_missing < self.first_seen((pages + 1) * page_size) // page_size
        return good

    def most_pages(self, tokens: int, page_size: int, step_tokens: int = 1) -> int:
        """Returns the largest number of pages that a request holds in one table of the group.

        The request has `tokens` tokens. A step runs at most `step_tokens` of them, from any token on.
        """
        pages = -(-tokens // page_size)
        if self.keeps_all:
            return pages
        # The step needs pages for its own tokens, and for the tokens that its first query sees. A window may begin at
        # any token of a page. If the page size divides the length of chunks, a chunk begins with a page.
        apart = gcd(self.window, page_size) if self.kind == "chunked" else 1
        return min(pages, -(-(self.window - 1 + step_tokens + page_size - apart) // page_size))


class GroupTable(NamedTuple):
    """A block table of a model: the layers whose KV its pages hold, and these layers' group."""

    group: LayerGroup
    layers: tuple[int, ...]  # the layers of the model, in the order in which a page holds them


class TableGroup(NamedTuple):
    """A group of layers and its block tables, which are consecutive among the model's tables."""

    group: LayerGroup
    tables: slice

    @property
    def num_tables(self) -> int:
        """Returns the number of tables of the group."""
        return self.tables.stop - self.tables.start


class LayerTables(NamedTuple):
    """The block tables of a model. Tables of full attention come first, and the tables of a group are consecutive."""

    layers_per_page: int
    tables: tuple[GroupTable, ...]

    @property
    def groups(self) -> tuple[TableGroup, ...]:
        """Returns each group with its tables."""
        found: list[TableGroup] = []
        for at, (group, _) in enumerate(self.tables):
            first = found.pop().tables.start if found and found[-1].group is group else at
            found.append(TableGroup(group, slice(first, at + 1)))
        return tuple(found)

    @property
    def positions(self) -> dict[int, tuple[int, int]]:
        """Returns the block table of each layer, and the layer's index among the layers of a page of this table."""
        return {
            layer: (number, position)
            for number, table in enumerate(self.tables)
            for position, layer in enumerate(table.layers)
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns the name of each table's kind."""
        return tuple(table.group.name for table in self.tables)

    @property
    def kinds_named(self) -> tuple[str, ...]:
        """Returns `kinds` in the form of `BlockTable.kinds`: without the first kind if it is full attention."""
        return self.kinds[1:] if self.kinds[0] == "full" else self.kinds

    def described(self) -> str:
        """Returns a string with the kind and layers of each table. Managers with equal strings can exchange pages."""
        tables = zip(self.kinds, self.tables, strict=True)
        return ", ".join(f"{kind} of layers {' '.join(map(str, table.layers))}" for kind, table in tables)

    def most_pages(self, tokens: int, page_size: int, step_tokens: int = 1) -> int:
        """Returns the largest number of pages, summed over all tables, that a request holds.

        The request has `tokens` tokens. A step runs at most `step_tokens` of them. Each kind of layer is counted when
        it has the most pages. With chunked attention, this is the end of a chunk, so a request that ends elsewhere may
        hold fewer pages than the sum.
        """
        return sum(of.num_tables * of.group.most_pages(tokens, page_size, step_tokens) for of in self.groups)


def layer_tables(groups: tuple[LayerGroup, ...], num_layers: int) -> LayerTables:
    """Divides the layers of all groups among block tables.

    Returns as few tables as possible, such that at most the share `MOST_LOST` of a request's pages is unused, whatever
    the length of the request.

    Without groups the result is one table of all `num_layers` layers. Raises `InvalidParamsError` unless each layer is
    in exactly one group.

    Examples:
        >>> groups = LayerGroup("full", (0, 3)), LayerGroup("window", (1, 2, 4, 5), window=64)
        >>> [(table.group.kind, table.layers) for table in layer_tables(groups, num_layers=6).tables]
        [('full', (0, 3)), ('window', (1, 2)), ('window', (4, 5))]
    """
    if not groups:
        every = LayerGroup("full", tuple(range(num_layers)))
        return LayerTables(num_layers, (GroupTable(every, every.layers),))
    named = sorted(layer for group in groups for layer in group.layers)
    if named != list(range(num_layers)):
        odd = next((layer for layer in named if named.count(layer) > 1 or layer >= num_layers), None)
        odd = next(layer for layer in range(num_layers) if layer not in named) if odd is None else odd
        raise InvalidParamsError(
            f"groups name layer {odd} {named.count(odd)} times: each of the {num_layers} layers must be in exactly "
            "one group"
        )
    in_order = sorted(groups, key=lambda group: (not group.keeps_all, group.kind != "full", -group.window))
    _, _, size = min(
        (count, lost, size)
        for size in range(1, num_layers + 1)
        for count, lost in [_cut(in_order, size)]
        if lost <= MOST_LOST
    )
    tables = [
        GroupTable(group, group.layers[first : first + size])
        for group in in_order
        for first in range(0, len(group.layers), size)
    ]
    return LayerTables(size, tuple(tables))


def _cut(groups: list[LayerGroup], size: int) -> tuple[int, float]:
    """Returns how many tables of `size` layers the groups need, and the largest unused share of a request's pages.

    `groups` are sorted: full attention first, then from the longest window to the shortest. The longer a request gets,
    the larger is the part of its pages that belongs to the first groups. Therefore the unused share at any length is at
    most the largest of these: the unused share of the first group alone, of the first two groups together, and so on.
    """
    tables, layers, lost = 0, 0, 0.0
    for group in groups:
        tables += -(-len(group.layers) // size)
        layers += len(group.layers)
        lost = max(lost, tables * size / layers - 1)
    return tables, lost
