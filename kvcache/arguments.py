"""Checks callers' arguments before any state changes. An error names the argument, its value and what is allowed.

A numpy integer counts as an integer; a bool does not. No value is rounded.
"""

import math
import operator
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np

from kvcache.errors import InvalidParamsError, InvalidRequestError, KVCacheError

MOST = (1 << 31) - 1
"""The largest position, page id or count. Models read these numbers as int32."""

_Kind = TypeVar("_Kind")

_SHOWN = 120  # a message shows at most this many characters of a value


def shown(value: object) -> str:
    """Returns `value` as text for a message: one line of bounded length, whatever its `repr` returns or raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001 - a caller's own object, or an integer of too many digits
        text = f"a {type(value).__name__} ({type(error).__name__} in its repr)"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def integer(value: object) -> int | None:
    """Returns `value` as an int if it is an integer, else None."""
    if type(value) is int:
        return value
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises a RuntimeError
        return None


def whole(
    name: str, value: object, least: int, most: int = MOST, error: type[KVCacheError] = InvalidParamsError
) -> int:
    """Returns `value` as an int from `least` to `most`. Raises `error` if it is not an integer in this range."""
    found = integer(value)
    if found is None or not least <= found <= most:
        raise refusal(name, value, f"an integer from {least} to {most}", error)
    return found


def number(
    name: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    error: type[KVCacheError] = InvalidParamsError,
) -> float:
    """Returns `value`, a finite number from `least` to `most`. Raises `error` if it is anything else."""
    # A numpy number is converted first, because it would round later results: half precision ends at 65,504.
    given = cast("Any", value)
    found: Any = given.item() if isinstance(given, np.integer | np.floating) else given
    is_number = isinstance(found, int | float) and type(found) is not bool
    # the bounds 2**62 are ints, because a huge int does not fit into a float
    if is_number and -(1 << 62) < found < 1 << 62 and least <= found <= most:
        return found
    limits = "a finite number" if math.isinf(least) else f"a number from {least} to {most}"
    raise refusal(name, value, limits, error)


def text(name: str, value: object, needed: str = "a string") -> str:
    """Returns `value`, which must be a string that UTF-8 can encode. Raises `InvalidParamsError` otherwise."""
    found = of_kind(name, value, str, needed)
    try:
        found.encode()
    except UnicodeEncodeError:
        raise refusal(name, value, "UTF-8 text") from None
    return found


def folder(name: str, value: object) -> str | PathLike[str]:
    """Returns `value`, which must be the name of a folder. Raises `InvalidParamsError` otherwise."""
    needed = "the name of a folder"
    path = cast("str | PathLike[str]", of_kind(name, value, (str, PathLike), needed))
    found = cast("object", fspath(path))
    if not isinstance(found, str) or not found or "\0" in found:  # an empty name would mean the current folder
        raise refusal(name, value, needed)
    return path


def flag(name: str, value: object, error: type[KVCacheError] = InvalidParamsError) -> bool:
    """Returns `value`, which must be True or False. Raises `error` otherwise."""
    return bool(of_kind(name, value, (bool, np.bool_), "True or False", error))


def one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Returns `value`, which must be one of the strings in `choices`. Raises `InvalidParamsError` otherwise."""
    needed = f"one of {', '.join(choices)}"
    text = of_kind(name, value, str, needed)
    if text not in choices:
        raise refusal(name, value, needed)
    return text


def of_kind(
    name: str,
    value: object,
    kind: type[_Kind] | tuple[type[_Kind], ...],
    needed: str,
    error: type[KVCacheError] = InvalidParamsError,
) -> _Kind:
    """Returns `value`, which must be of this kind.

    Raises `error` otherwise, with the message "<name> is <value>: <needed> is needed".
    """
    if isinstance(value, kind):
        return value
    raise refusal(name, value, needed, error)


def tuple_of(
    name: str, value: object, kind: type[_Kind], needed: str, error: type[KVCacheError] = InvalidParamsError
) -> tuple[_Kind, ...]:
    """Returns the items of `value`, a tuple or a list, which must all be of this kind. Raises `error` otherwise."""
    items = cast("Sequence[object]", of_kind(name, value, (tuple, list), needed, error))
    return tuple(of_kind(name, item, kind, needed, error) for item in items)


def refusal(name: str, value: object, needed: str, error: type[KVCacheError] = InvalidParamsError) -> KVCacheError:
    """Returns the error that refuses `value`. The caller raises it."""
    return error(f"{name} is {shown(value)}: {needed} is needed")


def optional(rule: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
    """Returns a rule that accepts None and otherwise applies `rule`."""
    return lambda name, value: None if value is None else rule(name, value)


def steps(num_steps: object) -> int:
    """Returns `num_steps` as an int. Raises `InvalidRequestError` if it is not a valid number of steps."""
    if type(num_steps) is int and 1 <= num_steps <= MOST:  # nearly always
        return num_steps
    return whole("num_steps", num_steps, 1, error=InvalidRequestError)


def check_request_id(request_id: object, call: str) -> None:
    """Raise `InvalidRequestError` unless `request_id` is a string."""
    if type(request_id) is not str:  # a function call for this test would cost more than the test itself
        of_kind(f"{call}: request_id", request_id, str, "a string", InvalidRequestError)
