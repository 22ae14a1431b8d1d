"""The command `pagewire`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from kvcache.errors import KVCacheError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, where argparse would print the usage too."""
        print(f"{self.prog}: error: {message}", file=sys.stderr)  # noqa: T201  (the command line's own output)
        sys.exit(2)


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
        default=text,
        help="a directory saved by transformers; without it, a small random Llama",
    )
    demo.add_argument(
        "--prompts", metavar="FILE", default=text, help='one prompt to a line, or JSON lines with a "prompt"'
    )
    demo.add_argument(
        "--requests", metavar="N", type=int, default=text, help="prompts to serve; without it, the whole file, or 32"
    )
    demo.add_argument("--page-size", metavar="P", type=int, default=16, help="tokens of a page")
    for side in ("prefill", "decode"):
        demo.add_argument(
            f"--{side}-page-size", metavar="P", type=int, default=text, help=f"the same, for {side} alone"
        )
    demo.add_argument("--json", metavar="FILE", default=text, help="write the figures there too")
    demo.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=32, help="most tokens to generate for a prompt"
    )
    demo.add_argument(
        "--cache-mb", metavar="MB", type=float, default=64.0, help="memory for pages in each process, in 2**20 bytes"
    )
    demo.add_argument("--concurrency", metavar="N", type=int, default=8, help="most requests on their way at a time")
    demo.add_argument("--token-budget", metavar="N", type=int, default=512, help="most tokens of one step of a process")
    demo.add_argument("--tp", metavar="N", type=int, default=1, help="shards that the heads are split over")
    for side in ("prefill", "decode"):
        demo.add_argument(f"--{side}-tp", metavar="N", type=int, default=text, help=f"those of {side} alone")
        demo.add_argument(f"--{side}s", metavar="N", type=int, default=1, help=f"{side} processes")
    demo.add_argument(
        "--no-chunkwise",
        dest="chunkwise",
        action="store_false",
        help="pull a prompt's pages when all of it has run, not while the rest still runs",
    )
    demo.add_argument(
        "--chaos",
        metavar="SEED",
        type=int,
        nargs="?",
        const=0,
        default=text,
        help="let READs and notifications fail, come late, twice, or wrong: requests may fail, none may be answered "
        "wrongly, and no page may stay held",
    )
    demo.add_argument(
        "--curve", action="store_true", help="keys for the processes' sockets: encrypted, and closed to anybody else"
    )
    demo.add_argument("--device", default="cpu", help="torch device of the model and its pages")
    demo.add_argument("--seed", metavar="N", type=int, default=0, help="of the small Llama's weights")


def _add_replay(commands: argparse._SubParsersAction[_Parser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="drive the manager with a request trace",
        description="Drive the real manager with a trace in the Mooncake format, one page to a block, one request "
        "after another; beside it the reference LRU and the optimum that knows the future.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    replay.add_argument("trace", metavar="TRACE", type=Path, help="JSON lines with hash_ids")
    replay.add_argument(
        "--capacity", metavar="BLOCKS", type=int, default=10_000, help="blocks of all replicas together"
    )
    replay.add_argument("--replicas", metavar="N", type=int, default=1, help="replicas that share the capacity")
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
        "--host-blocks", metavar="BLOCKS", type=int, default=0, help="blocks of a host tier below the replicas"
    )
    replay.add_argument(
        "--plots",
        metavar="DIR",
        type=Path,
        default=argparse.SUPPRESS,
        help="also sweep capacities, hints, replicas and rules, and draw hits and load balance there (minutes)",
    )
    replay.add_argument(
        "--json", metavar="FILE", type=Path, default=argparse.SUPPRESS, help="write the figures there too"
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit status. Errors are one line on standard error."""
    options = vars(build_parser().parse_args(argv))
    command = options.pop("command")
    # As an exception SIGTERM ends the child processes too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if command == "replay":
            from scheduler_adapters.replay import run_replay  # noqa: PLC0415  (as below)

            return run_replay(**options)
        from scheduler_adapters.demo import DemoOptions, run_demo  # noqa: PLC0415  (torch takes a second to import)

        return run_demo(DemoOptions(**options))
    except KVCacheError as error:
        print(f"pagewire {command}: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print(f"pagewire {command}: interrupted", file=sys.stderr)  # noqa: T201
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
