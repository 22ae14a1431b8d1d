"""`TopApp`: draws a `TopView` with Textual, and changes the view when a key is pressed or the mouse is used."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import ClassVar

import numpy as np
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from kvcache.errors import WatchError
from kvcache.watch.messages import PageState, states_of
from pagewire.top import panels
from pagewire.top.pagemap import DARK, GLYPHS, LIGHT, Colours, Span, colours
from pagewire.top.sources import LiveSource, PlayedSource
from pagewire.top.view import Filter, TopView, nobody_answers

_TICK_S = 0.1
_WAITING = "waiting for the first snapshot ..."
_STEP_S = 5.0  # in seconds: how far one key press moves in a recording
_SCROLLBAR = 2
_MAP_SHARE = 0.6  # the page map gets at most this share of the lines that the map and the panels have together
_IDS = "request"  # heading of the column whose ids may be long
_THEMES = {True: "textual-light", False: "textual-dark"}


class _Area:
    """The screen lines of one pool: a title line, and below it the positions of the pool's map (see `PageMap`)."""

    def __init__(self, key: str, top: int, lines: int, span: Span, *, wide: bool) -> None:
        self.key, self.top, self.lines, self.span, self.wide = key, top, lines, span, wide
        self.title = ""
        self.colours: Colours = np.zeros((0, 3), np.uint8)
        self.glyphs: list[str] = []

    def square_at(self, x: int, y: int, width: int) -> int | None:
        """Returns the map position at these screen coordinates, or None."""
        line = y - self.top - 1
        if not 0 <= line < self.lines - 1:
            return None
        # A half block shows two positions, one above the other. This method returns the upper one.
        square = line * (width // 2) + x // 2 if self.wide else line * 2 * width + x
        return square if square < self.span.squares else None


class PageMap(Widget):
    """The map of the pages of all pools, or of one pool.

    Each position on the map shows one page as a glyph, or several pages as half a character.
    """

    DEFAULT_CSS = "PageMap { height: 1fr; }"

    def __init__(self, view: TopView) -> None:
        super().__init__()
        self._view = view
        self._areas: list[_Area] = []

    def redraw(self) -> None:
        """Redraws the map from the view."""
        shown, width, height = self._view.shown(), self.size.width, self.size.height
        if not shown or width < 4 or height < 2:
            self._areas = []
            self.refresh()
            return
        each = max(2, height // len(shown))
        areas: list[_Area] = []
        for at, (key, process, pool, cells) in enumerate(shown[: height // 2]):
            lines = height - at * each if at == len(shown) - 1 else each
            wide = self._view.span(pool, 1).pages <= (width // 2) * (lines - 1)
            squares = (width // 2 if wide else 2 * width) * (lines - 1)
            area = _Area(key, at * each, lines, self._view.span(pool, squares), wide=wide)
            lit = self._view.lit(process, pool.name)
            area.colours = colours(cells, area.span, lit, light=self._view.light)
            first, per = area.span.first, area.span.per_square
            if wide:
                found = states_of(cells[first : first + area.span.pages]).tolist()
                area.glyphs = [GLYPHS[PageState(state)] for state in found]
            gone = f"  GONE for {self._view.now - process.heard_at:.0f} s" if self._view.is_gone(process) else ""
            scale = "a page each" if per == 1 else f"{per:,} pages each"
            area.title = (
                f"{process.name}/{pool.name}  {pool.num_pages:,} pages, shown {first:,}–{first + area.span.pages - 1:,}"
                f", {scale}{gone}"
            )
            areas.append(area)
        self._areas = areas
        self.refresh()

    def lines_needed(self, width: int) -> int:
        """Returns how many lines the map needs to show every page of the shown pools as a glyph, with titles."""
        return sum(1 - (-pool.num_pages // max(1, width // 2)) for _, _, pool, _ in self._view.shown())

    def render_line(self, y: int) -> Strip:
        """Renders one line of the screen."""
        width = self.size.width
        area = next((one for one in self._areas if one.top <= y < one.top + one.lines), None)
        if area is None:
            waiting = self._waiting(width) if not self._areas else []
            return Strip([Segment((waiting[y] if y < len(waiting) else "")[:width].ljust(width))], width)
        if y == area.top:
            style = Style(bold=True, reverse="GONE" in area.title)
            return Strip([Segment(area.title[:width].ljust(width), style)], width)
        line = y - area.top - 1
        make = _wide_line if area.wide else _half_line
        return Strip(make(area, line, width)).adjust_cell_length(width)

    def _waiting(self, width: int) -> list[str]:
        """Returns the lines to show while there is no map."""
        unanswered = self._view.unanswered()
        return textwrap.wrap(nobody_answers(unanswered), max(1, width)) if unanswered else [_WAITING]

    def on_click(self, event: events.Click) -> None:
        """Describes the pages below the pointer. A second click at the same position zooms in there."""
        for area in self._areas:
            square = area.square_at(event.x, event.y, self.size.width)
            if square is not None:
                self._look_at(area, square, closer=event.chain > 1)

    def on_mouse_scroll_up(self, _: events.MouseScrollUp) -> None:
        """Zooms in."""
        self._view.zoom_by(1)
        self.redraw()

    def on_mouse_scroll_down(self, _: events.MouseScrollDown) -> None:
        """Zooms out."""
        self._view.zoom_by(-1)
        self.redraw()

    def _look_at(self, area: _Area, square: int, *, closer: bool) -> None:
        view, span = self._view, area.span
        found = next((one for one in view.pools() if one[0] == area.key), None)
        if found is None:
            return
        _, process, pool, _ = found
        first = span.first + square * span.per_square
        count = min(span.per_square, span.first + span.pages - first)
        if closer:
            view.pool, view.centre = area.key, (first - 1 + count / 2) / pool.num_pages
            view.zoom_by(1)
            self.redraw()
        self.screen.query_one("#told", Static).update(view.told(process, pool, first, count))


def _wide_line(area: _Area, line: int, width: int) -> list[Segment]:
    first = line * (width // 2)
    squares = range(first, min(first + width // 2, area.span.squares))
    return [Segment(area.glyphs[at], _style(_rounded(area.colours[at]))) for at in squares]


def _half_line(area: _Area, line: int, width: int) -> list[Segment]:
    """Renders a line of half blocks.

    Neighbours of equal colour form one segment, because each segment costs Textual time.
    """
    first = 2 * line * width
    upper = [_rounded(colour) for colour in area.colours[first : first + width]]
    lower = [_rounded(colour) for colour in area.colours[first + width : first + 2 * width]]
    pairs = zip_longest(upper, lower)
    return [Segment("▀" * len([*same]), _style(*pair)) for pair, same in groupby(pairs)]


def _rounded(colour: Colours) -> str:
    """Returns the name of a colour, rounded so that only a few different colours occur."""
    return "#" + (colour & 0xF8).tobytes().hex()


@lru_cache(1 << 12)
def _style(colour: str, below: str | None = None) -> Style:
    """Returns the style for a colour over another one.

    Cached, because creating a style costs more than drawing with it.
    """
    return Style(color=colour, bgcolor=below)


class TopApp(App[None]):
    """The application of `pagewire top`."""

    TITLE = "pagewire top"
    AUTO_FOCUS = None
    CSS = """
    #legend, #told, #phases, #totals { height: 1; }
    #told { color: $text-muted; }
    #totals { text-style: bold; }
    #filter { display: none; }
    #filter.open { display: block; }
    TabbedContent { height: 1fr; min-height: 8; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("space", "pause", "pause"),
        Binding("plus,equals_sign", "zoom(1)", "closer", key_display="+"),
        Binding("minus", "zoom(-1)", "farther", key_display="-"),
        Binding("p", "pool(1)", "pool"),
        Binding("left,h", "pan(-0.5)", "pan", key_display="←→", priority=True),
        Binding("right,l", "pan(0.5)", "pan", show=False, priority=True),
        Binding("slash,f", "filter", "filter", key_display="/"),
        Binding("escape", "clear", "clear", show=False),
        Binding("c", "check", "recount"),
        Binding("t", "theme", "light/dark"),
        Binding("left_square_bracket", "seek(-1)", "back", key_display="["),
        Binding("right_square_bracket", "seek(1)", "on", key_display="]"),
        *(Binding(str(at + 1), f"panel('{name}')", name, show=False) for at, name in enumerate(panels.HEADINGS)),
    ]

    def __init__(self, source: LiveSource | PlayedSource, *, light: bool = False) -> None:
        super().__init__()
        self.source = source
        self.view = TopView(list(source.addresses), light=light)
        self.theme = _THEMES[light]
        self.map = PageMap(self.view)
        self._legend = Static(_legend(light=light), id="legend")
        self._phases = Static("", id="phases")
        self._totals = Static("", id="totals")
        self._panels = TabbedContent(id="panels")
        # For each panel, its rows with unshortened ids. The tables on the screen show shortened ids.
        self._rows: dict[str, panels.TableRows] = {}
        self._tables = {name: DataTable[str](cursor_type="row", zebra_stripes=True) for name in panels.HEADINGS}
        self._asked = Input(placeholder="request, tenant=…, replica=…, process=…", id="filter")
        self.updates = 0  # number of redraws

    def compose(self) -> ComposeResult:
        """Composes the screen from top to bottom."""
        yield self._totals
        yield self._legend
        yield self.map
        yield Static("", id="told")
        yield self._phases
        with self._panels:
            for at, (name, table) in enumerate(self._tables.items()):
                with TabPane(f"{at + 1} {name}", id=name):
                    yield table
        yield self._asked
        yield Footer()

    def on_mount(self) -> None:
        """Starts to poll for snapshots."""
        for name, (_, headings) in panels.HEADINGS.items():
            self._tables[name].add_columns(*headings)
        self._tables["requests"].focus()
        self.set_interval(_TICK_S, self.tick)

    def on_resize(self) -> None:
        """Redraws after a change of size."""
        self.call_after_refresh(self.redraw)

    def tick(self) -> None:
        """Polls the source and applies new snapshots."""
        heard = self.source.poll(self.view.followed)
        if self.view.paused and isinstance(self.source, LiveSource):
            return  # the screen is paused, but the recording continues
        played = isinstance(self.source, PlayedSource)
        now = self.source.now if isinstance(self.source, PlayedSource) else time.time()
        was_gone = [self.view.is_gone(one) for one in self.view.processes.values()]
        self.view.take(heard, now)
        if heard or played or any(was_gone) or any(map(self.view.is_gone, self.view.processes.values())):
            self.redraw()

    def redraw(self) -> None:
        """Draws the current state."""
        self.updates += 1
        self._share_lines()
        self.map.redraw()
        self._totals.update(panels.totals(self.view))
        self._phases.update(self._status())
        self._fill(self._panels.active)

    def _share_lines(self) -> None:
        """Divides the lines of the screen: the map gets the lines that it needs, but at most the fraction `_MAP_SHARE`.

        The panels get the remaining lines.
        """
        lines = self.map.size.height + self._panels.size.height
        if not lines or not self.view.shown():
            return
        height = min(max(2, self.map.lines_needed(self.map.size.width)), int(lines * _MAP_SHARE))
        if self.map.styles.height is None or self.map.styles.height.cells != height:
            self.map.styles.height = height
            self.call_after_refresh(self.map.redraw)

    def _status(self) -> str:
        view, parts = self.view, [panels.phases(self.view)]
        if view.paused:
            parts.append("PAUSED")
        if isinstance(self.source, PlayedSource):
            parts.append(f"playing {self.source.position:.1f} of {self.source.length:.1f} s, {self.source.speed:g}x")
        if (unanswered := view.unanswered()) and view.pools():
            parts.append(f"no process answers at {', '.join(unanswered)}")
        shown = [f"{name}={getattr(view.filter, name)}" for name in Filter.__slots__ if getattr(view.filter, name)]
        parts += [f"filter {' '.join(shown)}"] if shown else []
        return "   ".join(parts).replace("[", r"\[")

    def _fill(self, name: str) -> None:
        """Populates a panel with its rows. The cursor stays on the same item."""
        if name not in panels.HEADINGS:
            return
        table, (rows_of, headings) = self._tables[name], panels.HEADINGS[name]
        at = table.cursor_row
        table.clear()
        self._rows[name] = rows = rows_of(self.view)
        columns = [[row[at] for row in rows] for at in range(len(headings))]
        if _IDS in headings:
            ids = headings.index(_IDS)
            columns[ids] = panels.short_ids(columns[ids])
        self._widen(table, headings, columns)
        for row in zip(*columns, strict=True):
            table.add_row(*(text.replace("[", r"\[") for text in row))
        table.move_cursor(row=at)

    @staticmethod
    def _widen(table: DataTable[str], headings: Sequence[str], columns: Sequence[Sequence[str]]) -> None:
        """Shares unused width among the columns, so that a table fills the screen. No cell is cut."""
        widths = [max(map(cell_len, [name, *column])) for name, column in zip(headings, columns, strict=True)]
        left = table.size.width - sum(widths) - 2 * table.cell_padding * len(widths) - _SCROLLBAR
        for at, (column, width) in enumerate(zip(table.ordered_columns, widths, strict=True)):
            column.auto_width = False
            column.width = width + max(0, left) // len(widths) + (at < max(0, left) % len(widths))

    # ---- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Disables panning while a filter is typed, so that the keys for panning go to the input field."""
        del parameters
        return action != "pan" or not self._asked.has_focus

    def action_pause(self) -> None:
        """Pauses or resumes."""
        self.view.paused = not self.view.paused
        if isinstance(self.source, PlayedSource):
            self.source.paused = self.view.paused
        self.redraw()

    def action_zoom(self, step: int) -> None:
        """Zooms in or out."""
        self.view.zoom_by(step)
        self.map.redraw()

    def action_pool(self, step: int) -> None:
        """Selects the pool that is `step` pools further on."""
        self.view.next_pool(step)
        self.map.redraw()

    def action_pan(self, share: float) -> None:
        """Moves the visible part along the pool."""
        self.view.pan(share)
        self.map.redraw()

    def action_seek(self, steps: int) -> None:
        """Moves in a recording."""
        if isinstance(self.source, PlayedSource):
            self.source.seek(self.source.position + steps * _STEP_S)
            self.view.forget()
            self.tick()

    def action_check(self) -> None:
        """Makes the processes check their state, and shows the results."""
        if isinstance(self.source, LiveSource):
            self.source.check()
            self.action_panel("processes")

    def action_theme(self) -> None:
        """Switches between the light and the dark theme."""
        self.view.light = not self.view.light
        self.theme = _THEMES[self.view.light]
        self._legend.update(_legend(light=self.view.light))
        self.redraw()

    def action_panel(self, name: str) -> None:
        """Shows another panel."""
        self._panels.active = name
        self._tables[name].focus()
        self._fill(name)

    def action_filter(self) -> None:
        """Opens the input field of the filter."""
        self._asked.add_class("open")
        self._asked.focus()

    def action_clear(self) -> None:
        """Resets the filter, the pool and the zoom."""
        self.view.filter, self.view.pool, self.view.zoom = Filter(), "", 0
        self._close_filter()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Applies a typed filter."""
        try:
            self.view.filter = Filter.parse(event.value)
        except WatchError as error:
            self.notify(str(error), severity="error")
            return
        self._close_filter()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Shows only the pages of the selected request, lease or pull."""
        name = self._panels.active
        if name in ("requests", "transfers"):
            self.view.filter = Filter(request=self._rows[name][event.cursor_row][name == "transfers"])
            self.redraw()

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        """Populates a panel that was selected with the mouse."""
        self._fill(event.pane.id or "")

    def on_unmount(self) -> None:
        """Closes the sockets and the recording."""
        self.source.close()

    def _close_filter(self) -> None:
        self._asked.remove_class("open")
        self._tables[self._panels.active].focus()
        self.redraw()


def _legend(*, light: bool) -> str:
    palette = LIGHT if light else DARK
    parts = [
        f"[{_rounded(np.array(palette.states[state], np.uint8))}]{GLYPHS[state]}[/] {state.name.lower()}"
        for state in PageState
    ]
    return "  ".join(parts) + f"   {palette.fading}: goes first"
