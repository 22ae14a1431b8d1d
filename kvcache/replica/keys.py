"""Inputs of a request's KV other than its tokens: a salt, and keys at positions."""

from collections.abc import Sequence
from typing import cast

from kvcache.arguments import integer, shown
from kvcache.errors import InvalidRequestError

ExtraKeys = tuple[tuple[int, bytes], ...]
"""`(position, key)`: an input besides tokens on which the KV from this token on depends."""
_NONE: ExtraKeys = ()


def checked_salt(request_id: str, salt: object) -> str | None:
    """`salt` itself if it is None or valid UTF-8 text. Raises `InvalidRequestError` otherwise."""
    if salt is None:
        return None
    try:
        if isinstance(salt, str):
            salt.encode()
            return salt
    except UnicodeEncodeError:
        pass
    raise InvalidRequestError(f"request {request_id!r}: cache_salt is {shown(salt)}: UTF-8 text or None is needed")


def checked_keys(request_id: str, keys: object) -> ExtraKeys:
    """`keys` as a tuple of `(position, bytes)`, position and length below 2**31. Raises `InvalidRequestError`."""
    if keys is _NONE:  # nearly always: Python has one empty tuple
        return _NONE
    found: list[tuple[int, bytes]] = []
    try:
        pairs = [(position, key) for position, key in cast("Sequence[tuple[object, object]]", keys)]
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"request {request_id!r}: extra_keys is {shown(keys)}: a list of (position, bytes) is needed"
        ) from None
    for position, key in pairs:
        at = integer(position)
        if at is None or not 0 <= at < 1 << 31 or not isinstance(key, bytes | bytearray) or len(key) >= 1 << 31:
            raise InvalidRequestError(
                f"request {request_id!r}: extra key {shown(key)} at token {shown(position)}: "
                "bytes at a position are needed, with length and position below 2**31"
            )
        found.append((at, bytes(key)))
    return tuple(found)
