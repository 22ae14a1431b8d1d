"""`pagewire replay`: a progress bar, a table, and figures as JSON and plots where asked to."""

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scheduler_adapters.errors import ReplayError
from scheduler_adapters.replay.options import ReplayOptions
from scheduler_adapters.replay.plots import write_plots
from scheduler_adapters.replay.replay import ReplayResult, load_trace, replay
from scheduler_adapters.replay.trace_hints import hints_for


def run_replay(options: ReplayOptions) -> int:
    """Replay a trace and report; the exit status. A `KVCacheError` says in a sentence what does not work."""
    hints_for([], options.hints)  # no such kind is said before minutes of reading
    trace, console = load_trace(options.trace), Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=len(trace))
        result = replay(
            trace,
            options.capacity,
            options.replicas,
            lambda done: bar.advance(task, done),
            hints=options.hints,
            routing=options.routing,
            host_blocks=options.host_blocks,
        )
    Console().print(_table(options, result))
    if options.json is not None:
        try:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        except OSError as error:
            raise ReplayError(f"--json {options.json}: {error.strerror}") from error
    if options.plots is not None:
        for path in write_plots(options.trace.stem, trace, options.capacity, options.plots, console.print):
            console.print(f"drew {path}")
    return 0


def _table(options: ReplayOptions, result: ReplayResult) -> Table:
    below = f" and {options.host_blocks:,} on the host" if options.host_blocks else ""
    table = Table(
        title=f"{options.trace.name}, {options.capacity:,} blocks{below}, {options.replicas} replica(s), "
        f"routing {options.routing}, hints {options.hints}",
        show_header=False,
    )
    for name, value in msgspec.structs.asdict(result).items():
        text = "" if value is None else f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        table.add_row(name.replace("_", " "), text)
    return table
