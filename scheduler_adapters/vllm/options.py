"""`Options`: the settings in `kv_connector_extra_config`, checked before they are used.

vLLM logs its arguments, and it creates a connector only after minutes of loading weights. An option therefore says
where a secret is stored, and never contains the secret itself. All faults are reported together at startup, with the
values as the user wrote them.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm import envs

from kvcache.endpoints.addresses import resolved
from transfer.connector.config import Timing
from transfer.errors import InvalidEngineError, TransferError
from transfer.wire.allowed_peers import AllowedPeers, listed_peers
from transfer.wire.keys import Keyring, load_keyring
from transfer.wire.messages import MAX_LEASE_S
from transfer.wire.secret import read_secret

_TIMING = Timing()
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?|[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,15})?")
_MAX_PORT = 65535


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options in `kv_connector_extra_config`.

    Attributes:
        host: name or IP address at which readers reach this engine, not `0.0.0.0`. Defaults to vLLM's setting for its
            NIXL connector.
        port: port of the handshake server. Defaults to vLLM's setting for its NIXL connector.
        keyring: file with the keys of the side channel. Leave it out if there is a secret.
        secret: `file:PATH` or `env:NAME` of the fleet's secret. The secret itself is refused, because vLLM logs its
            arguments.
        allowed_peers: hosts as in `WorkerConfig`, or one comma-separated string. This host is always allowed.
        kv_lease_duration: duration of a lease that no reader renews, in seconds.
        load_timeout: time until a load fails, in seconds.
        model_id: name of the weights, which both sides must share; vLLM's name if empty.
        lend: fraction of the blocks that peers may hold at the same time, 0 to 1. With 0 none are lent. If it is given,
            a `kv_consumer` listens on the port, too; otherwise the default is 0 there, and 0.25 elsewhere.
        ask_timeout: how long peers may take to say which blocks of a prompt they have, in seconds. 0: none is asked.
    """

    host: str = msgspec.field(default_factory=lambda: envs.VLLM_NIXL_SIDE_CHANNEL_HOST)
    port: Annotated[int, Meta(ge=0, le=_MAX_PORT)] = msgspec.field(
        default_factory=lambda: envs.VLLM_NIXL_SIDE_CHANNEL_PORT
    )
    keyring: str | None = None
    secret: str | None = None
    allowed_peers: str | tuple[str, ...] = ()
    kv_lease_duration: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)] = _TIMING.lease
    load_timeout: Annotated[float, Meta(gt=0)] = _TIMING.load
    model_id: str = ""
    lend: Annotated[float, Meta(ge=0, le=1)] | None = None
    ask_timeout: Annotated[float, Meta(ge=0, le=60)] = 0.05

    @property
    def keys(self) -> Keyring | None:
        """The keys in the keyring file; None if no file is named."""
        return load_keyring(Path(self.keyring)) if self.keyring else None

    @property
    def secured_by(self) -> str:
        """Says where the side channel's keys come from, for the log."""
        return "of a secret" if self.secret else "of a keyring" if self.keyring else "none"


_EXPECTED = {
    "host": "a host name or an IP address",
    "port": f"a whole number from 0 to {_MAX_PORT}",
    "keyring": "the path of a file",
    "secret": "file:PATH or env:NAME",
    "allowed_peers": "a list of addresses, networks and host names, or one text with commas",
    "kv_lease_duration": f"a number of seconds above 0, at most {MAX_LEASE_S:g}",
    "load_timeout": "a number of seconds above 0",
    "model_id": "a text",
    "lend": "a number from 0 to 1",
    "ask_timeout": "a number of seconds from 0 to 60",
}
_VLLMS = {"host": "VLLM_NIXL_SIDE_CHANNEL_HOST", "port": "VLLM_NIXL_SIDE_CHANNEL_PORT"}
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Options)}
_NO_WAY_BACK = "kv_sources of a request says where prefill finds blocks of decode"
# The options of vLLM's NIXL connector that are not ours: the value that says what this connector does in any case, if
# there is one, and what to do instead.
_THEIRS: dict[str, tuple[Any, str]] = {
    "backends": (["UCX"], "NIXL reads through UCX here; remove it"),
    "bidirectional_kv_xfer": (False, f"{_NO_WAY_BACK}; remove it"),
    "decoder_kv_blocks_ttl": (None, f"{_NO_WAY_BACK}, as long as vLLM caches them; remove it"),
    "enforce_handshake_compat": (True, "both sides are always compared; name equal weights by model_id"),
    "engine_ttl": (None, "an engine is forgotten once it no longer answers; remove it"),
    "kv_recompute_threshold": (None, f"{_NO_WAY_BACK}, and they are pulled if that is quicker; remove it"),
    "num_threads": (None, "each agent of NIXL has one UCX thread here; remove it"),
    "push_registration_timeout": (None, "decode always reads; load_timeout says for how long it waits"),
}  # fmt: skip


def check_options(extra: Mapping[str, Any]) -> None:
    """Checks the values of the options, but not the files, environment variables and hosts that they name.

    Raises:
        InvalidEngineError: names every invalid option, its value and what is expected. A secret is not shown.
    """
    _raise([*_unknown(extra), *_faults(extra)])


def options_of(extra: Mapping[str, Any], index: int = 0, *, serves: bool = False, resolves: bool = False) -> Options:
    """Returns the options, after checking that their files, variables and hosts are usable.

    Args:
        extra: `kv_connector_extra_config`.
        index: index of the data-parallel engine; it is added to the port.
        serves: whether this engine is a source, so that readers connect to `host`.
        resolves: whether this process listens at `host`. If True, the name must have an address on this machine.

    Raises:
        InvalidEngineError: as `check_options`.
    """
    defaults = {name: value for name, value in _vllms().items() if name not in extra}
    told = defaults if serves else {name: value for name, value in defaults.items() if name != "host"}
    _raise([*_unknown(extra), *_faults(extra), *_faults(told, _VLLMS)])
    ours = {name: value for name, value in extra.items() if name in _TYPES}
    options = msgspec.convert(defaults | ours, Options, strict=False)
    _raise(list(_unusable(options, index, resolves=serves and resolves)))
    return msgspec.structs.replace(options, port=options.port + index)


def _raise(faults: list[str]) -> None:
    if faults:
        raise InvalidEngineError(f"kv_connector_extra_config: {'; '.join(faults)}")


def _vllms() -> dict[str, Any]:
    """Returns the host and the port of vLLM's NIXL side channel. A port that vLLM cannot parse remains a string."""
    try:
        port: Any = envs.VLLM_NIXL_SIDE_CHANNEL_PORT
    except ValueError:
        port = os.environ[_VLLMS["port"]]
    return {"host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST, "port": port}


def _unknown(extra: Mapping[str, Any]) -> Iterator[str]:
    for name, (same, instead) in _THEIRS.items():
        if name in extra and (same is None or extra[name] != same):
            given = reprlib.repr(extra[name])
            yield f"{name} is {given}: this option of vLLM's NIXL connector has no effect here: {instead}"
    if strange := sorted(str(name) for name in set(extra) - set(_TYPES) - set(_THEIRS)):
        yield f"there is no option {', '.join(map(repr, strange))}; the options are {', '.join(_TYPES)}"


def _faults(given: Mapping[str, Any], spelled: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Yields a message for each invalid value. Each value is checked independently of the other values.

    `spelled` maps the name of an option to the name that the user has used for it.
    """
    for name in (name for name in _TYPES if name in given):
        if reason := _fault(name, given[name]):
            shown = "" if name == "secret" else f" is {reprlib.repr(given[name])}"
            yield f"{spelled.get(name, name)}{shown}: {reason}"


def _fault(name: str, value: Any) -> str:
    """Returns what is wrong with a value, or an empty string if the value is valid."""
    expected = f"{_EXPECTED[name]} is expected"
    try:
        found: Any = msgspec.convert(value, _TYPES[name], strict=False)
    except msgspec.ValidationError:
        return expected
    match name:
        case "host" if not found or _is_every_address(found):
            return f"readers connect to it, so it must be an address of this one host; {expected}"
        case "host" if not _HOST.fullmatch(found[1:-1] if found[:1] + found[-1:] == "[]" else found):
            return expected
        case "secret" if found and not found.startswith(("file:", "env:")):
            return f"the secret itself was given, and vLLM writes its arguments to its log. Make a new one; {expected}"
        case "load_timeout" if found == math.inf:
            return expected
        case "allowed_peers":
            return ", ".join(_faults_of_peers(found))
        case _:
            return ""


def _is_every_address(host: str) -> bool:
    """Whether a host stands for all addresses of a machine."""
    try:
        return host == "*" or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _faults_of_peers(listed: str | tuple[str, ...]) -> Iterator[str]:
    for entry in listed_peers(listed, ""):
        try:
            AllowedPeers([entry])
        except InvalidEngineError as error:
            yield str(error).removeprefix("allowed_peers: ")


def _unusable(options: Options, index: int, *, resolves: bool) -> Iterator[str]:
    """Yields a message for each fault that shows only on this machine."""
    if options.port + index > _MAX_PORT:
        yield f"port is {options.port}: data-parallel engine {index} would listen at {options.port + index}"
    if resolves:
        try:
            if _is_every_address(resolved(options.host.strip("[]"))):
                yield f"host is {options.host!r}: it stands for every address of a host, and readers need one"
        except OSError as error:
            yield f"host is {options.host!r}: it has no address here ({error})"
    if options.keyring and options.secret:
        yield "keyring and secret are both given: one is needed"
    for read in (lambda: read_secret(options.secret or ""), lambda: options.keys):
        try:
            read()
        except TransferError as error:
            yield str(error)
