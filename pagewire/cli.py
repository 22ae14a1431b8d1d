"""The command `pagewire`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shutil
import signal
import socket
import sys
import textwrap
from functools import partial
from typing import Any, NamedTuple, NoReturn

from pagewire.arguments import add_options
from pagewire.demo.options import DemoOptions
from pagewire.distribution import DISTRIBUTION
from pagewire.doctor.options import DoctorOptions
from pagewire.extras import NotInstalledError, missing_line, needs_of, require
from pagewire.listening import listen
from pagewire.plan.options import PlanOptions
from pagewire.replay.options import ReplayOptions
from pagewire.serve.options import ServeOptions
from pagewire.top.options import TopOptions
from scheduler_adapters import interrupts

# Nothing heavy is imported here: importing torch takes a second, and an interrupt during that time would show a
# traceback.

Options = DemoOptions | DoctorOptions | PlanOptions | ReplayOptions | ServeOptions | TopOptions
_BAD = 2  # exit status of a failed command; argparse uses the same
_LONGEST = 1000  # most characters of a message
_NEAR = 0.7  # least similarity of an unknown option and the one that is suggested; with 0.6, `--model` is like `--help`
_LONGEST_OPTION = 100  # most characters of an unknown option that are compared with those that exist
_NO_OPTION = re.compile(r"-$|-\.?\d|.* ", re.DOTALL)  # what argparse takes for a value although it begins with "-"
_WIDEST_HELP, _HELP_COLUMN = 100, 25


class _Command(NamedTuple):
    """A command.

    Attributes:
        options: the dataclass of its options.
        does: its summary in the list of commands.
        description: the first lines of its help.
        example: a command line that works, except for the names of files.
        usage: its mandatory arguments, and where its options go.
    """

    options: type[Options]
    does: str
    description: str
    example: str
    usage: str = "[OPTIONS]"


_COMMANDS: dict[str, _Command] = {
    "demo": _Command(
        DemoOptions,
        "serve prompts across a prefill and a decode process",
        "Serve prompts across a prefill and a decode process that pulls pages by NIXL READs. Exit status: 0 if every "
        "output equals the model's own greedy output and no page is left held; 1 if not; 2 if something does not work.",
        "pagewire demo --requests 8 --decodes 2",
    ),
    "serve": _Command(
        ServeOptions,
        "serve a model by prefill and decode processes, over HTTP",
        "Serve a model by prefill and decode processes behind OpenAI's completions and chat completions. SIGTERM "
        "drains. Exit status: 2 if a page was left held.",
        "pagewire serve --model DIR --prefills 2 --watch",
        "[all | front | prefill | decode] [OPTIONS]",
    ),
    "replay": _Command(
        ReplayOptions,
        "drive the manager with a request trace",
        "Drive the real manager with a trace in the Mooncake format, one page to a block, one request after another. "
        "Its hits are compared with those of a reference LRU and of an optimum that knows the future.",
        "pagewire replay TRACE --capacity 50000 --json figures.json",
        "TRACE [OPTIONS]",
    ),
    "plan": _Command(
        PlanOptions,
        "say how many requests fit into memory, and how long they may be",
        "Say from a model's config.json how many requests fit, how long they may be, and what they take; then the "
        "details for every choice of tensor and data parallelism. With a trace, say how many hits more memory gives.",
        "pagewire plan --model DIR --memory 40GiB --devices 8 --lengths 8192",
        "--model DIR --memory BYTES [OPTIONS]",
    ),
    "doctor": _Command(
        DoctorOptions,
        "say what is installed here, what would be refused, and why",
        "Report versions, extras, NIXL with its plugins and settings, huge pages, GPUs and the speed of page hashes, "
        "then what would be refused here, why, and what to do.",
        "pagewire doctor --json report.json",
    ),
    "top": _Command(
        TopOptions,
        "show every page of running processes, its owner, and why pages were evicted",
        "Show what every page of watched processes is doing, in the terminal or a browser: a map of the pages, "
        "requests, leases and pulls, the prefix tree, evictions and rates; or play a recording of that.",
        "pagewire top tcp://127.0.0.1:40001 --record incident.pw",
        "[ADDRESS ...] [OPTIONS]",
    ),
}


class _Version(argparse.Action):
    """Prints the version and exits. The installed distribution is looked up only when the option is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata  # noqa: PLC0415

        try:
            found = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            found = "unknown"
        print(DISTRIBUTION, found)  # noqa: T201  (the command line's own output)
        parser.exit()


class _HelpAll(argparse.Action):
    """Prints the help of a command with its rare options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        build_parser(rare=True).parse_args([parser.prog.split()[-1], "--help"])
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] -- of three overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Refuses an unknown option before anything else.

        argparse would take the option's value for a positional argument, and complain about that.
        """
        given: list[str] = list(sys.argv[1:] if args is None else args)
        if unknown := self._unknown_option(given):
            near = difflib.get_close_matches(unknown[:_LONGEST_OPTION], self._option_string_actions, n=1, cutoff=_NEAR)
            all_of_them = "--help" if self._subparsers else "--help-all"
            hint = f"did you mean {near[0]}?" if near else f"{self.prog} {all_of_them} lists all"
            self.error(f"unknown option {unknown!a}; {hint}")
        return super().parse_known_args(given, namespace)

    def _unknown_option(self, given: list[str]) -> str:
        """Returns the first option that this parser does not know, without its value, or ""."""
        value = False  # whether an argument is the value of the option before it
        for argument in given:
            is_option = not value and argument[:1] == "-" and not _NO_OPTION.match(argument)
            if argument == "--" or (self._subparsers and not is_option):
                return ""  # the rest are positional arguments, or belong to the parser of the command
            name = argument.partition("=")[0]
            known = self._known_as(name) if is_option else []
            if is_option and not known:
                return name
            value = name == argument and any(action.nargs is None for action in known)
        return ""

    def _known_as(self, name: str) -> list[argparse.Action]:
        """Returns the options that argparse takes `name` for: an option may be abbreviated."""
        options = self._option_string_actions
        if not name.startswith("--"):
            return [options[name[:2]]] if name[:2] in options else []
        return [options[name]] if name in options else [one for full, one in options.items() if full.startswith(name)]

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits; argparse would print the usage too."""
        _complain(self.prog, f"error: {message}")
        sys.exit(_BAD)


def build_parser(*, rare: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of the command line. Its help leaves rare options out unless `rare` is set."""
    parser = _Parser(
        prog="pagewire",
        usage="pagewire COMMAND [OPTIONS]",
        description="A paged KV cache manager with disaggregated transfer built in.",
        epilog="example: pagewire demo --requests 8; `pagewire COMMAND --help` has one of each",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="print the version and end"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        _add_command(commands, name, command, rare=rare)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[_Parser],  # pyright: ignore[reportPrivateUsage]
    name: str,
    command: _Command,
    *,
    rare: bool,
) -> None:
    width = min(_WIDEST_HELP, shutil.get_terminal_size().columns) - 2
    parser = commands.add_parser(
        name,
        prog=f"pagewire {name}",
        usage=f"pagewire {name} {command.usage}",
        help=command.does,
        description=textwrap.fill(command.description, width),
        epilog=f"example: {command.example}",
        add_help=False,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=_HELP_COLUMN, width=width),
    )
    left_out = add_options(parser, command.options, rare=rare)
    told = "print this" + (f"; --help-all prints {left_out} more options" if left_out else "")
    parser.add_argument("-h", "--help", action="help", help=told)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status. An error is one line on standard error."""
    command = "pagewire"
    try:
        with interrupts.raised():
            options = vars(build_parser().parse_args(argv))
            name = options.pop("command")
            command = f"pagewire {name}"
            chosen = _COMMANDS[name].options(**options)
            require(needs_of(name, chosen))
            return _run(command, chosen)
    except interrupts.Interrupted as interrupted:
        _complain(command, str(interrupted))
        return interrupted.status
    except argparse.ArgumentTypeError as error:  # two options contradict each other
        _complain(command, f"error: {error}")
        return _BAD
    except ImportError as error:
        told = str(error) if isinstance(error, NotInstalledError) else missing_line(error)
        _complain(command, f"error: {told}")
        return _BAD
    except BrokenPipeError:  # the reader of our output has gone
        with contextlib.suppress(OSError, ValueError):
            # after this call, Python writes its buffered output to the null device at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(command: str, options: Options) -> int:
    with contextlib.ExitStack() as made:
        listening: socket.socket | None = None
        if isinstance(options, ServeOptions) and options.what in ("all", "front"):
            try:
                listening = made.enter_context(_listen(options.http_host, options.http_port))
            except OSError as error:
                _complain(command, f"error: {error}")
                return _BAD
        return _run_heavy(command, options, listening)


def _listen(host: str, port: int) -> socket.socket:
    """Returns the listening socket of the frontend's HTTP server.

    Raises `OSError` if the address is taken or invalid. The message is one sentence.
    """
    try:
        return listen(host, port)
    except UnicodeError as error:  # the host is not a valid name
        raise OSError(f"HTTP cannot listen at {host}:{port}: {error}") from error
    except OSError as error:
        # Python adds the address to the system's message, except for errors from the resolver. Our message already has
        # the address, so only the text of the system's error is used.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise OSError(f"HTTP cannot listen at {host}:{port}: {reason}") from error


def _run_heavy(command: str, options: Options, listening: socket.socket | None) -> int:
    """Imports the modules of a command, which takes seconds, and runs it."""
    from kvcache.errors import KVCacheError  # noqa: PLC0415  (torch, see above)

    try:
        if isinstance(options, ReplayOptions):
            from pagewire.replay.command import run_replay  # noqa: PLC0415  (as above)

            return run_replay(options)
        if isinstance(options, PlanOptions):
            from pagewire.plan.command import run_plan  # noqa: PLC0415  (as above)

            return run_plan(options)
        if isinstance(options, DoctorOptions):
            from pagewire.doctor.command import run_doctor  # noqa: PLC0415  (as above)

            return run_doctor(options)
        if isinstance(options, TopOptions):
            from pagewire.top.command import run_top  # noqa: PLC0415  (as above)

            return run_top(options)
        if isinstance(options, ServeOptions):
            from pagewire.serve.command import run_serve  # noqa: PLC0415  (as above)

            return run_serve(options, listening)
        from pagewire.demo.demo import run_demo  # noqa: PLC0415  (as above)

        return run_demo(options)
    except KVCacheError as error:
        _complain(command, f"error: {error}")
        return _BAD
    except MemoryError as error:
        _complain(command, f"error: the memory does not suffice: {error}")
        return _BAD


def _complain(command: str, text: str) -> None:
    line = " ".join(text.splitlines())
    if len(line) > _LONGEST:  # argparse repeats an invalid value in its message, however long it is
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    with contextlib.suppress(OSError):  # a terminal that has hung up accepts no output
        print(f"{command}: {line}", file=sys.stderr)  # noqa: T201  (the command line's own output)
