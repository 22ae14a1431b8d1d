"""Wrong calls among right ones: every refusal is ours, and no book moves."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kvcache.hostile import HostileMoves
from tests.kvcache.moves import SeededChooser


@pytest.mark.parametrize("seed", range(2))
def test_wrong_calls_among_right_ones(seed: int) -> None:
    """Each kind of wrong call is made; a seed that fails says so, and fails again."""
    seen: Counter[str] = Counter()
    kinds: set[str] = set()
    for number in range(6):
        moves = HostileMoves(SeededChooser(seed * 1000 + number))
        for at in range(80):
            try:
                moves.move()
            except BaseException:
                print(f"seed {seed * 1000 + number}, move {at} fails")  # noqa: T201
                raise
        moves.finish()
        seen += moves.hostile.seen
        kinds |= {*moves.hostile.calls}
    print(dict(seen))  # noqa: T201
    assert {kind: seen[kind] for kind in kinds if not seen[kind]} == {}
