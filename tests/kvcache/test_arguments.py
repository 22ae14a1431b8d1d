"""Tests which values count as an integer, a number, a flag or a text. Also tests the texts of refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import InvalidParamsError, InvalidRequestError
from kvcache.arguments import (
    MOST,
    check_request_id,
    flag,
    integer,
    number,
    of_kind,
    one_of,
    optional,
    shown,
    steps,
    tuple_of,
    whole,
)

ENDLESS = 10**5000  # Python cannot write a number with so many digits.


class Silent:
    def __repr__(self) -> str:
        raise OSError("gone")


class Chatty:
    def __repr__(self) -> str:
        return "two\n  lines"


@pytest.mark.parametrize("value", [0, -3, MOST, np.int8(5), np.uint64(7), torch.tensor(4)])
def test_integers_of_any_library_count_and_become_ints(value: Any) -> None:
    assert type(integer(value)) is int
    assert integer(value) == value
    assert type(whole("count", value, -3)) is int


@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float64(1), "1", None, torch.tensor(1.5), torch.zeros(2)])
def test_values_of_other_types_are_refused_as_integers(value: object) -> None:
    assert integer(value) is None
    with pytest.raises(InvalidRequestError, match="^count is .*: an integer from 2 to 9 is needed$"):
        whole("count", value, 2, 9, InvalidRequestError)


def test_the_range_includes_both_of_its_limits() -> None:
    assert [whole("count", value, 2, 4) for value in (2, 3, 4)] == [2, 3, 4]
    assert [number("share", value, 0.5, 2) for value in (0.5, 1, 2)] == [0.5, 1, 2]
    for value in (1, 5, MOST + 1):
        with pytest.raises(InvalidParamsError, match=f"^count is {value}: an integer from 2 to 4 is needed$"):
            whole("count", value, 2, 4)
    for value in (0.4, 2.1, math.nan, math.inf):
        with pytest.raises(InvalidParamsError, match=f"^share is {value}: a number from 0.5 to 2 is needed$"):
            number("share", value, 0.5, 2)
    with pytest.raises(InvalidParamsError, match=f"an integer from 0 to {2**31 - 1} "):
        whole("count", 2**31, 0)


@pytest.mark.parametrize("value", [0, -1.5, 2**61, -(2**61), np.float32(0.5), np.int64(3)])
def test_numbers_of_any_library_count(value: Any) -> None:
    assert number("seconds", value) == value


@pytest.mark.parametrize(
    "value",
    [
        True,
        "1",
        None,
        math.nan,
        math.inf,
        -math.inf,
        2.0**62,
        -(2**62),
        1j,
        *(pytest.param(s * ENDLESS, id="endless") for s in (1, -1)),
    ],
)
def test_a_number_is_finite_and_not_huge(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="^seconds is .*: a finite number is needed$"):
        number("seconds", value, error=InvalidRequestError)


def test_a_flag_is_true_or_false() -> None:
    assert [flag("on", value) for value in (True, np.True_, False, np.False_)] == [True, True, False, False]
    assert type(flag("on", np.True_)) is bool
    for value in (1, 0, "yes", None):
        with pytest.raises(InvalidRequestError, match=f"^on is {value!r}: True or False is needed$"):
            flag("on", value, InvalidRequestError)


def test_a_choice_is_one_of_the_texts() -> None:
    assert one_of("kind", "b", ("a", "b")) == "b"
    for value in ("c", "", 1, None):
        with pytest.raises(InvalidParamsError, match=f"^kind is {value!r}: one of a, b is needed$"):
            one_of("kind", value, ("a", "b"))


def test_a_list_becomes_a_tuple_of_one_kind() -> None:
    assert tuple_of("names", ["a", "b"], str, "texts") == tuple_of("names", ("a", "b"), str, "texts") == ("a", "b")
    for value, wrong in (("ab", "'ab'"), (["a", 1], "1"), (None, "None")):
        with pytest.raises(InvalidRequestError, match=f"^names is {wrong}: texts is needed$"):
            tuple_of("names", value, str, "texts", InvalidRequestError)


def test_an_optional_argument_is_none_or_follows_its_rule() -> None:
    rule: Callable[[str, Any], object] = optional(flag)
    assert [rule("on", value) for value in (None, True, False)] == [None, True, False]
    with pytest.raises(InvalidParamsError, match="^on is 0: "):
        rule("on", 0)


def test_an_argument_is_of_its_kind_or_of_one_of_several() -> None:
    assert of_kind("name", "a", str, "a text") == "a"
    assert of_kind("name", 1, (str, int), "a text or a number") == 1
    with pytest.raises(InvalidParamsError, match="^name is 1: a text is needed$"):
        of_kind("name", 1, str, "a text")


def test_steps_are_counted_from_one() -> None:
    assert [steps(value) for value in (1, MOST, np.int64(3))] == [1, MOST, 3]
    assert type(steps(np.int64(3))) is int
    for value in (0, -1, MOST + 1, True, 1.0, None):
        with pytest.raises(InvalidRequestError, match=f"^num_steps is {value}: an integer from 1 to {MOST} is needed$"):
            steps(value)


def test_a_request_id_is_a_string() -> None:
    check_request_id("r", "release")
    check_request_id(type("Name", (str,), {})("r"), "release")
    for value in (1, None, b"r"):
        with pytest.raises(InvalidRequestError, match=f"^release: request_id is {value!r}: a string is needed$"):
            check_request_id(value, "release")


def test_a_message_shows_a_value_on_one_line_of_bounded_length() -> None:
    assert shown("x" * 118) == f"'{'x' * 118}'"  # 120 characters
    assert shown("x" * 119) == f"'{'x' * 119}..."
    assert shown(Chatty()) == "two lines"
    assert shown(Silent()) == "a Silent (OSError in its repr)"
    assert shown(ENDLESS) == "a int (ValueError in its repr)"
