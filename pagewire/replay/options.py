"""The options of `pagewire replay`."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from pagewire.arguments import (
    input_path,
    number,
    option,
    output_file,
    output_folder,
    whole,
)
from pagewire.viewer import top_option

_MOST_BLOCKS = 1 << 26  # the manager's data for more blocks would take gigabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """The options of `pagewire replay`, validated except the kind of hints."""

    trace: Path = option("TRACE", input_path, MISSING, "JSON lines with hash_ids", name="trace")
    capacity: int = option("BLOCKS", whole(1, _MOST_BLOCKS), 10_000, "blocks of all replicas together")
    replicas: int = option("N", whole(1, 1024), 1, "replicas that share the capacity")
    hints: str = option(
        "KIND",
        str,
        "none",
        "hints made from the trace's future: none, true, inverted, wrong=SHARE",
    )
    routing: Literal["prefix", "least-loaded", "round-robin"] = option(
        "RULE", str, "prefix", "prefix, least-loaded or round-robin", choices=("prefix", "least-loaded", "round-robin")
    )
    host_blocks: int = option("BLOCKS", whole(0, _MOST_BLOCKS), 0, "blocks of a host tier below the replicas")
    top: str | None = top_option("show every page, beside the optimum")
    speed: float = option("N", number(0, 1_000_000), 100.0, "requests a second, with --top", rare=True)
    plots: Path | None = option(
        "DIR",
        output_folder,
        None,
        "also sweep capacities, hints, replicas and rules, and draw (minutes)",
    )
    json: Path | None = option("FILE", output_file, None, "also write the figures to this file")
