"""Options of a command: the fields of a dataclass, each with its type, its default and its help.

The types refuse values out of range before anything is started or allocated. So the code of a command need not check
its options again.
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

_SHOWN = 300  # characters of a value in a message
_LONGEST_PLAIN = 200
_MOST_BYTES = 1 << 20  # of a file that is read whole
_MOST_PORT = 65_535
_MOST_DIGITS = 60  # Python refuses to read thousands, which no limit needs


def option(metavar: str | None, kind: Callable[[str], object], default: object, told: str, **more: object) -> Any:
    """A field that is an option with a value: how it is called in the help, its type, its default, and its help.

    `more` goes to `ArgumentParser.add_argument`; `name` takes the place of the field's own. `--help` leaves an option
    out that is `rare`, `--help-all` shows it.
    """
    shown = "" if default is None or default is MISSING else f" (default: {_default(default)})"
    return field(default=default, metadata={"metavar": metavar, "type": kind, "help": told + shown, **more})


def switch(told: str, *, default: bool = False, **more: object) -> Any:
    """A field that is an option without a value, which changes the default."""
    return field(default=default, metadata={"action": f"store_{not default}".lower(), "help": told, **more})


def choice(told: str, *, default: bool, **more: object) -> Any:
    """A field that is an option without a value, and one with `no-` before its name."""
    return field(default=default, metadata={"action": argparse.BooleanOptionalAction, "help": told, **more})


def add_options(parser: argparse.ArgumentParser, options: Any, *, rare: bool) -> int:
    """Let a parser know the options of a command; what it then finds are the arguments of that dataclass.

    The help leaves rare options out unless `rare` is set. Returns the number of those left out.
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
    """The type of a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if len(text) <= _MOST_DIGITS and least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no whole number from {least:,} to {most:,}")

    return parse


def number(above: int, most: int) -> Callable[[str], float]:
    """The type of a number that is more than `above`, and at most `most`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if above < float(text) <= most:
                return float(text)
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no number above {above:,} and up to {most:,}")

    return parse


def num_bytes(least: int, most: int) -> Callable[[str], int]:
    """The type of a number of bytes from `least` to `most`: digits, a number with a unit (2.5GiB), or 4e9."""
    needed = f"no number of bytes from {least:,} to {most:,}, as in 40000000000, 40e9, 40GB or 37.25GiB"

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
    """The type of an input file or folder, which must exist. The command that reads it reports any other fault."""
    path = _path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"file or folder {_shown(text)} does not exist")
    return path


def small_file(path: Path) -> bytes:
    """What is in a file. `OSError` if it cannot be read, or is longer than 1 MiB: some never end."""
    with path.open("rb") as file:
        found = file.read(_MOST_BYTES + 1)
    if len(found) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"longer than {_MOST_BYTES:,} bytes")
    return found


def write_json(path: Path | None, figures: object) -> None:
    """Write what a command has found where `--json` says, if it does. `AdapterError`: that cannot be written."""
    if path is not None:
        import msgspec  # noqa: PLC0415 - here, as the errors are: with them comes torch

        from scheduler_adapters.errors import AdapterError  # noqa: PLC0415

        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
        except OSError as error:
            raise AdapterError(f"--json {str(path)!r} cannot be written: {error.strerror}") from error


def output_file(text: str) -> Path:
    """The type of a file that is written, at the end: its folder is there, and it can be written."""
    path = _path(text)
    folder = path.absolute().parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{_shown(text)} is a folder, a file is needed")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"file {_shown(text)}: its folder does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"file {_shown(text)} cannot be written: permission denied")
    return path


def output_folder(text: str) -> Path:
    """The type of a folder that is written, and made where it is not there: it can be made."""
    path = _path(text)
    nearest = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"folder {_shown(text)} cannot be made: {_shown(str(nearest))} is no folder")
    if not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"folder {_shown(text)} cannot be written: permission denied")
    return path


def plain(text: str) -> str:
    """The type of a name, an address or a secret. What is wrong is not shown: it may be a secret."""
    if not 0 < len(text) <= _LONGEST_PLAIN or not text.isascii() or not text.isprintable() or not text.strip():
        raise argparse.ArgumentTypeError(f"1 to {_LONGEST_PLAIN} printable ASCII characters are needed")
    return text


def endpoint(text: str) -> str:
    """The type of an address of a socket. ZeroMQ connects to a port that there cannot be, and waits for ever."""
    found = re.fullmatch(r"tcp://.*:(\d+)", plain(text))
    if found and (len(found[1]) > _MOST_DIGITS or int(found[1]) > _MOST_PORT):
        raise argparse.ArgumentTypeError(f"{_shown(text)}: a port from 0 to {_MOST_PORT:,} is needed")
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


def _default(value: Any) -> str:
    """A default as it would be typed."""
    return str(value) if isinstance(value, str | int | float) else ",".join(map(str, value))


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!a}..."
