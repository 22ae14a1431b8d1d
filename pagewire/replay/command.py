"""`pagewire replay`: shows progress and a table, and writes figures as JSON and plots if requested."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, nullcontext

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from kvcache.endpoints.watch import ManagerWatch
from kvcache.manager import PagedKVCacheManager
from kvcache.watch.messages import Beside
from pagewire import plots
from pagewire.arguments import write_json
from pagewire.replay.options import ReplayOptions
from pagewire.replay.plots import write_plots
from pagewire.replay.replay import ReplayResult, load_trace, optimum_of_each, replay
from pagewire.replay.trace_hints import hints_for
from pagewire.tables import print_table
from pagewire.viewer import viewer


def run_replay(options: ReplayOptions) -> int:
    """Replays a trace and reports. Returns the exit status. A `KVCacheError` says what does not work."""
    hints_for([], options.hints)  # an unknown kind of hints is refused here, before minutes of reading
    if options.plots is not None:
        plots.pyplot()  # a missing matplotlib is reported here, before minutes of reading and replaying
    trace, console = load_trace(options.trace), Console(stderr=True)
    show = None if options.top is None else _Show(options, trace)
    with Progress(console=console, transient=True, disable=not console.is_terminal or show is not None) as bar:
        task = bar.add_task("replaying", total=len(trace))
        result = replay(
            trace,
            options.capacity,
            options.replicas,
            (lambda done: bar.advance(task, done)) if show is None else show.progress,
            hints=options.hints,
            routing=options.routing,
            host_blocks=options.host_blocks,
            shown=nullcontext if show is None else show.shown,
        )
    _print(options, result)
    write_json(options.json, result)
    if options.plots is not None:
        for path in write_plots(options.trace.stem, trace, options.capacity, options.plots, console.print):
            console.print(f"drew {path}")
    return 0


class _Show:
    """Shows a replay in `pagewire top`, at the requested speed, until the viewer quits.

    The viewer also shows the best possible hit rate.
    """

    def __init__(self, options: ReplayOptions, trace: Sequence[Sequence[int]]) -> None:
        self._options = options
        self._best = np.cumsum(optimum_of_each(trace, options.capacity))
        self._blocks = np.cumsum([len(blocks) for blocks in trace])
        self._done = 0
        self._due = 0.0
        self._is_open: Callable[[], bool] = bool

    @contextmanager
    def shown(self, manager: PagedKVCacheManager) -> Generator[None]:
        """Makes the manager watchable and opens the viewer."""
        with (
            closing(ManagerWatch(manager, name="replay", beside=self._beside, clear_names=True)) as watch,
            viewer([watch.address], self._options.top or "") as self._is_open,
        ):
            self._due = time.monotonic()
            yield

    def progress(self, done: int) -> None:
        """Counts a request that has run. With a viewer, waits until the next request is due."""
        self._done += done
        self._due += done / self._options.speed
        if self._is_open():
            time.sleep(max(0.0, self._due - time.monotonic()))

    def _beside(self) -> Beside:
        if not self._done:
            return Beside()
        return Beside(figures={"optimum_hit_rate": float(self._best[self._done - 1] / self._blocks[self._done - 1])})


def _print(options: ReplayOptions, result: ReplayResult) -> None:
    below = f" and {options.host_blocks:,} on the host" if options.host_blocks else ""
    title = (
        f"{options.trace.name}, {options.capacity:,} blocks{below}, {options.replicas} replica(s), "
        f"routing {options.routing}, hints {options.hints}"
    )
    rows: list[tuple[str, str]] = []
    for name, value in msgspec.structs.asdict(result).items():
        text = "" if value is None else f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        rows.append((name.replace("_", " "), text))
    print_table(title, ("", ""), rows)
