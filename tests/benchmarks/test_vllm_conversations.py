"""The parts of `benchmarks.vllm_conversations` that need no server."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.vllm_conversations import (
    BLOCK,
    EQUAL,
    FULL,
    PAIR,
    QUICK,
    SETTINGS,
    Scale,
    Told,
    ratios_of,
    server_of,
    servers_of,
    talks_of,
    turn_rows,
)
from tests.vllm_serve.server import Settings

BASE = Settings(Path("model"), block_size=BLOCK, blocks=100, connector="", extra="")


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_prompts_have_the_lengths_that_were_asked_for(scale: Scale) -> None:
    talks = talks_of(scale)
    assert talks == talks_of(scale)
    assert len({tuple(talk.first[:BLOCK]) for talk in talks}) == scale.conversations
    last = [len(talk.first) + sum(len(words) + scale.answer for words in talk.added) for talk in talks]
    low, high = (first + growth * (scale.turns - 1) for first, growth in zip(scale.first, scale.growth, strict=True))
    assert (min(last), max(last)) == (low, high)
    assert all(words for talk in talks for words in talk.added)
    # no prompt is evicted, even when all conversations are in their last turn
    assert sum(-(-(tokens + scale.answer) // BLOCK) for tokens in last) < scale.blocks


def test_the_full_form_is_as_large_as_it_says() -> None:
    talks = talks_of(FULL)
    assert len(talks) == 24
    assert {len(talk.added) for talk in talks} == {5}
    assert min(len(talk.first) for talk in talks) == 300
    assert max(len(talk.first) + sum(len(words) + FULL.answer for words in talk.added) for talk in talks) == 3000


def test_the_draw_of_a_server_does_not_follow_the_conversation() -> None:
    drawn = [[server_of(at, turn, 2) for turn in range(1, 7)] for at in range(24)]
    assert drawn == [[server_of(at, turn, 2) for turn in range(1, 7)] for at in range(24)]
    stays = sum(one == other for turns in drawn for one, other in itertools.pairwise(turns))
    assert 40 <= stays <= 80  # of 120
    assert 52 <= sum(map(sum, drawn)) <= 92  # of 144


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_way_gets_the_same_blocks_and_the_same_threads(setting: str, tmp_path: Path) -> None:
    totals: set[tuple[int, int]] = set()
    for way in ("ours", "theirs", "theirs-ucx", "plain", "plain-sticky"):
        servers = servers_of(way, setting, BASE, tmp_path)
        blocks = sum(server.settings.blocks for server in servers)
        totals.add((blocks, sum(int(server.env["OMP_NUM_THREADS"]) for server in servers)))
        more = servers_of(way, setting, replace(BASE, more=("--seen",)), tmp_path)
        assert all("--seen" in server.command for server in more)
    assert totals == {(200, 2)}


def test_roles_and_options_are_those_of_the_setting(tmp_path: Path) -> None:
    def told(way: str, setting: str) -> list[tuple[str, str, dict[str, object]]]:
        return [
            (
                server.settings.role,
                json.loads(server.settings.connector)["kv_connector"],
                json.loads(server.settings.extra),
            )
            for server in servers_of(way, setting, BASE, tmp_path)
        ]

    prefill, decode = told("ours", PAIR)
    assert prefill[:2] == ("kv_producer", "PagewireConnector")
    assert decode[:2] == ("kv_consumer", "PagewireConnector")
    assert decode[2]["lend"]  # otherwise prefill could not pull from it
    assert told("theirs", PAIR) == [
        (role, "NixlConnector", {"bidirectional_kv_xfer": True}) for role in ("kv_producer", "kv_consumer")
    ]
    assert {role for role, *_ in told("ours", EQUAL) + told("theirs", EQUAL)} == {"kv_both"}
    assert "UCX_TLS" in servers_of("theirs-ucx", PAIR, BASE, tmp_path)[0].env


TOLD = [
    Told(1, 300, "right", 100.0, 0),
    Told(1, 400, "wrong", 300.0, 10),
    Told(2, 500, "right", 20.0, 320),
    Told(2, 600, "failed"),
]


def test_rows_count_results_and_leave_failed_answers_out_of_the_times() -> None:
    first, second, every = turn_rows("ours", PAIR, TOLD)
    assert first == {
        "setting": PAIR, "way": "ours", "turn": "1", "n": 2, "prompt": 700, "found": 10, "first p50": 300.0,
        "first p90": 300.0, "wrong": 1, "failed": 0,
    }  # fmt: skip
    assert (second["n"], second["first p50"], second["wrong"], second["failed"]) == (2, 20.0, 0, 1)
    assert (every["turn"], every["n"], every["found"], every["wrong"], every["failed"]) == ("all", 4, 330, 1, 1)
    assert "first p50" not in turn_rows("ours", PAIR, TOLD[3:])[0]


def test_ratios_compare_the_turns_after_the_first() -> None:
    slower = [told._replace(first_ms=told.first_ms * (4 if told.turn > 1 else 1)) for told in TOLD]
    rows = ratios_of({(PAIR, "ours"): TOLD, (PAIR, "theirs"): slower, (EQUAL, "plain"): slower})
    assert rows == [
        {"setting": PAIR, "ratio": "ours / theirs", "first p50": 0.25, "first p90": 0.25, "goal": 0.5}
    ]  # nothing to compare with in the other setting
    (failed,) = ratios_of({(PAIR, "ours"): TOLD, (PAIR, "theirs-ucx"): TOLD[3:]})
    assert failed == {"setting": PAIR, "ratio": "ours / theirs-ucx", "goal": 0.5}
