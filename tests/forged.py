"""Makes objects of public classes with wrong values, as far as the constructors accept wrong values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any


class Wild:
    """An object that no parameter accepts."""


WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "x", b"x", (), ("x", None), [], {}, Wild(), Wild)


def public_classes(package: ModuleType) -> list[type]:
    """Returns the public classes of a package, except its exceptions."""
    listed = [getattr(package, name) for name in package.__all__]
    own = [one for one in listed if inspect.isclass(one) and one.__module__.startswith(package.__name__)]
    return [one for one in own if not issubclass(one, BaseException)]


def forged(kind: type) -> Iterator[tuple[object, object]]:
    """Yields two equal objects for each wrong value. The wrong value is passed for every parameter, and then only for
    the required parameters.
    """
    parameters = inspect.signature(kind).parameters.values()
    named = [one for one in parameters if one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}]
    for given in (named, [one for one in named if one.default is one.empty]):
        for wrong in WRONG:
            positional = [wrong for one in given if one.kind is not one.KEYWORD_ONLY]
            by_name = {one.name: wrong for one in given if one.kind is one.KEYWORD_ONLY}
            with suppress(Exception):  # refused
                yield kind(*positional, **by_name), kind(*positional, **by_name)


def survives(kind: type) -> int:
    """Checks that forged objects can be shown, compared and hashed, as logs and sets do. Returns the number of objects.
    An unhashable object, such as one with a list, is allowed.
    """
    count = 0
    for one, other in forged(kind):
        assert kind.__name__ in repr(one)
        assert one != Wild()
        assert one == other or one != other
        try:
            hash(one)
        except TypeError as error:
            assert "unhashable" in str(error)  # noqa: PT017 - a helper of tests
        count += 1
    return count
