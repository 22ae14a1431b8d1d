"""`kv_transfer_params`: the dict by which a prefill engine's answer tells a decode engine where a request's pages are.

It travels through proxies and HTTP bodies as JSON, so a reader trusts nothing in it: every value is checked here, and
what cannot be checked here (whether the engine exists, has such ranks, holds such blocks, still leases them) is checked
where it is used, and fails that request alone. The keys are those of vLLM's connector, and those of the lease.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import msgspec

from transfer.errors import TransferParamsError
from transfer.pull.pull_state import LeaseRef
from transfer.wire.messages import MAX_RANKS

MAX_TOKENS = (1 << 31) - 1
MAX_BLOCK_ID = (1 << 31) - 1
MAX_LEASE_S = 86_400.0
_MAX_SLOT = 1 << 24
_MAX_NAME = 512
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80
# A host name, an IPv4 or a bracketed IPv6 address: nothing else gets into an endpoint.
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")


class RemotePages(msgspec.Struct, frozen=True, kw_only=True):
    """What a checked `kv_transfer_params` says.

    Attributes:
        engine_id: the source.
        request_id: as the source calls it; for logs.
        address: ZMQ endpoint of its handshake.
        incarnation: the start of it that granted the lease.
        ranks: ranks that it is said to have.
        lease: under which it holds the pages.
        block_ids: for each group, its blocks; the last one holds its last token, or the state after it.
        num_tokens: tokens that they hold.
        total_tokens: tokens that the source will have computed in the end; where they are more, further blocks follow.
    """

    engine_id: str
    request_id: str
    address: str
    incarnation: str
    ranks: int
    lease: LeaseRef
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int
    total_tokens: int


def params_of(pages: RemotePages, tp_size: int, pp_size: int) -> dict[str, Any]:
    """Returns the dict for a reader. Plain JSON: a lease's id is text, since many JSON readers keep 53 bits."""
    host, _, port = pages.address.removeprefix("tcp://").rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": pages.engine_id,
        "remote_request_id": pages.request_id,
        "remote_block_ids": [list(blocks) for blocks in pages.block_ids],
        "remote_host": host,
        "remote_port": int(port),
        "tp_size": tp_size,
        "pp_size": pp_size,
        "remote_num_tokens": pages.num_tokens,
        "remote_total_tokens": pages.total_tokens,
        "remote_incarnation": pages.incarnation,
        "transfer_mode": "pull",
        "lease_id": f"{pages.lease.lease_id:#018x}",
        "lease_slot": pages.lease.slot,
        "lease_duration_s": pages.lease.duration_s,
    }


def read_params(request_id: str, params: object, num_groups: int) -> RemotePages | None:
    """Returns what a dict from outside says, or None where it asks for no pages from elsewhere.

    Args:
        request_id: our request, for messages.
        params: whatever came.
        num_groups: page groups of our model.

    Raises:
        TransferParamsError: (a ValueError) names the request, the key, its value, and what may be there.
    """
    if params is None:
        return None
    if not _is_dict(params):
        raise TransferParamsError(f"request {request_id!r}: kv_transfer_params is {_short(params)}, a dict is expected")
    reader = _Reader(request_id, params)
    if not reader.flag("do_remote_prefill", default=False):
        return None
    if reader.flag("do_remote_decode", default=False):
        reader.refuse("do_remote_decode", "do_remote_prefill is true as well")
    if (mode := params.get("transfer_mode", "pull")) != "pull":
        reader.refuse("transfer_mode", "'pull' is the only one", mode)
    num_tokens = reader.integer("remote_num_tokens", 1, MAX_TOKENS)
    host, port = reader.text("remote_host", 1), reader.integer("remote_port", 1, 65535)
    if not _HOST.fullmatch(host):
        reader.refuse("remote_host", "a host name or an IP address is expected")
    ranks = reader.integer("tp_size", 1, MAX_RANKS, 1) * reader.integer("pp_size", 1, MAX_RANKS, 1)
    if ranks > MAX_RANKS:
        reader.refuse("tp_size", f"times pp_size is {ranks}, at most {MAX_RANKS} ranks may be")
    return RemotePages(
        engine_id=reader.text("remote_engine_id", 1),
        request_id=reader.text("remote_request_id", 1),
        address=f"tcp://{host}:{port}",
        incarnation=reader.text("remote_incarnation", 0),
        ranks=ranks,
        lease=reader.lease(),
        block_ids=reader.blocks("remote_block_ids", num_groups, num_tokens),
        num_tokens=num_tokens,
        total_tokens=reader.integer("remote_total_tokens", num_tokens, MAX_TOKENS, num_tokens),
    )


class _Reader:
    """Takes one value after another out of a dict, and names what is wrong with it."""

    def __init__(self, request_id: str, params: Mapping[object, object]) -> None:
        self._request_id = request_id
        self._params = params

    def refuse(self, key: str, expected: str, value: object = None) -> NoReturn:
        """Raises the error for a key."""
        shown = _short(self._params.get(key) if value is None else value) if key in self._params else "missing"
        raise TransferParamsError(f"request {self._request_id!r}: kv_transfer_params[{key!r}] is {shown}: {expected}")

    def flag(self, key: str, *, default: bool) -> bool:
        value: object = self._params.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, "true or false is expected")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value: object = self._params.get(key, default)
        if not _is_integer(value) or not low <= value <= high:
            self.refuse(key, f"an integer from {low} to {high} is expected")
        return value

    def text(self, key: str, shortest: int) -> str:
        value: object = self._params.get(key, "" if not shortest else None)
        if not isinstance(value, str) or not shortest <= len(value) <= _MAX_NAME or not value.isprintable():
            self.refuse(key, f"printable text of {shortest} to {_MAX_NAME} characters is expected")
        return value

    def lease(self) -> LeaseRef:
        text = self.text("lease_id", 1)
        try:
            lease_id = int(text, 16)
        except ValueError:
            lease_id = 0
        if not 0 < lease_id < 1 << 64 or not re.fullmatch(r"0x[0-9a-f]{1,16}", text):
            self.refuse("lease_id", "a hexadecimal number of 64 bits above 0 is expected")
        duration: object = self._params.get("lease_duration_s")
        if isinstance(duration, bool) or not isinstance(duration, int | float) or not 0 < duration <= MAX_LEASE_S:
            self.refuse("lease_duration_s", f"seconds above 0, at most {MAX_LEASE_S}, are expected")
        return LeaseRef(lease_id, self.integer("lease_slot", 0, _MAX_SLOT), float(duration))

    def blocks(self, key: str, num_groups: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        groups: object = self._params.get(key)
        if not _is_list(groups) or len(groups) != num_groups:
            self.refuse(key, f"a list of blocks for each of {num_groups} groups is expected")
        found = tuple(self._blocks_of(key, number, blocks, num_tokens) for number, blocks in enumerate(groups))
        if not any(found):
            self.refuse(key, f"no block at all, for {num_tokens} tokens")
        return found

    def _blocks_of(self, key: str, number: int, blocks: object, num_tokens: int) -> tuple[int, ...]:
        if not _is_list(blocks) or len(blocks) > num_tokens:
            self.refuse(key, f"group {number} is no list of at most {num_tokens} blocks, one for each token", blocks)
        found = tuple(block for block in blocks if _is_integer(block) and 0 <= block <= MAX_BLOCK_ID)
        if len(found) != len(blocks):
            wrong = next(block for block in blocks if not _is_integer(block) or not 0 <= block <= MAX_BLOCK_ID)
            self.refuse(key, f"group {number} names block {_short(wrong)}, 0 to {MAX_BLOCK_ID} may be")
        return found


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_dict(value: object) -> TypeGuard[Mapping[object, object]]:
    return isinstance(value, Mapping)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _short(value: object) -> str:
    try:
        return _repr.repr(value)
    except ValueError:  # Python spells no integer of more than some thousand digits
        return f"an object of {type(value).__name__}"
