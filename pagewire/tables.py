"""Prints tables with `rich` at any width. No figure is ever cut, whether the output is a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

# The width given to `rich`, in characters. It is large enough for any table. If a table did not fit the width, `rich`
# would cut its cells.
_WIDEST = 1 << 16
_GAP = 3  # characters between two columns


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> None:
    """Prints a title and a table. The first `words` columns are text, and the others are figures.

    On a terminal, a table that is too wide is printed in parts, one below the other. Each part begins with the text
    columns. In a file or a pipe the width has no limit.

    Args:
        title: printed above the table.
        columns: the headings. If all are empty, no heading is printed.
        rows: the cells of each row, as many as there are columns.
        words: number of leading columns that are text.
    """
    console, terminal = Console(width=_WIDEST), Console()
    console.print(title, style="bold", soft_wrap=True)
    widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    for part in _parts(widths, words, terminal.width if terminal.is_terminal else _WIDEST):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
        for number in part:
            table.add_column(columns[number], justify="left" if number < words else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[number] for number in part))
        console.print(table)


def _parts(widths: Sequence[int], words: int, limit: int) -> Iterator[list[int]]:
    """Yields the column numbers of each part of a wide table.

    Each part has the text columns and at least one other column. It has as many other columns as fit.
    """
    named = list(range(min(words, len(widths))))
    part, used = list(named), sum(widths[number] + _GAP for number in named)
    for number in range(len(named), len(widths)):
        if len(part) > len(named) and used + widths[number] + _GAP - 1 > limit:
            yield part
            part, used = list(named), sum(widths[one] + _GAP for one in named)
        part.append(number)
        used += widths[number] + _GAP
    yield part
