from __future__ import annotations

import gc

from benchmarks import first_contact


def test_a_first_contact_is_measured_step_by_step() -> None:
    try:
        rows = first_contact.contact(first_contact.PULLED, 2, 2)
        assert [row["operation"] for row in rows] == ["connect", "decode and check", "plan", "pull"]
        assert all(row["us_min"] > 0 and row["source_ranks"] == 2 for row in rows)
    finally:
        gc.unfreeze()
