from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pull import with_limits
from benchmarks.pulls import cases, engines
from benchmarks.pulls.cases import KIB, Case
from benchmarks.pulls.rates import LIMIT, SPUN, THREADED, measure
from benchmarks.pulls.reader import Reader, draw
from benchmarks.pulls.source import SourceProcess

KEYS = {"topology", "order", "page_bytes", "pages", "gbps", "limit_gbps", "ratio", "host_us"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cases, "_POOL_BYTES", 4 << 20)
    yield
    gc.unfreeze()  # what `frame.settle` froze: other tests share this process


def test_every_topology_and_order_fits_its_pools() -> None:
    for made in (cases.equal, cases.topologies, cases.shares):
        for case in made(quick=False):
            source, reader = case.specs()
            held = [sum(box.extent[0] * box.extent[2] for box in shard.groups[0].boxes) for _, shard in reader.shards()]
            assert sum(held) == reader.layers * reader.heads
            ranks = reader.tp * reader.pp
            assert reader.page_bytes * ranks * 16 // reader.page_size == case.page_bytes
            assert source.pages * source.page_size == reader.pages * reader.page_size >= 2 * case.pages * 16


@pytest.mark.slow
def test_a_case_is_measured_beside_the_limit_and_its_bytes_are_looked_at() -> None:
    rows = measure(Case("TP 1→2", "head-major", 64 * KIB, 8), 0.05)
    assert [row["program"] for row in rows] == [SPUN, LIMIT, THREADED]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["page_bytes"] == 32 * KIB
        assert row["runs"] == 16
        assert 0 < row["gbps"] < 1000
    assert rows[1]["ratio"] == 1


@pytest.mark.slow
def test_pages_that_are_not_the_sources_are_noticed() -> None:
    source_spec, spec = Case("equal", "head-major", 16 * KIB, 4).specs()
    with SourceProcess(source_spec) as source:
        reader = Reader(spec, source, source_spec)
        try:
            pages = draw(np.random.default_rng(0), spec, source_spec, 64, scattered=True)
            times = reader.pull(pages, source.lease())
            assert 0 < times.host <= times.total
            engines.verify((spec, reader.engine), source_spec, pages.local, pages.remote)
            reader.engine.regions[0][0].reshape(spec.pages, -1)[pages.local[2], 17] ^= 1
            with pytest.raises(RuntimeError, match="holds what page"):
                engines.verify((spec, reader.engine), source_spec, pages.local, pages.remote)
        finally:
            reader.close()


def test_who_ran_alone_is_compared_with_the_limit_of_as_many_bytes(tmp_path: Path) -> None:
    common = {"topology": "equal", "access": "random", "memory": "huge pages", "page_bytes": 64 * KIB, "pages": 2048}
    ours = [
        {**common, "order": "head-major", "program": name, "gbps": rate, "limit_gbps": 10.0, "ratio": rate / 10}
        for name, rate in ((SPUN, 8.0), (LIMIT, 10.0))
    ]
    vllm = {**common, "order": "a tensor a layer", "program": "vLLM", "gbps": 2.0}
    other = {**vllm, "pages": 17}
    rows = with_limits([*ours, vllm, other])
    assert [row["ratio"] for row in rows] == [0.8, 1.0, 0.2, None]
    plots = pytest.importorskip("benchmarks.pulls.plots")
    split = [{**row, "topology": "TP 1→2"} for row in ours]
    plots.draw([*rows, *split], tmp_path / "pull.png")
    assert (tmp_path / "pull.png").stat().st_size > 20_000
