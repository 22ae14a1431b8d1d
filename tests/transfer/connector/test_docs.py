"""The programs in docs/migration/nixl-connector.md run as they stand, and are as short as a first look may be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import transfer
from tests.programs import ROOT, printed_by, programs_of
from transfer.connector.config import LAYOUTS

DOCUMENT = (ROOT / "docs/migration/nixl-connector.md").read_text()
NAMES = ["a hand-over", "two groups"]
PROGRAMS = dict(zip(NAMES, programs_of(DOCUMENT), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_with_public_names_alone_and_prints_what_is_said(name: str, tmp_path: Path) -> None:
    code = PROGRAMS[name]
    assert len(code.splitlines()) <= 40
    (names,) = re.findall(r"^from transfer import (.*)", code, re.MULTILINE)
    assert code.count("transfer import") == 1
    assert set(names.split(", ")) <= set(transfer.__all__)
    assert f"`{printed_by(code, tmp_path)}`" in DOCUMENT


def test_every_layout_is_in_the_table() -> None:
    assert dict(re.findall(r"^\| `([\w-]+)` \| `([a-z,]+)` \|$", DOCUMENT, re.MULTILINE)) == LAYOUTS
