from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvcache.killed_writers import Tally, kill_one


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_no_wrong_page_behind(tmp_path: Path) -> None:
    tally = Tally()
    for number, after_s in enumerate((0.1, 0.4)):
        kill_one(tmp_path / str(number), after_s, tally)
    assert tally.pages_served > 0
    assert tally.pages_refused == 0
