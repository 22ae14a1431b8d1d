"""Where pages come from: a `Source`, or a `Wanted`, whose engine must first be asked which pages it holds.

Clients carry only a pointer to a lease. The reader asks the source which pages the lease holds, and for which tokens.
If these tokens are the tokens of the reader's request, the reader reads the pages. Otherwise the reader gives the lease
back.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from transfer.errors import PullFailedError
from transfer.failures import FailureKind
from transfer.pull.lease import LeaseRef
from transfer.wire.handshake import differences
from transfer.wire.messages import MAX_TOKENS, LeasedPages, LeaseQuery, LeaseReply, Wanted, open_pages, sealed_pages
from transfer.wire.prompt import Content

NO_WEIGHTS: Mapping[str, str] = MappingProxyType({})
"""Identifies no weights."""

Contact: TypeAlias = tuple[str, str]
"""The ZMQ endpoint of a handshake server, and the id of the engine that is expected there."""


_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class KVSource(msgspec.Struct, frozen=True):
    """A process that may have pages of a prompt. It is asked before the prompt is computed.

    Attributes:
        address: ZMQ endpoint of its handshake server.
        engines: ids of its engines, the likeliest first.
        tokens: a lower bound of the prompt tokens that the process has; 0 if unknown.
    """

    address: _Name
    engines: Annotated[tuple[_Name, ...], Meta(min_length=1, max_length=64)]
    tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0


class Source(NamedTuple):
    """Where a request's pages can be read. msgspec enforces the limits of its fields when decoding.

    Attributes:
        address: ZMQ endpoint of the handshake server.
        engine_id: the engine at that address.
        lease: the lease under which the engine holds the pages.
        incarnation: the incarnation that granted the lease. If it is empty (not known), only the lease word shows that
            the source was restarted.
    """

    address: Annotated[str, Meta(min_length=1, max_length=512)]
    engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    lease: LeaseRef
    incarnation: Annotated[str, Meta(max_length=256)] = ""

    @property
    def contact(self) -> Contact:
        """The address and engine id, by which the directory finds the source."""
        return (self.address, self.engine_id)


class OfferedPages(NamedTuple):
    """The pages of a lease, as its source tells them to a reader that knows only the lease. See `source_in`.

    Attributes:
        prompt: the prompt whose KV the pages hold, or the hashes of its pages.
        num_tokens: how many tokens the pages hold, counted from the first token of the prompt.
        block_ids: the blocks of each group. The last block holds the last token, or the state after it.
    """

    prompt: Content
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]

    def told(
        self,
        query: LeaseQuery,
        engine_id: str,
        incarnation: str,
        lease: LeaseRef,
        key: bytes,
        weights: Mapping[str, str] = NO_WEIGHTS,
    ) -> LeaseReply:
        """Returns the sealed answer to a reader's query. It is an error if the pages hold fewer tokens than asked for.

        Call this only for a lease that every rank has granted. `weights` are the source's, and `key` seals the answer.
        """
        count = query.num_tokens
        if not 0 <= count <= self.num_tokens:
            error = f"it holds the pages of {self.num_tokens} tokens, but {count} tokens were asked for"
            return LeaseReply(query_id=query.query_id, error=f"lease {query.lease_id:#018x}: {error}")
        pages = LeasedPages(
            engine_id=engine_id,
            incarnation=incarnation,
            lease_id=lease.lease_id,
            word_idx=lease.word_idx,
            duration_s=lease.duration_s,
            num_tokens=self.num_tokens,
            block_ids=self.block_ids,
            prompt_digest=self.prompt.digest(count),
            named={**dict(self.prompt.named), **weights},
        )
        return LeaseReply(query_id=query.query_id, pages=sealed_pages(pages, key))


def source_in(wanted: Wanted, data: bytes, key: bytes) -> tuple[Source, LeasedPages]:
    """Returns the source of a lease and its pages, from the source's sealed answer.

    Raises:
        MetadataError: the answer was changed on its way, or belongs to another engine or lease.
    """
    pages = open_pages(data, wanted.engine_id, wanted.lease_id, key)
    lease = LeaseRef(pages.lease_id, pages.word_idx, pages.duration_s)
    return Source(wanted.address, wanted.engine_id, lease, pages.incarnation), pages


def check_tokens(where: str, wanted: Wanted, pages: LeasedPages, weights: Mapping[str, str] = NO_WEIGHTS) -> None:
    """Raises `PullFailedError` if a lease holds the pages of another prompt, adapter or model.

    The message has both values. `weights` identifies the reader's own weights.
    """
    if differ := differences({**dict(wanted.named), **weights}, pages.named):
        raise PullFailedError(
            f"{where}: lease {wanted.lease_id:#018x} of engine {wanted.engine_id!r} holds pages of another model: "
            f"{differ}",
            FailureKind.REFUSED,
        )
    if pages.prompt_digest != wanted.digest:
        raise PullFailedError(
            f"{where}: lease {wanted.lease_id:#018x} of engine {wanted.engine_id!r} holds the pages of another prompt: "
            f"the digest of its first {wanted.num_tokens} tokens is {pages.prompt_digest.hex()[:16]}, but the "
            f"request's is {wanted.digest.hex()[:16]}",
            FailureKind.REFUSED,
        )


def check_weights(where: str, engine_id: str, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises `PullFailedError` if the reader's weights have changed since `check_tokens` compared them.

    A request may wait for its blocks for long after the source has named the pages of its lease.
    """
    if differ := differences(then, now, ("when it was asked for", "now")):
        raise PullFailedError(
            f"{where}: engine {engine_id!r} holds pages of another model, because this engine's weights have changed: "
            f"{differ}",
            FailureKind.REFUSED,
        )
