"""Tables of every width: each figure is complete, and is in the same line as the words of its row."""

import io
import re
import sys

import pytest

from pagewire.tables import print_table

COLUMNS = ("kind", "bytes", "tokens", "longest of all")
ROWS = [("window 1,024", "1,953,125", "1,048,576", "8,796,093,022,208"), ("full", "7", "", "131,072")]


class Terminal(io.StringIO):
    """Receives output as a terminal does."""

    def isatty(self) -> bool:
        return True


def lines_at(width: int, out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, value in {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out)
    print_table("a title", COLUMNS, ROWS)
    title, *lines = re.sub(r"\x1b\[\d*m", "", out.getvalue()).splitlines()
    assert title == "a title"
    return lines


@pytest.mark.parametrize("width", [10, 80, 200])
def test_a_pipe_takes_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_at(width, io.StringIO(), monkeypatch)
    rows = [re.split(r" {2,}", line.strip()) for line in lines if "," in line]
    assert rows == [[*ROWS[0]], ["full", "7", "131,072"]]


@pytest.mark.parametrize("width", range(1, 90))
def test_a_terminal_gets_the_columns_in_parts_that_fit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_at(width, Terminal(), monkeypatch)
    found = [re.split(r" {2,}", line.strip()) for line in lines if line.strip().startswith("window")]
    assert [row[0] for row in found] == ["window 1,024"] * len(found)
    assert [cell for row in found for cell in row[1:]] == [*ROWS[0][1:]]
    assert not any("…" in line for line in lines)
    least = 1 + len("window 1,024") + 3 + len("8,796,093,022,208") + 1
    if width >= least:
        assert max(map(len, lines)) <= width
    whole = 2 + sum(max(map(len, column)) + 3 for column in zip(COLUMNS, *ROWS, strict=True)) - 3
    assert (len(found) == 1) == (width >= whole), "the table must not be divided into more parts than necessary"
