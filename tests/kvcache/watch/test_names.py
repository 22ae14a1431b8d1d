"""`pagewire top` never shows a salt, and shows request ids only if that is allowed."""

from __future__ import annotations

import itertools

import pytest

from kvcache.watch.messages import request_digest
from kvcache.watch.names import WatchNames, tenant_name


def test_no_id_is_shown_in_part_whichever_contain_others() -> None:
    ids = ["r1", "r12", "r123", "1", "x r1 y"]
    named = {one: request_digest(one) for one in ids}
    expected = (
        f"row 3 of {named['r123']} and {named['r12']} and {named['r1']} differ, as does {named['x r1 y']}: "
        f"{named['1']} of 4"
    )
    for order in itertools.permutations(["", *ids]):
        text = "row 3 of r123 and r12 and r1 differ, as does x r1 y: 1 of 4"
        assert WatchNames(are_clear=False).error(text, order) == expected


@pytest.mark.parametrize("short", "0123456789abcdef#")
def test_the_substitute_for_an_id_is_not_mistaken_for_an_id(short: str) -> None:
    """A request id may have a single character. Every text that is shown in place of an id is long, so it cannot be
    such an id.
    """
    found = WatchNames(are_clear=False).error(f"(.*) {short} ; long", ["long", short, ".*"])
    assert found == f"({request_digest('.*')}) {request_digest(short)} ; {request_digest('long')}"


def test_ids_are_shown_if_that_is_allowed_and_salts_are_never_shown() -> None:
    clear = WatchNames(are_clear=True)
    assert clear.error("r1 is lost", ["r1"]) == "r1 is lost"
    assert clear.requests(["a", "b"]) == ["a", "b"]
    assert clear.tenants(["salt", "", "salt"]) == [tenant_name("salt"), "", tenant_name("salt")]
    assert "salt" not in tenant_name("salt")


def test_a_name_stays_and_memory_is_bounded() -> None:
    names, ids = WatchNames(are_clear=False), [str(one) for one in range(20_000)]
    for named, made in ((names.requests, request_digest), (names.tenants, tenant_name)):
        assert named(ids) == named(ids) == [made.__wrapped__(one) for one in ids]
        assert made.cache_info().currsize == made.cache_info().maxsize == 1 << 14
    assert names.error("", ["r"]) == ""
