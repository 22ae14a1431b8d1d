"""`Offer`: the lease of one request at its source, on all ranks, and what readers are told that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from transfer.connector.config import WorkerConfig
from transfer.pull.lease import LeaseRef
from transfer.wire.messages import LeasedPages, LeaseQuery, LeaseReply, sealed_pages
from transfer.wire.prompt import Prompt


class Held(NamedTuple):
    """The pages of a request, once they are computed.

    Attributes:
        prompt: the prompt whose KV they hold.
        num_tokens: the number of its tokens, from the first on, that they hold.
        block_ids: for each group its blocks; the last one holds the last token, or the state after it.
    """

    prompt: Prompt
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class Offer:
    """Every rank grants the lease and ends it on its own. The scheduler's thread writes, that of the server reads."""

    lease: LeaseRef
    ranks: int
    held: Held | None = None  # None while the request is computed
    offered: set[int] = field(default_factory=set[int])  # ranks on which it has stood
    over: set[int] = field(default_factory=set[int])  # ranks on which it has ended, or was not granted
    reason: str = "read"  # or the first other one why it ended on a rank
    aborted: bool = False  # its end was asked for

    @property
    def ended(self) -> str:
        """Why nothing can be read under it any more; empty while something can, or will."""
        if self.aborted:
            return "it is being ended"
        return f"it has ended on ranks {sorted(self.over)[:16]}: {self.reason}" if self.over else ""

    @property
    def missing(self) -> str:
        """Why it does not stand on every rank; empty if it does."""
        left = sorted(set(range(self.ranks)) - self.offered)
        return self.ended or (f"ranks {left[:16]} have not granted it yet" if left else "")

    def answer(self, query: LeaseQuery, config: WorkerConfig, key: bytes) -> LeaseReply:
        """Says what it holds, once it stands on every rank and the pages are computed; until then, to ask again."""
        held, count = self.held, query.num_tokens
        error = self.ended
        if held is not None and not error and not 0 <= count <= held.num_tokens:
            error = f"it holds the pages of {held.num_tokens} tokens, {count} are asked for"
        if error:
            return LeaseReply(query_id=query.query_id, error=f"lease {query.lease_id:#018x}: {error}")
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
