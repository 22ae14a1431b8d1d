from __future__ import annotations

import gc

from benchmarks import scrape


def test_a_scrape_of_each_collector_is_measured() -> None:
    try:
        rows = scrape.rows(((2_000, 3),), 2)
        assert [row["operation"] for row in rows] == [
            "scrape, manager",
            "scrape, exchange",
            "scrape, both",
            "count a pull",
        ]
        assert all(row["us_min"] > 0 for row in rows)
        assert rows[2]["families"] == rows[0]["families"] + rows[1]["families"]
    finally:
        gc.unfreeze()
