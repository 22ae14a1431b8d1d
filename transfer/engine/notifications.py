"""Notifications from peers: which shards of which transfer have said that all their bytes have arrived."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from typing import Literal

from transfer.engine.metadata import TransferReqData

_NAME = re.compile(rb"[0-9a-f]{32}")
_MAX_OPEN = 1 << 16
_MAX_ENDED = 1 << 16

Verdict = Literal["accepted", "unknown", "malformed", "duplicate", "late"]


class NotificationBook:
    """A ledger of completed shards. Anything unexpected is counted and dropped: peers are not trusted to be right.

    Attributes:
        completed: engine name to transfer name to the shards that have ended. It is bounded: of more than 65,536 open
            transfers of one peer, the oldest is dropped.
        counts: how many notifications met which verdict.
        given_up: transfer name to request of those that were given up here before their end was known.
    """

    def __init__(self, tp: int) -> None:
        self.completed: dict[str, dict[str, set[int]]] = {}
        self.counts: Counter[str] = Counter()
        self.given_up: dict[str, TransferReqData] = {}
        self._shards = set(range(tp))
        self._ended: OrderedDict[str, None] = OrderedDict()

    def connect(self, peer: str) -> None:
        """Opens the ledger of a peer."""
        self.completed.setdefault(peer, {})

    def disconnect(self, peer: str) -> None:
        """Forgets a peer's transfers, except those that are complete and not yet cleaned up."""
        left = {name: shards for name, shards in self.completed.pop(peer, {}).items() if shards == self._shards}
        if left:
            self.completed[peer] = left

    def accept(self, peer: str | None, shard: int, message: bytes) -> None:
        """Books a notification that our agent of `shard` got. The last one ends a transfer that was given up.

        `peer` is None if no connected engine has the agent that sent it on this shard.
        """
        verdict = self._verdict(peer, shard, message)
        self.counts[verdict] += 1
        if peer is None or verdict != "accepted":
            return
        transfers, name = self.completed[peer], message.decode()
        transfers.setdefault(name, set()).add(shard)
        if len(transfers) > _MAX_OPEN:
            del transfers[next(iter(transfers))]
        if name in self.given_up and self.is_complete(peer, name):
            self.end(peer, name)

    def _verdict(self, peer: str | None, shard: int, message: bytes) -> Verdict:
        if peer is None or peer not in self.completed:
            return "unknown"
        if not _NAME.fullmatch(message):
            return "malformed"
        name = message.decode()
        if name in self._ended:
            return "late"
        return "duplicate" if shard in self.completed[peer].get(name, ()) else "accepted"

    def is_complete(self, peer: str, transfer_name: str) -> bool:
        """Whether every shard of a transfer has ended."""
        return self.completed.get(peer, {}).get(transfer_name) == self._shards

    def has_ended(self, transfer_name: str) -> bool:
        """Whether a transfer was given up, or `end` was called for it not long ago."""
        return transfer_name in self.given_up or transfer_name in self._ended

    def end(self, peer: str, transfer_name: str) -> None:
        """Forgets a transfer: whatever still arrives for it is dropped."""
        self.completed.get(peer, {}).pop(transfer_name, None)
        self.given_up.pop(transfer_name, None)
        self._ended[transfer_name] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
