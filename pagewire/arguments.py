"""Declares the options of a command as fields of a dataclass, each with its type, its default and its help.

The types refuse values out of range before anything is started or allocated, so a command need not check its options
again.
"""

import argparse
import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

_SHOWN = 300  # most characters of a value that an error message shows
_LONGEST_PLAIN = 200
_MOST_BYTES = 1 << 20  # the largest file that is read whole
_MOST_PORT = 65_535
_MOST_DIGITS = 60  # Python refuses to parse numbers of thousands of digits


def option(metavar: str | None, kind: Callable[[str], object], default: object, told: str, **more: object) -> Any:
    """Returns a field for an option with a value: its name in the help, its type, its default, and its help text.

    `more` is passed to `ArgumentParser.add_argument`, except for two entries: `name` replaces the field's own name, and
    `rare` hides the option from `--help`, but not from `--help-all`.
    """
    shown = "" if default is None or default is MISSING else f" (default: {_default(default)})"
    return field(default=default, metadata={"metavar": metavar, "type": kind, "help": told + shown, **more})


def switch(told: str, *, default: bool = False, **more: object) -> Any:
    """Returns a field for an option without a value. Giving the option inverts the default."""
    return field(default=default, metadata={"action": f"store_{not default}".lower(), "help": told, **more})


def choice(told: str, *, default: bool, **more: object) -> Any:
    """Returns a field for a pair of options without a value: `--NAME` and `--no-NAME`."""
    return field(default=default, metadata={"action": argparse.BooleanOptionalAction, "help": told, **more})


def add_options(parser: argparse.ArgumentParser, options: Any, *, rare: bool) -> int:
    """Adds the options of a command to a parser. Returns how many of them the help leaves out, because they are rare.

    The parsed arguments then have the attributes of the dataclass `options`.
    """
    left_out = 0
    for one in fields(options):
        told: dict[str, Any] = dict(one.metadata)
        if told.pop("rare", False) and not rare:
            told["help"] = argparse.SUPPRESS
            left_out += 1
        name = told.pop("name", f"--{one.name.replace('_', '-')}")
        named: dict[str, Any] = {"dest": one.name} if name.startswith("-") else {}
        if name.startswith("-") or told.get("nargs") == "?":
            named["default"] = one.default
        parser.add_argument(name, **named, **told)
    return left_out


def whole(least: int, most: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if len(text) <= _MOST_DIGITS and least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a whole number from {least:,} to {most:,}")

    return parse


def number(above: int, most: int) -> Callable[[str], float]:
    """Returns a parser for numbers greater than `above` and at most `most`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if above < float(text) <= most:
                return float(text)
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a number above {above:,} and up to {most:,}")

    return parse


def num_bytes(least: int, most: int) -> Callable[[str], int]:
    """Returns a parser of a number of bytes from `least` to `most`: digits, a number with a unit (2.5GiB), or 4e9."""
    needed = f"not a number of bytes from {least:,} to {most:,}, as in 40000000000, 40e9, 40GB or 37.25GiB"

    def parse(text: str) -> int:
        found = re.fullmatch(r"(\d{1,19}(?:\.\d{1,9})?(?:e\d{1,2})?) ?(?:([KMGTP])(i?)B|B)?", text, re.ASCII)
        if found:
            power = "KMGTP".find(found[2]) + 1 if found[2] else 0
            value = int(Decimal(found[1]) * (1024 if found[3] else 1000) ** power)
            if least <= value <= most:
                return value
        raise argparse.ArgumentTypeError(f"{_shown(text)} is {needed}")

    return parse


def input_path(text: str) -> Path:
    """Parses an input file or folder, which must exist. The command that reads the file reports any other fault."""
    path = _path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"file or folder {_shown(text)} does not exist")
    return path


def input_folder(text: str) -> Path:
    """Parses an input folder, which must exist."""
    path = input_path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a folder")
    return path


def small_file(path: Path) -> bytes:
    """Returns the contents of a file.

    Raises `OSError` if the file cannot be read or is longer than 1 MiB. An endless file, such as a device, is longer.
    """
    with path.open("rb") as file:
        found = file.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"longer than {_MOST_BYTES:,} bytes")
    return found


def write_json(path: Path | None, figures: object) -> None:
    """Writes a command's figures to the file of `--json`, if given. Raises `AdapterError` if that fails."""
    if path is not None:
        import msgspec  # noqa: PLC0415 - here, because the errors import torch

        from scheduler_adapters.errors import AdapterError  # noqa: PLC0415

        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
        except OSError as error:
            raise AdapterError(f"--json {str(path)!r} cannot be written: {error.strerror}") from error


def output_file(text: str) -> Path:
    """Parses an output file. Its folder must exist, and the file must be writable."""
    path = _path(text)
    folder = path.absolute().parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{_shown(text)} is a folder; a file is needed")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"file {_shown(text)}: its folder does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"file {_shown(text)} cannot be written: permission denied")
    return path


def output_folder(text: str) -> Path:
    """Parses an output folder. It must be writable, or it must be possible to create it."""
    path = _path(text)
    nearest = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(
            f"folder {_shown(text)} cannot be made: {_shown(str(nearest))} is not a folder"
        )
    if not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"folder {_shown(text)} cannot be written: permission denied")
    return path


def plain(text: str) -> str:
    """Parses a name, an address or a secret. An error does not show the value, which may be a secret."""
    if not 0 < len(text) <= _LONGEST_PLAIN or not text.isascii() or not text.isprintable() or not text.strip():
        raise argparse.ArgumentTypeError(f"1 to {_LONGEST_PLAIN} printable ASCII characters are needed")
    return text


def endpoint(text: str) -> str:
    """Parses a socket address. Checks the port, because ZeroMQ connects to an impossible port and waits for ever."""
    found = re.fullmatch(r"tcp://.*:(\d+)", plain(text))
    if found and (len(found[1]) > _MOST_DIGITS or int(found[1]) > _MOST_PORT):
        raise argparse.ArgumentTypeError(f"{_shown(text)}: a port from 0 to {_MOST_PORT:,} is needed")
    return text


def device(text: str) -> str:
    """Parses a torch device that can hold pages."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a device for pages: cpu, cuda or cuda:N is needed")
    return text


def _path(text: str) -> Path:
    """Converts an argument to a path. Raises an error if the operating system cannot look the path up."""
    try:
        text.encode()
        if not text.strip():
            raise argparse.ArgumentTypeError("the path is empty")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(text)  # noqa: PTH116  (Path.exists returns False for a null character)
        return Path(text)
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not UTF-8 text") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a path: {reason}") from error


def _default(value: Any) -> str:
    """Returns a default in the form in which a user would type it."""
    return str(value) if isinstance(value, str | int | float) else ",".join(map(str, value))


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!a}..."
