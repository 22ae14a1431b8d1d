"""How fast does a pull move pages, and what does it cost the host, compared with the machine's limit and with others?

A pull includes everything: source and reader in two processes, a lease, READs of the data, the fence, and its
notification. In the row `pagewire`, the reader polls without a pause; in `pagewire, thread`, it uses the transfer
thread. The machine's limit is `process_vm_readv` of the same runs, many in each call, by one thread. The figures of a
ratio come from one loop, in which all programs alternate on pages that have left the processor's caches. Source and
reader may use every core; the source polls once a millisecond. `process_vm_readv` uses one thread, but our pulls also
use a NIXL thread. `cpu_ratio` therefore compares the bytes per second of processor time, including the source's. `nixl
as shipped` and vLLM's connector are measured in the same run, but in loops of their own. Both are measured again with
the environment and NIXL threads of our agents, as `nixl as ours` and `vLLM, UCX as ours`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.frame import Row, header, options, progress, table, write
from benchmarks.peers.environment import PeerError
from benchmarks.pulls import figures, others
from benchmarks.pulls.cases import QUICK_VLLM_BLOCKS, VLLM_BLOCKS, as_vllm, equal, shares, topologies
from benchmarks.pulls.plots import draw
from benchmarks.pulls.rates import LIMIT, measure
from scheduler_adapters.errors import MissingExtraError

_WIDE = ("order", "memory", "n")
_STATISTICS = (
    "rows: gbps, limit_gbps, us, host_us and ratio are of minima, *_median are medians, cpu_us and cpu_ratio of means, "
    "of n samples; figures: min and median of n samples"
)


def our_rows(*, quick: bool) -> Iterator[Row]:
    """Returns the rows of our pulls and of `process_vm_readv`, the machine's limit."""
    budget_s = 0.5 if quick else 1.5
    for cases in (equal, as_vllm, topologies, shares):
        for case in cases(quick=quick):
            rows = measure(case, budget_s)
            progress(f"{case.topology}, {case.order}, {case.page_bytes} × {case.pages}: {rows[0]['ratio']:.2f}")
            yield from rows


def other_rows(*, quick: bool) -> Iterator[Row]:
    """The rows of NIXL alone, and of vLLM if it can be run."""
    sizes = [(case.page_bytes, case.pages) for case in equal(quick=quick) if case.scattered]
    for as_ours in (False, True):
        yield from others.nixl(sizes, as_ours=as_ours)
    try:
        for way in others.VLLM:
            yield from others.vllm(QUICK_VLLM_BLOCKS if quick else VLLM_BLOCKS, way)
    except PeerError as error:
        progress(f"without vLLM: {error}")


def with_limits(rows: list[Row]) -> list[Row]:
    """Adds the rate of `process_vm_readv`, the machine's limit, to rows that were measured in loops of their own.

    The limit was measured in the loops of our pulls, for the same runs in the same memory.
    """
    limits = {_shape(row): row["limit_gbps"] for row in rows if row["program"] == LIMIT}
    for row in rows:
        limit = row.get("limit_gbps") or limits.get(_shape(row))
        row["limit_gbps"] = limit
        row.setdefault("ratio", round(row["gbps"] / limit, 3) if limit else None)
    return rows


def _shape(row: Row) -> tuple[object, ...]:
    """The columns that are equal for two rows that read the same bytes in the same way."""
    return tuple(row[key] for key in ("topology", "order", "memory", "access", "page_bytes", "pages", "runs"))


def single_figures(*, quick: bool) -> Iterator[Row]:
    """The figures that are single numbers."""
    budget_s = 0.5 if quick else 4.0
    for asked in (figures.latency, figures.fence, figures.caller):
        yield from asked(budget_s)
    if not quick:
        yield from figures.host(budget_s)
        yield from figures.first_contact(5)


def main(chosen: argparse.Namespace | None = None) -> None:
    """Measure, print, write."""
    chosen = chosen or options(__doc__)
    logging.getLogger("pagewire").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    before = header("python -m benchmarks.pull" + (" --quick" if chosen.quick else ""), _STATISTICS)
    rows = with_limits([*our_rows(quick=chosen.quick), *other_rows(quick=chosen.quick)])
    print(f"\npull\n{table([{key: row[key] for key in row if key not in _WIDE} for row in rows])}", flush=True)
    found = list(single_figures(quick=chosen.quick))
    print(f"\n{table(found)}", flush=True)
    if chosen.json:
        write(chosen.json, {**before, "rows": rows, "figures": found})
        _draw(rows, chosen.json.with_suffix(".png"))


def _draw(rows: list[Row], path: Path) -> None:
    try:
        draw(rows, path)
    except MissingExtraError as error:  # the tables need no matplotlib
        progress(f"no plot: {error}")
        return
    progress(f"drew {path}")


if __name__ == "__main__":
    main()
