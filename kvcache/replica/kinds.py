"""The kinds of layers whose KV is kept in block tables, and the class that keeps the pages of each kind."""

from collections.abc import Mapping

from kvcache.layer_groups import LayerGroup, TableGroup
from kvcache.replica.draft import DraftGroup, KeptDraft
from kvcache.replica.kept_pages import KeptPages
from kvcache.replica.rows import BlockRows
from kvcache.replica.sinks import KeptSinks, SinkGroup

KINDS: Mapping[type[LayerGroup], type[KeptPages]] = {
    LayerGroup: KeptPages,  # full attention, windows and chunks
    SinkGroup: KeptSinks,
    DraftGroup: KeptDraft,
}


def kept_pages(of: TableGroup, number: int, rows: BlockRows) -> KeptPages:
    """Returns what `rows` keep in the tables of a group. `number` is the index of the group in `rows`."""
    return KINDS[type(of.group)](of, number, rows)
