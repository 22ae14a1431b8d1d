"""What do layers of several kinds cost, and how many requests fit? Four models in 40 GiB.

An element of a page is simulated by one byte, so that the pages of 40 GiB of bfloat16 fit on any machine. `fit` is the
number of requests of a given length that can decode at the same time. Each prompt has its own tokens and runs in chunks
of 2,048. `lost` is the share of such a request's bytes that belong to no layer, because parts of its pages or blocks
are empty. `step` is reserve, fetch, update and step of a batch of 256 requests of 2,000 tokens. It is the mean over
steps in which each request needs one new page, with 640 GiB of memory, so that all of the requests fit. `cached` is the
number of prompt tokens found cached for the first 2,000 prompts of a public conversation trace (see
`benchmarks.trace_replay`), served one after another. `one table` is the same model without groups: every layer keeps
every page. With recurrent layers (`benchmarks.recurrent_models`), a step also handles the pages of states, and `split
memory` has a separate part of the memory for states. `claim` is the time of a claim in 40 GiB full of requests of 200
to 9,000 tokens that arrive and leave, each with memory for its state. `benchmarks.vllm_groups` measures vLLM's own
manager in the same way, if `make test-vllm` has made its environment.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import torch

from benchmarks import recurrent_models as recurrent
from benchmarks.frame import WARM_UP, Row, now, options, pin, progress, report, settle
from benchmarks.measured import ROOT
from benchmarks.pools import expect
from benchmarks.trace_replay import FOLDER
from kvcache import KVCacheParams, LayerGroup, PagedKVCacheManager, TextContext

PAGE, CHUNK, BATCH, LENGTH, CLAIMS = 16, 2048, 256, 2000, 4000
BUDGET, BUDGET_OF_STEPS, LENGTHS, LONGEST = 40 << 30, 640 << 30, (8192, 65536), 1 << 17
TRACE, REQUESTS, TRACE_BLOCK = FOLDER / "conversation_trace.jsonl", 2000, 512
VLLM = ROOT / ".venvs" / "vllm-engine" / "bin" / "python"
# For each model: the number of layers, the layers that see all tokens, the window of all other layers, and the bytes of
# a token in one layer.
MODELS = {
    "Gemma 3 27B": (62, range(5, 62, 6), 1024, 16 * 128 * 2 * 2),
    "gpt-oss 120B": (36, range(1, 36, 2), 128, 8 * 64 * 2 * 2),
}


_STATISTICS = (
    "columns step_*: minimum and median, in microseconds, of the means over as many steps as a page has tokens; "
    f"claim_*: of {CLAIMS} claims, in microseconds"
)


def manager_of(name: str, budget: int, *, grouped: bool, rows: int) -> PagedKVCacheManager:
    """A manager with `budget` bytes. It counts memory in units: the bytes of a token in one layer."""
    layers, full, window, of_token = MODELS[name]
    rest = tuple(layer for layer in range(layers) if layer not in full)
    groups = (LayerGroup("full", tuple(full)), LayerGroup("window", rest, window)) if grouped else ()
    params = KVCacheParams(
        dtype=torch.uint8, n_kv_heads=1, head_dim=1, page_size=PAGE, enable_prefix_caching=True, groups=groups
    )
    memory = 2 * budget // of_token  # a token of a layer takes one byte for the key and one for the value
    return PagedKVCacheManager(params, rows, LONGEST, layers, ["cpu"], available_cache_memory=memory)


def prompt(number: int, length: int) -> np.ndarray:
    """A prompt of distinct tokens."""
    return np.random.default_rng(number).integers(0, 1 << 30, length)


def lost_percent(name: str, length: int, places: int) -> float:
    """The percentage of the token places in a request's pages that are empty."""
    layers, full, window, _ = MODELS[name]
    pages = -(-(length + 1) // PAGE)
    seen = min(pages, -(-(window - 1) // PAGE) + 1)
    own = len(full) * pages + (layers - len(full)) * seen
    return round(100 * (1 - own / places), 2)


def trace_prompts() -> Iterator[np.ndarray]:
    """The prompts of the trace, int64; empty if there is no trace. Blocks with equal ids get equal tokens."""
    if not TRACE.exists():
        progress(f"layer_groups: no {TRACE.name} in {FOLDER}; PAGEWIRE_TRACES names another folder")
        return
    with TRACE.open() as lines:
        for line in islice(lines, REQUESTS):
            row = json.loads(line)
            ids = np.array(row["hash_ids"], np.int64)
            yield (ids[:, None] * TRACE_BLOCK + np.arange(TRACE_BLOCK)).ravel()[: min(row["input_length"], LONGEST - 1)]


def prefilled(manager: PagedKVCacheManager, name: str, tokens: np.ndarray) -> tuple[TextContext, int] | None:
    """Returns a prefilled request, and how many of its tokens were cached. Returns None if the request does not fit."""
    context, found = TextContext(tokens, LONGEST, name), 0
    if not recurrent.claimed(manager, context):
        return None
    while context.start_idx < len(tokens):
        context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + CHUNK))
        before = context.start_idx
        if not manager.maybe_reserve(context):
            manager.release(name)
            return None
        found += context.start_idx - before
        recurrent.run(manager, [name], [context.start_idx], [context.active_idx])
        context.update(1)
        manager.step([context])
    return context, found


def fitting(manager: PagedKVCacheManager, length: int) -> tuple[int, int]:
    """How many requests of this length can decode at the same time, and how many pages the first one holds."""
    count = held = 0
    while (made := prefilled(manager, str(count), prompt(count, length))) is not None and manager.maybe_reserve(
        made[0]
    ):
        count += 1
        held = held or recurrent.held_pages(manager)
    return count, held


def cached_tokens(manager: PagedKVCacheManager) -> int | None:
    """The number of the trace's prompt tokens that were found cached; None if there is no trace."""
    total = 0
    for number, tokens in enumerate(trace_prompts()):
        made = prefilled(manager, f"t{number}", tokens)
        expect(made is not None, "a prompt alone fits")
        total += 0 if made is None else made[1]
        manager.release(f"t{number}")
    return total if TRACE.exists() else None


def step_us(manager: PagedKVCacheManager, repeats: int) -> list[float]:
    """The times of a step in microseconds, each a mean over as many steps as a page has tokens."""
    made = [prefilled(manager, str(number), prompt(number, LENGTH + number % PAGE)) for number in range(BATCH)]
    batch, tokens = manager.batch([one[0] for one in made if one is not None]), np.ones(BATCH, np.int32)
    names, means = [str(number) for number in range(BATCH)], list[float]()
    settle()
    for _ in range(WARM_UP + repeats):
        start = now()
        for _ in range(PAGE):
            expect(bool(manager.reserve_batch(batch).all()), "every request has its pages")
            starts = manager.fetch(batch)[0].cache_lengths.numpy()
            recurrent.run(manager, names, starts, starts + 1)
            batch.update(tokens)
            manager.step(batch)
        means.append((now() - start) / 1e3 / PAGE)
    return means[WARM_UP:]


def measure(repeats: int) -> Iterable[Row]:
    """Returns two rows for each model: with layer groups and without."""
    for name in MODELS:
        for grouped in (True, False):
            manager = manager_of(name, BUDGET_OF_STEPS, grouped=grouped, rows=BATCH)
            times, tables = step_us(manager, repeats), manager.layer_tables
            row: Row = {
                "model": name,
                "manager": "ours" if grouped else "ours, one table",
                "tables": len(tables.tables),
            }
            for length in LENGTHS:
                row[f"fit {length}"], held = fitting(manager_of(name, BUDGET, grouped=grouped, rows=1024), length)
                lost = lost_percent(name, length, held * tables.layers_per_page) if grouped else 0.0
                row[f"lost % {length}"] = lost
            row |= {"step_min": round(min(times), 1), "step_median": round(statistics.median(times), 1)}
            if grouped:  # the longest of these prompts does not fit if all layers share one table
                row["cached tokens"] = cached_tokens(manager_of(name, BUDGET, grouped=True, rows=8))
            yield row
    yield from measure_recurrent(repeats)


def measure_recurrent(repeats: int) -> Iterable[Row]:
    """Measures each model with recurrent layers twice: with common and with separate memory for pages and states."""
    for name in recurrent.RECURRENT:
        for split in (False, True):
            made = functools.partial(recurrent.manager_of, name, page=PAGE, longest=LONGEST, split=split)
            row: Row = {"model": name, "manager": "ours, split memory" if split else "ours", "tables": 1}
            for length in LENGTHS:
                row[f"fit {length}"], held = fitting(made(BUDGET, rows=1024), length)
                row[f"lost % {length}"] = None if split else recurrent.lost_percent(name, length, held, PAGE)
            times = step_us(made(BUDGET_OF_STEPS, rows=BATCH), repeats)
            row |= {"step_min": round(min(times), 1), "step_median": round(statistics.median(times), 1)}
            claims = recurrent.claims_us(made(BUDGET, rows=1024), CLAIMS)
            row |= {"claim_median": round(statistics.median(claims), 1)}
            row |= {"claim_p99": round(statistics.quantiles(claims, n=100)[-1], 1)}
            yield row | {"cached tokens": cached_tokens(made(BUDGET, rows=1024 if split else 8))}


def of_vllm(repeats: int) -> list[Row]:
    """The rows for vLLM's manager, measured in its own environment; empty if that environment does not exist."""
    if not VLLM.exists():
        progress(
            f"layer_groups: no vLLM in {VLLM.parents[1].name}, which `make test-vllm` makes: its rows are left out"
        )
        return []
    command = [str(VLLM), "-W", "ignore", "-m", "benchmarks.vllm_groups", str(repeats)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - ours
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    repeats = 5 if chosen.quick else 20
    asked = sum(map(len, trace_prompts()))
    note = f"{_STATISTICS}; cached tokens: of {asked} of the trace's first {REQUESTS} prompts"
    report("layer_groups", [*measure(repeats), *of_vllm(repeats)], chosen, note)


if __name__ == "__main__":
    main()
