"""Any number of random moves: `python -m tests.kvcache.million_moves --seed 1 --moves 1000000`.

Each seed makes one manager and 200 moves on it. The manager gets the features that have been combined least so far,
unless `--only` names others. A seed that fails is printed with its features, and fails again with them. The exception
is a manager with interrupts and with threads that read files or objects: the interrupted bytecode then depends on the
timing of the threads. At the end the program prints, for each pair of features, on how many managers both were seen at
work.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence

from tests.kvcache.random_model.matrix import FEATURES, table, with_needed
from tests.kvcache.random_model.run import MOVES_A_MANAGER, Run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--moves", type=int, default=1_000_000)
    parser.add_argument(
        "--only", default="", help=f"managers of these features alone, with commas: {', '.join(FEATURES)}"
    )
    chosen = parser.parse_args(arguments)
    only = frozenset(one.strip() for one in chosen.only.split(",") if one.strip())
    if unknown := only - {*FEATURES}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is no feature")
    start, run, seed = time.monotonic(), Run(with_needed(only)), chosen.seed
    for seed in range(chosen.seed, chosen.seed - (-chosen.moves // MOVES_A_MANAGER)):
        try:
            run.manager(seed)
        except BaseException:
            named = ",".join(sorted(run.features))
            print(f"seed {seed} fails: --moves {MOVES_A_MANAGER} --seed {seed} --only {named!r}")  # noqa: T201
            raise
        if seed % 500 == 0:
            print(f"seed {seed}: {run.seen['moves']} moves, {time.monotonic() - start:.0f} s", flush=True)  # noqa: T201
    print(f"seeds {chosen.seed} to {seed}, no discrepancy: {dict(run.seen)}, {time.monotonic() - start:.0f} s")  # noqa: T201
    print(table(run.pairs, run.events))  # noqa: T201


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
