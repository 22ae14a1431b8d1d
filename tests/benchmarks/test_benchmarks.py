from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import admission, decode_step, evict, growing_conversation, release

pytestmark = pytest.mark.usefixtures("_unfrozen")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()  # what `frame.settle` froze: other tests share this process


@pytest.mark.parametrize("full", [False, True])
def test_a_decode_step_is_measured_both_ways(full: bool) -> None:
    rows = decode_step.measure(4, 16, 16, full=full)
    assert [row["calls"] for row in rows] == ["Batch", "per request"]


def test_every_benchmark_measures_what_it_says_on_a_small_pool() -> None:
    # Each stops with an error where a warm prompt does not hit, an evicting one does not evict, and so on.
    assert {row["case"] for row in admission.measure(4096, 16, 1024, "sha256", 3, ("new", "full"))} >= {
        "warm",
        "evicting",
    }
    assert len(release.measure(8192, 16, 3)) == 3
    assert evict.measure(4096, (1, 64), 3)[1]["at a time"] == 64
    assert len(growing_conversation.measure(1024, "xxh3_128", 3)) == 3


@pytest.mark.slow
def test_results_say_where_and_how_they_were_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "release", "--quick", "--clock", "cpu", "--json-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "published" in done.stdout
    result = json.loads((tmp_path / "release.json").read_text())
    assert result["command"] == "BENCH_CLOCK=cpu python -m benchmarks.release --quick"
    assert result["machine"]["clock"] == "cpu"
    assert {"cpu", "commit", "python", "load"} <= set(result["machine"])
