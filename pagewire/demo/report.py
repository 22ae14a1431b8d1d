"""The output of the demo: progress while it runs, and a table at the end. Without a terminal it prints plain lines."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec

from scheduler_adapters.errors import MissingExtraError


class Figures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The figures of a run, in the form that `--json` writes."""

    requests: int  # prompts served
    tokens_equal: bool  # every output equals the model's own, except for rounding ties
    ties: int  # outputs whose first difference is a rounding tie
    prompt_tokens: int  # tokens of all prompts
    cached_tokens: int  # prompt tokens that prefill found in its prefix cache
    hit_rate: float  # cached over prompt tokens, 0 to 1
    pages_pulled: int  # pages that decode read from prefill
    bytes_pulled: int  # bytes of these pages
    # bytes pulled, divided by the time in which at least one READ was in flight, in units of 1e9 bytes per second
    gbps: float
    ttft_ms_p50: float  # median of the requests' times from submission to the first token, in milliseconds
    tpot_ms_p50: float  # median over the requests of their mean time per token after the first token, in milliseconds
    leaked_pages: int  # pages that some process still holds after the last request
    failed: dict[str, str] | None = None  # requests that failed, with the reason; only with `--chaos`
    faults: dict[str, int] | None = None  # number of injected faults by kind, over all processes; only with `--chaos`


class Reporter:
    """Writes to standard output with `rich`."""

    def __init__(self) -> None:
        try:
            from rich.console import Console  # noqa: PLC0415  (of an optional extra)
        except ImportError as error:
            raise MissingExtraError(
                f"the demo needs the extra 'serve' (pip install 'pagewire[serve]'): {error}"
            ) from error
        self._console = Console(file=sys.stdout, highlight=False)

    def line(self, text: str) -> None:
        """Prints one line."""
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, total: int) -> Generator[Callable[[int, str], None]]:
        """Shows the progress of a phase.

        Yields a function to call with the number of finished requests and a remark.
        """
        if not self._console.is_terminal:
            self.line(f"{title} ...")
            yield lambda _done, _remark: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        remark = TextColumn("{task.fields[remark]}", style="dim")
        columns = (TextColumn("{task.description}"), BarColumn(32), MofNCompleteColumn(), TimeElapsedColumn(), remark)
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(title, total=total, remark="")
            yield lambda done, remark: progress.update(task, completed=done, remark=remark)

    def table(self, figures: Figures, where: str, notes: list[str]) -> None:
        """Prints the table of a run, and below it the notes on anything unexpected."""
        from pagewire.tables import print_table  # noqa: PLC0415  (of an optional extra)

        print_table(where, ("", ""), _rows(figures))
        for note in notes:
            self.line(note)


def _rows(figures: Figures) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{figures.requests:,}"),
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("cached tokens", f"{figures.cached_tokens:,}"),
        ("hit rate", f"{figures.hit_rate:.1%}"),
        ("pages pulled", f"{figures.pages_pulled:,}"),
        ("bytes pulled", f"{figures.bytes_pulled:,}"),
        ("GB/s while pulling", f"{figures.gbps:.2f}"),
        ("time to first token, p50", f"{figures.ttft_ms_p50:.1f} ms"),
        ("time per token, p50", f"{figures.tpot_ms_p50:.2f} ms"),
        ("pages left held", f"{figures.leaked_pages:,}"),
    ]
    if figures.failed:
        rows.append(("failed, each with its reason", f"{len(figures.failed):,}"))
    if figures.faults:
        rows.append(("faults injected", ", ".join(f"{count:,} {fault}" for fault, count in figures.faults.items())))
    ties = f", {figures.ties} by a rounding tie" if figures.ties else ""
    return [*rows, ("equal to the model's own generate", f"{'yes' if figures.tokens_equal else 'NO'}{ties}")]
