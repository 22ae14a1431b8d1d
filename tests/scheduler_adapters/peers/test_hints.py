"""Hints in the envelope that vLLM's and SGLang's requests have: our own action, beside others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_adapters.peers.hints import hints_of, next_sources, sources_in
from transfer.pull.source import KVSource

SOURCE = {"address": "tcp://a:1", "engines": ["x", "y"]}


def envelope(*payloads: Any, name: str = "pagewire.kv_sources") -> dict[str, Any]:
    """Returns an envelope with an action of this name for each payload."""
    return {"actions": [{"action_type": name, "action_version": "1.0", "payload": payload} for payload in payloads]}


def read(kv_hints: Any) -> list[tuple[str, str]]:
    return [hint.contact for hint in hints_of(SimpleNamespace(request_id="r", kv_hints=kv_hints))]


def test_our_sources_are_read_beside_the_action_that_names_blocks() -> None:
    fetch = {"source_control_endpoint": "tcp://b:2", "block_hashes": [1]}
    both = envelope({"kv_sources": [SOURCE]}) | {}
    both["actions"] += envelope(fetch, name="kv.fetch")["actions"]
    assert read(both) == [("tcp://a:1", "x"), ("tcp://a:1", "y"), ("tcp://b:2", "")]


@pytest.mark.parametrize("payload", [{}, {"kv_sources": 7}, {"kv_sources": [7]}, {"kv_sources": None}])
def test_sources_that_cannot_be_read_are_left_out(payload: dict[str, Any]) -> None:
    assert read(envelope(payload)) == []
    named = next_sources(KVSource("tcp://c:3", ("own",)), sources_in(envelope(payload)))
    assert [found["engines"] for found in named] == [("own",)]


def test_a_request_says_that_it_wants_to_know_where_its_kv_is() -> None:
    assert sources_in(envelope({"kv_sources": [SOURCE]})) == [SOURCE]
    assert sources_in(envelope({})) == []
    for silent in (None, 7, {}, envelope({}, name="kv.fetch"), {"actions": 7}):
        assert sources_in(silent) is None
