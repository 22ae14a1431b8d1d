"""Draws what `benchmarks.pull` found: rates against page size, number of pages and topology."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: there may be no screen

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.frame import Row
from benchmarks.pulls.rates import LIMIT, SPUN, THREADED

KIB = 1 << 10
_VLLM = ("vLLM", "vLLM, huge pages", "vLLM, UCX as ours")
_BESIDE = (SPUN, THREADED, LIMIT, "memcpy", "nixl as shipped", "nixl as ours", *_VLLM)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture."""
    figure, (sizes, counts, splits) = plt.subplots(1, 3, figsize=(17, 5), layout="constrained")
    alike = [row for row in rows if row["topology"] == "equal" and row["access"] == "random" and _known(row)]
    _lines(sizes, alike, lambda row: row["pages"] == _most_pages(row), "page_bytes", "bytes of a page")
    sizes.set_title("Equal layouts, random pages, as many as were measured")
    _lines(counts, alike, lambda row: row["page_bytes"] == 64 * KIB, "pages", "pages of 64 KiB in a pull")
    counts.set_title("Equal layouts, random pages of 64 KiB")
    _bars(splits, [row for row in rows if row["topology"] != "equal" and row["program"] in {SPUN, LIMIT}])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same figures give the same bytes
    plt.close(figure)


def _known(row: Row) -> bool:
    return (row["program"] in _BESIDE and row["memory"] == "huge pages") or row["program"] == "vLLM"


def _most_pages(row: Row) -> int:
    return min(2048, (512 << 20) // row["page_bytes"])


def _lines(axes: Any, rows: Sequence[Row], wanted: Callable[[Row], bool], x: str, along: str) -> None:
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if wanted(row):
            found = lines.setdefault(row["program"], {})
            found[row[x]] = max(row["gbps"], found.get(row[x], 0.0))
    for name in [name for name in _BESIDE if name in lines]:
        points = sorted(lines[name].items())
        style = "--" if name == LIMIT else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel=along, ylabel="GB/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="both", linewidth=0.3)
    if lines:
        axes.legend(fontsize=8)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        memory = "" if row["memory"] == "huge pages" else ", 4 KiB pages"
        case = f"{row['topology']}, {row['order']}, {row['page_bytes'] // KIB} KiB{memory}"
        found = cases.setdefault(case, {})
        found[row["program"]] = max(row["gbps"], found.get(row["program"], 0.0))
    names = list(cases)[::-1]
    for shift, program in ((0.2, SPUN), (-0.2, LIMIT)):
        places = [at + shift for at in range(len(names))]
        axes.barh(places, [cases[name].get(program, 0.0) for name in names], height=0.4, label=program)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(xlabel="GB/s", title="Splits, orders and memory that differ (page of the reader)")
    axes.grid(visible=True, axis="x", linewidth=0.3)
    if names:
        axes.legend(fontsize=8)
