"""The random moves, as many as one likes: `python -m tests.kvcache.million_moves --seed 1 --moves 1000000`.

Each seed makes a manager of its own and 200 moves; a seed that fails is printed, and fails again when it is run again.
With `--hostile` a wrong call follows each move, and how often each was made is printed too. With `--states` managers
have recurrent states: in the memory of pages (with `--hints` also hints and quotas), apart from it, or apart with a
host tier below. With `--groups` their layers have several tables: with states too, or with hints and quotas.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Sequence

from tests.kvcache.hinted_moves import HintedMoves
from tests.kvcache.hostile import HostileMoves
from tests.kvcache.moves import Moves, SeededChooser
from tests.kvcache.states.group_state_moves import GroupBelowMoves, GroupSlabMoves, GroupStateMoves
from tests.kvcache.states.hinted_slab_moves import HintedSlabMoves
from tests.kvcache.states.moves_below import BelowMoves
from tests.kvcache.states.slab_moves import SlabMoves
from tests.kvcache.states.state_moves import StateMoves

MOVES_A_SEED = 200
PLACES = ("shared", "apart", "below")
# By where states lie, whether layers have groups, and whether requests give hints.
KINDS: dict[tuple[str | None, bool, bool], type[Moves]] = {
    (None, False, False): Moves,
    (None, True, False): HintedMoves,  # two managers of three take hints
    ("shared", False, False): SlabMoves,
    ("shared", False, True): HintedSlabMoves,
    ("shared", True, False): GroupSlabMoves,
    ("apart", False, False): StateMoves,
    ("apart", True, False): GroupStateMoves,
    ("below", False, False): BelowMoves,
    ("below", True, False): GroupBelowMoves,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--moves", type=int, default=1_000_000)
    parser.add_argument("--groups", action="store_true", help="managers of groups of layers")
    parser.add_argument("--states", choices=PLACES, help="managers with recurrent states, which lie there")
    parser.add_argument("--hints", action="store_true", help="managers with hints and quotas (of shared states)")
    parser.add_argument("--hostile", action="store_true", help="a wrong call after each move")
    chosen = parser.parse_args(arguments)
    kind = KINDS.get((chosen.states, chosen.groups, chosen.hints))
    if kind is None:
        parser.error("--hints: with --states shared alone")
    start, seen, seed = time.monotonic(), Counter[str](), chosen.seed
    for seed in range(chosen.seed, chosen.seed - (-chosen.moves // MOVES_A_SEED)):
        hostile = HostileMoves(SeededChooser(seed)) if chosen.hostile else None
        moves = kind(SeededChooser(seed)) if hostile is None else hostile.moves
        try:
            for _ in range(MOVES_A_SEED):
                (hostile or moves).move()
            seen += counted(moves)
            (hostile or moves).finish()
        except BaseException:
            print(f"seed {seed} fails")  # noqa: T201
            raise
        seen += Counter() if hostile is None else hostile.hostile.seen
        seen["moves"] += MOVES_A_SEED
        if seed % 500 == 0:
            print(f"seed {seed}: {seen['moves']} moves, {time.monotonic() - start:.0f} s", flush=True)  # noqa: T201
    print(f"seeds {chosen.seed} to {seed}, no discrepancy: {dict(seen)}, {time.monotonic() - start:.0f} s")  # noqa: T201


def counted(moves: Moves) -> Counter[str]:
    """What happened on a manager, by itself and by its model."""
    metrics = moves.manager.metrics
    found = moves.seen + moves.of_groups()
    found["evicted"] += metrics.evictions
    found["restored"] += metrics.h2d_blocks_copied
    if isinstance(moves, StateMoves):
        found["state hit"] = metrics.state_hits
        found["state evicted"] = metrics.state_evictions
        found["state from the host"] = metrics.h2d_states_copied
        found["hit shortened"] = sum(model.shortened for model in moves.each_states)
        found["replicas beyond the first"] = len(moves.models) - 1
    if isinstance(moves, SlabMoves):
        found["moved"] = moves.moved
    return found


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
