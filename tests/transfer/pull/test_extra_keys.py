"""Salts and extra keys between two managers with a real pull. A page is found only under its own keys."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache import BlockTableMismatchError, TextContext
from tests.transfer.pull.test_ownership import MINE, OTHERS, PAGE_SIZE, PROMPT, Reader, Side

IMAGE = {"extra_keys": [(9, b"image")]}  # The image is in the third of four pages.
SALT = {"cache_salt": "tenant"}


@pytest.fixture(params=[False, True], ids=["at once", "in chunks"])
def pulled(request: pytest.FixtureRequest) -> Any:
    """Returns a function that moves a prompt with these keys from a source to a reader. Also returns the reader."""
    source, reader = Side("p", caching=True), Reader("d", caching=True)

    def pull(wrong: list[dict[str, Any]], **named: Any) -> None:
        context = TextContext(PROMPT, 32, "r", **named)
        source.manager.external_claim("r")
        if request.param:
            context.set_token_indices(active_idx=PAGE_SIZE)
            source.run(context, MINE)
        source.run(context, MINE)
        offer, table = source.offer(), source.manager.block_table("r")
        source.manager.release("r")
        reader.manager.external_claim("r")
        for other in wrong:
            with pytest.raises(BlockTableMismatchError, match="'r': the block table holds other tokens"):
                reader.manager.import_block_table(TextContext([*PROMPT, 1], 32, "r", **other), table)
        right = TextContext([*PROMPT, 1], 32, "r", **named)
        pending = reader.manager.import_block_table(right, table)
        assert pending is not None
        event, proof = reader.pull(source, offer, pending)
        assert event.error == ""
        reader.manager.commit_import(right, pending, proof)
        assert reader.values(pending) == {MINE}
        right.update(1)
        reader.manager.step([right])
        reader.manager.release("r")

    yield pull, reader
    for side in (source, reader):
        side.exchange.close()
        side.manager.check()
        assert side.idle
        side.manager.close()


def found(reader: Reader, **named: Any) -> int:
    """Returns the number of the prompt's tokens that the reader finds cached under these keys. The reader computes the
    other tokens.
    """
    context = TextContext([*PROMPT, 2, 3], 32, "q", **named)
    reader.manager.external_claim("q")
    assert reader.manager.maybe_reserve(context)
    hit = context.start_idx
    pages = reader.manager.get_req_blocks("q")
    assert {
        float(shard[page].max()) for shard in reader.manager.device_tensors[0] for page in pages[: hit // PAGE_SIZE]
    } <= {MINE}
    for shard in reader.manager.device_tensors[0]:
        for page in pages[hit // PAGE_SIZE :]:
            shard[page] = OTHERS
    reader.manager.release("q")
    return hit


def test_pulled_pages_are_found_up_to_the_first_key_that_differs(pulled: Any) -> None:
    pull, reader = pulled
    pull([{}, {"extra_keys": [(9, b"other")]}, {**IMAGE, **SALT}], **IMAGE)
    assert found(reader, **IMAGE) == 16
    assert found(reader) == 8
    assert found(reader, extra_keys=[(9, b"other")]) == 8
    assert found(reader, **SALT) == 0  # This check comes last, because its request evicts one of the found pages.


def test_pages_pulled_for_a_tenant_are_found_only_by_that_tenant(pulled: Any) -> None:
    pull, reader = pulled
    pull([{}, {"cache_salt": "another"}, {**SALT, **IMAGE}], **SALT)
    assert found(reader, **SALT) == 16
    assert found(reader, **SALT, **IMAGE) == 8
    assert found(reader) == 0
    assert found(reader, cache_salt="another") == 0
