"""Seals: proofs for a reader that the source itself stated which pages a lease holds.

A block table may travel from a source to a reader over a channel that is not ours, for example through a client. If
somebody changed a page id on the way, the reader would copy another request's page. The fence would not notice, because
it only proves that the lease was open. So a source seals each table that it makes under a lease, with a key that it
gives to readers only in its handshake. A reader compares the seal before it reads any page that the table names.
`docs/concepts/protocol.md` has the whole rule.
"""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from kvcache.replica.block_table import BlockTable

KEY_BYTES = 32
_SEAL_BYTES = 16
_encode = msgspec.msgpack.Encoder().encode


def new_table_key() -> bytes:
    """Returns a random key for the block tables of one incarnation of an engine."""
    return secrets.token_bytes(KEY_BYTES)


class TableSeals:
    """Makes and compares the seals of one engine's block tables.

    A seal covers the lease and the fields of the table that say where which tokens lie: the page ids of all groups, the
    tokens, the page size, the version of the weights and the last digest. The last digest suffices, because each digest
    covers every token before it, and a reader compares all digests with its own tokens. The seal does not cover fields
    without effect, or fields that must equal the reader's own (`kinds`).
    """

    def __init__(self, key: bytes) -> None:
        self._hash = hashlib.blake2b(digest_size=_SEAL_BYTES, key=key)

    def seal(self, lease_id: int, table: BlockTable) -> bytes:
        """Returns the seal of a table whose pages the lease holds.

        Raises:
            TypeError, ValueError, OverflowError: a field has a value that no real table has.
        """
        found = self._hash.copy()  # copying the keyed hash takes half the time of a new one
        found.update(
            _encode(
                (
                    lease_id,
                    table.groups,
                    table.num_tokens,
                    table.page_size,
                    table.first_page,
                    table.hash_algorithm,
                    table.digests[-_SEAL_BYTES:],
                    table.weights,
                )
            )
        )
        return found.digest()
