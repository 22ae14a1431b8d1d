"""The programs in docs/guides/prefill-decode.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import ROOT, printed_by, programs_of

DOCUMENT = (ROOT / "docs/guides/prefill-decode.md").read_text()


@pytest.mark.parametrize("number", [0, 1], ids=["many requests, given up in each way", "chunk by chunk"])
def test_a_program_prints_what_the_text_says(number: int, tmp_path: Path) -> None:
    code = programs_of(DOCUMENT)[number]
    printed = re.findall(r"^It prints\n\n((?:    .*\n)+)", DOCUMENT, re.MULTILINE)
    assert len(printed) == len(programs_of(DOCUMENT)) == 2
    assert printed_by(code, tmp_path).split() == printed[number].split()
