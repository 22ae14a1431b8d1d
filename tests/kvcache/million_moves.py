"""The random moves, as many as one likes: `python -m tests.kvcache.million_moves --seed 1 --moves 1000000`.

Each seed makes a manager of its own and 200 moves; a seed that fails is printed, and fails again when it is run again.
With `--hostile` a wrong call follows each move, and how often each was made is printed too. With `--states` managers
have recurrent states: in the memory of pages, apart from it, or apart with a host tier below.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter

from tests.kvcache.hinted_moves import HintedMoves
from tests.kvcache.hostile import HostileMoves
from tests.kvcache.moves import Moves, SeededChooser
from tests.kvcache.states.moves_below import BelowMoves
from tests.kvcache.states.slab_moves import SlabMoves
from tests.kvcache.states.state_moves import StateMoves

MOVES_A_SEED = 200
WITH_STATES = {"shared": SlabMoves, "apart": StateMoves, "below": BelowMoves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--moves", type=int, default=1_000_000)
    parser.add_argument("--groups", action="store_true", help="managers of groups of layers, with hints and quotas")
    parser.add_argument("--states", choices=tuple(WITH_STATES), help="managers with recurrent states, which lie there")
    parser.add_argument("--hostile", action="store_true", help="a wrong call after each move")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    start, seen, seed = time.monotonic(), Counter[str](), chosen.seed
    for seed in range(chosen.seed, chosen.seed - (-chosen.moves // MOVES_A_SEED)):
        hostile = HostileMoves(SeededChooser(seed)) if chosen.hostile else None
        kind = WITH_STATES[chosen.states] if chosen.states else HintedMoves if chosen.groups else Moves
        moves = kind(SeededChooser(seed)) if hostile is None else hostile.moves
        try:
            for _ in range(MOVES_A_SEED):
                (hostile or moves).move()
            (hostile or moves).finish()
        except BaseException:
            print(f"seed {seed} fails")  # noqa: T201
            raise
        seen += moves.seen
        seen += moves.of_groups()
        seen += Counter() if hostile is None else hostile.hostile.seen
        seen["moves"] += MOVES_A_SEED
        metrics = moves.manager.metrics
        seen["evicted"] += metrics.evictions
        seen["restored"] += metrics.h2d_blocks_copied
        seen["state hits"] += metrics.state_hits
        seen["states evicted"] += metrics.state_evictions
        seen["states restored"] += metrics.h2d_states_copied
        if seed % 500 == 0:
            print(f"seed {seed}: {seen['moves']} moves, {time.monotonic() - start:.0f} s", flush=True)  # noqa: T201
    print(f"seeds {chosen.seed} to {seed}, no discrepancy: {dict(seen)}, {time.monotonic() - start:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
