"""The program in docs/migration/nixl-connector.md is as short as a first look may be, and the table is complete."""

from __future__ import annotations

import re

import transfer
from tests.programs import ROOT, programs_of
from transfer.connector.config import LAYOUTS

DOCUMENT = (ROOT / "docs/migration/nixl-connector.md").read_text()


def test_the_program_is_short_and_uses_public_names_alone() -> None:
    (code,) = programs_of(DOCUMENT)
    assert len(code.splitlines()) <= 40
    (names,) = re.findall(r"^from pagewire import (.*)", code, re.MULTILINE)
    assert code.count("pagewire import") == 1
    assert set(names.split(", ")) <= set(transfer.__all__)


def test_every_layout_is_in_the_table() -> None:
    assert dict(re.findall(r"^\| `([\w-]+)` \| `([a-z,]+)` \|$", DOCUMENT, re.MULTILINE)) == LAYOUTS
