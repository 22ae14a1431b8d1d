"""The output of `pagewire plan`: one table for each topic, and sentences on what more memory would gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagewire.plan.memory import Room
from pagewire.plan.options import PlanOptions
from pagewire.plan.plan import KindOfLayer, MemoryPlan
from pagewire.plan.trace import TracePlan, TracePoint
from pagewire.plan.ways import Way


class PrintedTable(NamedTuple):
    """The arguments of `print_table`."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: int = 1  # the number of leading columns that are text


_OWN: dict[Way, str] = {
    "pagewire": "at a time",
    "groups": "at a time with `params.groups`",
    "share_memory": "at a time with states in slabs (the default)",
}
"""The layouts of our manager that are rows of the first table, with the words that name each row."""


def table_of_answer(found: MemoryPlan) -> PrintedTable:
    """Returns the table that shows how many requests of each length fit, and how much memory each of them takes."""
    chosen = found.chosen
    lengths = list(chosen.rooms[0].requests)
    devices = chosen.tp * chosen.dp
    of_device = "of its device" if chosen.tp == 1 else f"of each of its {chosen.tp} devices"
    rows = [
        (f"requests {_OWN[room.way]}", *(f"{count:,}" for count in room.requests.values()))
        for room in chosen.rooms
        if room.way in _OWN
    ]
    rows.append((f"memory of one, {of_device}", *(_size(chosen.rooms[0].request_bytes[at]) for at in lengths)))
    title = (
        f"{found.model} on {devices} devices with {_size(found.memory)} each for pages, TP {chosen.tp} x DP {chosen.dp}"
    )
    return PrintedTable(title, ("requests of", *(f"{length:,} tokens" for length in lengths)), rows)


def longest(found: MemoryPlan) -> str:
    """Returns a sentence on the longest request."""
    held = found.chosen.rooms[0].longest
    if held is None or (found.max_len is not None and held >= found.max_len):
        fits = "any" if held is None else f"{held:,}"
        limit = "no limit" if found.max_len is None else f"{found.max_len:,} tokens, the model's limit"
        return f"The longest request: {limit}; the memory holds {fits}."
    limit = "" if found.max_len is None else f"; the model was made for {found.max_len:,}"
    return f"The longest request: {held:,} tokens, which fill the memory{limit}."


def table_of_kinds(found: MemoryPlan) -> PrintedTable:
    """Returns the table of the cache sizes per token of each kind of layer, in the whole model."""
    limit = "" if found.max_len is None else f", made for {found.max_len:,} tokens"
    rows = [
        (
            kind.kind,
            f"{kind.layers:,}",
            _heads(kind) if kind.heads else "",
            f"{kind.window:,}" if kind.window else "",
            _size(kind.token_bytes) if kind.token_bytes else "",
            _size(kind.request_bytes) if kind.request_bytes else "",
        )
        for kind in found.kinds
    ]
    total = sum(kind.token_bytes for kind in found.kinds)
    rows.append(("all", f"{sum(kind.layers for kind in found.kinds):,}", "", "", _size(total), ""))
    title = f"{found.model}: keys and values in {found.kv_dtype}{limit}"
    return PrintedTable(title, ("layers", "count", "heads", "window", "a token", "a request"), rows)


def table_of_choices(found: MemoryPlan) -> PrintedTable:
    """Returns the table of the ways to divide a host's devices, with the pages and requests that fit in each case."""
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
    return PrintedTable(
        f"{_size(found.memory)} of each device, pages of {found.page_size} tokens; of a rank", columns, rows
    )


def table_of_rooms(found: MemoryPlan) -> PrintedTable:
    """Returns the table of what fits on the chosen ranks in each layout (`ways.py`), including vLLM's."""
    rows = [
        (
            room.way,
            _size(room.page_bytes) if room.page_bytes else "",
            f"{room.pages:,}" if room.pages else "",
            _tokens(room.longest),
            *(_each(room, length) for length in room.requests),
        )
        for room in found.chosen.rooms
    ]
    columns = (
        "layout",
        "a page",
        "pages",
        "longest",
        *(f"{_of_length(at)}, each" for at in found.chosen.rooms[0].requests),
    )
    return PrintedTable(f"TP {found.chosen.tp} x DP {found.chosen.dp}: layouts of the cache", columns, rows)


def _each(room: Room, length: int) -> str:
    """Formats the bytes of a request, what it takes besides while a chunk of it runs, and the number of requests."""
    chunk = f" + {_size(room.chunk_bytes[length])}" if room.chunk_bytes[length] else ""
    return f"{_size(room.request_bytes[length])}{chunk}, {room.requests[length]:,}"


def of_rooms(found: MemoryPlan, options: PlanOptions) -> Iterator[str]:
    """Yields a sentence on the chunk that runs, and a sentence on vLLM if its layout is not shown."""
    rooms = found.chosen.rooms
    if any(any(room.chunk_bytes.values()) for room in rooms):
        yield (
            f"While a step runs a chunk of up to {options.step_tokens:,} tokens of a prompt (--step-tokens), one "
            "request of each replica takes what is after the +, too."
        )
    if not any(room.way == "vllm" for room in rooms):
        states = any(kind.request_bytes for kind in found.kinds)
        with_what = "recurrent states" if states else "latents beside other layers"
        yield f"There is no row for vllm, because its blocks for {with_what} are not modelled here."


def table_of_parts(found: MemoryPlan) -> PrintedTable:
    """Returns the table of a request's memory under each layout, part by part, and of the bytes that no layer needs."""
    lengths = list(found.chosen.rooms[0].requests)
    rows: list[tuple[str, ...]] = []
    for room in found.chosen.rooms[:-1]:
        way = room.way
        for part in room.parts:
            sizes = (_size(part.request_bytes[length]) for length in lengths)
            rows.append((way, part.kind, f"{part.layers:,}", f"{part.tables or ''}", *sizes))
            way = ""
        lost = (
            f"{_size(room.lost_bytes[length])}, {100 * room.lost_bytes[length] / room.request_bytes[length]:.1f} %"
            for length in lengths
        )
        rows.append(("", "lost", "", "", *lost))
    return PrintedTable(
        "What a request takes while it decodes",
        ("layout", "of", "layers", "tables", *map(_of_length, lengths)),
        rows,
        2,
    )


def table_of_pulls(found: MemoryPlan, options: PlanOptions) -> PrintedTable:
    """Returns the table of the bytes that move from prefill to decode, and of the speed that the link needs."""
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
        f"From prefill TP {found.prefill_tp} to decode TP {found.chosen.tp}, {options.prefill_speed:,.0f} tokens of "
        f"prefill a second, first token in {options.first_token:g} s"
    )
    return PrintedTable(title, columns, rows, words=0)


def table_of_trace(trace: TracePlan) -> PrintedTable:
    """Returns the table of the trace's hits with the given memory, with less memory and with more memory."""
    rows = [
        (
            "now" if point is trace.now else "",
            str(point.hosts),
            _size(point.memory),
            _size(point.tier) if point.tier else "",
            f"{point.blocks:,}" + (f" + {point.tier_blocks:,}" if point.tier_blocks else ""),
            f"{point.hit_pct:.2f}",
            f"{point.optimum_pct:.2f}",
            "" if point is trace.now else f"{point.points:+.2f}",
            "" if point is trace.now else f"{point.saved_s:+,.0f} s",
        )
        for point in sorted([trace.now, *trace.others], key=_order)
    ]
    columns = ("", "hosts", "a device", "a tier", "blocks", "hits %", "optimum %", "points", "prefill saved")
    title = (
        f"{trace.requests:,} requests, blocks of {trace.block_tokens} tokens; without a cache they take "
        f"{trace.prefill_s:,.0f} s of prefill"
    )
    return PrintedTable(title, columns, rows)


def _order(point: TracePoint) -> tuple[int, int, int]:
    return point.hosts, point.tier, point.memory


def worth(trace: TracePlan) -> Iterator[str]:
    """Yields a sentence on each kind of additional memory, which says how many hits and prefill seconds it gains."""
    for point in sorted(trace.others, key=_order):
        more = (point.bytes - trace.now.bytes) / 1e9
        where = "of more hosts" if point.hosts > 1 else "of a tier" if point.tier > trace.now.tier else "of devices"
        if more > 0:
            yield (
                f"{more:,.0f} GB more {where} give {point.points:.2f} points and save {point.saved_s:,.0f} "
                "prefill seconds."
            )


def _heads(kind: KindOfLayer) -> str:
    """Formats the number of heads and the elements of a head. Keys and values are shown apart if they differ."""
    keys, values = kind.key_elements, kind.value_elements
    return f"{kind.heads} x ({keys} + {values})" if values and values != keys else f"{kind.heads} x {keys}"


def _size(count: float) -> str:
    """Formats bytes with their unit."""
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
