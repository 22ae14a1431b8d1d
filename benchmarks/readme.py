"""Writes the tables of `docs/results.md` and of the README from the committed results: `python -m benchmarks.readme`.

A table stands between two comments that name it. The text above a table says which statistic its figures are. The text
below says where each figure was made: command, day, commit and machine, from the headers of the results. A further
sentence says whether the code is newer. The README has six figures without this information, and links to the page of
results. A row with missing figures is left out. The tables must match the results. The sentences about newer code may
be out of date, so that a change of code needs no change of a page.
"""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.frame import Row
from benchmarks.measured import ROOT
from benchmarks.peers.peers import PEERS
from benchmarks.results import changed_since, load

PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
_MARK = " The code has changed since."
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


class Missing(Exception):  # noqa: N818 - no error: the row is left out
    """Raised if a result lacks a figure."""


class Line(NamedTuple):
    """A row of a table of figures.

    Attributes:
        what: the measured quantity, in words.
        of: the statistic of the figures.
        source: the name of the result that has the figures.
        figures: takes the result and returns the text of the cell.
    """

    what: str
    of: str
    source: str
    figures: Callable[[Row], str]


def number(value: float | None) -> str:
    """Formats a number: from 10 on without decimals, from 1 on with one, and below 1 with two; empty for None."""
    if value is None:
        return ""
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:,.{digits}f}"


def some(*values: float, unit: str = "") -> str:
    """Formats several numbers, with slashes between them, and then their unit."""
    return " / ".join(map(number, values)) + (f" {unit}" if unit else "")


def ratios(*values: float) -> str:
    """Formats ratios with two decimals, and slashes between them."""
    return " / ".join(f"{value:.2f}" for value in values)


def one(rows: Sequence[Row], **wanted: object) -> Row:
    """Returns the only row with these values.

    Raises:
        Missing: there is no such row.
    """
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    raise Missing


# ---- beside other managers

HASHES = ("sha256", "xxh3_128")
MANAGER = (
    ("decode step, 1,024 running requests, `Batch`", ("decode step, 1,024 requests, Batch",)),
    ("the same, then every context is read", ("the same, every context read after it",)),
    ("decode step, 1,024 running requests, one call per request", ("the same, plain calls",)),
    ("decode step, 1 request, `Batch`", ("decode step, 1 request, Batch",)),
    ("decode step, 1 request, one call per request", ("decode step, 1 request, plain calls",)),
    *(
        (
            f"{what} of {length} tokens, {' / '.join(HASHES)}",
            tuple(f"reserve {length} tokens, {case}, {hashed}, pages of 16" for hashed in HASHES),
        )
        for what, case in (
            ("reserve a cold prompt", "cold"),
            ("reserve and publish a cold prompt", "cold, reserved and published"),
            ("reserve a cached prompt", "warm"),
        )
        for length in ("4,096", "32,768")
    ),
    *(
        (
            f"reserve 4,096 tokens on a full pool, each page evicts, pages of {page}, {' / '.join(HASHES)}",
            tuple(f"reserve 4,096 tokens, evicting, {hashed}, pages of {page}" for hashed in HASHES),
        )
        for page in (16, 128)
    ),
    ("a conversation's next turn at 32,768 tokens, context kept", ("next turn at 32,768 tokens, context kept",)),
    ("the same turn, new context", ("next turn at 32,768 tokens, new context, sha256",)),
    ("the same turn, new context from a list of tokens", ("next turn at 32,768 tokens, from a list",)),
    ("release 2,048 pages", ("release 2,048 pages",)),
    (
        "evict, per page, 2,048 at a time, pool of 32 k / 4 M pages",
        ("evict, per page, small pool", "evict, per page, 4M pages"),
    ),
    ("memory per page, 1 M pages, all published, bytes", ("memory per page, 1M pages, all published, B",)),
    ("build a pool of 1 M pages, ms", ("build a pool of 1M pages, ms",)),
)
COLUMNS = {"max257": ("max257",), "max267": ("max-legacy", "max-jenga"), "vllm": ("vllm",), "sglang": ("sglang",)}
"""The programs that each column shows. If there are several, the column shows the best figure."""
PARTS = {"sglang"}
"""Columns of programs that do only a part of the work. They are shown, but the ratios leave them out."""


def manager_table() -> list[str]:
    """The table of our manager, MAX and vLLM."""
    result = load("peers")
    rows: list[Row] = result.get("rows", [])
    columns = {name: each for name, each in COLUMNS.items() if any(f"{peer}_min" in rows[0] for peer in each)}
    made = [["operation", "pagewire", *(PEERS[name].title for name in columns), "best of the others / ours"]]
    for what, questions in MANAGER:
        try:
            found = [one(rows, question=question) for question in questions]
        except Missing:
            continue
        best = [[_best(row, peers) for row in found] for peers in columns.values()]
        compared = [each[0] for name, each in zip(columns, best, strict=True) if name not in PARTS]
        others = [each for each in compared if each is not None]
        ratio = min(others) / found[0]["ours_min"] if others else None
        cells = [_together(each) for each in best]
        made.append([what, some(*(row["ours_min"] for row in found)), *cells, number(ratio)])
    heading = f"Minima of {_rounds(result)} rounds in microseconds, pages of 16 tokens unless a row says otherwise:"
    return [heading, "", *table(made), "", origin(["peers"])]


def _best(row: Row, peers: Sequence[str]) -> float | None:
    return min((row[f"{peer}_min"] for peer in peers if row.get(f"{peer}_min") is not None), default=None)


def _together(values: Sequence[float | None]) -> str:
    """Joins the figures of a cell. Equal figures are shown once, as for a program that has only one hash."""
    return " / ".join(dict.fromkeys(number(value) for value in values if value is not None))


def _rounds(result: Row) -> int:
    return max(row["round"] for row in result["rounds"])


# ---- between processes


def pulled(program: str, size: int, pages: int) -> Callable[[Row], Row]:
    """Returns a function that finds a program's row for random head-major pages in huge pages.

    Both sides have equal layouts, and `size` is in KiB.
    """
    shape = {"topology": "equal", "order": "head-major", "access": "random", "memory": "huge pages"}
    return lambda result: one(result["rows"], program=program, page_bytes=size << 10, pages=pages, **shape)


def blocks(program: str) -> Callable[[Row], str]:
    """Returns a function that formats two figures of vLLM's connector, for 2,048 blocks in 64 layers.

    They are the milliseconds of the whole pull, and the milliseconds until the call returns.
    """

    def cell(result: Row) -> str:
        row = one(result["rows"], program=program, page_bytes=256 << 10, pages=2048, order="a tensor a layer")
        return some(row["us"] / 1e3, row["host_us"] / 1e3, unit="ms")

    return cell


def columns_of(program: str, column: str, *cases: tuple[int, int]) -> Callable[[Row], str]:
    """Returns a function that formats a program's value in `column` for each of the cases.

    A case is the KiB of a page and the number of pages.
    """
    return lambda result: ratios(*(pulled(program, *case)(result)[column] for case in cases))


def figure(result: Row, question: str, column: str = "min") -> float:
    """Returns one value from the single figures of a result of `benchmarks.pull`."""
    return one(result["figures"], question=question)[column]


def handed(pull: str) -> Callable[[Row], str]:
    """Returns a function that formats the milliseconds of a hand-over of 2,048 and of 16,384 tokens.

    `pull` is the way to pull, as in `benchmarks.handover`.
    """

    def cell(result: Row) -> str:
        rows = [one(result["rows"], model="small", tokens=tokens, pull=pull) for tokens in (2048, 16_384)]
        return f"{rows[0]['handover_ms_min']:.1f} / {rows[1]['handover_ms_min']:.1f} ms"

    return cell


def added_to(token: str, part: str) -> Callable[[Row], str]:
    """Returns a function that formats the milliseconds that a separate decode process adds to the time to a token.

    There are two figures: the total, and the milliseconds in one part of that time.
    """
    return lambda result: some(*(one(result["rows"], part=name)["added_ms_p50"] for name in (token, part)), unit="ms")


_LARGE, _SMALL = ((64, 2048), (256, 2048)), ((64, 256), (64, 16))


def placed(result: Row) -> str:
    """Formats the share of prompt tokens that were cached, for each placement rule."""
    rates = (
        one(result["runs"], placement=name)["hit_rate"] for name in ("one cache", "own guess", "dynamo", "in turns")
    )
    return " / ".join(f"{100 * rate:.1f}" for rate in rates) + " %"


def from_a_peer(tokens: int) -> Callable[[Row], str]:
    """Returns a function that formats the time to the first token if the head of a prompt is computed, or pulled.

    The head has `tokens` tokens, and another prefill process has cached it.
    """

    def cell(result: Row) -> str:
        row = one(result["rows"], fleet="2 + 2", tokens=tokens)
        return some(row["computed_ms_p50"], row["pulled_ms_p50"], unit="ms")

    return cell


def chosen_ways(fleet: str) -> Callable[[Row], str]:
    """Returns a function that formats how well a fleet chooses between pulling and computing.

    The figures are the share of right choices, the number of right choices among the clear ones, and the mean loss.
    """

    def cell(result: Row) -> str:
        row = one(result["rows"], fleet=fleet, tokens="all")
        clear = f"{row.get('right_clear', 0) * row['clear']:.0f}/{row['clear']}"
        return f"{100 * row['right']:.0f} %, {clear}, {row['regret_ms']:.1f} ms"

    return cell


def both_ways(link: str) -> Callable[[Row], str]:
    """Returns a function that formats the time to the first token over a link, for each way to get a prompt's head.

    The head is pulled, computed, pulled from its end while it is computed from its front, or, as a calculated ideal,
    the latter without any loss.
    """
    columns = ("pulled_ms_median", "computed_ms_median", "split_ms_median", "ideal_ms")
    return lambda result: some(*(one(result["rows"], link=link)[column] for column in columns), unit="ms")


def asked(pages: int) -> Callable[[Row], str]:
    """Returns a function that formats the processor time of a query in the source's loop and in the reader's."""
    columns = [f"{side}: in all" for side in ("source", "reader")]
    return lambda result: some(
        *(one(result["rows"], pages=pages, operation=each)["us_median"] for each in columns), unit="µs"
    )


PROCESSES = (
    Line(
        "share of prompt tokens that two prefill processes had cached: one shared cache / placement `guess` / "
        "`dynamo` / `in-turns`",
        "count",
        "placement",
        placed,
    ),
    Line(
        "from a prompt's last chunk to decode's first step, 2 k / 16 k tokens, chunk by chunk",
        "minimum",
        "handover",
        handed("chunkwise"),
    ),
    Line("the same, pulled after the whole prompt has run", "minimum", "handover", handed("whole")),
    Line(
        "time that a separate decode process adds to the first token: in total / in the hand-over",
        "median",
        "first_token",
        added_to("first token", "hand-over"),
    ),
    Line(
        "time that it adds to the second token: in total / in the pull",
        "median",
        "first_token",
        added_to("second token", "pull"),
    ),
    Line(
        "time to first token if another prefill process has cached 256 tokens of the prompt: computed / pulled",
        "median",
        "prefix_peers",
        from_a_peer(256),
    ),
    Line("the same for 3,072 tokens", "median", "prefix_peers", from_a_peer(3072)),
    Line(
        "3,072 tokens over 100 Mbit/s: pulled / computed / both at once / both at once without any loss",
        "median",
        "both_ends",
        both_ways("100mbit"),
    ),
    Line("3,072 tokens over 1 Gbit/s", "median", "both_ends", both_ways("1gbit")),
    Line(
        "choice to pull or to compute: right choices, right choices if the times differ clearly, mean loss of time",
        "share",
        "prefix_peers",
        chosen_ways("2 + 2"),
    ),
    Line("the same choice over 100 Mbit/s", "share", "prefix_peers", chosen_ways("2 + 1, 100mbit")),
    Line(
        "question for 128 pages by content: processor time of the source's loop / of the reader's loop",
        "median",
        "asking",
        asked(128),
    ),
    Line("the same for 8,192 pages", "median", "asking", asked(8192)),
    Line(
        "1,000 requests of the conversation trace on 2 + 2 processes, 10 % cancelled, one of each kind killed: "
        "wrong answers / pages left held",
        "count",
        "fleet",
        lambda result: f"{len(result['wrong'])} / {result['pages_held']}",
    ),
    Line(
        "rate of a pull of 2,048 random pages of 64 / 256 KiB, divided by the baseline's rate",
        "minimum",
        "pull",
        columns_of("pagewire", "ratio", *_LARGE),
    ),
    Line("the same, bytes per second of processor time", "mean", "pull", columns_of("pagewire", "cpu_ratio", *_LARGE)),
    Line(
        "rate of a pull of 256 / 16 pages of 64 KiB, divided by the baseline's rate",
        "minimum",
        "pull",
        columns_of("pagewire", "ratio", *_SMALL),
    ),
    Line("the same, bytes per second of processor time", "mean", "pull", columns_of("pagewire", "cpu_ratio", *_SMALL)),
    Line(
        "rate of NIXL alone (default settings, no lease, no fence) for 2,048 pages of 64 / 256 KiB, "
        "divided by the baseline's rate",
        "minimum",
        "pull",
        columns_of("nixl as shipped", "ratio", *_LARGE),
    ),
    Line(
        "rate of NIXL alone with our settings, divided by the baseline's rate",
        "minimum",
        "pull",
        columns_of("nixl as ours", "ratio", *_LARGE),
    ),
    Line(
        "pull one page of 64 KiB, fence included; the fence alone",
        "minimum",
        "pull",
        lambda result: (
            f"{figure(result, 'one page of 64 KiB, fence included'):.0f}; "
            f"{figure(result, 'fence of one page of 64 KiB'):.0f} µs"
        ),
    ),
    Line(
        "share of time that the fence adds to a pull of 2,048 pages",
        "minimum",
        "pull",
        lambda result: f"{figure(result, 'fence of 2,048 pages of 64 KiB'):.1f} %",
    ),
    Line(
        "pull 2,048 blocks of 64 separate layers (131,072 runs): whole pull / until the call returns",
        "minimum",
        "pull",
        lambda result: some(
            figure(result, "2,048 pages × 64 regions: the whole pull"),
            figure(result, "2,048 pages × 64 regions: until the call returns"),
            unit="ms",
        ),
    ),
    Line("the same by vLLM's connector with default settings", "minimum", "pull", blocks("vLLM")),
    Line("the same by vLLM's connector in huge pages", "minimum", "pull", blocks("vLLM, huge pages")),
    Line("the same by vLLM's connector with our UCX settings", "minimum", "pull", blocks("vLLM, UCX as ours")),
)


# ---- in one process


def priced(pages: int, *variants: str, column: str = "us_min") -> Callable[[Row], list[float]]:
    """Returns a function that lists the values in `column` for pulls of `pages` pages.

    There is one value for each variant of the safety checks.
    """
    return lambda result: [one(result["rows"], pages=pages, variant=name)[column] for name in variants]


def routed(result: Row) -> str:
    """Formats the hits of 8 replicas as a share of the hits of one pool, for both traces."""
    rows = [one(result["rows"], trace=trace, replicas=8, routing="prefix") for trace in ("conversation", "synthetic")]
    return " / ".join(f"{row['of_one_pool_pct']:.1f}" for row in rows) + " %"


def recommended(result: Row) -> str:
    """Formats the time of a choice among 8 replicas."""
    cold, again = (
        one(result["rows"], replicas=8, prompt=32_768, hash="sha256", case=case) for case in ("cold", "again")
    )
    return f"{number(cold['us_min'])} (of it hash {number(cold['hash_min'])}) / {number(again['us_min'])} µs"


def served(result: Row) -> str:
    """The time to the first token, without and with a host tier."""
    rows = [one(result["rows"], case="serving", host=host) for host in ("none", "4 x device")]
    return some(*(row["ttft_ms_median"] for row in rows), unit="ms")


def switched(result: Row) -> str:
    """Formats the microseconds of a switch for each way in which requests go on, and of a reset."""
    names = ("switch: finish", "switch: recompute", "switch: stop", "reset")
    return some(*(one(result["rows"], case=name)["us_min"] for name in names), unit="µs")


def rolled_out(result: Row) -> str:
    """Formats the prompt tokens that a rollout trace computes with each bound of staleness, in thousands."""
    names = ("flush", "max_staleness=0", "max_staleness=1", "max_staleness=4")
    return some(*(one(result["rows"], case=f"rollouts: {name}")["computed"] / 1e3 for name in names), unit="k")


ALONE = (
    Line(
        "pull 2,048 pages of 64 KiB, source and reader in one process, without / with the fence",
        "minimum",
        "verify_price",
        lambda result: " / ".join(f"{value / 1e3:.1f}" for value in priced(2048, "no fence", "fence")(result)) + " ms",
    ),
    Line(
        "pull one page, without / with the fence",
        "minimum",
        "verify_price",
        lambda result: some(*priced(1, "no fence", "fence")(result), unit="µs"),
    ),
    Line(
        "time of a pull of 2,048 pages with checks of all / of 5 % of them, as a multiple of a pull without checks",
        "minimum",
        "verify_price",
        lambda result: ratios(*priced(2048, "digest", "sample 5 %", column="ratio")(result)),
    ),
    Line(
        "choose among 8 replicas for a prompt of 32 k tokens: new prompt / asked before",
        "minimum",
        "recommend",
        recommended,
    ),
    Line(
        "switch to other weights at 1 M pages, 16 replicas, 256 requests: finish / recompute / stop, and a reset",
        "minimum",
        "weights",
        switched,
    ),
    Line(
        "prompt tokens that a rollout trace of 655 k computes: flush / staleness 0 / 1 / 4",
        "count",
        "weights",
        rolled_out,
    ),
    Line(
        "hits of 8 replicas as a share of one pool's hits: conversation / synthetic trace",
        "count",
        "trace_routing",
        routed,
    ),
    Line(
        "time to first token if the prompts need three times the pool: without / with a host tier",
        "median",
        "tiers",
        served,
    ),
)


# ---- what is installed


def installed_table() -> list[str]:
    """The table of the disk space of each extra and the time of imports."""
    rows: list[Row] = load("installed")["rows"]
    manager = rows[0]
    made = [["installed", "MB"]]
    made.append(["`pagewire` without torch's own files", some(manager["MB"] - manager["MB_torch"])])
    alike: dict[float, list[str]] = {}
    for row in rows[1:]:
        if "MB" in row and row["what"] not in ("all", "dev"):
            alike.setdefault(row["MB"], []).append(f"`{row['what']}`")
    made += [[", ".join(names), some(size)] for size, names in sorted(alike.items())]
    times = [f"`{row['what']}` {some(row['cpu_ms_min'], unit='ms')}" for row in rows if "ms_min" in row]
    heading = "Megabytes that an extra adds, without bytecode:"
    return [
        heading,
        "",
        *table(made),
        "",
        f"Processor time of an import, minima: {', '.join(times)}.",
        "",
        origin(["installed"]),
    ]


# ---- under real `vllm serve` processes


def engines_table() -> list[str]:
    """The table that compares our connector with vLLM's."""
    rows: list[Row] = load("vllm_serve")["rows"]
    ways = {"ours": "pagewire", "theirs": "vLLM's connector", "theirs-ucx": "the same with our UCX settings"}
    ways = {way: title for way, title in ways.items() if any(row["connector"] == way for row in rows)}
    made = [["", *ways.values()]]
    for size in dict.fromkeys(row["tokens"] for row in rows if "first p50" in row):
        each = [one(rows, connector=way, tokens=size) for way in ways]
        for name in ("first", "second"):
            shares = ("p50", "p90", "p99")
            cells = [some(*(row[f"{name} {share}"] for share in shares)) for row in each]
            made.append([f"{name} token, {size:,} prompt tokens, median / p90 / p99 ms", *cells])
    each = [next(row for row in rows if row["connector"] == way and "requests/s" in row) for way in ways]
    made.append(["requests a second, 16 at a time", *(number(row["requests/s"]) for row in each)])
    made.append(["of these failed", *(f"{row['failed']} of {row['requests']}" for row in each)])
    idle = [[100 * row[f"idle CPU {side}"] for side in ("prefill", "decode")] for row in each]
    made.append(["processor time of an idle prefill / decode server", *(some(*both, unit="%") for both in idle)])
    return [*table(made), "", origin(["vllm_serve"])]


CONVERSATIONS = {
    "ours": "pagewire",
    "theirs": "vLLM's connector",
    "plain": "no connector",
    "plain-sticky": "no connector, sticky",
}


def conversations_table() -> list[str]:
    """The table of conversations on two servers: a column for each way, and some rows for each setting."""
    rows = [row for row in load("vllm_conversations")["rows"] if "turn" in row]
    made = [["", *CONVERSATIONS.values()]]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        columns = [_conversation(rows, setting, way) for way in CONVERSATIONS]
        made += [[f"{setting}: {what}", *(column.get(what, "") for column in columns)] for what in columns[0]]
    return [*table(made), "", origin(["vllm_conversations"])]


def _conversation(rows: Sequence[Row], setting: str, way: str) -> dict[str, str]:
    """Returns the cells of one way in one setting, by what they tell; none if it did not run."""
    by_turn = {row["turn"]: row for row in rows if (row["setting"], row["way"]) == (setting, way)}
    if not by_turn:
        return {}
    every, first = by_turn.pop("all"), by_turn.pop("1")
    later = sorted(by_turn.values(), key=lambda row: row["first p50"])
    return {
        f"tokens found, of {number(every['prompt'])}": number(every["found"]),
        "first token of turn 1, median / p90 ms": _first(first),
        f"first token of turns 2 to {len(later) + 1}, the quickest and the slowest of them": (
            f"{_first(later[0])}, {_first(later[-1])}"
        ),
        f"wrong / failed, of {every['n']} answers": f"{every['wrong']} / {every['failed']}",
        "blocks held 40 s later": str(every["held later"]),
    }


def _first(row: Row) -> str:
    return some(row["first p50"], row["first p90"])


def answers_table() -> list[str]:
    """The table of right and wrong answers under faults: a row for each way."""
    rows: list[Row] = load("vllm_answers")["rows"]
    titles = {"ours": "pagewire", "theirs": "vLLM's connector", "none": "one server without a connector"}
    made = [["", "answers", "wrong", "failed", "blocks still held", "crashes of servers"]]
    for way, title in titles.items():
        every = [row for row in rows if row["connector"] == way and row["case"] == "all"]
        if every:
            sums = (f"{sum(row[name] for row in every):,}" for name in ("n", "wrong", "failed"))
            models = " and ".join(row["model"].capitalize() for row in every)
            held, crashes = max(row["held"] for row in every), sum(row["crashes"] for row in every)
            made.append([f"{title}, {models}", *sums, str(held), str(crashes)])
    return [*table(made), "", origin(["vllm_answers"])]


def lines_table(lines: Sequence[Line]) -> list[str]:
    """A table of single figures, with their provenance."""
    made = [["what", "figure", "of", "result"]]
    sources: list[str] = []
    for line in lines:
        try:
            figures = line.figures(load(line.source))
        except (Missing, KeyError):
            continue
        made.append([line.what, figures, line.of, f"`{line.source}`"])
        sources.append(line.source)
    return [*table(made), "", origin(list(dict.fromkeys(sources)))]


# ---- six figures


class Figure(NamedTuple):
    """A row of the README's table.

    Attributes:
        what: the measured quantity, in words.
        ours: our figure, from the result.
        peers: figures of others by name; the best one is shown.
        unit: unit of both.
        beside: what else is true of these figures, with figures of the same results.
    """

    what: str
    ours: Callable[[], float]
    peers: Callable[[], dict[str, float]]
    unit: str
    beside: Callable[[], str]


def _question(question: str) -> Row:
    return one(load("peers")["rows"], question=question)


def _in_managers(what: str, question: str, unit: str, beside: Callable[[], str]) -> Figure:
    """Returns a row with our figure and the best figure of other managers, from the table of managers."""

    def peers() -> dict[str, float]:
        best = {name: _best(_question(question), each) for name, each in COLUMNS.items() if name not in PARTS}
        return {PEERS[name].title: value for name, value in best.items() if value is not None}

    return Figure(what, lambda: _question(question)["ours_min"], peers, unit, beside)


def _asked(question: str, unit: str = "µs") -> str:
    return some(_question(question)["ours_min"], unit=unit)


def _pulled_blocks(question: str | None = None) -> float:
    """The milliseconds of a pull of 2,048 blocks in 64 layers: ours, or the better figure of vLLM's connector."""
    result = load("pull")
    if question is not None:
        return figure(result, question)
    shape: dict[str, object] = {"page_bytes": 256 << 10, "pages": 2048, "order": "a tensor a layer"}
    return min(one(result["rows"], program=name, **shape)["us"] for name in ("vLLM", "vLLM, huge pages")) / 1e3


def _pulled_blocks_by(program: str) -> float:
    """The milliseconds that a program takes for as many blocks in huge pages."""
    shape: dict[str, object] = {"page_bytes": 256 << 10, "pages": 2048, "order": "a tensor a layer"}
    return one(load("pull")["rows"], program=program, memory="huge pages", **shape)["us"] / 1e3


def _first_token(connector: str) -> float:
    return one(load("vllm_serve")["rows"], connector=connector, tokens=500)["first p50"]


def _other_settings() -> str:
    """Formats our times of a decode step of one request in settings that are not plain, as multiples of the plain one.

    The figures are those of one run, which may be another one than that of the row.
    """
    times = {row["setting"]: row["us_min"] for row in load("settings")["rows"] if row["requests"] == 1}
    plain = times.pop("plain")
    ends = [(time / plain, name) for name, time in times.items()]
    return " to ".join(f"{ratio:.1f} times ({name})" for ratio, name in (min(ends), max(ends)))


def _polling() -> str:
    """Formats the processor time of vLLM's connector on idle servers."""
    row = next(row for row in load("vllm_serve")["rows"] if row["connector"] == "theirs" and "requests/s" in row)
    shares = some(*(100 * row[f"idle CPU {side}"] for side in ("prefill", "decode")), unit="%")
    return f"vLLM's connector polls: its idle servers take {shares} of a core, and all servers share two cores"


FIGURES = (
    _in_managers(
        "decode step, 1,024 running requests",
        "decode step, 1,024 requests, Batch",
        "µs",
        lambda: (
            f"as a `Batch`; {_asked('the same, plain calls')} with a call for each request. "
            "vLLM builds no block tables in this time"
        ),
    ),
    _in_managers(
        "decode step, 1 running request",
        "decode step, 1 request, plain calls",
        "µs",
        lambda: (
            f"{_asked('decode step, 1 request, Batch')} as a `Batch`; other settings take {_other_settings()} as long"
        ),
    ),
    _in_managers(
        "reserve and publish a cold prompt of 32,768 tokens",
        "reserve 32,768 tokens, cold, reserved and published, sha256, pages of 16",
        "µs",
        lambda: (
            f"sha256; {_asked('reserve 32,768 tokens, cold, reserved and published, xxh3_128, pages of 16')} with "
            "xxh3_128. MAX's hash has 64 bits"
        ),
    ),
    _in_managers(
        "bookkeeping memory of a page",
        "memory per page, 1M pages, all published, B",
        "bytes",
        lambda: "a pool of 1 M pages, all of them published, one group of layers",
    ),
    Figure(
        "pull 2,048 blocks of 64 layers between processes",
        lambda: _pulled_blocks("2,048 pages × 64 regions: the whole pull"),
        lambda: {"vLLM's connector": _pulled_blocks()},
        "ms",
        lambda: (
            "both in huge pages on one host; `process_vm_readv` alone takes "
            + some(_pulled_blocks_by("process_vm_readv"), unit="ms")
        ),
    ),
    Figure(
        "time to first token, 500 prompt tokens, separate prefill and decode under `vllm serve`",
        lambda: _first_token("ours"),
        lambda: {"vLLM's connector": _first_token("theirs")},
        "ms",
        _polling,
    ),
)


def six_figures() -> list[str]:
    """The README's table: for each row our figure, and the best one of others."""
    made = [["what", "pagewire", "best of the others", "besides"]]
    for each in FIGURES:
        try:
            ours, peers, beside = each.ours(), each.peers(), each.beside()
        except (Missing, KeyError):
            continue
        name = min(peers, key=peers.__getitem__)
        made.append([each.what, some(ours, unit=each.unit), f"{some(peers[name], unit=each.unit)}, {name}", beside])
    return [*table(made)]


TABLES: dict[str, Callable[[], list[str]]] = {
    "six": six_figures,
    "manager": manager_table,
    "engines": engines_table,
    "conversations": conversations_table,
    "answers": answers_table,
    "processes": lambda: lines_table(PROCESSES),
    "alone": lambda: lines_table(ALONE),
    "installed": installed_table,
}


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Formats rows as a Markdown table; the first row is its heading."""
    for at, row in enumerate(rows):
        yield f"| {' | '.join(row)} |".replace("  ", " ").replace("  ", " ")
        if not at:
            yield "|" + "---|" * len(row)


def origin(names: Sequence[str]) -> str:
    """Says where results were made. Results that were made together share a sentence."""
    where: dict[str, list[str]] = {}
    changed: set[str] = set()
    for name in names:
        result = load(name)
        place = _place(result)
        command = f" by `{result['command']}`" if "command" in result else ""
        where.setdefault(place, []).append(f"[{name}](../benchmarks/results/{name}.json) was made{command}")
        if changed_since(result):
            changed.add(place)
    return "\n".join(f"- {', and '.join(made)} {place}.{_MARK * (place in changed)}" for place, made in where.items())


def _place(result: Row) -> str:
    """Says on which day and machine a result was made, and from which commit."""
    machine = result.get("machine", {})
    commit, date = (result.get(key) or machine.get(key) or "" for key in ("commit", "date"))
    details = [
        machine["cpu"].replace("(R)", "") if machine else "unknown machine",
        f"{machine['cores']} cores" if machine else "",
        {True: "SHA extensions", False: "no SHA extensions", None: ""}[machine.get("sha_extensions")],
        f"commit {commit}" if commit else "unknown commit",
    ]
    return f"on {date.split(' ')[0] or 'an unknown day'} ({', '.join(filter(None, details))})"


def without_marks(text: str) -> str:
    """A page without its sentences about newer code."""
    return text.replace(_MARK, "")


def _made_anew(found: re.Match[str]) -> str:
    lines = "\n".join(TABLES[found[2]]())
    return f"{found[1]}{lines}\n{found[3]}"


def rendered(text: str) -> str:
    """A page with all of its tables regenerated."""
    return _BLOCK.sub(_made_anew, text)


def main() -> int:
    """Writes the tables. With `--check`, returns exit status 1 if they differ from the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare without writing")
    chosen = parser.parse_args()
    differs = False
    for page in PAGES:
        text = page.read_text()
        made = rendered(text)
        differs |= without_marks(made) != without_marks(text)
        if not chosen.check:
            page.write_text(made)
    return int(chosen.check and differs)


if __name__ == "__main__":
    sys.exit(main())
