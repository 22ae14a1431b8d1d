"""`pagewire plan`: the tables, and the figures as JSON where asked to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from scheduler_adapters.errors import PlanError
from scheduler_adapters.plan.layers import CachedModel, read_model
from scheduler_adapters.plan.link import Pull, Target, pulls
from scheduler_adapters.plan.memory import Choice, MemoryAsked, choice, choices
from scheduler_adapters.plan.options import PlanOptions


class KindOfLayer(msgspec.Struct, frozen=True):
    """What layers that are alike keep: of a token and of a request, in the whole model."""

    kind: str
    layers: int
    heads: int
    elements: int  # of a token and head, keys and values together
    window: int
    token_bytes: int
    request_bytes: int


class MemoryPlan(msgspec.Struct, frozen=True):
    """All that `pagewire plan` says. Bytes of tokens and pages are those of a rank, where not said otherwise."""

    model: str
    max_len: int | None
    kv_dtype: str
    memory: int
    page_size: int
    kinds: list[KindOfLayer]
    choices: list[Choice]
    chosen: Choice
    prefill_tp: int
    pulls: list[Pull]
    made_gbps: float  # that a prefill replica makes when it never rests; what is slower than this, computing beats


def run_plan(options: PlanOptions) -> int:
    """Plan and report; the exit status. A `KVCacheError` says in a sentence what does not work."""
    model = read_model(options.model, options.kv_dtype)
    found = plan_memory(options, model)
    console = Console()
    for title, table in (_kinds(found), _choices(found), _rooms(found), _pulls(found, options)):
        console.print(title, style="bold", soft_wrap=True)
        console.print(table)
    console.print(
        f"A prefill replica that never rests makes {found.made_gbps:,.2f} GB/s of keys and values: what a link or a "
        "tier cannot bring at that rate, computing brings sooner.",
        soft_wrap=True,
    )
    if options.json is not None:
        try:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        except OSError as error:
            raise PlanError(f"--json {options.json}: {error.strerror}") from error
    return 0


def plan_memory(options: PlanOptions, model: CachedModel) -> MemoryPlan:
    """What the memory holds, and what a hand-over moves. Raises `PlanError` for a `--tp` that does not fit."""
    tp = options.tp or options.devices
    if options.devices % tp:
        raise PlanError(f"--tp is {tp}: {options.devices} devices cannot be divided into replicas of as many")
    asked = MemoryAsked(options.memory, options.page_size, options.step_tokens, options.lengths)
    every = list(choices(model, options.devices, asked))
    if options.tp is None and every:
        tp = every[0].tp  # the widest that the heads allow
    prefill_tp = options.prefill_tp or tp
    chosen = choice(model, tp, options.devices // tp, asked)
    target = Target(options.first_token, options.prefill_speed, options.step_tokens)
    kinds = [
        KindOfLayer(
            kind=one.kind,
            layers=one.layers,
            heads=one.heads,
            elements=one.width,
            window=one.window,
            token_bytes=one.layers * one.heads * one.width * model.dtype.itemsize,
            request_bytes=one.state_bytes(1),
        )
        for one in model.each
    ]
    return MemoryPlan(
        model=model.name,
        max_len=model.max_len,
        kv_dtype=str(model.dtype).removeprefix("torch."),
        memory=options.memory,
        page_size=options.page_size,
        kinds=kinds,
        choices=every,
        chosen=chosen,
        prefill_tp=prefill_tp,
        pulls=list(pulls(model, (prefill_tp, tp), options.page_size, options.lengths, target)),
        made_gbps=sum(kind.token_bytes for kind in kinds) * options.prefill_speed / 1e9,
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> tuple[str, Table]:
    """A title, and a table whose first columns are words and the others figures."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return title, table


def _kinds(found: MemoryPlan) -> tuple[str, Table]:
    limit = "" if found.max_len is None else f", made for {found.max_len:,} tokens"
    rows = [
        (
            kind.kind,
            f"{kind.layers:,}",
            f"{kind.heads} x {kind.elements}" if kind.heads else "",
            f"{kind.window:,}" if kind.window else "",
            _size(kind.token_bytes) if kind.token_bytes else "",
            _size(kind.request_bytes) if kind.request_bytes else "",
        )
        for kind in found.kinds
    ]
    total = sum(kind.token_bytes for kind in found.kinds)
    rows.append(("all", f"{sum(kind.layers for kind in found.kinds):,}", "", "", _size(total), ""))
    title = f"{found.model}: keys and values in {found.kv_dtype}{limit}"
    return _table(title, ("layers", "count", "heads", "window", "a token", "a request"), rows)


def _choices(found: MemoryPlan) -> tuple[str, Table]:
    lengths = list(found.chosen.rooms[0].requests)
    rows = [
        (
            f"{one.tp} x {one.dp}",
            "/".join(map(str, dict.fromkeys(one.heads))),
            str(one.copies),
            _size(one.token_bytes),
            _size(one.rooms[0].page_bytes or 0),
            f"{one.rooms[0].pages:,}",
            _tokens(one.rooms[0].longest),
            *(f"{one.rooms[0].requests[length]:,}" for length in lengths),
        )
        for one in found.choices
    ]
    columns = ("TP x DP", "heads", "copies", "a token", "a page", "pages", "longest", *map(_of_length, lengths))
    return _table(f"{_size(found.memory)} of each device, pages of {found.page_size} tokens; of a rank", columns, rows)


def _rooms(found: MemoryPlan) -> tuple[str, Table]:
    rows = [
        (
            room.way,
            _size(room.page_bytes) if room.page_bytes else "",
            f"{room.pages:,}" if room.pages else "",
            _tokens(room.longest),
            *(f"{_size(room.request_bytes[length])}, {count:,}" for length, count in room.requests.items()),
        )
        for room in found.chosen.rooms
    ]
    columns = (
        "laid by",
        "a page",
        "pages",
        "longest",
        *(f"{_of_length(at)}, each" for at in found.chosen.rooms[0].requests),
    )
    return _table(f"TP {found.chosen.tp} x DP {found.chosen.dp}: how it can be laid", columns, rows)


def _pulls(found: MemoryPlan, options: PlanOptions) -> tuple[str, Table]:
    rows = [
        (
            f"{pull.length:,}",
            _size(pull.bytes),
            f"{pull.runs:,}",
            f"{pull.compute_s:.2f} s",
            *map(_figure, (pull.after_gbps, pull.after_runs_s, pull.chunks_gbps, pull.chunks_runs_s)),
        )
        for pull in found.pulls
    ]
    columns = ("tokens", "to move", "runs", "prefill", "GB/s after", "runs/s", "GB/s by chunks", "runs/s")
    title = (
        f"From prefill TP {found.prefill_tp} to decode TP {found.chosen.tp}, first token in {options.first_token:g} s"
    )
    return _table(title, columns, rows, words=0)


def _size(count: float) -> str:
    """Bytes with their unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.0f} TiB" if count >= 100 else f"{count:.3g} TiB"


def _tokens(count: int | None) -> str:
    return "any" if count is None else f"{count:,}"


def _of_length(length: int) -> str:
    return f"at {length:,}"


def _figure(value: float | None) -> str:
    return "too late" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
