"""The program in docs/transfer.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs import ROOT, printed_by, programs_of

DOCUMENT = (ROOT / "docs/transfer.md").read_text()


def test_many_requests_in_one_loop_end_in_each_way_and_no_page_stays_held(tmp_path: Path) -> None:
    (code,) = programs_of(DOCUMENT)
    (printed,) = re.findall(r"^It prints\n\n((?:    .*\n)+)", DOCUMENT, re.MULTILINE)
    assert printed_by(code, tmp_path).split() == printed.split()
