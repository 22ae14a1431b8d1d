"""Sweeps of a trace over capacities and replicas, and their plots."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcache.params import RoutingRule
from pagewire import plots
from pagewire.replay.replay import WINDOW, ReplayResult, replay
from pagewire.replay.trace_hints import Blocks
from scheduler_adapters.errors import ReplayError

Row = dict[str, Any]

CAPACITIES = (1000, 2000, 5000, 10_000, 20_000, 30_000)
# suffix of a kind of hints: the replay also has a host tier, with `HOST_TIMES` as many blocks as the pool
HOST = "+host"
HOST_TIMES = 3
HINTS = ("none", "true", "wrong=0.2", "inverted", "none+host")
REPLICAS = (1, 2, 4, 8, 16)
RULES: tuple[RoutingRule, ...] = ("prefix", "least-loaded", "round-robin")
_LABELS = {
    "none": "no hints (plain LRU)",
    "true": "hints, all right",
    "wrong=0.2": "hints, 20 % wrong",
    "inverted": "hints, all inverted",
    "none+host": f"no hints, host tier of {HOST_TIMES} times the blocks",
}


def sweep_capacities(
    trace: Sequence[Blocks],
    capacities: Iterable[int] = CAPACITIES,
    kinds: Iterable[str] = HINTS,
    note: Callable[[Row], None] = lambda _: None,
) -> list[Row]:
    """Replays a trace for each capacity and kind of hints. Returns rows with hits, reference LRU and optimum, in %.

    Capacities are in blocks. The reference and the optimum have the same capacity, but no host tier. Capacities that
    are too small for the longest request are left out.
    """
    longest, rows = max(map(len, trace)), list[Row]()
    for capacity in (capacity for capacity in capacities if capacity >= longest):
        for kind in kinds:
            below = HOST_TIMES * capacity if kind.endswith(HOST) else 0
            result = replay(trace, capacity, hints=kind.removesuffix(HOST), host_blocks=below)
            rows.append({"blocks": capacity, "hints": kind, **_percent(result)})
            note(rows[-1])
    return rows


def sweep_replicas(
    trace: Sequence[Blocks],
    capacity: int,
    counts: Iterable[int] = REPLICAS,
    rules: Iterable[RoutingRule] = RULES,
    note: Callable[[Row], None] = lambda _: None,
) -> list[Row]:
    """Replays a trace with each routing rule and number of replicas. The replicas share `capacity` blocks.

    Each row has the hits of one replay in %, and its load per window. A number of replicas is left out if the longest
    request does not fit into the blocks of one replica.
    """
    longest, rows = max(map(len, trace)), list[Row]()
    for count in (count for count in counts if capacity // count >= longest):
        for rule in rules:
            result = replay(trace, capacity, count, routing=rule)
            row = {"blocks": capacity, "replicas": count, "routing": rule, **_percent(result)}
            row["of_one_pool_pct"] = round(100 * result.hits / max(1, result.reference_lru_hits), 2)
            row |= {"window_load_mean": result.window_load_mean, "window_load_max": result.window_load_max}
            rows.append(row)
            note(row)
    return rows


def _percent(result: ReplayResult) -> Row:
    refs = result.block_refs
    return {
        "hits": result.hits,
        "hit_pct": round(100 * result.hits / refs, 2),
        "lru_pct": round(100 * result.reference_lru_hits / refs, 2),
        "optimum_pct": round(100 * result.optimum_hits / refs, 2),
        "us_per_request_p50": round(result.us_per_request_p50, 1),
    }


def draw_capacities(rows: Sequence[Row], title: str, path: Path) -> None:
    """Plots hits against capacity for each kind of hint and for the optimum. Raises the errors of `write_plots`."""
    figure, ((axes,),) = plots.figure(1)
    first = [row for row in rows if row["hints"] == rows[0]["hints"]]
    lines = [plots.Curve("optimum", [(row["blocks"], row["optimum_pct"]) for row in first], "limit")]
    for kind in dict.fromkeys(row["hints"] for row in rows):
        points = [(row["blocks"], row["hit_pct"]) for row in rows if row["hints"] == kind]
        lines.append(plots.Curve(_LABELS.get(kind, f"hints {kind}"), points))
    plots.draw_lines(axes, lines, title=title, along="blocks of the pool", up="blocks hit, %", logs="x")
    plots.save(figure, path)


def draw_replicas(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws hits and the balance of load against the number of replicas, for each routing rule.

    Raises the errors of `write_plots`.
    """
    figure, ((hits, loads),) = plots.figure(2)
    counts, along = [row["replicas"] for row in rows], "replicas that share the pool"
    found = [plots.Curve("one pool", [(at, rows[0]["lru_pct"]) for at in (min(counts), max(counts))], "limit")]
    balance: list[plots.Curve] = []
    for rule in dict.fromkeys(row["routing"] for row in rows):
        line = [row for row in rows if row["routing"] == rule]
        found.append(plots.Curve(rule, [(row["replicas"], row["hit_pct"]) for row in line]))
        split = [row for row in line if row["window_load_mean"] is not None]
        balance.append(plots.Curve(rule, [(row["replicas"], row["window_load_mean"]) for row in split]))
        worst = [(row["replicas"], row["window_load_max"]) for row in split]
        balance.append(plots.Curve(f"{rule}, worst window", worst, "worst"))
    plots.draw_lines(hits, found, title=title, along=along, up="blocks hit, %", logs="x")
    hits.set_ylim(0, None)
    windows = f"Busiest replica's load, mean of windows of {WINDOW} requests (1 = even)"
    plots.draw_lines(loads, balance, title=windows, along=along, up="times an even share", logs="x")
    plots.save(figure, path)


def write_plots(
    name: str,
    trace: Sequence[Blocks],
    capacity: int,
    folder: Path,
    note: Callable[[Row], None],
    capacities: Iterable[int] = CAPACITIES,
    counts: Iterable[int] = REPLICAS,
) -> list[Path]:
    """Sweeps the trace and draws both plots into `folder`. Returns the files.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ReplayError: the folder cannot be written to.
    """
    plots.pyplot()  # checked before the sweeps, which take minutes
    paths = [folder / f"{name}_capacity.png", folder / f"{name}_replicas.png"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rows := sweep_capacities(trace, capacities, note=note):
            draw_capacities(rows, f"{name}: hits against capacity", paths[0])
        if rows := sweep_replicas(trace, capacity, counts, note=note):
            draw_replicas(rows, f"{name}: {capacity:,} blocks in all", paths[1])
    except OSError as error:
        raise ReplayError(f"--plots {folder}: {error.strerror}") from error
    return [path for path in paths if path.exists()]
