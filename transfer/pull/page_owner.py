"""What an exchange needs of the manager whose pages it leases and fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvcache.layer_groups import LayerTables
    from kvcache.layout import KindPages, PageLayout
    from kvcache.replica.block_table import BlockTable


class PendingPages(Protocol):
    """Pages that are to be filled from another manager's, of a request and a replica: `kvcache.PendingImport`."""

    request_id: str
    replica_idx: int


class FurtherPages(Protocol):
    """Keeps further pages of each request, such as a state: one more group in the request's block table."""

    @property
    def tensors(self) -> Sequence[Sequence[torch.Tensor]]:
        """`[shard][region]`: those that are theirs alone."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages of a shard, without page 0, which has no owner."""
        ...

    def kinds(self, shard: int) -> Sequence[KindPages]:
        """Where the pages of each kind lie on a shard, and in which of its tensors."""
        ...


class PageOwner(Protocol):
    """The interface of a manager whose pages an exchange leases and fills. `kvcache.PagedKVCacheManager` implements it.

    The manager's own objects (holds on pages, copiers, proofs) pass through an exchange unchanged.
    """

    @property
    def num_replicas(self) -> int:
        """The number of replicas. Peers see each as an engine of its own."""
        ...

    @property
    def total_num_pages(self) -> int:
        """Pages of all replicas; the null page of each is not counted."""
        ...

    @property
    def slab_pages(self) -> int:
        """Pages of those of tokens that a request's state takes; 0: none."""
        ...

    @property
    def layouts(self) -> Sequence[PageLayout]:
        """The layout of a page on each shard of a replica."""
        ...

    @property
    def layer_tables(self) -> LayerTables:
        """Its block tables, and the layers of each."""
        ...

    @property
    def device_tensors(self) -> Sequence[Sequence[torch.Tensor]]:
        """`[replica][shard]`, dense: the null page, then all others."""
        ...

    @property
    def further_groups(self) -> Sequence[Sequence[FurtherPages]]:
        """`[replica][group]`, in the order of a block table, after the pages of tokens."""
        ...

    def lease(self, request_id: str, *, seal: Callable[[BlockTable], bytes]) -> Any:
        """Hold what a claimed request computes, until `end_lease`. The hold says its `replica_idx`.

        From now on each block table of the request carries its `seal` among its `seals`.
        """
        ...

    @property
    def contents(self) -> Any:
        """Pages by what they hold: `kvcache.replica.contents.PageContents`."""
        ...

    def end_lease(self, lease: Any) -> None:
        """End a hold under which no reader reads any more."""

    def copier(self, pending: Any) -> Any:
        """The only writer to the pages of an import, which can prove that it wrote them."""
        ...
