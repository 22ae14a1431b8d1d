"""Explores the ownership protocol. With all rules no promise is broken. Without any single rule some promise is
broken.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer import protocol_model, protocol_promises
from tests.transfer.protocol_model import Explorer
from tests.transfer.protocol_room import COMMITTED, GIVEN_UP, Move, Protocol, Room, View
from tests.transfer.protocol_rules import ASSUMPTIONS, CASTS, RULES, SHOWN_BY, Cast

HOLE, OTHER = "hole: D0 serves", "other weights: D0 serves"
STALE_PAGE, ROBBED, WAITS, WITHOUT_CAUSE = "stale page", "lease ended as read while", "may never", "has not ended"
# For each rule, the harm of leaving the rule out, and the smallest number of moves to this harm.
HARM = {
    "fence": (STALE_PAGE, 10),
    "fence-after-data": (STALE_PAGE, 12),
    "clear-before-release": (STALE_PAGE, 11),
    "all-words": (STALE_PAGE, 18),
    "word-before-offer": (WITHOUT_CAUSE, 6),
    "fresh-ids": (STALE_PAGE, 13),
    "mortal-words": (STALE_PAGE, 10),
    "no-revival": (STALE_PAGE, 13),
    "notify-with-fence": (ROBBED, 7),
    "all-readers": (ROBBED, 5),
    "count-names": (ROBBED, 6),
    "attempt-check": (ROBBED, 7),
    "writer-hold": (STALE_PAGE, 15),
    "quarantine": (STALE_PAGE, 16),
    "all-or-nothing": (STALE_PAGE, 15),
    "source-deadline": (WAITS, 2),
    "reader-deadline": (WAITS, 3),
    "find-and-hold": (STALE_PAGE, 13),
    "unlist-first": (STALE_PAGE, 11),
    "take-what-is-held": (STALE_PAGE, 12),
    "list-when-there": (STALE_PAGE, 13),
    "no-hole": (HOLE, 20),
    "hold-the-head": (HOLE, 20),
    "named-by-source": (STALE_PAGE, 9),
    "own-word": (STALE_PAGE, 17),
    "parts-in-order": (HOLE, 8),
    "found-when-committed": (STALE_PAGE, 4),
    "prove-what-came": (STALE_PAGE, 8),
    "same-weights": (OTHER, 9),
    "own-segment": (OTHER, 10),
    "asked-by-version": (OTHER, 10),
    "sealed-version": (OTHER, 9),
    "committed-as-taken": (OTHER, 10),
    "switch-keeps-leases": (STALE_PAGE, 11),
    "whole-reads": (STALE_PAGE, 9),
    "settled-ends": (STALE_PAGE, 17),
    "newer-reads": (STALE_PAGE, 12),
}
SIZES = {
    "2 requests, 1 reader": 13_861,
    "1 request, 2 readers": 1_110,
    "2 attempts, 1 reader": 996,
    "1 request, 2 source ranks": 2_141,
    "one word for all leases": 5_039,
    "by content": 246,
    "by content, lower tiers": 356,
    "2 stretches, 2 sources": 1_684,
    "1 import, 2 sources": 5_260,
    "again from another source": 1_080,
    "no request waits": 443,
    "switches of the weights": 766,
    "switches, by content": 1_366,
}
# The number of final states, in which all pages and leases are given back. Final states of a lease by content differ in
# the number of found pages: none, one or two. With two stretches, they differ in this number for each stretch and in
# the page at which the second stretch begins. If no request waits, they differ in whether the pull ended early. With
# switches, they differ in the versions.
FINALS = {"by content": 3, "by content, lower tiers": 3, "2 stretches, 2 sources": 7, "no request waits": 2}
FINALS |= {"switches of the weights": 4, "switches, by content": 12}


@pytest.mark.parametrize("cast", CASTS["small"], ids=lambda cast: cast.title)
def test_no_interleaving_breaks_a_promise(cast: Cast):
    result = Explorer(cast).run()
    assert (result.wrong, result.story) == ("", ())
    assert result.states == SIZES[cast.title]  # The number of states reveals unintended changes of the explored model.
    assert result.finals == FINALS.get(cast.title, 1)


@pytest.mark.parametrize("rule", [*RULES, *ASSUMPTIONS])
def test_without_a_rule_there_is_a_shortest_story_of_harm(rule: str):
    harm, moves = HARM[rule]
    result = Explorer(SHOWN_BY[rule], frozenset({rule})).run()
    assert harm in result.wrong
    assert len(result.story) == moves


@pytest.mark.parametrize(
    ("rule", "title", "harmed"),
    [
        ("own-word", "1 import, 2 sources", "A's back from Q0"),
        ("fence", "1 import, 2 sources", "A's front from P0"),
        ("quarantine", "again from another source", "A again from Q0"),
    ],
)
def test_an_import_from_two_sources_needs_the_rules_for_each_of_them(rule: str, title: str, harmed: str):
    cast = next(cast for cast in CASTS["small"] if cast.title == title)._replace(crashes=0)
    result = Explorer(cast, frozenset({rule})).run()
    assert STALE_PAGE in result.wrong
    assert harmed in result.wrong


@pytest.mark.parametrize("rule", [*RULES, *ASSUMPTIONS])
def test_only_the_missing_rule_causes_the_harm(rule: str):
    assert not Explorer(SHOWN_BY[rule]).run().wrong


def test_the_story_of_a_reused_page():
    story = Explorer(SHOWN_BY["fence"], frozenset({"fence"})).run().story
    assert story == (
        "P has computed A and holds its pages [0, 1]",
        "P0 writes the id of A's lease into its word",
        "the deadline of A's lease passes on P0: it clears the word",
        "P lets go of the pages of A",
        "page 0 of A is rewritten on P0, for another request",
        "D0 takes the offer of A, reserves pages [0, 1], posts its READs",
        "page 0 of A is copied from P0 to D0, page 0: bytes of another request",
        "page 1 of A is copied from P0 to D0, page 1",
        "D0 sees that the READs of A have ended; 'done' went to P0 with them",
        "D0 commits A",
    )


def without(text: str) -> type[Protocol]:
    """Returns the protocol without the moves whose text contains `text`."""

    class Lame(Protocol):
        def moves(self, name: str, size: int, room: Room, view: View) -> Iterator[Move]:
            return (move for move in super().moves(name, size, room, view) if text not in move.text)

    return Lame


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("commits", "cannot go on"),
        ("posts that of P0's word", "cannot go on"),
        ("lets go", "waits for a message"),
        ("has ended, or its agent", "waits for a READ"),
        ("has answered", "waits for a READ"),
    ],
)
def test_a_stuck_party_is_found(monkeypatch: pytest.MonkeyPatch, text: str, wrong: str):
    monkeypatch.setattr(protocol_model, "Protocol", without(text))
    assert wrong in Explorer(CASTS["small"][0]).run().wrong


def nobody_is_stuck(*_: object) -> str:
    return ""


def test_pages_that_are_never_given_back_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol_model, "Protocol", without("has answered"))
    monkeypatch.setattr(protocol_promises, "stuck", nobody_is_stuck)
    result = Explorer(CASTS["small"][0]).run()
    assert "pages are lost" in result.wrong
    assert any("commits" in line for line in result.story)


def test_a_move_that_leads_back_is_found(monkeypatch: pytest.MonkeyPatch):
    class Circle(Protocol):
        def moves(self, name: str, size: int, room: Room, view: View) -> Iterator[Move]:
            yield from super().moves(name, size, room, view)
            if GIVEN_UP in room.pull:
                yield Move("begins anew", self.initial)

    monkeypatch.setattr(protocol_model, "Protocol", Circle)
    with pytest.raises(RuntimeError, match="a move does not increase the rank"):
        Explorer(CASTS["small"][0]).run()


def test_every_part_of_every_cast_is_committed_somewhere(monkeypatch: pytest.MonkeyPatch):
    reached = set[tuple[str, int]]()

    class Watched(Protocol):
        def moves(self, name: str, size: int, room: Room, view: View) -> Iterator[Move]:
            reached.update((name, reader) for reader, state in enumerate(room.pull) if state == COMMITTED)
            return super().moves(name, size, room, view)

    monkeypatch.setattr(protocol_model, "Protocol", Watched)
    for cast in CASTS["small"]:
        reached.clear()
        Explorer(cast).run()
        # Equal readers are interchangeable, so the first reader need not commit anything.
        assert {name for name, _ in reached} == {part.name for part in cast.parts}


def test_the_command_tells_the_story(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["protocol_model", "--without", "quarantine"])
    assert protocol_model.main() == 0
    assert "  16. D0 commits B\n  => stale page: D0 serves page 0 of B" in capsys.readouterr().out


def test_the_command_fails_where_no_harm_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    # With one reader, leaving the rule out does no harm.
    monkeypatch.setitem(SHOWN_BY, "all-readers", SHOWN_BY["fence"])
    monkeypatch.setattr(sys, "argv", ["protocol_model", "--without", "all-readers"])
    assert protocol_model.main() == 1
    assert "no stale page accepted" in capsys.readouterr().out


def test_the_command_runs_as_documented():
    command = [sys.executable, "-m", "tests.transfer.protocol_model", "--config", "small"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=True)
    assert all(f"{states:,} states" in done.stdout for states in SIZES.values())
