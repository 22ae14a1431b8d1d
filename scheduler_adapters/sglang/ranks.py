"""Tensor parallelism at prefill: rank 0 decides about leases and exchanges messages with decode.

The other ranks follow it.

Rank 0 sends each of the other ranks the same work that the workers of any engine get, and receives their outputs
(`transfer.connector.metadata`). These messages go through the socket to which decode also sends its messages. Each
output carries a token that only the ranks have, as proof of its sender.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator

import msgspec
import zmq

from scheduler_adapters.sglang.rooms import RankOutput, RankStep, RoomServer, connect
from transfer.connector.metadata import ConnectorMetadata, WorkerOutput
from transfer.errors import MetadataError
from transfer.wire.keys import Keyring

_encode = msgspec.msgpack.Encoder().encode
_metadata = msgspec.msgpack.Decoder(ConnectorMetadata)
_output = msgspec.msgpack.Decoder(WorkerOutput)


class RankLeader:
    """Rank 0's connections to the other ranks.

    Nothing is sent before every other rank has sent its first message, because only then are all their addresses known.

    Args:
        server: the socket that decode and the ranks talk to.
        ranks: number of ranks, including this one.
        token: secret shared by the ranks.
    """

    def __init__(self, server: RoomServer, ranks: int, token: bytes) -> None:
        self._server = server
        self._ranks = ranks
        self._token = token
        self._peers: dict[int, bytes] = {}
        self._unsaid: list[bytes] = []

    def tell(self, metadata: ConnectorMetadata) -> None:
        """Sends the work of a step to every other rank."""
        data = _encode(metadata)
        if len(self._peers) < self._ranks - 1:
            self._unsaid.append(data)
            return
        self._say(data)

    def _say(self, data: bytes) -> None:
        for peer in self._peers.values():
            self._server.send(peer, RankStep(metadata=data))

    def heard(self, peer: bytes, message: RankOutput) -> tuple[int, WorkerOutput]:
        """Returns the rank that sent a message, and its output.

        Raises:
            MetadataError: the message is not from a rank of this engine, or its output cannot be decoded.
        """
        if not hmac.compare_digest(message.token, self._token) or not 0 < message.rank < self._ranks:
            raise MetadataError(
                f"a message with the output of rank {message.rank} was not sent by a rank of this engine"
            )
        if message.rank not in self._peers:
            self._peers[message.rank] = peer
            if len(self._peers) == self._ranks - 1:
                for data in self._unsaid:
                    self._say(data)
                self._unsaid.clear()
        try:
            return message.rank, _output.decode(message.output)
        except msgspec.DecodeError as error:
            raise MetadataError(f"rank {message.rank}: {error}") from error


class RankFollower:
    """The connection of a rank other than 0 to rank 0.

    Args:
        endpoint: endpoint of rank 0.
        rank: number of this rank.
        token: secret shared by the ranks.
        keyring: keys of the fleet.
    """

    def __init__(self, endpoint: str, rank: int, token: bytes, keyring: Keyring | None) -> None:
        self._socket = connect(endpoint, keyring)
        self._rank = rank
        self._token = token
        self.report(WorkerOutput())  # this first message tells rank 0 our address

    def report(self, output: WorkerOutput) -> None:
        """Sends this rank's events to rank 0."""
        self._socket.send(_encode(RankOutput(rank=self._rank, token=self._token, output=_encode(output))))

    def steps(self) -> Iterator[ConnectorMetadata]:
        """Yields the work that rank 0 has sent, step by step."""
        decoder = msgspec.msgpack.Decoder(RankStep)
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield _metadata.decode(decoder.decode(frames[-1]).metadata)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(linger=0)
