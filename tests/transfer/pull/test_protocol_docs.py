"""The tests that `docs/concepts/protocol.md` names exist, and the figures on that page are right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.transfer.protocol_rules import ASSUMPTIONS, CASTS, RULES
from tests.transfer.pull.test_protocol_model import HARM, HOLE, OTHER, ROBBED, STALE_PAGE, WAITS, WITHOUT_CAUSE

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "concepts" / "protocol.md").read_text()
HARMS = {
    STALE_PAGE: "stale page",
    HOLE: "a hole",
    OTHER: "other weights",
    ROBBED: "a good pull fails",
    WITHOUT_CAUSE: "a good pull fails",
    WAITS: "pages held",
}


def named_tests() -> list[tuple[str, str]]:
    named, file = list[tuple[str, str]](), ""
    for found, test in re.findall(r"`(test_\w+\.py)?::(test_\w+)`", DOCS):
        file = found or file
        named.append((file, test))
    return named


def test_the_page_names_tests():
    assert len(named_tests()) > 20


@pytest.mark.parametrize(("file", "test"), named_tests())
def test_every_named_test_exists(file: str, test: str):
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob(file)]
    assert test in {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_rule_is_described_with_its_harm():
    told: dict[str, tuple[str, int]] = {}
    for harm, rules in re.findall(
        r"^- \*([^*]+)\*: ((?:assumption )?`[\w-]+` \(\d+\)(?:.|\n(?!\n|- ))*)", DOCS, re.MULTILINE
    ):
        told |= {rule: (harm, int(moves)) for rule, moves in re.findall(r"`([\w-]+)`\s+\((\d+)\)", rules)}
    assert told.keys() == {*RULES, *ASSUMPTIONS}
    for rule, (harm, moves) in told.items():
        assert harm.startswith(HARMS[HARM[rule][0]])
        assert moves == HARM[rule][1]


def test_the_sizes_add_up():
    rows = re.findall(r"^\| [^|]+ \| \d \| ([\d,]+) \| ([\d,]+) \|$", DOCS, re.MULTILINE)
    assert len(rows) == len(CASTS["full"])
    states, moves = (sum(int(row[column].replace(",", "")) for row in rows) for column in (0, 1))
    assert f"{states:,} states, {moves:,} moves" in DOCS


def test_links_within_the_page_lead_somewhere():
    titles = re.findall(r"^## (.*)$", DOCS, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#([\w-]+)\)", DOCS))
    assert links <= anchors
