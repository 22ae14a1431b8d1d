"""Parses the output of the peers' scripts into figures by name.

A figure is a minimum and a median in microseconds, or a number of bytes. Its name says what was measured. For example,
`decode 16 1024` is a step of 1,024 requests on pages of 16 tokens, and `cold 16 32768` is the reservation of a new
prompt of 32,768 tokens, including its hash. `admit` also publishes the prompt's pages. `get` (lookup) and `alloc`
(allocation) are measured separately by the peer, and are added up. Lines of JSON with a name, as `aside.py` prints
them, are figures already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

PAGES = 2048
PROMPT = 32_768


class Figure(NamedTuple):
    """A minimum and a median; they are equal for a single measurement."""

    minimum: float
    median: float

    def __add__(self, other: tuple[float, ...]) -> Figure:
        return Figure(self.minimum + other[0], self.median + other[1])

    def less(self, other: Figure, pages: int) -> Figure:
        """Returns this figure minus another one, divided by a number of pages."""
        return Figure((self.minimum - other.minimum) / pages, (self.median - other.median) / pages)


Figures = dict[str, Figure]
Parser = Callable[[str], Figures]

_TIMES = re.compile(r"([\d.]+) us +\(min ([\d.]+), n=\d+\)")
_HASH = re.compile(r"^(sha256|xxhash) +(\d+) tok ")
_CALL = re.compile(r"^ *(\d+) tok (\w+) ")
_DECODE = re.compile(r"^B= *(\d+) allocate_slots.*append\+hash ([\d.]+) us/req")
_MEMORY = {
    "build 1M": re.compile(r"BlockPool\(1000000\).* built in ([\d.]+) ms"),
    "memory 1M": re.compile(r"total ([\d.]+) B/block"),
    "gc 1M": re.compile(r"full gc.collect with 1M blocks alive: ([\d.]+) ms"),
}


_MEMORY_OF_MAX = (
    ("build 1M", "build_s", 1e6),
    ("memory 1M", "bytes_per_page_all_committed", 1.0),
    ("gc 1M", "full_gc_s", 1e6),
)


def rows_of_kind(output: str, kind: str) -> Figures:
    """Parses the rows of one of MAX's managers, or of one way to use NIXL: a JSON row in each line."""
    figures: Figures = {}
    for line in output.splitlines():
        row = json.loads(line) if line.startswith("{") else {}
        if row.get("kind") != kind or not row.get("caching", True):
            continue
        if "name" in row:
            figures[row["name"]] = Figure(row["min"], row["med"])
            continue
        if row["test"] == "mem_1M_pages":
            for name, column, factor in _MEMORY_OF_MAX:
                figures[name] = Figure(row[column] * factor, row[column] * factor)
            continue
        parts = {key: Figure(value["min"], value["med"]) for key, value in row.items() if isinstance(value, dict)}
        if row["test"] == "decode" and row["prompt"] == 1024:
            figures[f"decode {row['page']} {row['batch']}"] = parts["total"]
        elif row["test"] == "prefill" and "alloc" in parts:
            at = f"{row['page']} {row['prompt']}"
            figures[f"{row['phase'].removesuffix('_fresh_pool').replace('cold_', '')} {at}"] = parts["alloc"]
            if row["phase"] == "cold_fresh_pool":
                figures[f"publish {at}"], figures[f"release {at}"] = parts["step"], parts["release"]
                figures[f"admit {at}"] = parts["alloc"] + parts["step"]
    if f"evicting 16 {PROMPT}" in figures:
        figures["evict"] = figures[f"evicting 16 {PROMPT}"].less(figures[f"cold 16 {PROMPT}"], PAGES)
    return figures


def rows_of_vllm(output: str) -> Figures:
    """Parses the lines for the parts hash, mgr (one group), decode and mem."""
    figures: Figures = {}
    section = ""
    for line in output.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            figures[row["name"]] = Figure(row["min"], row["med"])
            continue
        section = line if line.startswith("==") else section
        times = _TIMES.search(line)
        found = Figure(float(times[2]), float(times[1])) if times else None
        if found and (named := _HASH.match(line)):
            figures[f"hash {named[1]} {named[2]}"] = found
        elif found and "1 group" in section and (named := _CALL.match(line)):
            figures[f"{named[2]} {named[1]}"] = found
        elif found and (named := _DECODE.match(line)):
            figures[f"allocate 16 {named[1]}"] = found
            extra = float(named[2]) * int(named[1])
            figures[f"decode 16 {named[1]}"] = found + Figure(extra, extra)
        for name, pattern in _MEMORY.items():
            if value := pattern.search(line):
                factor = 1.0 if name == "memory 1M" else 1e3
                figures[name] = Figure(float(value[1]) * factor, float(value[1]) * factor)
    return figures | _sums_of_vllm(figures)


def rows_of_json(output: str) -> Figures:
    """Parses lines of JSON with a name, a minimum and a median, as `ours` prints them."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["name"]: Figure(row["min"], row["med"]) for row in rows}


def _sums_of_vllm(parts: Figures) -> Figures:
    """Sums vLLM's hashing, lookup and allocation, which its script measures separately."""
    sums: Figures = {}
    for length in (4096, PROMPT):
        for algorithm in ("sha256", "xxhash"):
            for case, calls in {
                "cold": ("cold_get", "cold_alloc"),
                "warm": ("warm_get", "warm_alloc"),
                "evicting": ("cold_get", "evict_alloc"),
            }.items():
                names = [f"hash {algorithm} {length}", *(f"{call} {length}" for call in calls)]
                if all(name in parts for name in names):
                    first, second, third = (parts[name] for name in names)
                    sums[f"{case} 16 {length} {algorithm}"] = first + second + third
            # vLLM's allocation publishes the pages at once, so it counts as both
            if f"cold 16 {length} {algorithm}" in sums:
                sums[f"admit 16 {length} {algorithm}"] = sums[f"cold 16 {length} {algorithm}"]
        if f"free {length}" in parts:
            sums[f"release 16 {length}"] = parts[f"free {length}"]
    if f"evict_alloc {PROMPT}" in parts:
        sums["evict"] = parts[f"evict_alloc {PROMPT}"].less(parts[f"cold_alloc {PROMPT}"], PAGES)
    return sums
