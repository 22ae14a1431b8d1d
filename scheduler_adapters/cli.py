"""The command `pagewire`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from scheduler_adapters import arguments, interrupts

# Nothing heavy is imported here: torch takes a second, in which an interrupt would show a traceback.

_BAD = 2  # exit status: something does not work, as argparse has it
_LONGEST = 1000  # characters of a message
_MOST_BLOCKS = 1 << 26  # the manager's books of that many take gigabytes

_COUNT = arguments.whole(1, 100_000)
_PAGE_SIZE = arguments.whole(1, 1 << 20)
_TOKENS = arguments.whole(1, 1 << 20)
_RUNNING = arguments.whole(1, 4096)
_MEGABYTES = arguments.number(0, 1 << 24)
_SHARDS = arguments.whole(1, 64)
_PROCESSES = arguments.whole(1, 64)
_SEED = arguments.whole(0, (1 << 32) - 1)
_BLOCKS = arguments.whole(1, _MOST_BLOCKS)
_HOST_BLOCKS = arguments.whole(0, _MOST_BLOCKS)
_REPLICAS = arguments.whole(1, 1024)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, where argparse would print the usage too."""
        _complain(self.prog, f"error: {message}")
        sys.exit(_BAD)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(prog="pagewire", description="A paged KV cache manager with disaggregated transfer built in.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_replay(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="serve prompts across a prefill and a decode process",
        description="Serve prompts across a prefill and a decode process that pulls pages by NIXL READs. "
        "Exit status: 0 if every output equals the model's own greedy output (rounding ties are counted beside) "
        "and no page is left held; 1 if not; 2 if something does not work.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    text = argparse.SUPPRESS  # no "(default: None)" behind what has none
    demo.add_argument(
        "--model",
        metavar="DIR",
        type=arguments.input_folder,
        default=text,
        help="a directory saved by transformers; without it, a small random Llama",
    )
    demo.add_argument(
        "--prompts",
        metavar="FILE",
        type=arguments.input_file,
        default=text,
        help='one prompt to a line, or JSON lines with a "prompt"',
    )
    demo.add_argument(
        "--requests", metavar="N", type=_COUNT, default=text, help="prompts to serve; without it, the whole file, or 32"
    )
    _add_layout(demo)
    demo.add_argument(
        "--json", metavar="FILE", type=arguments.output_file, default=text, help="write the figures there too"
    )
    demo.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=_TOKENS,
        default=32,
        help="most tokens to generate for a prompt",
    )
    demo.add_argument(
        "--cache-mb",
        metavar="MB",
        type=_MEGABYTES,
        default=64.0,
        help="memory for pages in each process, in 2**20 bytes",
    )
    demo.add_argument(
        "--concurrency",
        metavar="N",
        type=_RUNNING,
        default=8,
        help="most requests on their way at a time",
    )
    demo.add_argument(
        "--token-budget",
        metavar="N",
        type=_TOKENS,
        default=512,
        help="most tokens of one step of a process",
    )
    _add_service(demo)


def _add_layout(demo: _Parser) -> None:
    """Page sizes, shards and processes of the two sides."""
    text = argparse.SUPPRESS
    demo.add_argument("--page-size", metavar="P", type=_PAGE_SIZE, default=16, help="tokens of a page")
    for side in ("prefill", "decode"):
        demo.add_argument(
            f"--{side}-page-size", metavar="P", type=_PAGE_SIZE, default=text, help=f"the same, for {side} alone"
        )
    demo.add_argument("--tp", metavar="N", type=_SHARDS, default=1, help="shards that the heads are split over")
    for side in ("prefill", "decode"):
        demo.add_argument(f"--{side}-tp", metavar="N", type=_SHARDS, default=text, help=f"those of {side} alone")
        demo.add_argument(f"--{side}s", metavar="N", type=_PROCESSES, default=1, help=f"{side} processes")


def _add_service(demo: _Parser) -> None:
    """How the processes work together."""
    demo.add_argument(
        "--no-chunkwise",
        dest="chunkwise",
        action="store_false",
        help="pull a prompt's pages when all of it has run, not while the rest still runs",
    )
    demo.add_argument(
        "--chaos",
        metavar="SEED",
        type=_SEED,
        nargs="?",
        const=0,
        default=argparse.SUPPRESS,
        help="let READs and notifications fail, come late, twice, or wrong: requests may fail, none may be answered "
        "wrongly, and no page may stay held",
    )
    demo.add_argument(
        "--curve", action="store_true", help="keys for the processes' sockets: encrypted, and closed to anybody else"
    )
    demo.add_argument("--device", type=arguments.device, default="cpu", help="torch device of the model and its pages")
    demo.add_argument("--seed", metavar="N", type=_SEED, default=0, help="of the small Llama's weights")


def _add_replay(commands: argparse._SubParsersAction[_Parser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="drive the manager with a request trace",
        description="Drive the real manager with a trace in the Mooncake format, one page to a block, one request "
        "after another; beside it the reference LRU and the optimum that knows the future.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    replay.add_argument("trace", metavar="TRACE", type=arguments.input_file, help="JSON lines with hash_ids")
    replay.add_argument(
        "--capacity",
        metavar="BLOCKS",
        type=_BLOCKS,
        default=10_000,
        help="blocks of all replicas together",
    )
    replay.add_argument("--replicas", metavar="N", type=_REPLICAS, default=1, help="replicas that share the capacity")
    replay.add_argument(
        "--hints",
        metavar="KIND",
        default="none",
        help="session_continues of each request, from the trace's future: none, true, inverted, or wrong=SHARE",
    )
    replay.add_argument(
        "--routing",
        choices=("prefix", "least-loaded", "round-robin"),
        default="prefix",
        help="how a replica is claimed",
    )
    replay.add_argument(
        "--host-blocks",
        metavar="BLOCKS",
        type=_HOST_BLOCKS,
        default=0,
        help="blocks of a host tier below the replicas",
    )
    replay.add_argument(
        "--plots",
        metavar="DIR",
        type=arguments.output_folder,
        default=argparse.SUPPRESS,
        help="also sweep capacities, hints, replicas and rules, and draw hits and load balance there (minutes)",
    )
    replay.add_argument(
        "--json",
        metavar="FILE",
        type=arguments.output_file,
        default=argparse.SUPPRESS,
        help="write the figures there too",
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit status. Errors are one line on standard error."""
    command = "pagewire"
    try:
        with interrupts.raised():
            options = vars(build_parser().parse_args(argv))
            command = f"pagewire {options.pop('command')}"
            return _run(command, options)
    except interrupts.Interrupted as interrupted:
        _complain(command, str(interrupted))
        return interrupted.status
    except BrokenPipeError:  # who reads our output has gone
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed at exit
        return 128 + signal.SIGPIPE


def _run(command: str, options: dict[str, Any]) -> int:
    from kvcache.errors import KVCacheError  # noqa: PLC0415  (torch, see above)

    try:
        if command == "pagewire replay":
            from scheduler_adapters.replay.replay import run_replay  # noqa: PLC0415  (as above)

            paths = {name: Path(options[name]) for name in ("trace", "json", "plots") if name in options}
            return run_replay(**{**options, **paths})
        from scheduler_adapters.demo.demo import DemoOptions, run_demo  # noqa: PLC0415  (as above)

        return run_demo(DemoOptions(**options))
    except KVCacheError as error:
        _complain(command, f"error: {error}")
        return _BAD
    except MemoryError as error:
        _complain(command, f"error: the memory does not suffice: {error}")
        return _BAD


def _complain(command: str, text: str) -> None:
    line = " ".join(text.splitlines())
    if len(line) > _LONGEST:  # argparse repeats whatever it was given
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    with contextlib.suppress(OSError):  # a terminal that has hung up takes no more
        print(f"{command}: {line}", file=sys.stderr)  # noqa: T201  (the command line's own output)


if __name__ == "__main__":
    sys.exit(main())
