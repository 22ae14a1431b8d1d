from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.pull import with_limits
from benchmarks.pulls import cases, engines, others, rates
from benchmarks.pulls.cases import KIB, Case
from benchmarks.pulls.rates import LIMIT, SPUN, THREADED, measure
from benchmarks.pulls.reader import Reader, Times, draw
from benchmarks.pulls.source import SourceProcess
from transfer.nixl.settings import effective_settings

KEYS = {"topology", "order", "page_bytes", "pages", "gbps", "limit_gbps", "ratio", "host_us"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cases, "_POOL_BYTES", 4 << 20)
    yield
    gc.unfreeze()  # This undoes `frame.settle`, because other tests share this process.


def test_every_topology_and_order_fits_its_pools() -> None:
    for made in (cases.equal, cases.as_vllm, cases.topologies, cases.shares):
        for case in made(quick=False):
            source, reader = case.specs()
            held = [sum(box.extent[0] * box.extent[2] for box in shard.groups[0].boxes) for _, shard in reader.shards()]
            assert sum(held) == reader.layers * reader.heads
            ranks = reader.tp * reader.pp
            assert reader.page_bytes * ranks * 16 // reader.page_size == case.page_bytes
            assert source.pages * source.page_size == reader.pages * reader.page_size >= 2 * case.pages * 16


@pytest.mark.ci
def test_a_case_is_measured_beside_the_limit_and_its_bytes_are_looked_at() -> None:
    rows = measure(Case("TP 1→2", "head-major", 64 * KIB, 8), 0.05)
    assert [row["program"] for row in rows] == [SPUN, LIMIT, THREADED]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["page_bytes"] == 32 * KIB
        assert row["runs"] == 16
        assert 0 < row["gbps"] < 1000
    assert rows[1]["ratio"] == 1


@pytest.mark.ci
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


def test_a_program_that_ran_alone_is_compared_with_the_limit_of_the_same_runs(tmp_path: Path) -> None:
    common = {"topology": "equal", "access": "random", "memory": "huge pages", "page_bytes": 64 * KIB, "pages": 2048}

    def beside(limit: float, **differs: object) -> list[dict[str, object]]:
        shape = {**common, "order": "head-major", "runs": 2048, **differs}
        return [{**shape, "program": name, "gbps": limit, "limit_gbps": limit, "ratio": 1.0} for name in (SPUN, LIMIT)]

    shape = {**common, "order": "a tensor a layer", "runs": 8192}
    vllm = {**shape, "program": "vLLM", "gbps": 2.0}
    nixl = {**common, "order": "head-major", "runs": 2048, "program": "nixl as shipped", "gbps": 5.0}
    ours = [
        *beside(10.0),
        *beside(4.0, order="a tensor a layer", runs=8192),
        *beside(99.0, topology="TP 1→2"),  # The pulls have the same number of bytes, divided into other runs.
        *beside(98.0, memory="4 KiB pages", order="a tensor a layer", runs=8192),
    ]
    alone = [vllm, nixl, {**vllm, "pages": 17}, {**vllm, "memory": "4 KiB pages"}]
    rows = with_limits([*ours, *alone])
    assert [row["limit_gbps"] for row in rows[-4:]] == [4.0, 10.0, None, 98.0]
    assert [row["ratio"] for row in rows[-4:]] == [0.5, 0.5, None, 0.02]
    plots = pytest.importorskip("benchmarks.pulls.plots")
    plots.draw(rows, tmp_path / "pull.png")
    assert (tmp_path / "pull.png").stat().st_size > 20_000


def test_each_case_of_vllm_has_a_case_of_ours_in_the_same_layout() -> None:
    for quick, blocks in ((True, cases.QUICK_VLLM_BLOCKS), (False, cases.VLLM_BLOCKS)):
        found = {(case.specs()[1].layers, case.heads, case.pages, case.huge) for case in cases.as_vllm(quick=quick)}
        assert found == {(*each, huge) for each in blocks for huge in (False, True)}
        assert all(case.page_bytes == case.specs()[1].page_bytes for case in cases.as_vllm(quick=quick))


def test_vllm_is_run_as_shipped_and_with_our_settings() -> None:
    ours = effective_settings(environ={})
    assert {way: all(found.get(key) == ours[key] for key in ours) for way, found in others.VLLM.items()} == {
        "vLLM": False,
        "vLLM, huge pages": False,
        "vLLM, UCX as ours": True,
    }


def test_the_sources_processor_time_counts_only_for_our_program(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10**9, 5000))
    source: Any = SimpleNamespace(cpu_ns=lambda: next(ticks))
    monkeypatch.setattr(rates.time, "process_time_ns", lambda: 0)
    times = rates.in_turn(dict.fromkeys((SPUN, LIMIT), lambda _: Times(1.0, 1.0)), 2, 0.0, source)
    assert {one.cpu for one in times[SPUN]} == {5.0}
    assert {one.cpu for one in times[LIMIT]} == {0.0}


@pytest.mark.ci
def test_a_sources_processor_time_is_read_from_its_pid() -> None:
    with SourceProcess(Case("equal", "head-major", 16 * KIB, 4).specs()[0]) as source:
        assert 10**6 < source.cpu_ns() < 600 * 10**9  # importing torch alone takes more than a millisecond
