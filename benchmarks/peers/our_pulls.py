"""Our pulls for `benchmarks.peers`: random pages between two processes, under a lease, with the fence."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.frame import Row, summary
from benchmarks.peers.raw_nixl import SIZES
from benchmarks.pulls.cases import Case
from benchmarks.pulls.figures import running
from benchmarks.pulls.rates import in_turn


def pulls(budget_s: float) -> Iterable[tuple[str, Row]]:
    """Yields a row for each size that is measured with NIXL alone too."""
    for size, count in SIZES:
        specs = Case("equal", "head-major", size, count).specs()
        with running(specs, count, 256 if count == 1 else 8) as (reader, source, sets):
            program = {"": lambda at, r=reader, s=source, p=sets: r.pull(p[at], s.lease())}
            times = in_turn(program, len(sets), budget_s)[""]
        yield f"pull {size >> 10} {count}", summary([one.total for one in times])
