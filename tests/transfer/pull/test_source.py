"""A reader accepts a source's statement of its pages only if the statement is sealed, is about this lease, and covers
the reader's own tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from transfer.errors import MetadataError, PullFailedError
from transfer.pull.lease import LeaseRef
from transfer.pull.source import Source, check_tokens, source_in
from transfer.wire.messages import LeasedPages, Wanted, sealed_pages

KEY = b"known to all"
WANTED = Wanted("tcp://10.0.0.7:5600", "p", 0xABC, 20, b"digest of 20 tokens")
PAGES = LeasedPages(
    engine_id="p",
    incarnation="i",
    lease_id=0xABC,
    word_idx=7,
    duration_s=30.0,
    num_tokens=24,
    block_ids=((3, 4, 5), (9,)),
    prompt_digest=WANTED.digest,
)


def answered(where: str, wanted: Wanted, data: bytes, key: bytes) -> tuple[Source, LeasedPages]:
    """Returns the reader's result for a source's answer."""
    source, pages = source_in(wanted, data, key)
    check_tokens(where, wanted, pages)
    return source, pages


def test_a_source_states_the_pages_to_read() -> None:
    source, pages = answered("request 'r'", WANTED, sealed_pages(PAGES, KEY), KEY)
    assert source == Source("tcp://10.0.0.7:5600", "p", LeaseRef(0xABC, 7, 30.0), "i")
    assert (pages.num_tokens, pages.block_ids) == (24, ((3, 4, 5), (9,)))


def test_pages_of_other_tokens_are_refused_with_both_digests() -> None:
    other = msgspec.structs.replace(PAGES, prompt_digest=b"\1" * 32)
    with pytest.raises(PullFailedError) as raised:
        answered("request 'r'", WANTED, sealed_pages(other, KEY), KEY)
    text = str(raised.value)
    assert text.startswith("request 'r': lease 0x0000000000000abc of engine 'p' holds the pages of another prompt")
    assert "first 20 tokens is 0101010101010101, but the request's is " + WANTED.digest.hex()[:16] in text


@pytest.mark.parametrize(
    ("theirs", "adapters", "weights", "told"),
    [
        ({}, {}, {"weights": "a"}, "weights: None at the source, 'a' at the reader"),
        ({"weights": "a"}, {}, {}, "weights: 'a' at the source, None at the reader"),
        ({"weights": "a"}, {}, {"weights": "b"}, "weights: 'a' at the source, 'b' at the reader"),
        ({"poet": "a"}, {"poet": "b"}, {}, "poet: 'a' at the source, 'b' at the reader"),
        ({"poet": "a", "weights": "w"}, {"poet": "a"}, {"weights": "w"}, ""),
    ],
)
def test_pages_of_other_weights_or_adapters_are_refused_by_name(
    theirs: dict[str, str], adapters: dict[str, str], weights: dict[str, str], told: str
) -> None:
    wanted, pages = WANTED._replace(named=tuple(adapters.items())), msgspec.structs.replace(PAGES, named=theirs)
    _, found = source_in(wanted, sealed_pages(pages, KEY), KEY)
    if not told:
        check_tokens("request 'r'", wanted, found, weights)
        return
    with pytest.raises(PullFailedError) as raised:
        check_tokens("request 'r'", wanted, found, weights)
    assert str(raised.value).endswith(f"of engine 'p' holds pages of another model: {told}")


@pytest.mark.parametrize("change", [{"lease_id": 0xABD}, {"engine_id": "q"}], ids=str)
def test_an_answer_about_another_lease_or_engine_is_refused(change: dict[str, Any]) -> None:
    other = sealed_pages(msgspec.structs.replace(PAGES, **change), KEY)
    with pytest.raises(MetadataError, match="the answer of engine 'p' about lease 0x0000000000000abc names engine"):
        answered("request 'r'", WANTED, other, KEY)


@pytest.mark.parametrize("key", [b"", b"another"])
def test_an_answer_that_was_changed_or_has_another_key_is_refused(key: bytes) -> None:
    with pytest.raises(MetadataError, match="was changed in transit or made with another key"):
        answered("request 'r'", WANTED, sealed_pages(PAGES, key), KEY)
    sealed = sealed_pages(PAGES, KEY)
    changed = sealed.replace(b"\x93\x03\x04\x05", b"\x93\x03\x04\x06")
    assert changed != sealed
    with pytest.raises(MetadataError, match="was changed in transit"):
        answered("request 'r'", WANTED, changed, KEY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"word_idx": -1}, "Expected `int` >= 0 - at `$.slot`"),
        ({"duration_s": 0.0}, "Expected `float` > 0"),
        ({"duration_s": 1e9}, "Expected `float` <= 86400"),
        ({"block_ids": ((-1,),)}, "Expected `int` >= 0"),
        ({"block_ids": ((1 << 31,),)}, "Expected `int` <"),
        ({"num_tokens": 1 << 31}, "Expected `int` <="),
        ({"incarnation": ""}, "of length >= 1"),
    ],
    ids=str,
)
def test_impossible_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MetadataError, match="cannot be read as the pages of a lease") as raised:
        answered("request 'r'", WANTED, sealed_pages(msgspec.structs.replace(PAGES, **change), KEY), KEY)
    assert message in str(raised.value)


def test_bytes_that_are_no_answer_are_refused() -> None:
    for data in (b"", b"\xc1", msgspec.msgpack.encode(PAGES)[:-3]):
        with pytest.raises(MetadataError, match="cannot be read as the pages of a lease of protocol 3"):
            answered("request 'r'", WANTED, data, KEY)
