"""What callers hand in, checked before anything is touched: an error names the argument, the value and what is needed.

numpy's integers are integers here, a bool is none, and nothing is rounded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex, cast

import numpy as np
import torch

from kvcache.errors import InvalidParamsError, InvalidRequestError, KVCacheError

MOST = (1 << 31) - 1
"""Positions, page ids and counts of them are int32 where models read them."""

_SHOWN = 120  # characters of a value in a message


def shown(value: object) -> str:
    """`value` for a message: one line, not too long, whatever its own `repr` does."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # noqa: BLE001 - a caller's own object, or an integer of too many digits
        text = f"a {type(value).__name__} ({type(error).__name__} in its repr)"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def integer(value: object) -> int | None:
    """`value` as an int where it is an integer, else None."""
    if type(value) is int:
        return value
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last one
        return None


def whole(
    name: str, value: object, least: int, most: int = MOST, error: type[KVCacheError] = InvalidParamsError
) -> int:
    """`value` as an int from `least` to `most`; else `error`."""
    found = integer(value)
    if found is None or not least <= found <= most:
        raise error(f"{name} is {shown(value)}: an integer from {least} to {most} is needed")
    return found


def number(name: str, value: object, error: type[KVCacheError] = InvalidParamsError) -> float:
    """`value`, a finite number; else `error`."""
    given = cast("Any", value)
    if isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool):
        found = cast("float", given)
        if -(1 << 62) < found < 1 << 62 and math.isfinite(found):  # a huge int is no float
            return found
    raise error(f"{name} is {shown(value)}: a finite number is needed")


def flag(name: str, value: object, error: type[KVCacheError] = InvalidParamsError) -> None:
    """Raise `error` unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"{name} is {shown(value)}: True or False is needed")


def steps(num_steps: object) -> int:
    """`num_steps` of a call. Raises `InvalidRequestError`."""
    if type(num_steps) is int and 1 <= num_steps <= MOST:
        return num_steps
    found = integer(num_steps)
    if found is None or not 1 <= found <= MOST:
        raise InvalidRequestError(f"num_steps is {shown(num_steps)}: an integer, at least 1 is needed")
    return found


def check_request_id(request_id: object, call: str) -> None:
    """Raise `InvalidRequestError` unless it is a string."""
    if not isinstance(request_id, str):
        raise InvalidRequestError(f"{call}: request_id is {shown(request_id)}: a string is needed")


def checked_devices(devices: object, count: int, split: str, *, here: bool) -> list[torch.device]:
    """The `count` devices that are named: the CPU, or GPUs. `split` says how they are used; `here`: they must exist.

    Raises:
        InvalidParamsError: another number of them, no device, or one that pages cannot be kept on.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise InvalidParamsError(f"devices is {shown(devices)}: a list of torch devices or their names is needed")
    named = cast("Sequence[Any]", devices)
    if len(named) != count:
        raise InvalidParamsError(f"{len(named)} devices given, params.n_devices is {count} ({split})")
    return [_checked_device(device, here=here) for device in named]


def _checked_device(device: object, *, here: bool) -> torch.device:
    try:
        found = device if isinstance(device, torch.device) else torch.device(cast("str", device))
    except (TypeError, RuntimeError, ValueError, OverflowError):
        found = None
    if isinstance(device, bool | int) or found is None or found.type not in ("cpu", "cuda"):
        raise InvalidParamsError(f"device {shown(device)}: pages are kept on 'cpu' or 'cuda' devices")
    there = 1 if found.type == "cpu" else torch.cuda.device_count() if here else MOST
    if (found.index or 0) >= there:
        raise InvalidParamsError(f"device {shown(device)}: this process sees {there} of its kind")
    return found


def stream_of(session: object) -> Any:
    """The CUDA stream that `session` is or has as `stream`; None for None.

    Raises:
        InvalidParamsError: it is no stream and has none.
    """
    stream = getattr(session, "stream", session)
    if stream is not None and not isinstance(stream, torch.cuda.Stream):
        raise InvalidParamsError(
            f"session is {shown(session)}: a torch.cuda.Stream, an object with one as `stream`, or None is needed"
        )
    return stream
