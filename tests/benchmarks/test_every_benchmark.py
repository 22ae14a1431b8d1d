"""Runs every program of benchmarks/ in its smallest form, here or in the test file of the same name. Each benchmark
checks its own results with `expect`. These tests only check that each benchmark ends and returns rows.
"""

from __future__ import annotations

import ast
import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
import torch

from benchmarks import (
    asking,
    events,
    first_contact,
    fleet_trace,
    gpu,
    growth,
    growth_transfer,
    handover,
    hinted,
    installed,
    layer_groups,
    memory,
    objects,
    overlap,
    placement,
    plan,
    prefix_peers,
    prompt_digest,
    scrape,
    settings,
    trace_hints,
    trace_replay,
    trace_routing,
    verify_price,
    vllm_serve,
    watch,
    weights,
)
from benchmarks.frame import Row, table
from benchmarks.peers import ours
from benchmarks.pulls import figures, others
from tests.transfer.nixl.moto_store import moto_store
from tests.transfer.nixl.slow_link import slow_link

ROOT = Path(__file__).parents[2]
Patch: TypeAlias = pytest.MonkeyPatch
ELSEWHERE = {
    "gpu": "needs a CUDA device",
    "vllm_groups": "needs vLLM, and is run by layer_groups in the environment of `make test-vllm`",
    "vllm_serve": "needs vLLM's servers: its parts are those of tests/vllm_serve, `make test-engines`",
    "vllm_answers": "needs vLLM's servers: tests/vllm_serve/test_answers.py runs its parts, `make test-engines`",
    "vllm_conversations": "needs vLLM's servers: tests/vllm_serve/test_conversations.py runs it, `make test-engines`",
    "pulls/vllm_worker": "needs vLLM's environment and shared scripts: others.vllm says what is missing",
    "fleet_worker": "is what fleet, first_token and handover start",
    "both_ends": "needs network namespaces: tests/hosts/test_both_ends_on_hosts.py runs it, `make test-hosts`",
    "prefix_worker": "is what prefix_peers and both_ends start",
    "pulls/as_shipped": "is what others.nixl starts",
    "__main__": "starts the others",
}


def of_events(patch: Patch, _: Path) -> list[Row]:
    patch.setattr(events, "SUBSCRIBERS", ("off", "none", "reading", "dead"))
    patch.setattr(events, "PAUSES_MS", (0.0,))
    rows = events.loops(4, 40, 1)
    return [*rows, events.stores(events.Prefills, 2, 4), events.stores(events.Decodes, 4, 4)]


def of_layer_groups(patch: Patch, _: Path) -> list[Row]:
    for name, value in {"BATCH": 4, "LENGTH": 64, "LENGTHS": (1024, 4096), "REQUESTS": 3, "CLAIMS": 9}.items():
        patch.setattr(layer_groups, name, value)
    patch.setattr(layer_groups, "BUDGET", 1 << 32)
    patch.setattr(layer_groups, "BUDGET_OF_STEPS", 1 << 34)
    return [*layer_groups.measure(1)]


def of_objects(patch: Patch, _: Path) -> list[Row]:
    patch.setattr(objects, "PROMPT", 4)
    with moto_store() as store, slow_link(store.url) as link:
        return [objects.row_of(store, link, 4 << 10, 2, 0.001, 1)]


def of_peers(patch: Patch, _: Path) -> list[Row]:
    patch.setattr(ours, "POOL", 8192)
    patch.setattr(memory, "child", lambda pages, algorithm: {"rss_B_per_page": 1.0, "build_ms": 1.0, "gc_ms": pages})
    return [row for _, row in [*ours.pages(3, quick=True), *ours.weights()]]


def of_placement(patch: Patch, _: Path) -> list[Row]:
    patch.setattr(placement, "DUE", placement.DUE[2:3])
    requests = [fleet_trace.scaled([1, 2, number], 1400, 40) for number in range(3, 7)]
    answered, row = placement.run(placement.Setting("one", 1, 1, "guess"), requests)
    assert len(answered) == 4
    assert (row["errors"], row["pages_held"], row["drained_badly"]) == ([], 0, [])
    return [row]


def of_plan(patch: Patch, _: Path) -> list[Row]:
    for name, value in {"POOL": 4000, "PAGES": 64, "SOURCE_BYTES": 16 << 20}.items():
        patch.setattr(plan, name, value)
    on_wire, home = plan.wire(2), plan.copies(2)
    fitted = [plan.fitted(on_wire, "wire, fitted"), plan.fitted(home, "copy, fitted")]
    return [*plan.contact(2), *plan.pulls(2), *on_wire, *home, *fitted]


def of_prefix_peers(patch: Patch, _: Path) -> list[Row]:
    patch.setattr(prefix_peers, "LENGTHS", (64,))
    return prefix_peers.rows_of("2 + 1", prefix_peers.rounds_of(2, 1, 2, 0))


def of_traces(patch: Patch, folder: Path) -> list[Row]:
    name = "small_trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 1500, "output_length": 4, "hash_ids": [at % 3, 10 + at % 5, 20 + at]}
        for at in range(12)
    ]
    (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for module in (trace_replay, trace_hints, trace_routing):
        patch.setattr(module, "FOLDER", folder)
    return [trace_replay.measure(name, 8), *trace_hints.measure(name, (8,)), *trace_routing.measure(name, (2,))]


def of_watch(patch: Patch, _: Path) -> list[Row]:
    patch.setattr(watch, "MODELS_MS", (1.0,))
    patch.setattr(watch, "FORGET_S", 0.2)
    return watch.measure(4000, 32, 1, 0.3)


def of_pulls_figures(patch: Patch, _: Path) -> list[Row]:
    for name, value in {"PAGES": 8, "REGIONS": 2}.items():
        patch.setattr(figures, name, value)
    asked = (figures.latency, figures.fence, figures.caller, figures.host)
    return [row for one in asked for row in one(0.01)] + [*figures.first_contact(1)]


def of_growth_transfer(*_: Any) -> list[Row]:
    return [*growth_transfer.by_regions(2, 0.01), *growth_transfer.by_peers((1, 3), 5)]


RUNS: dict[str, Callable[[Patch, Path], list[Row]]] = {
    "asking": lambda *_: asking.rows((4,), 2),
    "events": of_events,
    "first_contact": lambda *_: first_contact.contact(first_contact.PULLED, 2, 2),
    "growth": lambda *_: growth.measure(
        [
            (growth.by_batch, (2,), 2),
            (growth.by_replicas, (2,), 2),
            (growth.by_pool, (8000,), 2),
            (growth.by_queue, (3,), 2),
        ]
    ),
    "growth_transfer": of_growth_transfer,
    "handover": lambda *_: handover.measure("small", [2 * handover.BUDGET + 1], 1),
    "installed": lambda *_: [*installed.sizes(), *installed.imports(1)],
    "hinted": lambda *_: hinted.measure(4096, 3),
    "layer_groups": of_layer_groups,
    "memory": lambda *_: [memory.child(memory.PROMPT_PAGES, "sha256")],
    "objects": of_objects,
    "overlap": lambda *_: [*overlap.cost(2, 16), overlap.gain(2, 0.1, 16)],
    "peers/ours": of_peers,
    "placement": of_placement,
    "plan": of_plan,
    "prefix_peers": of_prefix_peers,
    "prompt_digest": lambda *_: prompt_digest.rows((100,), 2),
    "pulls/figures": of_pulls_figures,
    "pulls/others": lambda *_: others.nixl([(64 << 10, 1)], as_ours=True),
    "scrape": lambda *_: scrape.rows(((2_000, 3),), 2),
    "weights": lambda *_: weights.measure(1_200, 2, 2, 2, 2),
    "settings": lambda *_: [settings.measure(name, 2, "a list", 16) for name in settings.SETTINGS],
    "trace_replay": of_traces,
    "verify_price": lambda *_: [msgspec.to_builtins(price) for price in verify_price.measure(2, 2)],
    "watch": of_watch,
}


@pytest.mark.ci
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_comes_to_its_end_with_rows(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        rows = RUNS[name](monkeypatch, tmp_path)
    finally:
        gc.unfreeze()
    assert rows
    assert all(rows)
    assert table(json.loads(json.dumps(rows)))


def test_no_program_is_left_out() -> None:
    folder = ROOT / "benchmarks"
    programs = {
        str(path.relative_to(folder).with_suffix(""))
        for path in folder.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    imports = [
        ast.unparse(one) for text in texts for one in ast.walk(ast.parse(text)) if isinstance(one, ast.ImportFrom)
    ]
    named = {word for line in imports if line.startswith("from benchmarks") for word in re.findall(r"\w+", line)}
    skipped = {name for text in texts for name in re.findall(r'importorskip\("benchmarks\.(\w+)"\)', text)}
    covered = {*RUNS, *ELSEWHERE, "trace_hints", "trace_routing"}
    left_out = {name for name in programs - covered if name.split("/")[-1] not in named | skipped}
    assert left_out == set()
    assert {name for name in ELSEWHERE if name not in programs} == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_the_benchmark_of_a_gpu_says_that_none_is_here(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    gpu.main()
    assert capsys.readouterr() == ("", "gpu: left out, for there is no CUDA device\n")


def test_a_benchmark_without_its_environment_says_so(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm_serve"])
    assert vllm_serve.main() == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "`make test-engines` makes" in said
