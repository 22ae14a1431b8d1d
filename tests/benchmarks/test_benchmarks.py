from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import admission, decode_step, evict, growing_conversation, recommend, release, waiting
from benchmarks.frame import HEADER

pytestmark = pytest.mark.usefixtures("_unfrozen")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()  # This undoes `frame.settle`, because other tests run in the same process.


@pytest.mark.parametrize("full", [False, True])
def test_a_decode_step_is_measured_both_ways(full: bool) -> None:
    rows = decode_step.measure(4, 16, 16, full=full)
    assert [row["calls"] for row in rows] == ["Batch", "Batch, arrays read", "Batch, contexts read", "per request"]


def test_every_benchmark_measures_what_it_says_on_a_small_pool() -> None:
    # Each benchmark checks itself: it fails if a warm prompt does not hit, if an evicting prompt does not evict, and so
    # on.
    assert {row["case"] for row in admission.measure(4096, 16, 1024, "sha256", 3, ("new", "full"))} >= {
        "warm",
        "evicting",
    }
    assert len(release.measure(8192, 16, 3)) == 3
    assert evict.measure(4096, (1, 64), 3)[1]["at a time"] == 64
    assert len(growing_conversation.measure(1024, "xxh3_128", 3)) == 4
    assert [row["case"] for row in recommend.measure(3, 256, "sha256", 3)] == ["cold", "one", "all", "again"]
    assert [row["call"] for row in waiting.measure(10, 3)] == ["step", "add", "abort"]
    assert [row["call"] for row in waiting.measure_polls(10, 3)] == ["poll, pages to come", "poll, silent source"]


def test_sweeps_of_traces_are_drawn_one_by_one(tmp_path: Path) -> None:
    plots = pytest.importorskip("benchmarks.plots")
    hints = [
        {"trace": trace, "blocks": 10 * at, "hints": kind, "hit_pct": 2.0, "optimum_pct": 3.0}
        for trace in ("a", "b")
        for at in (1, 2)
        for kind in ("none", "true")
    ]
    split = {"trace": "a", "blocks": 10, "routing": "prefix", "hit_pct": 2.0, "lru_pct": 3.0}
    loads = [
        {**split, "replicas": count, "window_load_mean": load, "window_load_max": load}
        for count, load in ((1, None), (2, 1.5))
    ]
    made = plots.draw({"trace_hints": hints, "trace_routing": loads}, tmp_path)
    assert [path.name for path in made] == ["trace_hints_a.png", "trace_hints_b.png", "trace_routing_a.png"]
    assert all(path.stat().st_size > 10_000 for path in made)


@pytest.mark.ci
def test_results_say_where_and_how_they_were_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "release", "--quick", "--clock", "cpu", "--json-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "published" in done.stdout
    result = json.loads((tmp_path / "release.json").read_text())
    assert result["command"] == "BENCH_CLOCK=cpu python -m benchmarks.release --quick"
    assert result["machine"]["clock"] == "cpu"
    assert [*result][: len(HEADER)] == [*HEADER]
    assert {"kvcache", "benchmarks/release.py"} <= set(result["measures"])
    assert "transfer" not in result["measures"]
