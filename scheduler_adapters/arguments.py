"""Types of command line arguments. Each refuses what is out of range before anything is started or allocated."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SHOWN = 300  # characters of a value in a message
_MOST_DIGITS = 60  # Python refuses to read thousands, which no limit needs


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text) if len(text) <= _MOST_DIGITS else None
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is no whole number from {least:,} to {most:,}")
        return value

    return parse


def number(above: int, most: int) -> Callable[[str], float]:
    """The type of a number that is more than `above`, and at most `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not above < value <= most:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is no number above {above:,} and up to {most:,}")
        return value

    return parse


def input_file(text: str) -> str:
    """The type of a file that is read: it is there, and is no folder. A pipe will do."""
    path = _path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{_shown(text)} is a folder, a file is needed")
    if not path.exists():
        raise argparse.ArgumentTypeError(f"file {_shown(text)} does not exist")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"file {_shown(text)} cannot be read: permission denied")
    return text


def input_folder(text: str) -> str:
    """The type of a folder that is read: it is there."""
    path = _path(text)
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise argparse.ArgumentTypeError(f"folder {_shown(text)} {what}")
    return text


def output_file(text: str) -> str:
    """The type of a file that is written: its folder is there, and it can be written."""
    path = _path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{_shown(text)} is a folder, a file is needed")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"file {_shown(text)}: its folder does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"file {_shown(text)} cannot be written: permission denied")
    return text


def output_folder(text: str) -> str:
    """The type of a folder that is written, and made where it is not there: it can be made."""
    nearest = _path(text).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"folder {_shown(text)} cannot be made: {_shown(str(nearest))} is no folder")
    if not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"folder {_shown(text)} cannot be written: permission denied")
    return text


def device(text: str) -> str:
    """The type of a torch device that can hold pages."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no device for pages: cpu, cuda or cuda:N is needed")
    return text


def _path(text: str) -> Path:
    """The path that a text names, where the system can name it at all."""
    try:
        text.encode()
        if not text.strip():
            raise argparse.ArgumentTypeError("an empty path")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(text)  # noqa: PTH116  (Path.exists takes a null character for "no")
        return Path(text)
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not UTF-8 text") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no path: {reason}") from error


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!a}..."
