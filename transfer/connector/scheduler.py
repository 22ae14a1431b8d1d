"""`NixlConnectorScheduler`: the part of the connector that works with an engine's scheduler, at a source or a reader.

The engine's scheduler tells this object about requests, sends the result of `build_metadata` to every worker once a
step, and passes the result of each worker's `take_output` to `update`. At a source, call `offer` for a request, and
`params` when its lease is granted. The request's pages may be freed when the request is in `sent`. At a reader, call
`read` with the parameters that came with a request, and then `load`. The load has ended when the request is in
`received`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcache.uncopied import Uncopied
from transfer.connector.config import GroupConfig, WorkerConfig, check_config, check_endpoint, check_groups
from transfer.connector.metadata import ConnectorMetadata, LoadRequest, Progress, SendRequest, WorkerOutput, as_blocks
from transfer.connector.transfer_params import TransferParams, params_of, pointer_in, read_params
from transfer.errors import HandshakeError, InvalidLeaseError, InvalidTransferError, TransferParamsError
from transfer.pull.lease import LEASE_WORDS, LENT_WORDS, LeaseRef, LeaseWords
from transfer.pull.source import OfferedPages
from transfer.wire.handshake import EngineCard, HandshakeServer, differences
from transfer.wire.keys import Keyring
from transfer.wire.messages import ContentQuery, LeaseQuery, LeaseRefusal, LeaseReply, Wanted
from transfer.wire.prompt import Prompt
from transfer.wire.secret import fleet_keys

_LARGEST_BLOCK = 4096
"""The largest block size of a reader, in tokens, for which a source with sliding-window layers keeps enough blocks.

The first block that a reader needs can begin up to one block before the window. A source therefore also names the
blocks that hold this many tokens before the window, as far as it still has those blocks.
"""


@dataclass(slots=True, eq=False)
class Offer:
    """A lease. Every rank grants and ends it separately.

    The scheduler's thread writes this object, and the handshake server's thread reads it.
    """

    request_id: str
    lease: LeaseRef
    ranks: int
    held: OfferedPages | None = None  # None until `params` names the pages
    offered: set[int] = field(default_factory=set[int])  # the ranks that have granted the lease
    over: set[int] = field(default_factory=set[int])  # the ranks on which the lease has ended, or that have refused it
    reason: str = "read"  # why the lease has ended: "read", or the first other reason that a rank has given
    aborted: bool = False  # whether the scheduler has asked for the lease to end
    engines: int = 1  # how many reading engines must finish before the lease ends
    weights: dict[str, str] = field(default_factory=dict[str, str])  # the weights that the pages are computed with
    refused_by: set[str] = field(default_factory=set[str])  # the reading engines that have refused it here

    @property
    def ended(self) -> str:
        """Why the lease can no longer be read. Empty while the lease is open or still being granted."""
        if self.aborted:
            return "it is being ended"
        return f"it has ended on ranks {sorted(self.over)[:16]}: {self.reason}" if self.over else ""

    @property
    def missing(self) -> str:
        """Why the lease is not open on every rank. Empty if the lease is open on every rank."""
        left = sorted(set(range(self.ranks)) - self.offered)
        return self.ended or (f"ranks {left[:16]} have not granted it yet" if left else "")

    def answer(self, query: LeaseQuery, config: WorkerConfig, key: bytes) -> LeaseReply:
        """Answers a reader's query.

        If every rank has granted the lease and its pages are known, the answer has the leased pages.

        Until then, the answer says what is missing, and the reader asks again. If the lease has ended or holds fewer
        tokens than the reader needs, the answer is an error.
        """
        held, error = self.held, self.ended
        if error:
            error = f"lease {query.lease_id:#018x}: {error}"
            return LeaseReply(query_id=query.query_id, error=error, is_over=True)
        if held is None or self.missing:
            return LeaseReply(query_id=query.query_id, waits_for=self.missing or "its request is still computed")
        return held.told(query, config.engine_id, config.incarnation, self.lease, key, self.weights)


@dataclass(slots=True, eq=False)
class _Load:
    """The load of one request: what the ranks were asked for, which ranks are done, and whether one has failed."""

    asked: LoadRequest
    received: set[int] = field(default_factory=set[int])
    failed: bool = False
    cancelled: bool = False  # whether the scheduler has given the load up
    # as in `Progress`, collected from the ranks on which the load has ended
    unwritten: dict[int, int] = field(default_factory=dict[int, int])


class NixlConnectorScheduler(Uncopied):
    """Leases and loads of one engine, over all its ranks. Single-threaded.

    Args:
        config: the config of any one of the ranks.
        host: name or address at which readers reach this process.
        bind: ZMQ endpoint of the handshake server. The default is the loopback interface and a free port.
        keyring: keys for the side channel. If it is None, the keys are derived from the config's shared secret; without
            a secret, the sockets are plain.

    Attributes:
        keyring: keys of the side channel; None if its sockets are plain.

    Raises:
        InvalidEngineError: no engine can be created from the config.
    """

    def __init__(
        self,
        config: WorkerConfig,
        host: str = "127.0.0.1",
        bind: str = "tcp://127.0.0.1:0",
        keyring: Keyring | None = None,
    ) -> None:
        self.config = check_config(config)
        where = f"engine {config.engine_id!r}"
        check_endpoint(f"{where}: host", host)
        check_endpoint(f"{where}: bind", bind)
        self._host = host
        self._bind = bind
        self._key, self.keyring = fleet_keys(where, config.secret, config.key, keyring)
        self._server: HandshakeServer | None = None
        self._metadata = ConnectorMetadata()
        self._words = LeaseWords()
        self._lent_words = LeaseWords(range(LEASE_WORDS, LEASE_WORDS + LENT_WORDS))
        # Answers readers that ask for pages by hash. Set before the engine serves; None if it lends none.
        self.lent: Callable[[ContentQuery], LeaseReply] | None = None
        self._offers: dict[str, Offer] = {}
        self._by_lease: dict[int, Offer] = {}
        self._loads: dict[str, _Load] = {}
        self._weights: dict[int, dict[str, str]] = {}  # by rank: the weights that it has reported last
        self._refusals: deque[LeaseRefusal] = deque(maxlen=LEASE_WORDS)  # written by the handshake server's thread

    def set_handshake_metadata(self, ranks: Mapping[int, bytes], fingerprint: Mapping[str, str] | None = None) -> str:
        """Starts to answer handshakes for the engine. Returns the endpoint for readers.

        Args:
            ranks: the result of `get_handshake_metadata` on each rank, by rank.
            fingerprint: the fingerprint of the ranks' configs. It is needed if those configs have settings that this
                config lacks. With None, the fingerprint of this config is served.

        Raises:
            HandshakeError: a rank is missing, or the endpoint is taken.
        """
        if sorted(ranks) != list(range(self.config.ranks)):
            raise HandshakeError(
                f"engine {self.config.engine_id!r}: got the metadata of ranks {sorted(ranks)[:16]}; "
                f"all {self.config.ranks} ranks are needed"
            )
        metadata = tuple(ranks[rank] for rank in range(self.config.ranks))
        agreed = self.config.fingerprint() if fingerprint is None else fingerprint
        engine_id, incarnation = self.config.engine_id, self.config.incarnation
        # `build_metadata` reads the refusals, because the handshake server's thread must not end a lease
        card = EngineCard(
            engine_id, incarnation, metadata, agreed, self._leased, lent=self.lent, refused=self._refusals.append
        )
        if self._server is None:
            secure = None if self.keyring is None else self.keyring.secure_server
            self._server = HandshakeServer([card], self._bind, secure)
        else:
            self._server.serve(card)
        return self.address

    def reopened(self, incarnation: str, weights: Mapping[str, str]) -> None:
        """Reports that all ranks have registered their caches anew, before `set_handshake_metadata` says where.

        No lease and no load may be open. Readers that know the former incarnation notice that it has ended.

        Args:
            incarnation: the new incarnation of all ranks.
            weights: what identifies their weights, as in `NixlConnectorWorker.set_weights`.

        Raises:
            InvalidTransferError: a lease or a load has not ended.
        """
        if self._offers or self._loads:
            names = [*self._offers, *self._loads]
            raise InvalidTransferError(
                f"engine {self.config.engine_id!r}: caches were registered anew while leases or loads are open: "
                f"{names[:8]}"
            )
        self.config = msgspec.structs.replace(self.config, incarnation=incarnation)
        self._weights = {rank: dict(weights) for rank in range(self.config.ranks)}

    def look_again(self) -> None:
        """Makes the handshake server send the answers that it has held back, if they are ready."""
        if self._server is not None:
            self._server.look_again()

    @property
    def key(self) -> bytes:
        """The key that seals what this engine tells its readers."""
        return self._key

    @property
    def address(self) -> str:
        """Endpoint of the handshake server, as readers see it.

        Raises:
            HandshakeError: the server has not been started.
        """
        return f"tcp://{self._host}:{self._port}"

    @property
    def _port(self) -> int:
        if self._server is None:
            raise HandshakeError(f"engine {self.config.engine_id!r}: the metadata of its ranks is not known yet")
        return int(self._server.endpoint.rpartition(":")[2])

    def offer(
        self,
        request_id: str,
        *,
        running: bool = False,
        engines: int = 1,
        block_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Asks every rank for a lease on a request's pages.

        The caller must not free the pages before the request is in `sent`.

        Args:
            request_id: the request.
            running: True if the request is still being computed. The lease's clock then starts when `computed` is
                called.
            engines: how many reading engines must finish before the lease ends.
            block_ids: the blocks of each group. They are needed only if the config turns page checks on.

        Raises:
            InvalidLeaseError: the request already has a lease, or no lease word is free.
        """
        if request_id in self._offers:
            raise InvalidLeaseError(f"request {request_id!r}: its lease has not ended on every rank yet")
        lease = self._words.take(self.config.timing.lease)
        if lease is None:
            raise InvalidLeaseError(f"request {request_id!r}: all {LEASE_WORDS} lease words are taken")
        offer = Offer(request_id, lease, self.config.ranks, engines=engines)
        self._grant(offer, running=running, block_ids=block_ids)

    def lend(self, name: str, pages: OfferedPages, duration_s: float) -> LeaseRef | None:
        """Asks every rank for a lease on computed pages of no request in particular. Returns None if no word is free.

        The lease has a word of its own, so that no request lacks one. Its clock starts when it is granted. `name` is in
        `offered` when every rank has granted the lease, and in `sent` when its pages may be freed.

        Args:
            name: a name that no other lease has.
            pages: the pages. The last blocks of each group end with the last token; a group may lack its first ones.
            duration_s: the duration of the lease, if its reader does not renew it.
        """
        if (lease := self._lent_words.take(duration_s)) is None:
            return None
        self._grant(Offer(name, lease, self.config.ranks, pages), running=False, block_ids=pages.block_ids)
        return lease

    def _grant(self, offer: Offer, *, running: bool, block_ids: Sequence[Sequence[int]]) -> None:
        self._offers[offer.request_id] = self._by_lease[offer.lease.lease_id] = offer
        self._metadata.reqs_to_send[offer.request_id] = SendRequest(
            lease=offer.lease, engines=offer.engines, running=running, block_ids=as_blocks(block_ids)
        )

    def computed(self, request_id: str) -> None:
        """Reports that all pages of a request are computed. The clock of the request's lease starts now."""
        self._metadata.reqs_computed.append(request_id)

    def is_ending(self, request_id: str) -> bool:
        """Whether the request's lease or load was given up and ends within the next steps."""
        offer, load = self._offers.get(request_id), self._loads.get(request_id)
        return (offer is not None and offer.aborted) or (load is not None and (load.cancelled or load.failed))

    def is_offered(self, request_id: str) -> bool:
        """Whether every rank has granted the request's lease, and none has ended it."""
        offer = self._offers.get(request_id)
        return offer is not None and not offer.missing

    def _leased(self, query: LeaseQuery) -> LeaseReply:
        """Answers a reader's query about a lease. Runs on the handshake server's thread."""
        offer = self._by_lease.get(query.lease_id)
        if offer is None:
            error = f"lease {query.lease_id:#018x} has ended, or engine {self.config.engine_id!r} never had it"
            return LeaseReply(query_id=query.query_id, error=error, is_over=True)
        return offer.answer(query, self.config, self._key)

    def params(
        self,
        request_id: str,
        prompt: Prompt,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        first_blocks: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Returns the `kv_transfer_params` for the reader of a leased request, and records which pages are leased.

        The parameters only point to the lease. A reader sends the lease's id back to this engine to ask which pages the
        lease holds. The reader gets the answer once every rank has granted the lease. Blocks that lie far before the
        sliding window are left out, because no reader needs them.

        Args:
            request_id: the request.
            prompt: the request's tokens, and everything else that its KV depends on.
            block_ids: the blocks of each group. The caller must still hold all of these blocks, because a reader may
                read each of them in full. Surplus blocks at the end are left out. For a state, only the last block is
                used.
            num_tokens: the number of tokens whose KV the pages hold now, or will hold at the end of this step.
            first_blocks: for each group, the index within the request of the first block in `block_ids`. Empty means 0
                for every group.

        Raises:
            InvalidLeaseError: the request has no lease, or its lease has ended on a rank.
            InvalidTransferError: there are too few blocks or too few tokens in the prompt, or the number of groups does
                not match the config.
        """
        offer, groups = self._open(request_id), self.config.groups
        firsts = tuple(first_blocks) or (0,) * len(groups)
        check_groups(f"request {request_id!r}", groups, block_ids, firsts)
        if prompt.num_tokens < num_tokens:
            raise InvalidTransferError(
                f"request {request_id!r}: got pages for {num_tokens} tokens, but its prompt has {prompt.num_tokens}"
            )
        kept = [
            _kept(f"request {request_id!r}: group {number}", group, blocks, first, num_tokens)
            for number, (group, blocks, first) in enumerate(zip(groups, block_ids, firsts, strict=True))
        ]
        offer.held = OfferedPages(prompt, num_tokens, as_blocks(kept))
        return self.pointer(request_id, num_tokens)

    def pointer(self, request_id: str, num_tokens: int) -> dict[str, Any]:
        """Returns `kv_transfer_params` that name a request's lease, as `params` does, but records no pages.

        Use this for other requests with the same prompt: they share the lease. A reader that asks before `params` was
        called is told to ask again.

        Raises:
            InvalidLeaseError: the request has no lease, or its lease has ended on a rank.
        """
        params = TransferParams(
            engine_id=self.config.engine_id,
            request_id=request_id,
            host=self._host,
            port=self._port,
            lease_id=f"{self._open(request_id).lease.lease_id:#018x}",
            num_tokens=num_tokens,
        )
        return params_of(params)

    def _open(self, request_id: str) -> Offer:
        offer = self._offers.get(request_id)
        if offer is None or offer.ended:
            reason = "none was granted" if offer is None else offer.ended
            raise InvalidLeaseError(f"request {request_id!r}: it has no valid lease: {reason}")
        return offer

    def abort(self, request_id: str, reason: str) -> bool:
        """Ends a request's lease, even while a reader reads its pages. Returns False if the request has no lease.

        The request's pages may be freed once the request is in `sent`.
        """
        if (offer := self._offers.get(request_id)) is not None:
            offer.aborted = True
            self._metadata.reqs_not_processed[request_id] = reason
        return offer is not None

    def read(self, request_id: str, params: object, prompt: Prompt) -> Wanted | None:
        """Returns the lease that a request's `kv_transfer_params` name, or None if they ask for no pages.

        Args:
            request_id: the request.
            params: parameters from outside, which are not trusted.
            prompt: the request's prompt. The leased pages must hold the KV of this prompt. The prompt may have more or
                fewer tokens than the source has computed.

        Raises:
            TransferParamsError: (a ValueError) a parameter is invalid. The message names the request, the key, its
                value and the limits.
        """
        found, count = read_params(request_id, params), len(prompt.token_ids)
        if found is not None and found.num_tokens > count and any(group.is_state for group in self.config.groups):
            raise TransferParamsError(
                f"request {request_id!r}: kv_transfer_params['remote_num_tokens'] is {found.num_tokens}, but the "
                f"request has {count} tokens: a state of more tokens cannot be used"
            )
        return None if found is None else found.wanted(prompt)

    def give_back(self, params: object, reason: str) -> None:
        """Tells a source that the lease in a request's params will not be read. A no-op if the params name no lease.

        Call this for a request that is not loaded because its params are invalid, or because a load of the same request
        id has not ended.
        """
        if (wanted := pointer_in(params)) is not None:
            self._metadata.to_give_back.append((wanted, reason))

    def refuse(self, wanted: Wanted, reason: str) -> None:
        """Tells a source that its lease will not be read."""
        self._metadata.to_give_back.append((wanted, reason))

    def hold(self, request_id: str, wanted: Wanted) -> None:
        """Makes every rank renew a source's lease for a request that has no blocks yet.

        The time limit of the load starts now. A later call to `load` names the blocks and starts to read. A call to
        `cancel` gives up the load and tells the source.

        Raises:
            InvalidTransferError: an earlier load of the request has not ended.
        """
        if request_id in self._loads:
            raise InvalidTransferError(f"request {request_id!r}: its load has not ended on every rank yet")
        asked = LoadRequest(wanted=wanted)
        self._loads[request_id], self._metadata.reqs_to_recv[request_id] = _Load(asked), asked

    def load(
        self,
        request_id: str,
        wanted: Wanted,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        num_computed_tokens: int,
        *,
        first_blocks: Sequence[int] = (),
    ) -> None:
        """Makes every rank read the pages of a request.

        If this engine lacks no page, the call only tells the source that nothing remains to be read.

        If `hold` was called for the request, the request appears in `received` even if no page was missing.

        Args:
            request_id: the request.
            wanted: the result of `read`.
            block_ids: our blocks of each group, into which the pages are read. There must be enough blocks for all
                pages that are loaded. For a state, only the last block is used.
            num_tokens: how many tokens of the request this engine needs, including the computed ones.
            num_computed_tokens: number of tokens that this engine already has.
            first_blocks: for each group, the index within the request of the first block in `block_ids`. If the
                argument is empty, the first block is the one that holds the first missing token.

        Raises:
            InvalidTransferError: an earlier load of the request has not ended, or the number of groups does not match
                the config.
        """
        missing = min(wanted.num_tokens, num_tokens) > num_computed_tokens
        groups, load = self.config.groups, self._loads.get(request_id)
        if load is not None and (load.asked.local_block_ids or load.failed):
            raise InvalidTransferError(f"request {request_id!r}: its load has not ended on every rank yet")
        firsts = tuple(first_blocks) or tuple(num_computed_tokens // group.block_size for group in groups)
        check_groups(f"request {request_id!r}", groups, block_ids, firsts)
        asked = LoadRequest(
            wanted=wanted,
            local_block_ids=as_blocks(block_ids),
            first_blocks=firsts,
            num_computed_tokens=num_computed_tokens,
            num_tokens=num_tokens,
        )
        if load is not None and request_id in self._metadata.reqs_to_recv:
            del self._loads[request_id]  # the metadata from `hold` was not sent yet, so no rank knows about this load
            load = None
        self._metadata.reqs_to_recv[request_id] = asked
        if load is not None:
            load.asked = asked
        elif missing:
            self._loads[request_id] = _Load(asked)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Gives up the load of a request. Returns False if the request has no load.

        The request's pages may be freed when the request is in `received`.
        """
        if (load := self._loads.get(request_id)) is not None:
            load.cancelled = True
            self._metadata.reqs_to_cancel[request_id] = reason
        return load is not None

    def save(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Makes every rank copy a request's blocks to its host buffers, if it has host buffers.

        Call this before `params`.
        """
        self._metadata.reqs_to_save[request_id] = as_blocks(block_ids)

    def build_metadata(self) -> ConnectorMetadata:
        """Returns the work of this step, which is the same for every worker.

        From then on, the object collects the work of the next step.
        """
        while self._refusals:
            self._on_refusal(self._refusals.popleft())
        metadata, self._metadata = self._metadata, ConnectorMetadata()
        return metadata

    def _on_refusal(self, refusal: LeaseRefusal) -> None:
        """Ends a lease that its readers have refused, because they cannot load this engine."""
        if (offer := self._by_lease.get(refusal.lease_id)) is not None:
            offer.refused_by.add(refusal.reader)
            if len(offer.refused_by) >= offer.engines and not offer.aborted:
                self.abort(offer.request_id, refusal.reason)

    def update(self, rank: int, output: WorkerOutput) -> Progress:
        """Records the output of one rank's worker, and returns what the scheduler learns from it.

        Raises:
            InvalidTransferError: the engine has no such rank.
        """
        if not 0 <= rank < self.config.ranks:
            raise InvalidTransferError(f"got the output of rank {rank}; there are ranks 0 to {self.config.ranks - 1}")
        progress = Progress()
        if output.weights:
            self._on_weights(rank, output.weights)
        for request_id, error in output.offered.items():
            if error:
                self.abort(request_id, "not granted by every rank")
                self._lease_over(rank, request_id, error, progress)
            elif (offer := self._offers.get(request_id)) is not None:
                offer.offered.add(rank)
                offer.weights = self._weights.get(rank, {})
                if self.is_offered(request_id):
                    progress.offered.add(request_id)
        for request_id, reason in output.sent.items():
            self._lease_over(rank, request_id, reason, progress)
        self._book_loads(rank, output, progress)
        return progress

    def has_new_weights(self, rank: int, output: WorkerOutput) -> bool:
        """Whether an output that `update` has not got yet reports other weights than the rank had before."""
        return bool(output.weights) and output.weights != self._weights.get(rank, {})

    def _on_weights(self, rank: int, weights: dict[str, str]) -> None:
        """Records a rank's weights. If they have changed, ends the leases that the rank granted before.

        The requests of some of these leases may have computed a part of their pages with each of the weights.
        """
        before, self._weights[rank] = self._weights.get(rank, {}), weights
        if before == weights:
            return
        for request_id, offer in self._offers.items():
            if rank in offer.offered and not offer.aborted:
                self.abort(request_id, f"the weights have changed: {differences(before, weights, ('now', 'before'))}")

    def _lease_over(self, rank: int, request_id: str, reason: str, progress: Progress) -> None:
        """Records that a lease has ended on one rank.

        Once it has ended on every rank, `progress.sent` names the request.
        """
        if (offer := self._offers.get(request_id)) is None:
            return
        offer.over.add(rank)
        if offer.reason == "read":
            offer.reason = reason
        if len(offer.over) == self.config.ranks:
            del self._offers[request_id], self._by_lease[offer.lease.lease_id]
            words = self._lent_words if offer.lease.word_idx in self._lent_words.words else self._words
            words.give_back(offer.lease)
            progress.sent[request_id] = offer.reason

    def _book_loads(self, rank: int, output: WorkerOutput, progress: Progress) -> None:
        """Records the loads that have failed or ended on a rank.

        A load counts as failed as soon as it has failed on one rank. The other ranks are then told to give up the load.
        A load counts as ended only when it has ended on every rank.
        """
        for request_id, reason in output.failed.items():
            load = self._loads.get(request_id)
            if load is not None and not load.failed:
                load.failed = True
                self._metadata.reqs_to_recv.pop(request_id, None)
                self._metadata.reqs_to_cancel[request_id] = reason
                progress.failed[request_id] = reason
                progress.block_ids_with_errors |= output.block_ids_with_errors
        for request_id in output.received:
            if (load := self._loads.get(request_id)) is not None:
                load.received.add(rank)
                for group, token in output.unwritten.get(request_id, {}).items():
                    load.unwritten[group] = max(token, load.unwritten.get(group, 0))
                if len(load.received) == self.config.ranks:
                    del self._loads[request_id]
                    progress.received.add(request_id)
                    if load.unwritten and not load.failed:
                        progress.unwritten[request_id] = load.unwritten

    def close(self) -> None:
        """Stops the handshake server. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _kept(where: str, group: GroupConfig, blocks: Sequence[int], first: int, num_tokens: int) -> list[int]:
    """Returns the blocks that a reader may need, up to the block that holds the last token.

    For a state, returns only the last block.
    """
    if group.is_state:
        return list(blocks[-1:])
    end = -(-num_tokens // group.block_size)
    if first + len(blocks) < end or first < 0:
        raise InvalidTransferError(
            f"{where}: got blocks {first} to {first + len(blocks)}, but {num_tokens} tokens fill {end} blocks of "
            f"{group.block_size}"
        )
    start = max(first, (group.needed(num_tokens) - _LARGEST_BLOCK) // group.block_size)
    return list(blocks[min(start, end) - first : end - first])
