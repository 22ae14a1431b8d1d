"""The list of layouts in docs/migration/nixl-connector.md is complete."""

from __future__ import annotations

import re

from tests.programs import ROOT
from transfer.connector.config import LAYOUTS

DOCUMENT = (ROOT / "docs/migration/nixl-connector.md").read_text()


def test_every_layout_is_in_the_list() -> None:
    assert dict(re.findall(r"^- `([\w-]+)`: `([a-z,]+)`$", DOCUMENT, re.MULTILINE)) == LAYOUTS
