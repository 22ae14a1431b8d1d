"""The interface through which an exchange uses the manager whose pages it leases and fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from kvcache.layer_groups import LayerTables
from kvcache.layout import KindPages, PageLayout
from kvcache.replica.block_table import BlockTable


class PendingPages(Protocol):
    """An import: pages of a request on a replica that a pull will fill, such as `kvcache.PendingImport`."""

    request_id: str
    replica_idx: int


class FurtherPages(Protocol):
    """Pages of requests that are not token pages, such as recurrent states.

    In the block table of a request, these pages form an additional group.
    """

    @property
    def tensors(self) -> Sequence[Sequence[torch.Tensor]]:
        """`[shard][region]`: the tensors that hold only these pages."""
        ...

    @property
    def num_pages(self) -> int:
        """The number of pages of a shard, without page 0, which belongs to no request."""
        ...

    def kinds(self, shard: int) -> Sequence[KindPages]:
        """Returns the layout of the pages of each kind on a shard, and the tensor that holds them."""
        ...


class PageOwner(Protocol):
    """The interface of a manager whose pages an exchange leases and fills. `kvcache.PagedKVCacheManager` implements it.

    The manager's own objects (holds on pages, copiers, proofs) pass through an exchange unchanged.
    """

    @property
    def num_replicas(self) -> int:
        """The number of replicas. For peers, each of them is a separate engine."""
        ...

    @property
    def total_num_pages(self) -> int:
        """The number of pages of all replicas, without the null page of each replica."""
        ...

    @property
    def slab_pages(self) -> int:
        """How many token pages a request's state takes; 0 if it takes none."""
        ...

    @property
    def layouts(self) -> Sequence[PageLayout]:
        """The layout of a page on each shard of a replica."""
        ...

    @property
    def layer_tables(self) -> LayerTables:
        """The block tables that each request has, and the layers of each table."""
        ...

    @property
    def device_tensors(self) -> Sequence[Sequence[torch.Tensor]]:
        """The tensors of the pages, `[replica][shard]`. Each is dense, and its first page is the null page."""
        ...

    @property
    def further_groups(self) -> Sequence[Sequence[FurtherPages]]:
        """The pages of requests that are not token pages, `[replica][group]`, such as recurrent states.

        In a block table, these groups follow the groups of token pages.
        """
        ...

    def lease(self, request_id: str, *, seal: Callable[[BlockTable], bytes]) -> Any:
        """Holds the pages that a claimed request computes, until `end_lease`. The returned object names its replica.

        Each block table that the manager makes for the request from now on has the result of `seal` among its `seals`.
        """
        ...

    @property
    def contents(self) -> Any:
        """The index of pages by content: a `kvcache.replica.contents.PageContents`."""
        ...

    def end_lease(self, lease: Any) -> None:
        """Releases the pages of a lease that `lease` returned. No reader may still read them."""

    def copier(self, pending: Any) -> Any:
        """Returns the copier of the import `pending`: the only object that may write to the pages of this import.

        After the copy, the copier's `prove` returns a proof that the pages were copied while their source held them.
        """
        ...
