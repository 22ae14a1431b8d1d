"""`kv_transfer_params`: the dict in a prefill engine's answer that tells a decode engine where the pages are.

The dict travels through proxies and HTTP bodies as JSON, so a reader trusts nothing in it. It only points to a lease:
the reader asks the source, and the source's answer says which pages the lease holds, and for which tokens
(`transfer.wire.messages.Wanted`). Every value is checked here. Only the source's answer shows whether the engine and
the lease exist. If one of them does not exist, only the request fails. The dict has the keys of vLLM's NIXL connector,
plus the key `lease_id`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal, TypeGuard

import msgspec
from msgspec import Meta

from transfer.errors import TransferParamsError
from transfer.wire.messages import MAX_TOKENS, Wanted
from transfer.wire.prompt import Prompt

_MAX_NAME = 512
_PRINTABLE = "printable text is expected"
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80
# Matches a host name, an IPv4 address or a bracketed IPv6 address. No other string may become part of an endpoint.
_HOST = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,15})?\]"
)
_LEASE_ID = re.compile(r"0x(?=.*[1-9a-f])[0-9a-f]{1,16}")
_NAMES = {name: f"remote_{name}" for name in ("engine_id", "request_id", "host", "port", "num_tokens")}


class _Pointer(msgspec.Struct, frozen=True, kw_only=True, rename=_NAMES):
    """The part of the params that names a source and a lease."""

    engine_id: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    host: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    lease_id: str

    @property
    def address(self) -> str:
        """ZMQ endpoint of the handshake."""
        return f"tcp://{self.host}:{self.port}"


class TransferParams(_Pointer, frozen=True, kw_only=True, rename=_NAMES):
    """The contents of `kv_transfer_params`. Made by a source, or checked by `read_params`.

    Attributes:
        engine_id: id of the source.
        request_id: the source's name for the request, used only in logs.
        host: name or address of the source's handshake server.
        port: port of the handshake server.
        num_tokens: how many tokens the source has computed. If a client lowers the number, fewer tokens are loaded. If
            a client raises it, the load fails.
        lease_id: the lease's id in hexadecimal, because many JSON readers keep only 53 bits of a number.
        do_remote_prefill: True if the request asks to read pages from a source.
        do_remote_decode: True if the request's own pages are to be offered to a reader. It cannot be combined with
            `do_remote_prefill`.
        transfer_mode: "pull" means that the reader moves the pages.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool | None = False
    request_id: Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    transfer_mode: Literal["pull"] = "pull"

    def wanted(self, prompt: Prompt) -> Wanted:
        """Returns the lease to ask for.

        The number of tokens to read is the number that the source has computed, or the length of `prompt` if the prompt
        is shorter.
        """
        num_tokens = min(self.num_tokens, len(prompt.token_ids))
        digest, lease_id = prompt.digest(num_tokens), int(self.lease_id, 16)
        return Wanted(self.address, self.engine_id, lease_id, num_tokens, digest, prompt.named)


def params_of(params: TransferParams) -> dict[str, Any]:
    """Returns the dict for a reader, as plain JSON values."""
    return msgspec.json.decode(msgspec.json.encode(params))


def read_params(request_id: str, params: object) -> TransferParams | None:
    """Returns the checked contents of a dict from outside, or None if it asks for no pages.

    Raises:
        TransferParamsError: the dict asks for pages, and a value is missing or invalid.
    """
    if params is None:
        return None
    if not _is_dict(params):
        raise TransferParamsError(f"request {request_id!r}: kv_transfer_params is {_short(params)}; a dict is expected")
    if (asked := params.get("do_remote_prefill")) is None or asked is False:
        return None
    known: dict[str, Any] = {key: value for key, value in params.items() if isinstance(key, str)}
    if known.get("do_remote_decode") is True:
        raise _refusal(request_id, known, ("do_remote_decode",), "do_remote_prefill is true as well")
    try:
        found = msgspec.convert(known, TransferParams)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        # the last word of the message is the missing key
        key, *steps = re.findall(r"\w+", path or reason.rpartition(" ")[2])
        raise _refusal(request_id, known, (key, *map(int, steps)), reason) from error
    faults = _faults(found)
    if not found.request_id.isprintable():
        faults["remote_request_id"] = _PRINTABLE
    for key, expected in faults.items():
        raise _refusal(request_id, known, (key,), expected)
    return found


def pointer_in(params: object) -> Wanted | None:
    """Returns the lease that a dict from outside names.

    Returns None if the dict asks for no pages, or if its lease is invalid.
    """
    if not _is_dict(params) or params.get("do_remote_prefill") in (None, False):
        return None
    try:
        found = msgspec.convert({key: value for key, value in params.items() if isinstance(key, str)}, _Pointer)
    except msgspec.ValidationError:
        return None
    return None if _faults(found) else Wanted(found.address, found.engine_id, int(found.lease_id, 16), 0, b"")


def _faults(found: _Pointer) -> dict[str, str]:
    """Checks values that have the right type. Returns, for the key of each invalid value, what is expected instead."""
    faults: dict[str, str] = {}
    if not found.engine_id.isprintable():
        faults["remote_engine_id"] = _PRINTABLE
    if not _HOST.fullmatch(found.host):
        faults["remote_host"] = "a host name or an IP address is expected"
    if not _LEASE_ID.fullmatch(found.lease_id):
        faults["lease_id"] = "0x and up to 16 digits of 0-9 and a-f, not all 0, are expected"
    return faults


def _refusal(request_id: str, params: dict[str, Any], path: tuple[Any, ...], reason: str) -> TransferParamsError:
    try:
        shown = _short(reduce(getitem, path, params))
    except (LookupError, TypeError):  # the value is missing, or its container cannot be indexed
        shown = "missing" if path[0] not in params else _short(params[path[0]])
    where = "".join(f"[{step!r}]" for step in path)
    return TransferParamsError(f"request {request_id!r}: kv_transfer_params{where} is {shown}: {reason}")


def _is_dict(value: object) -> TypeGuard[Mapping[object, object]]:
    return isinstance(value, Mapping)


def _short(value: object) -> str:
    try:
        return _repr.repr(value)
    except ValueError:  # Python does not format integers of more than a few thousand digits
        return f"an object of {type(value).__name__}"
