"""Objects of the caller that are request contexts, and objects that are not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache import InvalidRequestError, TextContext
from kvcache.replica.context import check_context

NAMES = ("start_idx", "active_idx", "end_idx", "active_length", "current_length")


def context_with(*indices: object, **others: object) -> SimpleNamespace:
    """Returns a context of 3 tokens that is no `TextContext`, with these indices and other members."""
    members: Mapping[str, Any] = {
        **dict(zip(NAMES, indices or (1, 3, 3, 2, 3), strict=True)),
        "request_id": "mine",
        "tokens": np.arange(3),
        "update": int,
        "set_token_indices": int,
    }
    return SimpleNamespace(**{**members, **others})


def is_refused(context: object) -> bool:
    try:
        check_context(context, "step")
    except InvalidRequestError as error:
        return str(error).endswith(" is not a request context, or its indices do not fit its tokens")
    return False


def test_the_indices_of_a_context_are_ordered_and_fit_its_tokens() -> None:
    right = 0
    for indices in itertools.product((None, -1, 0, 1, 2, 3, 4), repeat=5):
        start, active, end, length, current = (np.nan if one is None else one for one in indices)
        fits = 0 <= start <= active <= end <= 3 and length == active - start and current == end
        assert is_refused(context_with(*indices)) != fits, indices
        right += fits
    assert right == 20


@pytest.mark.parametrize(
    ("others", "fits"),
    [
        ({"tokens": np.arange(3, dtype=np.uint16)}, True),
        ({"tokens": np.arange(4)}, True),
        ({"tokens": np.arange(2)}, False),
        ({"tokens": [0, 1, 2]}, False),
        ({"tokens": np.arange(3.0)}, False),
        ({"tokens": np.ones(3, np.bool_)}, False),
        ({"update": None}, False),
        ({"set_token_indices": None}, False),
        ({"start_idx": np.int64(1)}, True),
        ({"start_idx": True}, False),
        ({"cache_salt": "s", "extra_keys": ((1, b"k"),)}, True),
    ],
)
def test_the_members_of_a_context_have_their_types(others: dict[str, object], fits: bool) -> None:
    assert is_refused(context_with(**others)) != fits


@pytest.mark.parametrize("missing", [*NAMES, "tokens", "update", "set_token_indices"])
def test_an_object_without_a_member_is_no_context(missing: str) -> None:
    context = context_with()
    delattr(context, missing)
    assert is_refused(context)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"request_id": None}, "step of namespace.*request_id"),
        ({"request_id": [1]}, "step of namespace.*request_id"),
        ({"cache_salt": 7}, "request 'mine'.*cache_salt"),
        ({"extra_keys": 7}, "request 'mine'.*extra_keys"),
    ],
)
def test_a_context_names_its_request_and_what_its_pages_depend_on(others: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_context(context_with(**others), "step")
    context = context_with(request_id=TextContext([1], 2).request_id)
    check_context(context, "step")
    check_context(TextContext([1], 2), "step")
