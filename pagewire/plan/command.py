"""`pagewire plan`: prints the tables, and writes figures as JSON and a plot if requested."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.progress import Progress

from pagewire import plots
from pagewire.arguments import write_json
from pagewire.plan.layers import read_model
from pagewire.plan.options import PlanOptions
from pagewire.plan.plan import MemoryPlan, plan_memory
from pagewire.plan.tables import (
    longest,
    of_rooms,
    table_of_answer,
    table_of_choices,
    table_of_kinds,
    table_of_parts,
    table_of_pulls,
    table_of_rooms,
    table_of_trace,
    worth,
)
from pagewire.plan.trace import MOST_POINTS, TracePlan, TraceQuestion, draw, sweep
from pagewire.replay.replay import load_trace
from pagewire.replay.trace_hints import Blocks
from pagewire.tables import print_table
from scheduler_adapters.errors import PlanError


def run_plan(options: PlanOptions) -> int:
    """Plans and reports. Returns the exit status. A `KVCacheError` says what does not work."""
    model = read_model(options.model, options.kv_dtype)
    blocks = None if options.trace is None else load_trace(options.trace)
    found = plan_memory(options, model)
    if options.plot is not None:
        plots.pyplot()  # a missing matplotlib is reported before the replays, which take minutes
    console = Console()
    print_table(*table_of_answer(found))
    console.print(longest(found), soft_wrap=True)
    console.print("\nDetails\n", style="bold")
    for table in (table_of_kinds(found), table_of_choices(found), table_of_rooms(found)):
        print_table(*table)
    for sentence in of_rooms(found, options):
        console.print(sentence, soft_wrap=True)
    for table in (table_of_parts(found), table_of_pulls(found, options)):
        print_table(*table)
    console.print(
        f"A prefill replica that computes {options.prefill_speed:,.0f} tokens a second (--prefill-speed) makes "
        f"{found.made_gbps:,.2f} GB/s of keys and values. Reading them over a slower link, or from a slower tier, "
        "takes longer than computing them again.",
        soft_wrap=True,
    )
    if blocks is not None:
        trace = _replayed(options, found, blocks)
        found = msgspec.structs.replace(found, trace=trace)
        print_table(*table_of_trace(trace))
        for sentence in worth(trace):
            console.print(sentence, soft_wrap=True)
    _write(options, found)
    return 0


def _replayed(options: PlanOptions, found: MemoryPlan, trace: Sequence[Blocks]) -> TracePlan:
    question = TraceQuestion(
        found.chosen,
        options.memory,
        options.page_size,
        options.block_tokens,
        options.prefill_speed,
        options.host_memory,
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=MOST_POINTS)
        return sweep(trace, question, lambda _: bar.advance(task))


def _write(options: PlanOptions, found: MemoryPlan) -> None:
    """Writes the requested files. Raises an error if a file cannot be written."""
    if options.plot is not None and options.trace is not None and found.trace is not None:
        try:
            draw(found.trace, f"{found.model}, {options.trace.name}: hits against memory", options.plot)
        except OSError as error:
            raise PlanError(f"--plot {options.plot}: {error.strerror}") from error
    write_json(options.json, found)
