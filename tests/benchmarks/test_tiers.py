from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tiers
from kvcache.tiers.page_files import SystemIO


def test_the_file_tier_is_measured_beside_dd(tmp_path: Path) -> None:
    dd = tiers.rates_of_dd(tmp_path, 1 << 20)
    ours = tiers.rates_of_tier(tmp_path, 4096, 1 << 20, lambda _: SystemIO(), "file tier")
    assert set(dd) == set(ours) == {"by", "write", "read", "read_cold"}
    assert all(row[what] > 0 for row in (dd, ours) for what in ("write", "read", "read_cold"))


@pytest.mark.ci
def test_serving_and_steps_are_measured_with_and_without_a_tier() -> None:
    model = tiers.load_model(None)
    without, with_tier = tiers.serving(model, 0, 5), tiers.serving(model, 4, 5)
    assert without["h2d_pages"] == 0 < with_tier["h2d_pages"]
    assert with_tier["hit_pct"] > 99
    idle, busy = tiers.model_steps(model, 2, 1)
    assert (idle["tier"], busy["tier"]) == ("idle", "busy")
    assert busy["pages_per_step"] > 0 == idle["pages_per_step"]
