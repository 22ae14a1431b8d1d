"""`kv_transfer_params`: the dict by which a prefill engine's answer tells a decode engine where a request's pages are.

It travels through proxies and HTTP bodies as JSON, so a reader trusts nothing in it: every value is checked here, and
what cannot be checked here (whether the engine exists, has such ranks, holds such blocks, still leases them) is checked
where it is used, and fails that request alone. The keys are those of vLLM's connector, and those of the lease.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal, TypeGuard

import msgspec
from msgspec import Meta

from transfer.errors import TransferParamsError
from transfer.pull.lease import LeaseRef
from transfer.pull.replica import Source
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
_LEASE_ID = re.compile(r"0x(?=.*[1-9a-f])[0-9a-f]{1,16}")
_REMOTE = ("engine_id", "request_id", "block_ids", "host", "port", "num_tokens", "incarnation")


class RemotePages(msgspec.Struct, frozen=True, kw_only=True, rename={name: f"remote_{name}" for name in _REMOTE}):
    """What `kv_transfer_params` says. Made by a source, or checked by `read_params`.

    Attributes:
        engine_id: the source.
        request_id: as the source calls it; for logs.
        host: name or address of its handshake.
        port: likewise.
        num_tokens: tokens whose pages are written.
        block_ids: for each group, its blocks; the last one holds its last token, or the state after it.
        incarnation: the start of it that granted the lease; empty where that is not known.
        tp_size: tensor-parallel ranks that it is said to have.
        pp_size: pipeline stages, likewise.
        lease_id: in hexadecimal: as a number, many JSON readers would keep 53 bits of it.
        lease_slot: of the lease word.
        lease_duration_s: seconds that a renewal lasts.
        do_remote_prefill: pages are asked for.
        do_remote_decode: pages are to be offered, which cannot be asked for as well.
        transfer_mode: who moves the pages: the reader.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool | None = False
    engine_id: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    request_id: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    block_ids: tuple[tuple[Annotated[int, Meta(ge=0, le=MAX_BLOCK_ID)], ...], ...]
    host: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    incarnation: Annotated[str, Meta(max_length=_MAX_NAME)] = ""
    tp_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    pp_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    lease_id: str
    lease_slot: Annotated[int, Meta(ge=0, le=_MAX_SLOT)]
    lease_duration_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]
    transfer_mode: Literal["pull"] = "pull"

    @property
    def source(self) -> Source:
        """Where a pull finds the pages."""
        lease = LeaseRef(int(self.lease_id, 16), self.lease_slot, self.lease_duration_s)
        return Source(
            f"tcp://{self.host}:{self.port}", self.engine_id, lease, self.incarnation, self.tp_size * self.pp_size
        )


def params_of(pages: RemotePages) -> dict[str, Any]:
    """Returns the dict for a reader: plain JSON."""
    return msgspec.json.decode(msgspec.json.encode(pages))


def read_params(request_id: str, params: object, num_groups: int) -> RemotePages | None:
    """Returns what a dict from outside says, or None where it asks for no pages from elsewhere."""
    if params is None:
        return None
    if not _is_dict(params):
        raise TransferParamsError(f"request {request_id!r}: kv_transfer_params is {_short(params)}, a dict is expected")
    if (asked := params.get("do_remote_prefill")) is None or asked is False:
        return None
    known: dict[str, Any] = {key: value for key, value in params.items() if isinstance(key, str)}
    if known.get("do_remote_decode") is True:
        raise _refusal(request_id, known, ("do_remote_decode",), "do_remote_prefill is true as well")
    try:
        pages = msgspec.convert(known, RemotePages)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        key, *steps = re.findall(r"\w+", path or reason.rpartition(" ")[2])  # of what is missing the last word
        raise _refusal(request_id, known, (key, *map(int, steps)), reason) from error
    for key, is_wrong, expected in _rules(pages, num_groups):
        if is_wrong:
            raise _refusal(request_id, known, (key,), expected)
    return pages


def _rules(pages: RemotePages, num_groups: int) -> Iterable[tuple[str, bool, str]]:
    """What the type of a value does not say: the key, whether it breaks the rule, and the rule."""
    ranks, tokens, blocks = pages.tp_size * pages.pp_size, pages.num_tokens, pages.block_ids
    longest, printable = max(map(len, blocks), default=0), "printable text is expected"
    of_groups = f"a list of blocks for each of {num_groups} groups is expected"
    return (
        ("remote_engine_id", not pages.engine_id.isprintable(), printable),
        ("remote_request_id", not pages.request_id.isprintable(), printable),
        ("remote_incarnation", not pages.incarnation.isprintable(), printable),
        ("remote_host", not _HOST.fullmatch(pages.host), "a host name or an IP address is expected"),
        ("tp_size", ranks > MAX_RANKS, f"times pp_size is {ranks}, at most {MAX_RANKS} ranks may be"),
        ("lease_id", not _LEASE_ID.fullmatch(pages.lease_id), "a hexadecimal number of 64 bits above 0 is expected"),
        ("remote_block_ids", len(blocks) != num_groups, of_groups),
        ("remote_block_ids", not longest, f"no block at all, for {tokens} tokens"),
        ("remote_block_ids", longest > tokens, f"a group has {longest} blocks, at most {tokens}, one a token, may be"),
    )


def _refusal(request_id: str, params: dict[str, Any], place: tuple[Any, ...], reason: str) -> TransferParamsError:
    try:
        shown = _short(reduce(getitem, place, params))
    except (LookupError, TypeError):  # it is not there, or what it is in has no order
        shown = "missing" if place[0] not in params else _short(params[place[0]])
    where = "".join(f"[{step!r}]" for step in place)
    return TransferParamsError(f"request {request_id!r}: kv_transfer_params{where} is {shown}: {reason}")


def _is_dict(value: object) -> TypeGuard[Mapping[object, object]]:
    return isinstance(value, Mapping)


def _short(value: object) -> str:
    try:
        return _repr.repr(value)
    except ValueError:  # Python spells no integer of more than some thousand digits
        return f"an object of {type(value).__name__}"
