from __future__ import annotations

import gc

from benchmarks import asking


def test_the_costs_of_both_loops_the_bytes_sent_and_the_bytes_kept_are_measured() -> None:
    try:
        rows = asking.rows((4,), 2)
    finally:
        gc.unfreeze()
    found = {row["operation"]: row for row in rows}
    assert {"source: in all", "reader: in all", "on the wire"} < set(found)
    assert all(row["us_min"] > 0 for row in rows if "us_min" in row)
    assert found["source: in all"]["us_min"] >= found["source: look and lease"]["us_min"]
    # One question and one answer are enough, because the source keeps the question until it can answer.
    assert found["on the wire"]["messages"] == 2
    assert found["on the wire"]["bytes"] > 4 * 32
    kept = [row["bytes"] for name, row in found.items() if name.startswith("kept")]
    assert len(kept) == 3
    assert kept[0] > 4 * 32
