"""Notifications from peers: the shards of each transfer that have reported that all their bytes have arrived."""

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
    """Records completed shards. Unexpected notifications are counted and dropped, because peers are not trusted.

    Attributes:
        completed: engine name to transfer name to the shards that have ended. Each peer has at most 65,536 entries; the
            oldest is dropped.
        counts: number of notifications by verdict.
        given_up: request by transfer name of the transfers that were given up here before their end was known.
    """

    def __init__(self, tp: int) -> None:
        self.completed: dict[str, dict[str, set[int]]] = {}
        self.counts: Counter[str] = Counter()
        self.given_up: dict[str, TransferReqData] = {}
        self._shards = set(range(tp))
        self._ended: OrderedDict[str, None] = OrderedDict()

    def connect(self, peer: str) -> None:
        """Starts to record notifications of a peer."""
        self.completed.setdefault(peer, {})

    def disconnect(self, peer: str) -> None:
        """Forgets a peer's transfers, except those that are complete and not yet cleaned up."""
        left = {name: shards for name, shards in self.completed.pop(peer, {}).items() if shards == self._shards}
        if left:
            self.completed[peer] = left

    def accept(self, peer: str | None, shard: int, message: bytes) -> None:
        """Records a notification that our agent of `shard` received. The last one ends a transfer that was given up.

        `peer` is None if the sending agent belongs to no connected engine on this shard.
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
        """Whether a transfer was given up, or was ended recently by `end`."""
        return transfer_name in self.given_up or transfer_name in self._ended

    def end(self, peer: str, transfer_name: str) -> None:
        """Forgets a transfer. Later notifications for it are dropped."""
        self.completed.get(peer, {}).pop(transfer_name, None)
        self.given_up.pop(transfer_name, None)
        self._ended[transfer_name] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
