"""`Offer`: the lease of one request on all ranks of its source, and the answer to readers that ask for its pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from transfer.connector.config import WorkerConfig
from transfer.pull.lease import LeaseRef
from transfer.wire.messages import LeasedPages, LeaseQuery, LeaseReply, sealed_pages
from transfer.wire.prompt import Prompt


class Held(NamedTuple):
    """The pages of a request that readers may read once they are computed.

    Attributes:
        prompt: the prompt whose KV they hold.
        num_tokens: tokens that they hold, from the first on.
        block_ids: the blocks of each group. The last block holds the last token, or the state after it.
    """

    prompt: Prompt
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class Offer:
    """A lease that every rank grants and ends on its own.

    The scheduler's thread writes it; the server's thread reads it.
    """

    lease: LeaseRef
    ranks: int
    held: Held | None = None  # None until `params` names the pages
    offered: set[int] = field(default_factory=set[int])  # ranks that have granted it
    over: set[int] = field(default_factory=set[int])  # ranks on which it has ended, or that did not grant it
    reason: str = "read"  # "read", or the first other reason for which a rank ended the lease
    aborted: bool = False  # the scheduler has asked for its end

    @property
    def ended(self) -> str:
        """Why nothing can be read under the lease any more; empty while it is open or still being granted."""
        if self.aborted:
            return "it is being ended"
        return f"it has ended on ranks {sorted(self.over)[:16]}: {self.reason}" if self.over else ""

    @property
    def missing(self) -> str:
        """Why the lease is not open on every rank; empty if it is."""
        left = sorted(set(range(self.ranks)) - self.offered)
        return self.ended or (f"ranks {left[:16]} have not granted it yet" if left else "")

    def answer(self, query: LeaseQuery, config: WorkerConfig, key: bytes) -> LeaseReply:
        """Returns the leased pages once every rank has granted the lease and the pages are known.

        Until then the answer says what is waited for, and the reader asks again.
        """
        held, count = self.held, query.num_tokens
        error = self.ended
        if held is not None and not error and not 0 <= count <= held.num_tokens:
            error = f"it holds the pages of {held.num_tokens} tokens, {count} are asked for"
        if error:
            error = f"lease {query.lease_id:#018x}: {error}"
            return LeaseReply(query_id=query.query_id, error=error, is_over=bool(self.ended))
        if held is None or self.missing:
            return LeaseReply(query_id=query.query_id, waits_for=self.missing or "its request is still computed")
        pages = LeasedPages(
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            lease_id=self.lease.lease_id,
            slot=self.lease.slot,
            duration_s=self.lease.duration_s,
            num_tokens=held.num_tokens,
            block_ids=held.block_ids,
            prompt_digest=held.prompt.digest(count),
        )
        return LeaseReply(query_id=query.query_id, pages=sealed_pages(pages, key))
