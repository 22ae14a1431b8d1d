"""Checks the arguments of `PageExchange`, before anything is created or changed.

Without these checks, a wrong argument would fail later. If it failed on the transfer thread, it would kill that thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvcache.arguments import flag, integer, number, of_kind, shown
from kvcache.errors import InvalidRequestError, KVCacheError
from kvcache.replica.block_table import PageDigests
from transfer.errors import InvalidEngineError, InvalidLeaseError
from transfer.pull.directory import Times
from transfer.pull.lease import LeaseRef
from transfer.pull.source import Source

_MOST_NAME = 240  # in characters; engine ids, which add a slash and a number, have at most 256
_OF_MANAGER = ("num_replicas", "layouts", "layer_tables", "device_tensors", "further_groups", "lease", "copier")


def check_text(name: str, value: object, error: type[KVCacheError] = InvalidRequestError) -> None:
    """Raises `error` unless `value` is a string."""
    of_kind(name, value, str, "a string", error)


def check_exchange(owner: object, given: object, options: Mapping[str, Any]) -> None:
    """Raises `InvalidEngineError` unless an exchange can be created from a manager, a name and the other arguments."""
    if isinstance(owner, type) or any(not (hasattr(type(owner), one) or hasattr(owner, one)) for one in _OF_MANAGER):
        raise InvalidEngineError(f"manager is {shown(owner)}: a manager with a cache's pages is needed")
    if not isinstance(given, str) or not 0 < len(given) <= _MOST_NAME:
        raise InvalidEngineError(f"name is {shown(given)}: a string of 1 to {_MOST_NAME} characters is needed")
    where = f"exchange {given!r}: "
    check_text(f"{where}bind", options["bind"], InvalidEngineError)
    if not isinstance(options["secret"], str):  # the value is not shown, because it may be a secret
        raise InvalidEngineError(f"{where}secret is a {type(options['secret']).__name__}: a string is needed")
    agreed = options["compatibility"]
    if agreed is not None and not (
        isinstance(agreed, Mapping) and _are_texts([*agreed, *cast("Any", agreed).values()])
    ):
        raise InvalidEngineError(
            f"{where}compatibility is {shown(cast('object', agreed))}: a mapping from strings to strings is needed"
        )
    _check_replica_options(f"{where}replica_options", options["replica_options"])
    flag(f"{where}verify", options["verify"], InvalidEngineError)
    if not callable(options["agent"]):
        raise InvalidEngineError(f"{where}agent is {shown(options['agent'])}: a function that makes an agent is needed")
    if not _are_texts(options["allowed_peers"]):
        raise InvalidEngineError(
            f"{where}allowed_peers is {shown(options['allowed_peers'])}: a list of strings is needed"
        )
    number(f"{where}lend", options["lend"], 0.0, 1.0, InvalidEngineError)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in cast("Any", values))


def _check_replica_options(name: str, given: Any) -> None:
    options = cast(
        "Mapping[object, object]",
        {} if given is None else of_kind(name, given, Mapping, "a dict of options", InvalidEngineError),
    )
    for option, value in options.items():
        if option == "timed":
            flag(f"{name}['timed']", value, InvalidEngineError)
        elif option not in Times._fields:
            known = ", ".join((*Times._fields, "timed"))
            raise InvalidEngineError(f"{name} has {shown(option)}, which is no option: the options are {known}")
        elif number(f"{name}[{option!r}]", value, error=InvalidEngineError) <= 0:
            raise InvalidEngineError(f"{name}[{option!r}] is {value}: more than 0 seconds are needed")


def check_source(name: str, source: object, error: type[KVCacheError] = InvalidLeaseError) -> None:
    """Raises `error` unless `source` is a `Source`, as `offer` returns it."""
    of_kind(name, of_kind(name, source, Source, "a Source", error).lease, LeaseRef, "a Source", error)


def check_pull(key: object, source: object, pending: object, timeout_s: object, replicas: int) -> None:
    """Raises `InvalidRequestError` unless a pull can be requested with these arguments."""
    check_text("key", key)
    if isinstance(source, Source) or not isinstance(source, list | tuple):
        check_source("source", source, InvalidRequestError)
    else:
        for at, one in enumerate(cast("Sequence[object]", source)):
            check_source(f"source[{at}]", one, InvalidRequestError)
    number("timeout_s", timeout_s, error=InvalidRequestError)
    check_pending(pending, replicas)


def check_pending(pending: object, replicas: int) -> None:
    """Raises `InvalidRequestError` unless `pending` looks like an import on one of our replicas."""
    replica = integer(getattr(pending, "replica_idx", None))
    if replica is None or not 0 <= replica < replicas or not hasattr(pending, "request_id"):
        raise InvalidRequestError(f"pending is {shown(pending)}: an open import of this manager is needed")


def check_question(key: object, contact: tuple[object, object], wanted: object, timeout_s: object) -> None:
    """Raises `InvalidRequestError` unless a source can be asked for pages with these arguments."""
    for name, text in (("key", key), ("address", contact[0]), ("engine_id", contact[1])):
        check_text(name, text)
    needed = "a result of `contents.digests`"
    digests = of_kind("wanted", wanted, PageDigests, needed, InvalidRequestError).digests
    of_kind("wanted.digests", digests, bytes, needed, InvalidRequestError)
    number("timeout_s", timeout_s, error=InvalidRequestError)
