"""Draws the results of `benchmarks.pull`: rates by page size, number of pages and topology."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import Row
from benchmarks.pulls.rates import LIMIT, SPUN, THREADED
from pagewire import plots

KIB = 1 << 10
_VLLM = ("vLLM", "vLLM, huge pages", "vLLM, UCX as ours")
_BESIDE = (SPUN, THREADED, LIMIT, "memcpy", "nixl as shipped", "nixl as ours", *_VLLM)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture."""
    figure, ((sizes, counts), (splits,)) = plots.figure(2, (1.0, 1.3))
    alike = [row for row in rows if row["topology"] == "equal" and row["access"] == "random" and _known(row)]
    title = "Equal layouts, random pages, as many as were measured"
    whole = [row for row in alike if row["pages"] == _most_pages(row)]
    plots.draw_lines(sizes, _lines(whole, "page_bytes"), title=title, along="bytes of a page", up="GB/s", in_bytes=True)
    title = "Equal layouts, random pages of 64 KiB"
    of_64 = [row for row in alike if row["page_bytes"] == 64 * KIB]
    plots.draw_lines(counts, _lines(of_64, "pages"), title=title, along="pages in a pull", up="GB/s")
    others = [row for row in rows if row["topology"] != "equal" and row["program"] in {SPUN, LIMIT}]
    title = "Splits, orders and memory that differ (page of the reader)"
    plots.draw_bars(splits, _bars(others), {SPUN: "ours", LIMIT: "limit"}, title, "GB/s")
    plots.save(figure, path)


def _known(row: Row) -> bool:
    return (row["program"] in _BESIDE and row["memory"] == "huge pages") or row["program"] == "vLLM"


def _most_pages(row: Row) -> int:
    return min(2048, (512 << 20) // row["page_bytes"])


def _lines(rows: Sequence[Row], x: str) -> list[plots.Curve]:
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        found = lines.setdefault(row["program"], {})
        found[row[x]] = max(row["gbps"], found.get(row[x], 0.0))
    roles: dict[str, plots.CurveRole] = {SPUN: "ours", THREADED: "ours", LIMIT: "limit"}
    return [plots.Curve(name, [*lines[name].items()], roles.get(name, "peer")) for name in _BESIDE if name in lines]


def _bars(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        memory = "" if row["memory"] == "huge pages" else ", 4 KiB pages"
        case = f"{row['topology']}, {row['order']}, {row['page_bytes'] // KIB} KiB{memory}"
        found = cases.setdefault(case, {})
        found[row["program"]] = max(row["gbps"], found.get(row["program"], 0.0))
    return cases
