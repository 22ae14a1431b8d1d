"""The common style of all plots: a README's width, unshortened labels and round ticks.

Our own curves are solid and coloured. Curves of others are dashed and grey, and the theoretical limit is dotted and
black. Legends are below the panels. Equal figures give byte-identical files.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scheduler_adapters.errors import MissingExtraError

# in inches: the width of a figure, and the height of a row of panels; a README shows about 900 pixels
WIDTH, HEIGHT, DPI = 9.0, 4.2, 100

CurveRole = Literal["ours", "peer", "limit", "worst"]
_OURS = ("#0b6e99", "#d1495b", "#3a7d44", "#8a4fbe", "#c98b00", "#17a398", "#7a4b2a", "#b0578d", "#4f6d2f", "#274690")
_PEERS = ("#555555", "#7a7a7a", "#9a9a9a", "#b0b0b0")
_PEER_MARKS = ("s", "^", "v", "D", "P", "X")
_CHARACTERS_AN_INCH = 11.5  # characters of a title per inch
_MOST_TICKS = 10  # the most ticks on an axis as wide as the figure
_LEAST_SPAN = 20.0  # the least ratio between the ends of a log axis, so that an almost flat curve looks flat
_OF_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


class Curve(NamedTuple):
    """A curve of a panel: its name, its points, and its role.

    A curve with the role `worst` has the colour of the previous curve, to which it belongs.
    """

    name: str
    points: Sequence[tuple[float, float]]
    role: CurveRole = "ours"


def pyplot() -> Any:
    """Returns matplotlib's pyplot, set up to write files only. Raises `MissingExtraError` if it is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

        mpl.use("Agg")  # files only, because there may be no screen
        from matplotlib import pyplot as plt  # noqa: PLC0415 - as above
    except ImportError as error:
        raise MissingExtraError(f"plots need matplotlib: pip install 'pagewire[bench]' ({error})") from error
    return plt


def figure(columns: int, heights: Sequence[float] = (1.0,)) -> tuple[Any, Sequence[Sequence[Any]]]:
    """Returns a figure and its panels, row by row. `heights` has the height of each row.

    A row whose height is above 1 has a single panel.
    """
    plt = pyplot()
    made = plt.figure(figsize=(WIDTH, HEIGHT * sum(heights)), layout="constrained")
    grid = made.add_gridspec(len(heights), columns, height_ratios=heights)
    rows = [
        [made.add_subplot(grid[row, :])] if height > 1 else [made.add_subplot(grid[row, at]) for at in range(columns)]
        for row, height in enumerate(heights)
    ]
    return made, rows


def draw_lines(
    axes: Any, lines: Sequence[Curve], *, title: str, along: str, up: str, logs: str = "xy", in_bytes: bool = False
) -> None:
    """Draws the curves of one panel. `logs` names the logarithmic axes; `in_bytes` labels the x axis in bytes."""
    colours, peers, colour = iter(_OURS * 2), 0, _OURS[0]
    for line in lines:
        points = sorted(line.points)
        style: dict[str, Any] = {"linewidth": 1.6, "markersize": 4, "marker": "o"}
        if line.role == "limit":
            style |= {"color": "black", "linestyle": ":", "marker": ""}
        elif line.role == "peer":
            mark = _PEER_MARKS[peers % len(_PEER_MARKS)]
            style |= {"color": _PEERS[peers % len(_PEERS)], "linestyle": "--", "marker": mark, "linewidth": 1.2}
            peers += 1
        elif line.role == "worst":
            style |= {"color": colour, "linestyle": (0, (1, 1.5)), "marker": "", "linewidth": 1.2}
        else:
            colour = next(colours)
            style |= {"color": colour}
        axes.plot([x for x, _ in points], [y for _, y in points], label=line.name, **style)
    axes.set(xlabel=along, ylabel=up)
    axes.set_title(title, loc="left")
    every = [point for line in lines for point in line.points]
    if "x" in logs:
        axes.set_xscale("log")
        columns = axes.get_subplotspec().get_gridspec().ncols
        _round_ticks(axes.xaxis, [x for x, _ in every], _MOST_TICKS // columns, in_bytes=in_bytes)
    if "y" in logs:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < _LEAST_SPAN * low:
            middle = math.sqrt(low * high)
            axes.set_ylim(middle / math.sqrt(_LEAST_SPAN), middle * math.sqrt(_LEAST_SPAN))
        _round_ticks(axes.yaxis, axes.get_ylim(), _MOST_TICKS, in_bytes=False)
    axes.grid(visible=True, linewidth=0.3)


def draw_bars(
    axes: Any, bars: Mapping[str, Mapping[str, float]], roles: Mapping[str, CurveRole], title: str, along: str
) -> None:
    """Draws a group of bars for each case. `bars[case][name]` is a bar's value, and `roles[name]` its role."""
    cases, thick = list(bars)[::-1], 0.8 / len(roles)
    looks: dict[CurveRole, dict[str, Any]] = {
        "ours": {"color": _OURS[0]},
        "worst": {"color": _OURS[1]},
        "peer": {"color": _PEERS[1], "linestyle": "--"},
        "limit": {"facecolor": "white", "edgecolor": "black", "linestyle": ":"},
    }
    for number, (who, role) in enumerate(roles.items()):
        positions = [at + 0.4 - thick * (number + 0.5) for at in range(len(cases))]
        lengths = [bars[case].get(who, 0.0) for case in cases]
        axes.barh(positions, lengths, height=thick, label=who, **looks[role])
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.set_ylim(-0.6, len(cases) - 0.4)
    axes.set(xlabel=along)
    axes.set_title(title, loc="left")
    axes.grid(visible=True, axis="x", linewidth=0.3)


def mark(axes: Any, at: float, name: str) -> None:
    """Draws a labelled vertical line at `at` on the x axis."""
    axes.axvline(at, color="black", linewidth=0.8)
    axes.annotate(
        name, (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -10), textcoords="offset points", fontsize=8
    )


def save(made: Any, path: Path) -> None:
    """Adds the legend, wraps titles, writes the file, and closes the figure."""
    named: dict[str, Any] = {}
    for axes in made.axes:
        handles, names = axes.get_legend_handles_labels()
        named |= {name: handle for handle, name in zip(handles, names, strict=True) if name not in named}
    if named:
        columns = max(1, min(len(named), 3, int(110 // (max(map(len, named)) + 8))))
        made.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    made.canvas.draw()  # the widths of the panels are known only after the figure has been drawn once
    for axes in made.axes:
        inches = axes.get_window_extent().width / made.dpi
        title = axes.get_title(loc="left").replace("\n", " ")
        axes.set_title("\n".join(textwrap.wrap(title, int(inches * _CHARACTERS_AN_INCH))), loc="left", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=DPI, metadata={"Software": None})
    pyplot().close(made)


def _round_ticks(axis: Any, values: Sequence[float], most: int, *, in_bytes: bool) -> None:
    """Sets a few labelled ticks."""
    some = [value for value in values if value > 0]
    if not some:
        return
    low, high = min(some), max(some)
    twos = all(value >= 1 and math.log2(value).is_integer() for value in some)
    ticks = _powers_of_two(low, high, most) if twos else _decades(low, high, most)
    axis.set_ticks(ticks, [_spelled(tick, in_bytes=in_bytes) for tick in ticks])
    axis.set_ticks([], minor=True)


def _powers_of_two(low: float, high: float, most: int) -> list[float]:
    first, last = round(math.log2(low)), round(math.log2(high))
    step = max(1, -(-(last - first + 1) // most))
    return [2.0**at for at in range(first, last + 1, step)]


def _decades(low: float, high: float, most: int) -> list[float]:
    found: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        found = [times * 10.0**at for at in range(first, last + 1) for times in steps]
        found = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
        if len(found) <= most:
            break
    return found


def _spelled(value: float, *, in_bytes: bool) -> str:
    if not in_bytes:
        return f"{value:,.0f}" if value >= 1 else f"{value:g}"
    power = min(int(math.log2(value)) // 10, len(_OF_BYTES) - 1)
    return f"{value / 1024**power:g} {_OF_BYTES[power]}"
