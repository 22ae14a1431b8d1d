"""Reads from a request which other engines may have cached the beginning of its prompt.

A hint only says whom to ask. Whether an engine may be asked is decided by `allowed_peers` and the keys, and what it
lends by the request's own hashes.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import Meta

from transfer.pull.source import Contact, KVSource

logger = logging.getLogger("pagewire.peers")

_MOST = 8
_MOST_NAMED = 4  # sources in the answer to a request
_LOW = (1 << 64) - 1
_Host = Annotated[str, Meta(min_length=1, max_length=256)]


class Hint(NamedTuple):
    """An engine that may have cached a prefix of a request's prompt.

    Attributes:
        contact: its address, and its engine id; empty for any engine at the address.
        hashes: the low 64 bits of the hashes of the blocks that it has. None if the sender did not say.
    """

    contact: Contact
    hashes: frozenset[int] | None = None

    def pages(self, numbers: Iterable[int]) -> int:
        """Returns how many of the blocks with these numbers, from the first one on, the engine may have."""
        count = 0
        for one in numbers:
            if self.hashes is not None and one not in self.hashes:
                break
            count += 1
        return count


class _RemoteSource(msgspec.Struct, frozen=True):
    """`remote_kv_source`, as llm-d's router sends it to vLLM."""

    remote_host: _Host
    remote_port: Annotated[int, Meta(ge=1, le=65535)]


class _Action(msgspec.Struct, frozen=True):
    """An action of the `KvHintsEnvelope` of vLLM and SGLang."""

    action_type: str
    payload: dict[str, Any]
    action_version: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    """The `KvHintsEnvelope` of vLLM and SGLang, of any version."""

    actions: list[_Action]


_SOURCES = "pagewire.kv_sources"
"""Our action for engines whose requests have no `kv_transfer_params`. Its payload is `{"kv_sources": [...]}`."""


class _FetchPayload(msgspec.Struct, frozen=True):
    """The payload of the action `kv.fetch`."""

    source_control_endpoint: Annotated[str, Meta(min_length=1, max_length=512)]
    block_hashes: list[int]
    mode: str = "copy"


def hints_of(request: Any) -> list[Hint]:
    """Returns the hints of an engine's request, at most 8. A hint that cannot be read is left out, and logged.

    The request may have them in `kv_transfer_params` and in `kv_hints`.
    """
    params, found = getattr(request, "kv_transfer_params", None), list[Hint]()
    given = cast("Mapping[str, Any]", params if isinstance(params, Mapping) else {})
    for name, value, read in (
        ("kv_sources", given.get("kv_sources"), _ours),
        ("remote_kv_source", given.get("remote_kv_source"), _llm_d),
        ("kv_hints", getattr(request, "kv_hints", None), _envelope),
    ):
        try:
            found += [] if value is None else read(value)
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            logger.warning(
                "request %r: %s is %s: %s; it is ignored", request.request_id, name, reprlib.repr(value), error
            )
    return found[:_MOST]


def _ours(value: Any) -> Iterator[Hint]:
    for one in msgspec.convert(value, list[Any])[:_MOST]:
        source = _source(one)
        yield from (Hint((source.address, engine)) for engine in source.engines)


def _source(value: Any) -> KVSource:
    """Reads a source.

    Raises:
        ValueError: it is not one, or its names have no UTF-8 form, so no message can have them.
    """
    source = msgspec.convert(value, KVSource)
    "".join((source.address, *source.engines)).encode()
    return source


def _llm_d(value: Any) -> Iterator[Hint]:
    source = msgspec.convert(value, _RemoteSource)
    host = f"[{source.remote_host}]" if ":" in source.remote_host.strip("[]") else source.remote_host
    yield Hint((f"tcp://{host}:{source.remote_port}", ""))


def _envelope(value: Any) -> Iterator[Hint]:
    """Reads a `KvHintsEnvelope`, from the object or its JSON.

    Any version is read by the schema of 1.0, because senders differ in what they call their version. Unknown keys are
    ignored. Hashes are compared modulo 2**64, because some senders write them with a sign.
    """
    for action in msgspec.convert(value, _Envelope, from_attributes=True).actions:
        if action.action_type == _SOURCES:
            yield from _ours(action.payload.get("kv_sources"))
        if action.action_type != "kv.fetch":
            continue
        if action.action_version != "1.0":
            logger.info("kv.fetch %r is read as version 1.0", action.action_version)
        fetch = msgspec.convert(action.payload, _FetchPayload)
        if fetch.mode != "copy":
            raise ValueError(f"mode {fetch.mode!r}: only 'copy' is known")
        yield Hint((fetch.source_control_endpoint, ""), frozenset(each & _LOW for each in fetch.block_hashes))


def sources_in(kv_hints: Any) -> Any:
    """Returns `kv_sources` of a request's `KvHintsEnvelope`. Returns None if the request does not speak of them."""
    with suppress(msgspec.ValidationError):
        for action in msgspec.convert(kv_hints, _Envelope, from_attributes=True).actions:
            if action.action_type == _SOURCES:
                return action.payload.get("kv_sources", [])
    return None


def next_sources(own: KVSource, given: Any) -> list[dict[str, Any]]:
    """Returns `kv_sources` for the next turn of a conversation: this engine, and then those of the finished turn.

    A source that cannot be read is left out.
    """
    found = [own]
    for one in cast("list[Any]", given)[:_MOST] if isinstance(given, list) else ():
        with suppress(ValueError):  # a `msgspec.ValidationError` is one
            source = _source(one)
            if source.engines != own.engines:
                found.append(source)
    return [msgspec.to_builtins(source) for source in found[:_MOST_NAMED]]
