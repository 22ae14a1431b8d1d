"""Tests how every plot looks: no text is cut or covered, ticks are round, and equal figures give equal bytes."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots as benchmark_plots
from benchmarks.pulls import plots as pull_plots
from benchmarks.results import RESULTS, load
from pagewire import plots

pytest.importorskip("matplotlib")


def texts(made: Any) -> Iterator[Any]:
    """Returns every visible text. The labels of ticks beyond the ends of an axis are left out."""
    from matplotlib.text import Text

    hidden = {
        label
        for axis in (axis for axes in made.axes for axis in (axes.xaxis, axes.yaxis))
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        for label in (tick.label1, tick.label2)
    }
    every = (one for one in made.findobj(Text) if one.get_visible() and one.get_text().strip())
    return (one for one in every if one not in hidden)


def faults(made: Any) -> list[str]:
    """Returns the texts that are cut by the edge of the figure, and the tick labels or titles that overlap."""
    made.canvas.draw()
    width, height = made.canvas.get_width_height()
    seen = [(one, one.get_window_extent()) for one in texts(made)]
    found = [
        f"cut: {one.get_text()!r}"
        for one, box in seen
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    inside = [(one.get_text(), box.padded(-1)) for one, box in seen if one.get_fontsize() > 0]
    return found + [
        f"{a!r} on {b!r}" for (a, at), (b, other) in itertools.combinations(inside, 2) if at.overlaps(other)
    ]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Returns the faults of every saved figure. The key is the name of the figure's file."""
    found: dict[str, list[str]] = {}
    real = plots.save

    def looked_at(made: Any, path: Path) -> None:
        close = plots.pyplot().close
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plots.pyplot(), "close", lambda _: None)
            real(made, path)
        found[path.name] = faults(made)
        close(made)

    monkeypatch.setattr(plots, "save", looked_at)
    return found


@pytest.mark.ci
def test_every_plot_of_the_committed_results_is_whole(saved: dict[str, list[str]], tmp_path: Path) -> None:
    made = benchmark_plots.draw_files(tmp_path, [])
    assert made == []
    figures = {plot.source: load(plot.source)["rows"] for plot in benchmark_plots.PLOTS}
    figures |= {panel.source: load(panel.source)["rows"] for panel in benchmark_plots.GROWTH}
    figures |= {name: load(name)["rows"] for name in ("trace_hints", "trace_routing")}
    benchmark_plots.draw(figures, tmp_path)
    pull_plots.draw(load("pull")["rows"], tmp_path / "pull.png")
    assert {name: faults for name, faults in saved.items() if faults} == {}
    assert set(saved) == {path.name for path in RESULTS.glob("*.png")}, "a committed picture is no longer drawn"


def test_a_cut_title_would_be_noticed(saved: dict[str, list[str]], tmp_path: Path) -> None:
    made, ((axes, _),) = plots.figure(2)
    plots.draw_lines(axes, [plots.Curve("a", [(1, 2), (3, 4)])], title="short", along="x", up="y")
    axes.set_title("far too long for half of a figure, " * 6)
    plots.save(made, tmp_path / "cut.png")
    assert saved["cut.png"][0].startswith("cut: 'far too long")


def test_ticks_are_round_and_few() -> None:
    (made, ((axes,),)), (wide, ((other,),)) = plots.figure(1), plots.figure(1)
    sizes = [(1 << at, 3.0) for at in range(12, 25)]
    plots.draw_lines(axes, [plots.Curve("a", sizes)], title="", along="", up="", in_bytes=True)
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        *("4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"),
    ]
    plots.draw_lines(other, [plots.Curve("a", [(37, 0.2), (9_000, 7_000)])], title="", along="", up="")
    assert [label.get_text() for label in other.get_xticklabels()] == [
        "50",
        "100",
        "200",
        "500",
        "1,000",
        "2,000",
        "5,000",
    ]
    for value in other.get_yticks():
        assert math.log10(value).is_integer() or round(value / 10 ** math.floor(math.log10(value))) in (2, 3, 5)
    assert len(other.get_yticks()) <= 10
    low, high = axes.get_ylim()
    assert high / low == pytest.approx(20), "the axis of a flat curve must make it look flat"
    half, ((narrow, _),) = plots.figure(2)
    plots.draw_lines(narrow, [plots.Curve("a", sizes)], title="", along="", up="", in_bytes=True)
    assert len(narrow.get_xticks()) <= 5, "a figure of half the width must have half as many ticks"
    for one in (made, wide, half):
        plots.pyplot().close(one)


def test_limits_and_peers_have_one_style_and_our_figures_another() -> None:
    made, ((axes,),) = plots.figure(1)
    points = [(1.0, 1.0), (2.0, 2.0)]
    lines = [("us", "ours"), ("worst of us", "worst"), ("they", "peer"), ("others", "peer"), ("limit", "limit")]
    plots.draw_lines(axes, [plots.Curve(name, points, role) for name, role in lines], title="", along="", up="")  # type: ignore[arg-type]
    us, worst, they, others, limit = axes.get_lines()
    assert us.get_color() == worst.get_color()
    assert (us.get_linestyle(), they.get_linestyle(), others.get_linestyle(), limit.get_linestyle()) == (
        "-",
        "--",
        "--",
        ":",
    )
    assert they.get_marker() != others.get_marker()
    plots.pyplot().close(made)


def test_the_same_figures_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made, ((axes,),) = plots.figure(1)
        plots.draw_lines(axes, [plots.Curve("line", [(1, 1), (10, 5)])], title="title", along="x", up="y")
        plots.mark(axes, 5, "here")
        plots.save(made, tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
