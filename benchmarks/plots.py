"""Draws the figures on logarithmic axes: cost by batch, prompt length, conversation and pool size.

`python -m benchmarks.plots` draws the committed results again, without measuring.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.frame import Row, progress
from benchmarks.pulls.plots import draw as draw_pulls
from benchmarks.results import RESULTS, load
from pagewire import plots
from pagewire.replay.plots import draw_capacities, draw_replicas

Figures = Mapping[str, Sequence[Row]]
"""The rows of each result, by the benchmark's name."""


class Plot(NamedTuple):
    """One picture.

    Attributes:
        name: name of the file.
        title: the question.
        along: the name of the x axis.
        source: the benchmark whose rows are drawn.
        wanted: returns whether to draw a row.
        line: returns the name of the line that a row belongs to.
        x: the column of the x axis.
        y: the column of the y axis. The default is the minimum of a call.
    """

    name: str
    title: str
    along: str
    source: str
    wanted: Callable[[Row], bool]
    line: Callable[[Row], str]
    x: str
    y: str = "us_min"


PLOTS = (
    Plot(
        "decode_step",
        "One decode step on the host",
        "running requests",
        "decode_step",
        lambda row: row["pool"] == "new",
        lambda row: f"{row['calls']}, pages of {row['page']}",
        "batch",
        "page_mean",
    ),
    Plot(
        "admission",
        "Reserving a prompt, hash included (pages of 16)",
        "tokens of the prompt",
        "admission",
        lambda row: row["pool"] == "new" and row["page"] == 16 and row["case"] != "publish",
        lambda row: f"{row['case']}, {row['hash']}",
        "prompt",
    ),
    Plot(
        "growing_conversation",
        "The next turn of a conversation: 256 tokens more",
        "tokens of the conversation",
        "growing_conversation",
        lambda row: "context" in row,
        lambda row: f"context {row['context']}, {row['hash']}",
        "conversation",
    ),
    Plot(
        "pool_size_admission",
        "Reserving 4,096 tokens on a full pool",
        "pages of the pool",
        "admission",
        lambda row: row["pool"] == "full",
        lambda row: row["case"],
        "pages",
    ),
    Plot(
        "pool_size_release",
        "Releasing 2,048 pages",
        "pages of the pool",
        "release",
        lambda row: "case" in row,
        lambda row: row["case"],
        "pages",
    ),
    Plot(
        "pool_size_evict",
        "Evicting, per page",
        "pages of the pool",
        "evict",
        lambda row: row["evict_median"] > 0,
        lambda row: f"{row['at a time']:,} at a time",
        "pages",
        "evict_median",
    ),
)


class Panel(NamedTuple):
    """Describes one panel of the page on growth. `along` and `calls` select the rows that the panel shows."""

    title: str
    axis: str
    source: str
    along: str
    calls: tuple[str, ...]


_LIMIT = "process_vm_readv"
GROWTH = (
    Panel("Running requests", "requests of a batch", "growth", "batch", ("step",)),
    Panel(
        "Requests that wait behind 64 that run", "requests in the queue", "growth", "waiting", ("step", "add", "abort")
    ),
    Panel("A full pool", "pages", "growth", "pool", ("reserve, evicting", "reserve, cached", "step")),
    Panel("Replicas, 64 requests in all", "replicas", "growth", "replicas", ("step", "choose")),
    Panel("A pull of pages of 16 KiB", "pages", "growth_transfer", "pages", ("pull", "pull, thread", _LIMIT)),
    Panel(
        "A pull of 16 pages, 16 KiB in each region",
        "regions",
        "growth_transfer",
        "regions",
        ("pull", "pull, thread", "contact", _LIMIT),
    ),
    Panel("Sources that are known", "sources", "growth_transfer", "peers", ("contact", "pull")),
    Panel("The same, while nothing is read", "sources", "growth_transfer", "peers", ("poll, pulls open", "poll")),
)
"""The panels of `growth.png`, row by row."""


def draw(figures: Figures, folder: Path) -> list[Path]:
    """Writes a PNG for each plot that has rows. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for plot in PLOTS:
        rows = [row for row in figures.get(plot.source, ()) if plot.wanted(row)]
        if rows:
            made.append(folder / f"{plot.name}.png")
            _draw_one(plot, rows, made[-1])
    if all(figures.get(panel.source) for panel in GROWTH):
        made.append(folder / "growth.png")
        _draw_growth(figures, made[-1])
    return made + _draw_traces(figures, folder)


def draw_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Draws the named results in `folder`. Returns the files."""
    rows: dict[str, list[Row]] = {name: load(name, folder).get("rows", []) for name in names}
    return draw(rows, folder)


def _draw_traces(figures: Figures, folder: Path) -> list[Path]:
    """Draws hits by capacity, and hits and load by replicas, for each trace."""
    made: list[Path] = []
    for source, draw_rows in (("trace_hints", draw_capacities), ("trace_routing", draw_replicas)):
        rows = figures.get(source, ())
        for trace in dict.fromkeys(row["trace"] for row in rows):
            made.append(folder / f"{source}_{trace}.png")
            title = f"{trace} trace" + (f", {rows[0]['blocks']:,} blocks in all" if draw_rows is draw_replicas else "")
            draw_rows([row for row in rows if row["trace"] == trace], title, made[-1])
    return made


def _draw_one(plot: Plot, rows: Sequence[Row], path: Path) -> None:
    lines: dict[str, list[tuple[Any, Any]]] = {}
    for row in rows:
        lines.setdefault(plot.line(row), []).append((row[plot.x], row[plot.y]))
    figure, ((axes,),) = plots.figure(1)
    drawn = [plots.Curve(name, points) for name, points in lines.items()]
    plots.draw_lines(axes, drawn, title=plot.title, along=plot.along, up="µs")
    plots.save(figure, path)


def _draw_growth(figures: Figures, path: Path) -> None:
    made, rows_of_axes = plots.figure(2, [0.8] * (len(GROWTH) // 2))
    for panel, axes in zip(GROWTH, (axes for row in rows_of_axes for axes in row), strict=True):
        rows = [row for row in figures[panel.source] if row["along"] == panel.along]
        curves = [
            plots.Curve(
                call,
                [(row["size"], row["us_min"]) for row in rows if row["call"] == call],
                "limit" if call == _LIMIT else "ours",
            )
            for call in panel.calls
        ]
        plots.draw_lines(axes, curves, title=panel.title, along=panel.axis, up="µs")
        axes.legend(fontsize=8, edgecolor="none", framealpha=0.8)
        for line in axes.lines:
            # the panel has its own legend, and an underscore hides the line from the figure's
            line.set_label(f"_{line.get_label()}")
    plots.save(made, path)


def main() -> None:
    """Draws the plots."""
    argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__).parse_args()
    made = draw_files(RESULTS, sorted(path.stem for path in RESULTS.glob("*.json")))
    draw_pulls(load("pull")["rows"], RESULTS / "pull.png")
    for path in (*made, RESULTS / "pull.png"):
        progress(f"drew {path}")


if __name__ == "__main__":
    main()
